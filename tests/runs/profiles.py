"""What tests ask of the file of a profile: that it is whole, and that everything in it goes by one clock."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLOCKS_APART_US = 2000.0
"""A clock that is not the other's is off by seconds or more; what two readings of one are apart is 10 µs."""


@dataclass(frozen=True)
class Profile:
    """The events of a profile."""

    events: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Return the events of a file, which must have the form that readers of trace events expect."""
        content = json.loads(gzip.decompress(path.read_bytes()))
        assert content["displayTimeUnit"] == "ms" and content["baseTimeNanoseconds"] == 1767225600 * 10**9
        _check_form(content["traceEvents"])
        return cls(content["traceEvents"])

    def processes(self) -> dict[str, int]:
        """The number of each process, by its name."""
        named = [event for event in self.events if event["name"] == "process_name"]
        found = {event["args"]["name"]: event["pid"] for event in named}
        assert len(found) == len(named) == len(set(found.values()))
        return found

    def threads(self, process: str) -> dict[str, int]:
        """The number of each thread of a process, by its name."""
        pid = self.processes()[process]
        return {
            one["args"]["name"]: one["tid"] for one in self.events if one["name"] == "thread_name" and one["pid"] == pid
        }

    def slices(self, process: str, *, cat: str | None = None, name: str | None = None) -> list[dict[str, Any]]:
        """What a process did, in the order of time."""
        pid = self.processes()[process]
        found = [one for one in self.events if one["ph"] == "X" and one.get("pid") == pid]
        found = [one for one in found if cat in (None, one.get("cat")) and name in (None, one["name"])]
        return sorted(found, key=lambda one: one["ts"])

    def marked_steps(self, rank: int) -> list[str]:
        """The steps that torch's trace of a rank marks."""
        marks = self.slices(f"trainer rank {rank}", cat="user_annotation")
        return [one["name"] for one in marks if one["name"].startswith("ProfilerStep#")]


def _check_form(events: list[dict[str, Any]]) -> None:
    """Check that every event has its place and time, every arrow two ends, and every process that is used a name."""
    for one in events:
        assert one["ph"] in "XMsfi" and type(one["pid"]) is int and type(one["tid"]) is int, one
        assert math.isfinite(one["ts"]) and (one["ph"] != "X" or one["dur"] >= 0), one
    begun, ended = ([(one["cat"], one["id"]) for one in events if one["ph"] == end] for end in "sf")
    assert len(begun) == len(set(begun)) and sorted(begun) == sorted(ended)
    named = {one["pid"] for one in events if one["name"] == "process_name"}
    assert {one["pid"] for one in events if one["ph"] != "M"} <= named


def encloses(outer: dict[str, Any], inner: dict[str, Any]) -> bool:
    """Whether a slice begins before another one and ends behind it."""
    begins = outer["ts"] - CLOCKS_APART_US <= inner["ts"]
    return begins and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + CLOCKS_APART_US


def check_clocks(profile: Profile, name: str, *, ranks: int = 1) -> None:
    """Check that every span `name` of the trainer's timeline encloses what torch saw in that phase, on each rank."""
    spans = profile.slices("trainer: timeline", name=name)
    assert spans
    for rank in range(ranks):
        process = f"trainer rank {rank}"
        phases = profile.slices(process, cat="user_annotation", name=name)
        operations = profile.slices(process, cat="cpu_op")
        assert len(phases) == len(spans)
        for span, phase in zip(spans, phases, strict=True):
            # Ranks begin a phase when they come to it; the span is rank 0's.
            assert rank or encloses(span, phase), (span, phase)
            (step,) = profile.slices(process, name=f"ProfilerStep#{span['args']['step']}")
            assert encloses(step, phase)
            within = [one for one in operations if phase["ts"] <= one["ts"] <= phase["ts"] + phase["dur"]]
            assert len(within) > 10 and all(encloses(phase, one) for one in within if one["tid"] == phase["tid"])
