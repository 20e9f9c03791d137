"""Prints a run as lines of text or as JSON lines, for the command that runs it and for log files.

The console reads what the processes write (`events.jsonl`, `metrics.jsonl`), so it can neither slow them down nor
disagree with the files. With `--log-format json` every line on stdout is one JSON object, whatever prints it.
"""

import io
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, TextIO

from holdfast.errors import HoldfastError, printable
from holdfast.process import events
from holdfast.process.child import make_output_lossy
from holdfast.run.run_dir import RunDir
from holdfast.view.follow import EventLog, Follower, News, Stepped
from holdfast.view.state import LAUNCHER, Alarm, Phase, duration

if TYPE_CHECKING:
    from rich.live import Live
    from rich.spinner import Spinner

USUAL_TIMES = {
    "importing torch": "usually 3-10 s",
    "loading vllm": "usually 15-60 s, minutes on a cold disk",
    "loading model": "seconds for small models",
    "starting the engine": "usually 5-60 s, minutes if it compiles",
}
ENDS = ("ready", "finished", "stopped")
"""Phases in which nothing happens."""
_COLUMNS = {
    "reward/mean": "reward/mean {:6.3f}",
    "loss": "loss {:8.4f}",
    "rewards/accuracies": "rewards/accuracies {:5.3f}",
    "rewards/margins": "rewards/margins {:6.3f}",
    "val/loss": "val/loss {:7.4f}",
    "val/rewards/accuracies": "val/rewards/accuracies {:5.3f}",
    "val/rewards/margins": "val/rewards/margins {:6.3f}",
    "grad_norm": "grad_norm {:7.3f}",
    "mismatch_kl": "mismatch_kl {:8.1e}",
    "lr": "lr {:.1e}",
    "tokens_per_s": "{:7,.0f} tok/s",
    "time/step": "{:6.2f} s",
    "time/validation": "validation {:5.2f} s",
    "time/wait_for_batch": "wait {:5.2f} s",
    "memory_gib": "{:5.2f} GiB",
}
_MAX_ALARM = 2000
_SHORTEST_PHASE_S = 1.0
"""The line of a shorter phase is enough."""
_LINE_EVERY_S = 10.0
"""Between lines about long phases, if no moving line can be drawn."""
_COUNTED_EVERY_S = 2.0
"""See `holdfast.process.events.Counted`."""


def step_line(metrics: Mapping[str, Any], max_steps: int | None, *, left_s: float | None = None) -> str:
    """Return the line of a step; columns that a program lacks are left out."""
    step = int(metrics["step"])
    if isinstance(validation_s := metrics.get("time/validation"), int | float):
        # Validation has its own column, so that the times of all steps can be compared.
        metrics = {**metrics, "time/step": (metrics.get("time/step") or 0.0) - validation_s}
    values = ((template, metrics.get(name)) for name, template in _COLUMNS.items())
    return "  ".join(
        [
            f"step {step:>{len(str(max_steps))}}/{max_steps}" if max_steps else f"step {step}",
            *(template.format(value) for template, value in values if isinstance(value, int | float)),
            *([f"left {duration(left_s)}"] if left_s else []),
        ]
    )


def phase_text(phase: Phase, *, now: float) -> str:
    """Return what a process does, for how long by the unix time `now`, and how long it usually takes."""
    usual = f", {USUAL_TIMES[phase.name]}" if phase.name in USUAL_TIMES else ""
    lasts = "" if phase.name in ENDS else f" ({duration(now - phase.since_unix_s)}{usual})"
    counted = f" {phase.text}" if phase.counts else ""
    return f"{phase.process:<12} {phase.name}{counted}{lasts}"


def event_line(event: Phase | Alarm, *, seconds: float) -> str:
    """Return the line of an event, `seconds` after the start of the attempt."""
    begin = f"{seconds:6.1f}s  {event.process:<12}  "
    if isinstance(event, Alarm):
        step = "" if event.step is None else f" (step {event.step})"
        return f"{begin}{event.kind.upper()}: {printable(event.text, most=_MAX_ALARM)}{step}"
    usual = f" ({USUAL_TIMES[event.name]})" if event.name in USUAL_TIMES else ""
    return f"{begin}{event.name}{usual}{': ' if event.text else ''}{event.text}"


class JsonLines(io.TextIOBase):
    """Replaces stdout: a printed line becomes an object of type `message`. `end`: fields of the object of type `end`,
    beside the exit code."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._begun = ""
        self.end: dict[str, Any] = {}

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._stream.encoding

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            if line.strip():
                self.emit("message", text=line.rstrip())
        return len(text)

    def emit(self, kind: str, *, unix_s: float | None = None, **fields: Any) -> None:
        """Write one object of type `kind`, with the time `unix_s`, or the current time."""
        fields = {"type": kind, "time": round(time.time() if unix_s is None else unix_s, 3), **fields}
        self._stream.write(json.dumps(_finite(fields), default=str) + "\n")
        self._stream.flush()

    def close_with(self, exit_code: int, **fields: Any) -> None:
        """Write a line without an end, and the last object."""
        if self._begun.strip():
            self.write("\n")
        self.emit("end", exit_code=exit_code, **self.end, **fields)

    def emit_news(self, news: News, *, max_steps: int) -> None:
        """Write the object of something that happened in a run."""
        match news:
            case Stepped():
                metrics = {name: value for name, value in news.metrics.items() if name != "step"}
                left_s = None if news.left_s is None else round(news.left_s, 1)
                self.emit("step", step=news.metrics["step"], max_steps=max_steps, left_s=left_s, metrics=metrics)
            case Alarm():
                self.emit(news.kind, unix_s=news.unix_s, step=news.step, text=news.text)
            case Phase(name="checkpoint saved"):
                self.emit("checkpoint", unix_s=news.since_unix_s, state="committed", **_unreserved(news.details))
            case Phase():
                details = _unreserved(news.details)
                self.emit("phase", unix_s=news.since_unix_s, process=news.process, phase=news.name, details=details)


def json_lines() -> JsonLines | None:
    """Return what writes JSON lines to stdout, if `--log-format json` is on."""
    return sys.stdout if isinstance(sys.stdout, JsonLines) else None


@contextmanager
def as_json_lines() -> Iterator[JsonLines]:
    """Replace stdout by JSON lines. The block calls `close_with` at its end; an error that it raises does so, too."""
    make_output_lossy()  # `| head` does not end a run
    stdout = sys.stdout
    lines = JsonLines(stdout)
    sys.stdout = lines
    try:
        yield lines
    except BaseException as error:
        lines.close_with(code_of_error(error), error=str(error) or type(error).__name__)
        raise
    finally:
        sys.stdout = stdout


def run_in_json_lines(action: Callable[[], int]) -> int:
    """Run `action` with stdout in JSON lines; return its exit code."""
    with as_json_lines() as lines:
        code = action()
        lines.close_with(code)
    return code


def code_of_error(error: BaseException) -> int:
    """Return the exit code of a command that ends by `error`."""
    match error:
        case HoldfastError():
            return error.exit_code
        case KeyboardInterrupt():
            return 128 + signal.SIGINT
        case OSError():
            return 2
    return 1


def _unreserved(details: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in details.items() if name not in ("type", "time", "kind", "unix_s", "state")}


def _finite(value: Any) -> Any:
    """Return `value` with null for numbers that JSON lacks."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {str(key): _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
    return value


class Console:
    """Shows one attempt; used as a context manager. `attempt`: that is about to begin, after `first_step`."""

    def __init__(self, run_dir: RunDir, *, attempt: int, first_step: int, max_steps: int) -> None:
        self._events = run_dir.logs(attempt) / "events.jsonl"
        self._max_steps = max_steps
        log = EventLog(run_dir, attempt=attempt)
        self._follower = Follower(run_dir, log, max_steps=max_steps)
        self._follower.catch_up()
        state = self._follower.state
        if state.attempt < attempt:
            state.begin_attempt(attempt, unix_s=time.time())
        state.first_step = first_step
        self._started = self._printed = time.monotonic()
        self._json = json_lines()
        self._spinner = _Spinner() if self._json is None and _can_draw_on(sys.stderr) else None
        self._counted: dict[tuple[str, str], float] = {}
        self.last_step = self._first_step = first_step

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.refresh()
        finally:
            if self._spinner is not None:
                self._spinner.show([])

    def say(self, text: str) -> None:
        print(text, flush=True)
        self._printed = time.monotonic()

    def note(self, what: str, **fields: Any) -> None:
        """Write an event of the launcher itself, for `monitor` and the report."""
        if os.path.isdir(self._events.parent):  # noqa: PTH112 - `Path.is_dir` raises if the storage fails
            events.append(self._events, LAUNCHER, what, **fields)

    def refresh(self) -> None:
        """Show what the processes have written since the last call."""
        for news in self._follower.news():
            if isinstance(news, Phase) and not self._is_due(news):
                continue
            if self._json is not None:
                self._json.emit_news(news, max_steps=self._max_steps)
            elif isinstance(news, Stepped):
                self.say(step_line(news.metrics, self._max_steps, left_s=news.left_s))
            else:
                self.say(event_line(news, seconds=time.monotonic() - self._started))
        # Also of steps that the storage gave too late for news; steps before the attempt are not its own.
        self.last_step = max(self.last_step, self._follower.state.step)
        now = time.time()
        phases = [phase for phase in self._follower.state.starting() if phase.name not in ENDS]
        lasting = [phase for phase in phases if now - phase.since_unix_s >= _SHORTEST_PHASE_S]
        if self._spinner is not None:
            lasting.sort(key=lambda phase: not phase.counts)  # narrow terminals cut the last ones off
            self._spinner.show([phase_text(phase, now=now) for phase in lasting])
        elif self._json is None and self.last_step == self._first_step and self._was_silent():
            for phase in lasting:
                if not phase.name.startswith("waiting"):
                    seconds = time.monotonic() - self._started
                    self.say(f"{seconds:6.1f}s  {phase.process:<12}  still {phase_text(phase, now=now)[13:]}")

    def pace(self) -> str:
        """Return how long a step takes, in brackets; nothing if that is not known."""
        state = self._follower.state
        if not state.left_s or state.max_steps is None:
            return ""
        seconds = state.left_s / (state.max_steps - state.step)
        return f" (a step takes about {duration(seconds) if seconds >= 60 else f'{seconds:.1f} s'})"

    def _was_silent(self) -> bool:
        return time.monotonic() - self._printed >= _LINE_EVERY_S

    def _is_due(self, phase: Phase) -> bool:
        """Whether a phase gets a line: progress only now and then, and not if the moving line shows it."""
        if not phase.counts:
            return True
        key, now = (phase.process, phase.name), time.monotonic()
        if self._spinner is not None or now - self._counted.get(key, -math.inf) < _LINE_EVERY_S - _COUNTED_EVERY_S:
            return False
        self._counted[key] = now
        return True


def _can_draw_on(stream: TextIO | None) -> bool:
    """Whether `stream` is a terminal with this process in the foreground; None is a closed one (`2>&-`)."""
    try:
        return (
            stream is not None
            and stream.isatty()
            and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
            and os.tcgetpgrp(stream.fileno()) == os.getpgrp()
        )
    except (OSError, ValueError):  # it is closed, or not the terminal that controls this process
        return False


class _Spinner:
    """A moving line below the others, on the terminal of stderr, during long phases."""

    def __init__(self) -> None:
        self._live: Live | None = None
        self._spinner: Spinner | None = None

    def show(self, phases: Sequence[str]) -> None:
        """Show phases; without phases the line disappears."""
        if not phases:
            if self._live is not None:
                self._live.stop()
                self._live = None
            return
        from rich.console import Console as Terminal
        from rich.live import Live
        from rich.spinner import Spinner
        from rich.text import Text

        if self._live is None or self._spinner is None:
            # soft_wrap: the terminal wraps lines that are printed meanwhile, as at other times.
            terminal = Terminal(stderr=True, highlight=False, soft_wrap=True)
            self._spinner = Spinner("line")  # ASCII: for any locale
            self._live = Live(self._spinner, console=terminal, transient=True, redirect_stdout=sys.stdout.isatty())
            self._live.start()
            terminal.show_cursor()  # a launcher that is killed cannot bring it back
        words = printable(" | ".join(" ".join(phase.split()) for phase in phases))
        self._spinner.update(text=Text(words[: max(0, self._live.console.width - 5)], "dim"))
