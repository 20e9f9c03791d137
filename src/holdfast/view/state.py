"""State of one run, from its files: steps, phases, alarms, checkpoints, time left, and the process that holds it up."""

from __future__ import annotations

import math
import os
import re
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from holdfast.errors import CheckpointError, ReadError
from holdfast.run.atomic import TEMPORARY_PREFIX, is_gone
from holdfast.run.manifest import MANIFEST_NAME, read_manifest
from holdfast.view.tables import size

RECENT_STEPS = 50
# A step that waited for the start of an engine, or for a process to come back, says nothing of those to come.
_MOST_OF_MEDIAN = 5.0


class TimeLeft:
    """How long the steps that are left will take, if they take as long as the last ones did by the wall clock."""

    def __init__(self) -> None:
        self._ends: deque[tuple[float, int]] = deque(maxlen=RECENT_STEPS + 1)
        # What one that was not seen may have taken, until one was seen.
        self._unseen_s: float | None = None

    def begin_with(
        self, steps: Iterable[tuple[int, float | None]], *, max_steps: int | None, now: float
    ) -> float | None:
        """Begin with steps whose ends nobody saw, each with the seconds that it says it took; return as `after`."""
        self._ends.clear()
        self._unseen_s = None
        recent = [(step, seconds or 0.0) for step, seconds in steps][-RECENT_STEPS:]
        if not recent:
            return None
        limit = _MOST_OF_MEDIAN * statistics.median(seconds for _, seconds in recent)
        ends = [(step, min(seconds, limit)) for step, seconds in recent]
        moment = now - sum(seconds for _, seconds in ends[1:])
        left_s = self.after(ends[0][0], max_steps=max_steps, now=moment, step_s=ends[0][1] or None)
        for step, seconds in ends[1:]:
            moment += seconds
            left_s = self.after(step, max_steps=max_steps, now=moment, step_s=seconds or None)
        self._unseen_s = limit or math.inf
        return left_s

    def after(self, step: int, *, max_steps: int | None, now: float, step_s: float | None = None) -> float | None:
        """Return the seconds left after `step`, which was seen to end at `now`; None where nothing can be said.

        Args:
            max_steps: that the run trains until; None where that is not known.
            step_s: how long the step says that it took itself.
        """
        if self._ends and step <= self._ends[-1][1]:  # the run went back to a checkpoint
            self._ends.clear()
        if self._ends and self._unseen_s is not None:
            # The processes may have been started since: only what the step itself took counts.
            waited_s = now - self._ends[-1][0]
            start_s = waited_s - min(waited_s, step_s or math.inf, self._unseen_s)
            self._ends = deque(((end + start_s, number) for end, number in self._ends), maxlen=self._ends.maxlen)
        self._unseen_s = None
        self._ends.append((now, step))
        first, first_step = self._ends[0]
        # The first of an attempt takes longer than the others.
        if step == first_step:
            return None
        mean = (now - first) / (step - first_step) if now > first else step_s
        return None if mean is None or max_steps is None else mean * max(0, max_steps - step)


def duration(seconds: float) -> str:
    """Return `0:42`, `12:05` or `3:07:20`; clocks that went back give `0:00`."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# Below this share of a step nobody waits for anybody in a way that is worth a change.
_LEAST_SHARE = 0.1
Metrics = Mapping[str, float | None]


@dataclass(frozen=True)
class Bottleneck:
    """What to look at to make a run faster.

    Attributes:
        who: `generation`, `training`, `weight update`, `checkpoints`, `evaluation`, or `none`.
        why: the figures, in words.
        trainer_waits: share of a step in which the trainer waits for its batch; None where it waits for none.
        engine_idle: share of the time of a batch in which no engine has a request; None without engines.
    """

    who: str
    why: str
    trainer_waits: float | None = None
    engine_idle: float | None = None

    def __str__(self) -> str:
        """Return the line that people see."""
        return f"no bottleneck ({self.why})" if self.who == "none" else f"bottleneck: {self.who} ({self.why})"


def find_bottleneck(recent: Iterable[Metrics]) -> Bottleneck | None:
    """Return who holds the run up in the steps `recent`, by their metrics; None where these do not say.

    What counts is the sum over the steps: one that waited for a start does not hide behind many short ones.
    """
    steps = list(recent)
    step_s = _total(steps, "time/step")
    if not step_s:
        return None
    batch_s = _total(steps, "time/batch")
    if not batch_s:  # no orchestrator: nobody to wait for but the storage
        share = _total(steps, "time/checkpoint") / step_s
        if share < _LEAST_SHARE:
            return None
        return Bottleneck("checkpoints", f"training waits {_percent(share)} of the time for a save")
    waits = _total(steps, "time/wait_for_batch") / step_s
    weighted = [((line.get("engine/idle_share") or 0.0), (line.get("time/batch") or 0.0)) for line in steps]
    idle = sum(share * seconds for share, seconds in weighted) / batch_s
    if max(waits, idle) < _LEAST_SHARE:
        return Bottleneck(
            "none", f"trainer waits {_percent(waits)} of a step, engines {_percent(idle)} idle", waits, idle
        )
    if waits >= idle:
        # The trainer waits for the orchestrator: for what part of its work?
        parts = {
            "generation": _total(steps, "time/generate"),
            "weight update": _total(steps, "time/update_weights"),
            "evaluation": _total(steps, "time/evaluate"),
        }
        who = max(parts, key=lambda name: parts[name])
        return Bottleneck(who, f"trainer waits {_percent(waits)} of a step", waits, idle)
    return Bottleneck("training", f"engines are idle {_percent(idle)} of the time", waits, idle)


def _total(steps: Iterable[Metrics], name: str) -> float:
    return sum(line.get(name) or 0.0 for line in steps)


def _percent(share: float) -> str:
    return f"{100 * min(1.0, share):.0f} %"


_RECENT_STEPS = 10
LAUNCHER = "launcher"
"""Process of the events that the launcher itself writes: `starting`, `starting again`, `ended`."""
# What a trainer says when it is about to take its first step.
_TRAINS = ("training", "waiting for batches")
_ALARMS = ("ALERT: ", "WARNING: ")
_MOST_ALARMS = 100
_NOW_AND_THEN = ("val/", "eval/")


@dataclass(frozen=True)
class Phase:
    """What a process said last that it does.

    Attributes:
        since_unix_s: when it said so.
        details: what it said beside, such as the step.
    """

    process: str
    name: str
    since_unix_s: float
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def share(self) -> float | None:
        """How much of it is done; None where it does not count."""
        done, total = self.details.get("done"), self.details.get("total")
        return done / total if isinstance(done, int) and isinstance(total, int) and total else None

    @property
    def said(self) -> str:
        """The details in words: `step 4, 7.56 MB, 0.92 s`."""
        rest, words = dict(self.details), []
        if self.share is not None:
            words = [f"{rest.pop('done'):,} of {rest.pop('total'):,} {rest.pop('unit', '')}".rstrip()]
            if isinstance(left_s := rest.pop("left_s", None), int | float):
                words[0] += f", left {duration(left_s)}"
        if "step" in rest and "max_steps" in rest:
            words.append(f"step {rest.pop('step')} of {rest.pop('max_steps')}")
        if "host" in rest and "port" in rest:
            words.append(f"{rest.pop('host')}:{rest.pop('port')}")
        return ", ".join([*words, *(_in_words(key, value) for key, value in rest.items())])


_PLAIN = ("model", "name", "layout", "path", "url", "urls", "reason", "text")
"""Details whose values need no name beside them."""
_COUNTED = ("rows", "samples", "pairs", "answers", "tokens", "tasks", "held_out", "steps_per_epoch", "epochs")


def _in_words(key: str, value: Any) -> str:
    """Return one detail of a phase for people."""
    if key == "bytes" and isinstance(value, int | float):
        return size(value)
    if key == "seconds" and isinstance(value, int | float):
        return f"{value:.2g} s"
    if key in _PLAIN:
        return str(value)
    if key in _COUNTED:
        return f"{value} {key.replace('_', ' ')}"
    if key.endswith("_s"):
        return f"{key.removesuffix('_s').replace('_', ' ')} {value} s"
    return f"{key if '/' in key else key.replace('_', ' ')} {value}"


@dataclass(frozen=True)
class Alarm:
    """An alert or a warning.

    Attributes:
        kind: `alert`: of the metrics; `warning`: anything else.
        process: that gave it.
        step: at which it was given, where that is known.
    """

    kind: str
    process: str
    text: str
    step: int | None
    unix_s: float


@dataclass
class RunState:
    """All that is known of a run; made of lines of `metrics.jsonl` and of events, in their order.

    Attributes:
        max_steps: that the run trains until; None while that is not known.
        first_step: that the newest attempt began behind.
        attempt: number of the newest attempt that has said anything.
        restarts: how often a process was started again by the launcher, in all attempts whose logs are there.
        alarms: the last ones; alerts stay longer than warnings.
        num_alarms: how many of each kind there were.
        begun_unix_s: when the newest attempt said its first word.
        stepped_unix_s: when the last step was seen to end.
        evaluated: what only some steps have, as it was last.
        ended: the last word of the launcher of the newest attempt: exit code, step and error.
    """

    max_steps: int | None = None
    first_step: int = 0
    step: int = 0
    attempt: int = 0
    restarts: int = 0
    begun_unix_s: float | None = None
    stepped_unix_s: float | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    evaluated: dict[str, Any] = field(default_factory=dict)
    phases: dict[str, Phase] = field(default_factory=dict)
    alarms: list[Alarm] = field(default_factory=list)
    num_alarms: Counter[str] = field(default_factory=Counter)
    ended: dict[str, Any] | None = None
    left_s: float | None = None
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))

    def forget_steps(self) -> None:
        """Know no steps: they are read anew."""
        self.step, self.metrics, self.left_s, self.stepped_unix_s = 0, {}, None, None
        self.evaluated.clear()
        self.recent.clear()

    def take_step(self, metrics: dict[str, Any], *, now: float) -> None:
        """Take one line of `metrics.jsonl`; a step that comes again replaces itself and what came after it."""
        step = int(metrics["step"])
        if step <= self.step:
            kept = [line for line in self.recent if line["step"] < step]
            self.recent.clear()
            self.recent.extend(kept)
        self.step, self.metrics, self.stepped_unix_s = step, metrics, now
        self.recent.append(metrics)
        self.evaluated |= {name: value for name, value in metrics.items() if name.startswith(_NOW_AND_THEN)}

    def begin_attempt(self, attempt: int, *, unix_s: float) -> None:
        """Begin attempt number `attempt`: what the processes of the one before did is over."""
        self.attempt, self.begun_unix_s, self.ended = attempt, unix_s, None
        self.phases.clear()

    def take_event(self, event: dict[str, Any], *, attempt: int) -> Alarm | Phase | None:
        """Take one event of an attempt; return what it says, None where it is the launcher's own."""
        process, name = str(event.get("process", "")), str(event.get("phase", ""))
        time = event.get("time")
        unix_s = float(time) if isinstance(time, int | float) else 0.0
        details = {key: value for key, value in event.items() if key not in ("phase", "process", "time")}
        if attempt > self.attempt:
            self.begin_attempt(attempt, unix_s=unix_s)
        if name in _TRAINS and attempt == self.attempt:
            step, max_steps = details.get("step"), details.get("max_steps")
            self.first_step = step if isinstance(step, int) else self.first_step
            self.max_steps = max_steps if isinstance(max_steps, int) and max_steps else self.max_steps
        if process == LAUNCHER:
            if name == "starting again":
                self.restarts += 1
            elif name == "starting":  # of what has no attempts, once more
                self.begun_unix_s, self.ended = unix_s, None
                self.phases.clear()
            elif name == "ended" and attempt == self.attempt:
                self.ended = {"unix_s": unix_s, **details}
            return None
        for beginning in _ALARMS:
            if name.startswith(beginning):
                step = details.get("step")
                text = name.removeprefix(beginning)
                kind = beginning.removesuffix(": ").lower()
                alarm = Alarm(kind, process, text, step if isinstance(step, int) else None, unix_s)
                self._keep(alarm)
                return alarm
        phase = Phase(process, name, unix_s, details)
        before = self.phases.get(process)
        if phase.share is not None and before is not None and before.name == name:
            phase = replace(phase, since_unix_s=before.since_unix_s)  # it says how far it is
        if name == "evaluated" and "tasks" not in details:  # the end of a phase, and none begins
            self.phases.pop(process, None)
        elif name != "checkpoint saved":  # it goes on with what it did
            self.phases[process] = phase
        return phase

    def _keep(self, alarm: Alarm) -> None:
        self.num_alarms[alarm.kind] += 1
        if len(self.alarms) >= _MOST_ALARMS:
            kinds = [one.kind for one in self.alarms]
            del self.alarms[kinds.index("warning") if "warning" in kinds else 0]
        self.alarms.append(alarm)

    @property
    def bottleneck(self) -> Bottleneck | None:
        """Who holds the run up, by its last steps."""
        # The first step of an attempt waited for the start of the others.
        recent = [line for line in self.recent if line["step"] > self.first_step + 1] or self.recent
        return find_bottleneck(recent)

    def starting(self) -> list[Phase]:
        """Return what processes do that have not begun their work, or that began anew since the last step."""
        seen = self.stepped_unix_s
        is_new = [phase for phase in self.phases.values() if seen is None or phase.since_unix_s > seen]
        return [phase for phase in is_new if phase.name not in ("finished", "ready") or seen is None]


# Every look at a manifest is a question to the storage.
_LOOKED_AT_AGAIN = 3
_NAME = re.compile(rf"({re.escape(TEMPORARY_PREFIX)})?step_(\d+)")


@dataclass(frozen=True)
class Checkpoints:
    """What was found at one look.

    Attributes:
        good: the newest step whose manifest is whole.
        saved_unix_s: when that was committed.
        damaged: steps after `good` whose manifest is missing or damaged.
        unreadable: steps after `good` whose manifest the storage has not given yet.
        saving: the step that is written now, or was when its writer was killed.
        steps: all whole ones, ascending.
    """

    good: int | None = None
    saved_unix_s: float | None = None
    damaged: tuple[int, ...] = ()
    unreadable: tuple[int, ...] = ()
    saving: int | None = None
    steps: tuple[int, ...] = ()


class CheckpointWatch:
    """Looks into a directory of checkpoints; reads each manifest once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[int, tuple[int, float | None]] = {}
        self.last = Checkpoints()

    def look(self) -> Checkpoints:
        """Return what is there now; the same as before where the directory cannot be read."""
        try:
            with os.scandir(self._directory) as entries:
                # fullmatch: removals and downloads put something behind the step.
                names = [match for entry in entries if (match := _NAME.fullmatch(entry.name))]
        except FileNotFoundError:
            names = []
        except OSError:
            return self.last
        there = sorted(int(match[2]) for match in names if not match[1])
        saving = [int(match[2]) for match in names if match[1]]
        newest = set(there[-_LOOKED_AT_AGAIN:])
        for step in there:
            if step in newest or step not in self._known:
                self._read(step)
        self._known = {step: self._known[step] for step in there if step in self._known}
        saved = {step: time for step, (_, time) in self._known.items() if time is not None}
        good = max(saved, default=None)
        others = [step for step in there if step not in saved and (good is None or step > good)]
        self.last = Checkpoints(
            good,
            None if good is None else saved[good],
            # Removed since it was listed, a step is not damaged.
            tuple(step for step in others if step in self._known and not is_gone(self._directory / f"step_{step}")),
            tuple(step for step in others if step not in self._known),
            max(saving, default=None),
            tuple(saved),
        )
        return self.last

    def _read(self, step: int) -> None:
        """Learn when `step` was committed, or that it is damaged; what is known stays where it cannot be read."""
        path = self._directory / f"step_{step}"
        try:
            changed = (path / MANIFEST_NAME).stat().st_mtime_ns
        except FileNotFoundError:
            changed = 0
        except OSError:
            return
        known = self._known.get(step)
        if known is not None and known[0] == changed:
            return
        try:
            manifest = read_manifest(path)
            time = float(manifest.created_unix_s) if manifest.step == step else None
        except ReadError:
            return  # it may be read at the next look
        except CheckpointError:
            time = None
        self._known[step] = (changed, time)
