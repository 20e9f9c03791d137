"""A launcher that is killed while it prepares the run directory loses nothing, and the next start goes on.

Preparing clears leftovers, sets damaged and superseded steps aside, trims metrics, brings in forks. Each
call that does so is an instant to die at.
"""

from __future__ import annotations

import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast.shared.files.manifest import MANIFEST_NAME
from tests.builders.checkpoint_files import contents
from tests.conftest import ModelFactory
from tests.faults.faulty_calls import Call, read_trail
from tests.faults.run_states import differing, end_state, whole_steps
from tests.forking.commands import Run, shared_commands

pytestmark = pytest.mark.slow

FLAGS = ("--max-steps", "6", "--ckpt.interval", "2")
FULL_RUNS = 6
"""How many of the deaths of a case are followed to the end of training; the others to its start."""

Start = Callable[..., Run]


@dataclass(frozen=True)
class Case:
    """A start that changes the directory.

    Attributes:
        directory: the run directory before it.
        flags: of the start.
        other: a run that must not change.
    """

    directory: Path
    flags: tuple[str, ...]
    other: Path | None = None


@pytest.fixture(scope="module")
def start(tiny_model: ModelFactory, sft_data: Path) -> Start:
    model = tiny_model(weights=False, attention_dropout=0.3)

    def run(output: Path, *flags: str, kill: str | None = None, **options: Any) -> Run:
        trail = str(output.with_name(f"{output.name}.trail"))
        source = f"from tests.faults.faulty_calls import install\ninstall({str(output)!r}, {trail!r}, {kill})"
        fault = source if kill is not None else ""
        return shared_commands().sft(output, model, sft_data, *FLAGS, *flags, fault=fault, **options).wait()

    return run


@pytest.fixture(scope="module")
def finished(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run of the steps 2, 4 and 6."""
    output = tmp_path_factory.mktemp("finished") / "run"
    run = start(output)
    assert run.code == 0, run.log
    return output


@pytest.fixture(params=["after a torn save, with a damaged step", "an older step", "a fork"])
def case(request: pytest.FixtureRequest, start: Start, finished: Path, tmp_path: Path) -> Iterator[Case]:
    directory = tmp_path / "before"
    if request.param == "a fork":
        directory.mkdir()
        (directory / "notes.txt").write_text("mine")
        yield Case(directory, ("--ckpt.resume-dir", str(finished / "checkpoints/step_4")), finished)
        return
    shutil.copytree(finished, directory)
    if request.param == "an older step":
        yield Case(directory, ("--ckpt.resume-step", "2"))
        return
    checkpoints = directory / "checkpoints"
    (checkpoints / "step_6").rename(checkpoints / ".tmp-step_6")
    (checkpoints / ".tmp-step_6" / MANIFEST_NAME).unlink()
    manifest = checkpoints / "step_4" / MANIFEST_NAME
    manifest.write_bytes(manifest.read_bytes()[:-9])
    yield Case(directory, ("--ckpt.resume-step", "auto"))


def possessions(directory: Path) -> Counter[tuple[str, bytes]]:
    """Return what nobody may lose: files of steps and lines of metrics, wherever in the run they are."""
    found: Counter[tuple[str, bytes]] = Counter()
    for place, data in contents(directory).items():
        if ".tmp-" in place or "/trainer.log" in place:
            continue
        name = place.split("checkpoints/")[-1] if "checkpoints/" in place else place.rsplit("/", 1)[-1]
        lines = data.splitlines() if "metrics.jsonl" in name else [data]
        kind = "metrics" if "metrics.jsonl" in name else name
        if "checkpoints/" in place or kind in ("metrics", "notes.txt"):
            found.update((kind, line) for line in lines)
    return found


def in_place(directory: Path) -> dict[str, bytes]:
    """Return what the attempt starts from: everything but what it set aside and what names the attempt."""
    return {
        place: data
        for place, data in contents(directory).items()
        if not place.startswith(("discarded/", "configs/", "run.json", "run.lock"))
    }


def check_death(number: int, instant: str, case: Case, start: Start, output: Path, expected: dict[str, Any]) -> str:
    """Die, look, start again, compare. Returns what is wrong, or nothing."""
    name = f"{number} {instant}"
    shutil.copytree(case.directory, output)
    kill = f"kill_at={number}, instant={instant!r}"
    killed = start(output, *case.flags, kill=kill, until="prepared")
    if killed.code != -signal.SIGKILL:
        return f"{name}: not killed but ended with {killed.code}:\n{killed.log}"
    owned = possessions(case.directory)
    if lost := owned.keys() - possessions(output).keys():
        return f"{name}: lost {sorted(kind for kind, _ in lost)}"
    again = start(output, *case.flags, until="prepared")
    if again.code != 0 or "Traceback" in again.log:
        return f"{name}: the next start ended with {again.code}:\n{again.log}"
    if lost := owned.keys() - possessions(output).keys():
        return f"{name}: the next start lost {sorted(kind for kind, _ in lost)}"
    if differs := differing(in_place(output), expected["prepared"]):
        return f"{name}: {differs} differ after the next start"
    if expected["trains"]:
        trained = start(output, *case.flags)
        if trained.code != 0:
            return f"{name}: training ended with {trained.code}:\n{trained.log}"
        if differs := differing(end_state(output), expected["end"]):
            return f"{name}: {differs} differ at the end"
        whole_steps(output / "checkpoints")
    shutil.rmtree(output)
    return ""


def deaths(calls: list[Call]) -> list[tuple[int, str]]:
    """Return every call with the instant before it, and renames with that after it."""
    return [(call.number, "before") for call in calls] + [
        (call.number, "after") for call in calls if call.name in ("rename", "unlink")
    ]


@pytest.mark.timeout(1800)
def test_killed_at_any_call_of_its_start_the_next_start_goes_on_bit_for_bit(
    case: Case, start: Start, finished: Path, tmp_path: Path
) -> None:
    untouched = contents(case.other) if case.other else {}
    undisturbed = tmp_path / "undisturbed"
    shutil.copytree(case.directory, undisturbed)
    prepared = start(undisturbed, *case.flags, kill="kill_at=None", until="prepared")
    assert prepared.code == 0, prepared.log
    calls = read_trail(tmp_path / "undisturbed.trail")
    state = in_place(undisturbed)
    assert differing(state, in_place(case.directory)), "this start changes nothing"
    trained = start(undisturbed, *case.flags)
    assert trained.code == 0, trained.log
    end = end_state(undisturbed)
    straight = end_state(finished)
    if case.other is not None:  # a fork has no lines of the steps before it
        end_metrics, straight["metrics"] = end["metrics"], straight["metrics"][4:]
        assert end_metrics == straight["metrics"]
    assert differing(end, straight) == []

    instants = deaths(calls)
    assert len(instants) >= 15
    every = max(1, len(instants) // FULL_RUNS)

    def check(place: int) -> str:
        number, instant = instants[place]
        expected = {"prepared": state, "end": end, "trains": place % every == 0}
        return check_death(number, instant, case, start, tmp_path / f"death_{place}", expected)

    with ThreadPoolExecutor(max_workers=2) as pool:
        wrong = list(pool.map(check, range(len(instants))))
    assert not any(wrong), "\n".join(filter(None, wrong))
    assert not case.other or contents(case.other) == untouched
