"""What tests ask of the traces of a profile: that each is whole, and marks the steps and the phases of the run."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Trace:
    events: list[dict[str, Any]]

    @classmethod
    def read(cls, profile: Path, *, rank: int = 0) -> Trace:
        return cls(json.loads(gzip.decompress((profile / f"rank_{rank}.json.gz").read_bytes()))["traceEvents"])

    def slices(self, *, cat: str, name: str | None = None) -> list[dict[str, Any]]:
        """What the rank did, in the order of time."""
        found = [one for one in self.events if one["ph"] == "X" and one.get("cat") == cat]
        return sorted((one for one in found if name in (None, one["name"])), key=lambda one: one["ts"])

    def steps(self) -> list[int]:
        marks = [one["name"] for one in self.slices(cat="user_annotation")]
        return [int(name.removeprefix("ProfilerStep#")) for name in marks if name.startswith("ProfilerStep#")]

    def check_phase(self, name: str) -> None:
        """Check that every marked step has phase `name` once, and operations of the phase within the phase."""
        phases = self.slices(cat="user_annotation", name=name)
        steps = [self.slices(cat="user_annotation", name=f"ProfilerStep#{step}")[0] for step in self.steps()]
        assert len(phases) == len(steps) > 0
        for step, phase in zip(steps, phases, strict=True):
            assert _encloses(step, phase)
            within = [one for one in self.slices(cat="cpu_op") if phase["ts"] <= one["ts"] <= _end(phase)]
            assert len(within) > 10 and all(_encloses(phase, one) for one in within if one["tid"] == phase["tid"])


def traces(profile: Path) -> list[str]:
    return sorted(path.name for path in profile.iterdir())


def _end(event: dict[str, Any]) -> float:
    return event["ts"] + event["dur"]


def _encloses(outer: dict[str, Any], inner: dict[str, Any]) -> bool:
    return outer["ts"] <= inner["ts"] and _end(inner) <= _end(outer)
