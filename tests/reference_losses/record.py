"""`recorded.json`: the numbers that a refactor must reproduce, and on what they were recorded."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.reference_losses.runs import Numbers

PATH = Path(__file__).with_name("recorded.json")
RENEW = "uv run python -m tests.reference_losses"


@dataclass(frozen=True)
class Record:
    numerics: dict[str, str]  # what its numbers depend on, see `machine`
    numbers: Numbers  # what it amounted to


def read_records() -> dict[str, Record]:
    found: dict[str, Any] = json.loads(PATH.read_text())
    return {command: Record(entry["numerics"], Numbers(**entry["numbers"])) for command, entry in found.items()}


def write_records(records: Mapping[str, Record]) -> None:
    PATH.write_text(json.dumps({command: asdict(record) for command, record in records.items()}, indent=1) + "\n")


def other_numerics(recorded: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Return one line for everything that the numbers depend on and that is not as it was recorded."""
    names = [*recorded, *(name for name in here if name not in recorded)]
    others = [name for name in names if recorded.get(name) != here.get(name)]
    return [f"{name}: recorded {recorded.get(name)}, here {here.get(name)}" for name in others]


def differences(recorded: Numbers, now: Numbers) -> list[str]:
    """Return one line for everything that differs: where first, and by how much; no line for equal bits. A batch that
    differs before any loss does was sampled otherwise by the same weights: then the engine has changed, or what it was
    asked; else the trainer has."""
    return [
        *_metric_differences(recorded.metrics, now.metrics),
        *_rollout_differences(recorded.rollouts, now.rollouts),
        *(
            f"weights in {name}: recorded {recorded.weights.get(name)}, now {now.weights.get(name)}"
            for name in sorted(recorded.weights.keys() | now.weights.keys())
            if recorded.weights.get(name) != now.weights.get(name)
        ),
    ]


def largest_relative(recorded: list[float], now: list[float]) -> float:
    """Return the largest difference between the values of a step, relative to the recorded one."""
    pairs = zip(recorded, now, strict=True)
    return max((abs(new - old) / abs(old) if old else float("inf") for old, new in pairs if new != old), default=0.0)


def _metric_differences(recorded: Mapping[str, list[float]], now: Mapping[str, list[float]]) -> list[str]:
    lines = [f"{name}: recorded or made by one side only" for name in sorted(recorded.keys() ^ now.keys())]
    for name in recorded.keys() & now.keys():
        old, new = recorded[name], now[name]
        if len(old) != len(new):
            lines.append(f"{name}: recorded {len(old)} steps, now {len(new)}")
        elif old != new:
            place = next(place for place, (a, b) in enumerate(zip(old, new, strict=True)) if a != b)
            largest = largest_relative(old, new)
            lines.append(
                f"{name}: from step {place + 1} on, recorded {old[place]}, now {new[place]};"
                f" the largest relative difference of a step is {largest:.2g}"
            )
    return sorted(lines)


def _rollout_differences(recorded: list[str], now: list[str]) -> list[str]:
    if len(recorded) != len(now):
        return [f"rollouts: recorded {len(recorded)} batches, now {len(now)}"]
    places = [place for place, (a, b) in enumerate(zip(recorded, now, strict=True), 1) if a != b]
    return [f"rollouts: from batch {places[0]} on, {len(places)} of {len(now)} batches differ"] if places else []
