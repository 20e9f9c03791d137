"""State of one run, from lines of `metrics.jsonl` and `events.jsonl`: steps, phases, alarms, time left, bottleneck.

The console, `monitor` and the report show this state; `holdfast.view.follow` reads the files.
"""

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from holdfast.run.checkpoints import list_entries
from holdfast.view.tables import size

LAUNCHER = "launcher"
"""Process of the launcher's own events: `starting`, `starting again`, `ended`."""
_RECENT_STEPS = 50
_BOTTLENECK_STEPS = 10
_MAX_OF_MEDIAN = 5.0
"""A step that waited for the start of an engine says nothing about the steps to come."""
_LEAST_SHARE = 0.1
"""Below this share of a step a wait is not worth a change."""
_FULL_SHARE = 0.9
"""From this share in use on, the slots of rounds hold the engines back."""
_TRAINING = ("training", "waiting for batches")
"""Phases that a trainer reports before its first step."""
_ALARMS = {"ALERT: ": "alert", "WARNING: ": "warning"}
_PLAIN = ("model", "name", "layout", "path", "url", "urls", "reason", "text")
"""Details whose values need no name beside them."""
_COUNTED = ("rows", "samples", "pairs", "answers", "tokens", "tasks", "held_out", "steps_per_epoch", "epochs")


def duration(seconds: float) -> str:
    """Return `0:42`, `12:05` or `3:07:20`; negative times give `0:00`."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


_ADVICE = {
    "generation": "more engines, shorter answers, a larger async_level, or with it orchestrator.schedule = 'rounds'",
    "training": "more trainer ranks, a larger async_level",
    "weight update": "LoRA, weights.transport = 'collective'",
    "evaluation": "a larger eval.interval",
    "checkpoints": "a larger ckpt.interval",
}


@dataclass(frozen=True)
class Bottleneck:
    """The part of a run to look at to make it faster.

    Attributes:
        part: `generation`, `training`, `weight update`, `checkpoints`, `evaluation`, or `none`.
        why: the numbers, in words.
        advice: settings that help, in words; empty if nothing limits the run.
    """

    part: str
    why: str
    advice: str = ""

    def __str__(self) -> str:
        if self.part == "none":
            return f"no bottleneck ({self.why})"
        return f"bottleneck: {self.part} ({self.why}); what helps: {self.advice}"


def find_bottleneck(steps: Iterable[Mapping[str, float | None]]) -> Bottleneck | None:
    """Return the bottleneck of some steps by the sums of their metrics; None if these do not say."""
    steps = list(steps)

    def total(name: str) -> float:
        return sum(line.get(name) or 0.0 for line in steps)

    step_s, batch_s = total("time/step"), total("time/batch")
    if not step_s:
        return None
    if not batch_s:  # no orchestrator: only the storage can hold up the trainer
        share = total("time/checkpoint") / step_s
        why = f"training waits {_percent(share)} of the time for a save"
        return Bottleneck("checkpoints", why, _ADVICE["checkpoints"]) if share >= _LEAST_SHARE else None
    waits = total("time/wait_for_batch") / step_s
    idle = sum((line.get("engine/idle_share") or 0.0) * (line.get("time/batch") or 0.0) for line in steps) / batch_s
    if max(waits, idle) < _LEAST_SHARE:
        return Bottleneck("none", f"trainer waits {_percent(waits)} of a step, engines {_percent(idle)} idle")
    if waits < idle:
        return Bottleneck("training", f"engines are idle {_percent(idle)} of the time", _ADVICE["training"])
    parts = {"generation": "time/generate", "weight update": "time/update_weights", "evaluation": "time/evaluate"}
    limit = max(parts, key=lambda part: total(parts[part]))
    advice = _ADVICE[limit]
    if limit == "generation" and any(line.get("rounds/played") is not None for line in steps):
        rounds = total("rounds/played")
        used = sum((line.get("rounds/slots_used") or 0.0) * (line.get("rounds/played") or 0.0) for line in steps)
        is_full = used >= _FULL_SHARE * rounds > 0
        more = "orchestrator.client.max_concurrency" if is_full else "async_level"
        advice = f"more engines, shorter answers, a larger {more}"
    return Bottleneck(limit, f"trainer waits {_percent(waits)} of a step", advice)


def _percent(share: float) -> str:
    return f"{100 * min(1.0, share):.0f} %"


@dataclass(frozen=True)
class Phase:
    """The last thing that a process said that it does."""

    process: str
    name: str
    since_unix_s: float
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def counts(self) -> bool:
        """Whether the phase tells how much of its work is done."""
        return isinstance(self.details.get("done"), int) and isinstance(self.details.get("total"), int)

    @property
    def text(self) -> str:
        """The details in words: `step 4, 7.56 MB, 0.92 s`."""
        rest, words = dict(self.details), []
        if self.counts:
            words = [f"{rest.pop('done'):,} of {rest.pop('total'):,} {rest.pop('unit', '')}".rstrip()]
            if isinstance(left_s := rest.pop("left_s", None), int | float):
                words[0] += f", left {duration(left_s)}"
        if "step" in rest and "max_steps" in rest:
            words.append(f"step {rest.pop('step')} of {rest.pop('max_steps')}")
        if "host" in rest and "port" in rest:
            words.append(f"{rest.pop('host')}:{rest.pop('port')}")
        return ", ".join([*words, *(_in_words(key, value) for key, value in rest.items())])


def _in_words(key: str, value: Any) -> str:
    if key == "bytes" and isinstance(value, int | float):
        return size(value)
    if key == "seconds" and isinstance(value, int | float):
        return f"{value:.2g} s"
    if key in _PLAIN:
        return str(value)
    name = key if "/" in key else key.replace("_", " ")
    if key.endswith("_s"):
        return f"{name.removesuffix(' s')} {value} s"
    return f"{value} {name}" if key in _COUNTED else f"{name} {value}"


@dataclass(frozen=True)
class Alarm:
    """An alert (of the metrics) or a warning (of anything else), as `kind` says; `step` is None if it is not known."""

    kind: str
    process: str
    text: str
    step: int | None
    unix_s: float


def alarm_of(event: Mapping[str, Any]) -> Alarm | None:
    """Return the alarm that an event is, or None."""
    name, step = str(event.get("phase", "")), event.get("step")
    for prefix, kind in _ALARMS.items():
        if name.startswith(prefix):
            text = name.removeprefix(prefix)
            step = step if isinstance(step, int) else None
            return Alarm(kind, str(event.get("process", "")), text, step, unix_s_of(event))
    return None


def unix_s_of(event: Mapping[str, Any]) -> float:
    """Return the time of an event; 0 if it has none."""
    time = event.get("time")
    return float(time) if isinstance(time, int | float) else 0.0


@dataclass
class RunState:
    """The known facts of a run.

    Attributes:
        max_steps: None until it is known.
        first_step: the step that the newest attempt resumed from.
        attempt: the newest attempt that has said anything.
        restarts: of processes by the launcher, in all attempts whose logs are there.
        begun_unix_s: when the newest attempt said its first word.
        stepped_unix_s: when the last step ended.
        ended: the last word of the launcher of the newest attempt: exit code, step and error.
        recent: metrics of the last steps.
    """

    max_steps: int | None = None
    first_step: int = 0
    step: int = 0
    attempt: int = 0
    restarts: int = 0
    begun_unix_s: float | None = None
    stepped_unix_s: float | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    phases: dict[str, Phase] = field(default_factory=dict)
    alarms: list[Alarm] = field(default_factory=list)
    ended: dict[str, Any] | None = None
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))

    def forget_steps(self) -> None:
        """Forget all steps, to read them again."""
        self.step, self.metrics, self.stepped_unix_s = 0, {}, None
        self.recent.clear()

    def take_step(self, metrics: dict[str, Any], *, unix_s: float) -> None:
        """Take one line of `metrics.jsonl`; a step that was trained again replaces its old line and all later lines."""
        step = int(metrics["step"])
        while self.recent and self.recent[-1]["step"] >= step:
            self.recent.pop()
        self.step, self.metrics, self.stepped_unix_s = step, metrics, unix_s
        self.recent.append(metrics)

    @property
    def left_s(self) -> float | None:
        """The time until the last step, by the mean of the last steps; None if it is not known."""
        seconds = [line["time/step"] for line in self.recent if line.get("time/step")]
        if len(seconds) < 2 or self.max_steps is None:  # the first step takes longer than the others
            return None
        limit = _MAX_OF_MEDIAN * statistics.median(seconds)
        return statistics.fmean(min(each, limit) for each in seconds) * max(0, self.max_steps - self.step)

    @property
    def bottleneck(self) -> Bottleneck | None:
        recent = list(self.recent)[-_BOTTLENECK_STEPS:]
        # The first step of an attempt waited for the start of the others.
        return find_bottleneck([line for line in recent if line["step"] > self.first_step + 1] or recent)

    def begin_attempt(self, attempt: int, *, unix_s: float) -> None:
        """Begin another attempt, without the phases of the one before."""
        self.attempt, self.begun_unix_s, self.ended = attempt, unix_s, None
        self.phases.clear()

    def take_event(self, event: dict[str, Any], *, attempt: int) -> Alarm | Phase | None:
        """Take one event of an attempt; return its alarm or phase, None for an event of the launcher."""
        process, name, unix_s = str(event.get("process", "")), str(event.get("phase", "")), unix_s_of(event)
        details = {key: value for key, value in event.items() if key not in ("phase", "process", "time")}
        if attempt > self.attempt:
            self.begin_attempt(attempt, unix_s=unix_s)
        is_newest = attempt == self.attempt
        if name in _TRAINING and is_newest:
            step, max_steps = details.get("step"), details.get("max_steps")
            self.first_step = step if isinstance(step, int) else self.first_step
            self.max_steps = max_steps if isinstance(max_steps, int) and max_steps else self.max_steps
        match process, name:
            case "launcher", "starting again":
                self.restarts += 1
            case "launcher", "starting":  # of `evaluate`, which has no attempts
                self.begin_attempt(self.attempt, unix_s=unix_s)
            case "launcher", "ended" if is_newest:
                self.ended = {"unix_s": unix_s, **details}
        if process == LAUNCHER:
            return None
        if (alarm := alarm_of(event)) is not None:
            self.alarms.append(alarm)
            return alarm
        phase, before = Phase(process, name, unix_s, details), self.phases.get(process)
        if phase.counts and before is not None and before.name == name:
            phase = replace(phase, since_unix_s=before.since_unix_s)  # progress within the phase
        if name == "evaluated" and "tasks" not in details:  # the end of a phase, without a new one
            self.phases.pop(process, None)
        elif name != "checkpoint saved":  # the process continues what it did
            self.phases[process] = phase
        return phase

    def starting(self) -> list[Phase]:
        """Return the phases of processes that have not begun their work, or began again since the last step."""
        if self.stepped_unix_s is None:
            return list(self.phases.values())
        new = (phase for phase in self.phases.values() if phase.since_unix_s > self.stepped_unix_s)
        return [phase for phase in new if phase.name not in ("finished", "ready")]


@dataclass(frozen=True)
class Checkpoints:
    """The newest checkpoints of a run.

    Attributes:
        good: the newest step whose manifest is whole, committed at `saved_unix_s`.
        damaged, unreadable: later steps whose manifest is missing or damaged, or cannot be read now.
        saving: the step that is being written, or was when its writer was killed.
    """

    good: int | None = None
    saved_unix_s: float | None = None
    damaged: tuple[int, ...] = ()
    unreadable: tuple[int, ...] = ()
    saving: int | None = None


def look_at_checkpoints(directory: Path) -> Checkpoints:
    """Return the newest checkpoints. Raise OSError if the directory cannot be read."""
    entries = list_entries(directory)
    good = next((entry for entry in reversed(entries) if entry.status == "committed"), None)
    after = [entry for entry in entries if good is None or entry.step > good.step]
    return Checkpoints(
        None if good is None else good.step,
        None if good is None or good.manifest is None else good.manifest.created_unix_s,
        tuple(entry.step for entry in after if entry.status == "damaged"),
        tuple(entry.step for entry in after if entry.status == "unreadable"),
        max((entry.step for entry in entries if entry.status == "torn"), default=None),
    )
