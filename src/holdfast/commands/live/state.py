"""What is known of one run: its steps, what its processes do, what went wrong."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from holdfast.commands.live.bottleneck import Bottleneck, find_bottleneck

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
        if name != "saved checkpoint":  # it goes on with what it did
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
