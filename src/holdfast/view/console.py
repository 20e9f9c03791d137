"""Prints a run as lines of text or as JSON lines: for a user beside a run, for log files, and for `monitor`.

The console reads what the processes write (`events.jsonl`, `metrics.jsonl`), so it can neither slow them down nor
disagree with the files. The lines are the same in a file, in a pipe and on a terminal. With `--log-format json` every
line on stdout is one JSON object, whatever prints it.
"""

from __future__ import annotations

import io
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from holdfast.errors import HoldfastError, printable
from holdfast.process import events
from holdfast.process.child import make_output_lossy
from holdfast.run.run_dir import RunDir
from holdfast.view.follow import Follower, News, Stepped
from holdfast.view.state import LAUNCHER, Alarm, Checkpoints, Phase, RunState, duration
from holdfast.view.tables import Grid, age

if TYPE_CHECKING:
    from rich.live import Live
    from rich.spinner import Spinner


USUAL_TIMES = {
    "importing torch": "usually 3-10 s",
    "loading vllm": "usually 15-60 s, minutes on a cold disk",
    "loading model": "seconds for small models",
    "starting the engine": "usually 5-60 s, minutes if it compiles",
}
"""How long what a process begins with usually takes."""
ENDS = ("ready", "finished", "stopped")
"""Phases that nothing goes on in."""

_MOST_OF_ALARM = 2000
_COLUMNS = {
    "reward/mean": "reward {:6.3f}",
    "loss": "loss {:8.4f}",
    "rewards/accuracies": "acc {:5.3f}",
    "rewards/margins": "margin {:6.3f}",
    "val/loss": "val {:7.4f}",
    "val/rewards/accuracies": "val acc {:5.3f}",
    "val/rewards/margins": "val margin {:6.3f}",
    "grad_norm": "grad {:7.3f}",
    "mismatch_kl": "mismatch {:8.1e}",
    "lr": "lr {:.1e}",
    "tokens_per_s": "{:7,.0f} tok/s",
    "time/step": "{:6.2f} s",
    "time/validation": "val {:5.2f} s",
    "time/wait_for_batch": "wait {:5.2f} s",
    "memory_gib": "{:5.2f} GiB",
}


def step_line(metrics: Mapping[str, Any], max_steps: int | None, *, left_s: float | None = None) -> str:
    """Return the one line that a step gets; columns that a program lacks are left out."""
    step = int(metrics["step"])
    if isinstance(validation_s := metrics.get("time/validation"), int | float):
        # It has a column of its own: the step of the others is to be compared with this one.
        metrics = {**metrics, "time/step": (metrics.get("time/step") or 0.0) - validation_s}
    parts = [f"step {step:>{len(str(max_steps))}}/{max_steps}" if max_steps else f"step {step}"]
    parts += [
        template.format(value)
        for name, template in _COLUMNS.items()
        if isinstance(value := metrics.get(name), int | float)
    ]
    return "  ".join([*parts, *([f"left {duration(left_s)}"] if left_s else [])])


def phase_text(phase: Phase, *, now: float) -> str:
    """Return what a process does, for how long, and how long it usually takes.

    Args:
        now: in unix seconds.
    """
    usual = f", {USUAL_TIMES[phase.name]}" if phase.name in USUAL_TIMES else ""
    lasts = "" if phase.name in ENDS else f" ({duration(now - phase.since_unix_s)}{usual})"
    counted = f" {phase.said}" if phase.share is not None else ""
    return f"{phase.process:<12} {phase.name}{counted}{lasts}"


def event_line(told: Phase | Alarm, *, seconds: float) -> str:
    """Return the line that an event gets.

    Args:
        seconds: since the attempt was started here.
    """
    if isinstance(told, Alarm):
        at = "" if told.step is None else f" (step {told.step})"
        return (
            f"{seconds:6.1f}s  {told.process:<12}  {told.kind.upper()}: {printable(told.text, most=_MOST_OF_ALARM)}{at}"
        )
    usual = f" ({USUAL_TIMES[told.name]})" if told.name in USUAL_TIMES else ""
    return f"{seconds:6.1f}s  {told.process:<12}  {told.name}{usual}{': ' if told.said else ''}{told.said}"


_VALUES = {"reward/mean": "reward", "val/loss": "val loss", "loss": "loss"}
_MOST_ALARMS = 3


@dataclass(frozen=True)
class Shown:
    """What a view is made of.

    Attributes:
        name: of the run: its directory.
        status: `running`, `finished`, `stopped`, `failed`, or what else there is to say.
        since: what follows the status, such as for how long.
        is_evaluation: of `evaluate`, which has tasks in place of steps and checkpoints.
    """

    name: str
    status: str
    state: RunState
    checkpoints: Checkpoints
    since: str = ""
    is_evaluation: bool = False

    @property
    def is_running(self) -> bool:
        """Whether processes are at work."""
        return self.status not in ("finished", "stopped", "failed")


def run_lines(shown: Shown, *, now: float) -> list[str]:
    """Return the lines about one run, without what a terminal would act on.

    Args:
        now: in unix seconds.
    """
    state = shown.state
    facts = [shown.name, f"{shown.status} {shown.since}".rstrip()]
    facts += [f"attempt {state.attempt}"] if state.attempt else []
    lines = [" | ".join([*facts, f"{state.restarts} restart{'' if state.restarts == 1 else 's'}"])]
    if shown.is_evaluation:
        lines.append(_evaluation(state))
    else:
        lines += [_progress(shown), _checkpoint(shown, now)]
        lines[2:2] = [str(state.bottleneck)] if shown.is_running and state.bottleneck is not None else []
    if shown.is_running:
        lines += [phase_text(phase, now=now) for phase in state.starting()]
    lines += _alarms(state)
    error = (state.ended or {}).get("error")
    if shown.status == "failed" and isinstance(error, str) and error.strip():
        lines.append(f"error: {error.strip().splitlines()[0]}")  # the message without its log
    return [printable(line) for line in lines]


def _evaluation(state: RunState) -> str:
    said = [phase for phase in state.phases.values() if phase.process == "evaluation"]
    if not said:
        return "evaluation starting"
    tasks = said[-1].details.get("tasks")
    return f"evaluation {said[-1].name}" + (f", tasks {tasks}" if tasks else "")


def _progress(shown: Shown) -> str:
    state = shown.state
    left_s = state.left_s if shown.is_running else None
    line = step_line({"step": state.step, **state.metrics}, state.max_steps, left_s=left_s)
    return line if state.step or not shown.is_running else f"{line}  starting"


def _checkpoint(shown: Shown, now: float) -> str:
    found = shown.checkpoints
    said = []
    if found.good is not None and found.saved_unix_s is not None:
        said.append(f"step {found.good} committed {age(now - found.saved_unix_s)} ago")
    else:
        said.append("none committed")
    if found.saving is not None:
        said.append(f"saving step {found.saving}" if shown.is_running else f"save of step {found.saving} broke off")
    if found.damaged:
        good = "none" if found.good is None else f"step {found.good}"
        said.append(f"step {found.damaged[-1]} is damaged, last good: {good}")
    if found.unreadable:
        said.append(f"step {found.unreadable[-1]} cannot be read just now")
    behind = shown.state.step - (found.good or 0)
    if behind > 0 and found.saving is None:
        said.append(f"{behind} step{'' if behind == 1 else 's'} since")
    return f"checkpoint  {', '.join(said)}"


def _alarms(state: RunState) -> list[str]:
    """Return the newest alarm, and the last others, alerts before warnings."""
    if not state.alarms:
        return []
    *others, newest = sorted(state.alarms, key=lambda alarm: alarm.unix_s)
    others.sort(key=lambda alarm: (alarm.kind == "alert", alarm.unix_s))
    kept = [*sorted(others[-(_MOST_ALARMS - 1) :], key=lambda alarm: alarm.unix_s), newest]
    more = state.num_alarms.total() - len(kept)
    lines = [
        f"{alarm.kind.upper()}{'' if alarm.step is None else f' step {alarm.step}'}: {alarm.text}" for alarm in kept
    ]
    return [*lines, f"and {more} more"] if more else lines


def table_of_runs(runs: Sequence[Shown], *, now: float) -> Grid:
    """Return a table with a row for each run."""
    columns = ("run", "state", ">step", ">left", "value", "bottleneck", "checkpoint", ">restarts", ">alerts")
    expendable = ("restarts", "bottleneck", "alerts", "checkpoint", "left", "value")
    return Grid(columns, [[printable(cell) for cell in _row(shown, now)] for shown in runs], expendable)


def _row(shown: Shown, now: float) -> list[str]:
    state, found = shown.state, shown.checkpoints
    values = ((name, state.metrics.get(metric)) for metric, name in _VALUES.items())
    value = next((f"{name} {latest:.4f}" for name, latest in values if isinstance(latest, int | float)), "")
    bottleneck = state.bottleneck if shown.is_running else None
    saved = ""
    if found.good is not None and found.saved_unix_s is not None:
        saved = f"{found.good}, {age(now - found.saved_unix_s)} ago"
    alerts = state.num_alarms["alert"]
    return [
        shown.name,
        shown.status,
        f"{state.step}/{state.max_steps}" if state.max_steps else str(state.step),
        duration(state.left_s) if shown.is_running and state.left_s else "",
        value,
        bottleneck.who if bottleneck is not None else "",
        saved,
        str(state.restarts) if state.restarts else "",
        str(alerts) if alerts else "",
    ]


_SAVED = "checkpoint saved"


class JsonLines(io.TextIOBase):
    """Takes the place of stdout: a line that is printed becomes an object of type `message`.

    Attributes:
        end: what the object of type `end` says beside the exit code; whoever knows adds to it.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._begun = ""
        self.end: dict[str, Any] = {}

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] - of whom it stands for
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
        """Write one object of type `kind`.

        Args:
            unix_s: when it came about; unset: now.
        """
        fields = {"type": kind, "time": round(time.time() if unix_s is None else unix_s, 3), **fields}
        self._stream.write(json.dumps(_finite(fields), default=str) + "\n")
        self._stream.flush()

    def close_with(self, exit_code: int, **fields: Any) -> None:
        """Write what was begun, and the last object."""
        if self._begun.strip():
            self.write("\n")
        self.emit("end", exit_code=exit_code, **self.end, **fields)

    def tell_news(self, news: News, *, max_steps: int) -> None:
        """Write the object that says what has happened in a run."""
        if isinstance(news, Stepped):
            metrics = {name: value for name, value in news.metrics.items() if name != "step"}
            left_s = None if news.left_s is None else round(news.left_s, 1)
            self.emit("step", step=news.metrics["step"], max_steps=max_steps, left_s=left_s, metrics=metrics)
        elif isinstance(news, Alarm):
            self.emit(news.kind, unix_s=news.unix_s, step=news.step, text=news.text)
        elif news.name == _SAVED:
            self.emit("checkpoint", unix_s=news.since_unix_s, state="committed", **_unreserved(news.details))
        else:
            details = _unreserved(news.details)
            self.emit("phase", unix_s=news.since_unix_s, process=news.process, phase=news.name, details=details)


def json_lines() -> JsonLines | None:
    """Return what writes JSON lines to stdout, if `--log-format json` is on."""
    return sys.stdout if isinstance(sys.stdout, JsonLines) else None


@contextmanager
def as_json_lines() -> Iterator[JsonLines]:
    """Have stdout say everything as JSON lines, the last of which is of type `end`.

    The block calls `close_with` at its end; where it raises, that is done here.
    """
    make_output_lossy()  # `| head` ends no run
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
    """Return the exit code of `action`, which is done with stdout in JSON lines."""
    with as_json_lines() as lines:
        code = action()
        lines.close_with(code)
    return code


def code_of_error(error: BaseException) -> int:
    """Return the exit code of a command that ends by `error`."""
    if isinstance(error, HoldfastError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return 2 if isinstance(error, OSError) else 1


def _unreserved(details: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in details.items() if name not in ("type", "time", "kind", "unix_s", "state")}


def _finite(value: Any) -> Any:
    """Return `value` with null for numbers that JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


# Shorter ones are told by their lines alone.
_SHORTEST_PHASE_S = 1.0
# Where no line below the others can turn: of what counts, and before the first step of whatever lasts.
_LINE_EVERY_S = 10.0
_COUNTED_EVERY_S = 2.0  # see `holdfast.process.events.Counted`
_WAITS = "waiting"


class Console:
    """What is shown of one attempt; used as a context manager.

    Args:
        attempt: that is about to begin.
        events_name: of the file in its logs that the events of this node go to.
        first_step: that it goes on behind.
    """

    def __init__(
        self,
        run_dir: RunDir,
        *,
        attempt: int,
        events_name: str = "events.jsonl",
        first_step: int,
        max_steps: int,
    ) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self._events = run_dir.logs(attempt) / events_name
        self._max_steps = max_steps
        self._follower = Follower(run_dir, events_name=events_name, attempt=attempt, max_steps=max_steps)
        self._follower.catch_up()
        state = self._follower.state
        if state.attempt < attempt:
            state.begin_attempt(attempt, unix_s=time.time())
        state.first_step = first_step
        self._started = time.monotonic()
        self._json = json_lines()
        self._spinner = _Spinner() if self._json is None and _can_be_drawn_on(sys.stderr) else None
        self._said = time.monotonic()  # the last line
        self._counted: dict[tuple[str, str], float] = {}
        self.last_step = self._first_step = first_step

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.refresh()
        finally:
            if self._spinner is not None:
                self._spinner.show([])

    def say(self, text: str) -> None:
        """Print a line."""
        print(text, flush=True)
        self._said = time.monotonic()

    def note(self, what: str, **fields: Any) -> None:
        """Write what the launcher itself does into the events, for those who look at the run from elsewhere."""
        if os.path.isdir(self._events.parent):  # noqa: PTH112 - `Path.is_dir` raises where the storage fails
            events.append(self._events, LAUNCHER, what, **fields)

    def refresh(self) -> None:
        """Show what the processes have written since the last call."""
        for news in self._follower.news():
            if isinstance(news, Phase) and not self._is_due(news):
                continue
            if self._json is not None:
                self._json.tell_news(news, max_steps=self._max_steps)
            elif isinstance(news, Stepped):
                self.say(step_line(news.metrics, self._max_steps, left_s=news.left_s))
            else:
                self.say(event_line(news, seconds=time.monotonic() - self._started))
        # Also of steps that the storage gave too late for news; but those before the attempt are not its own.
        self.last_step = max(self.last_step, self._follower.state.step)
        now = time.time()
        phases = [phase for phase in self._follower.state.starting() if phase.name not in ENDS]
        lasting = [phase for phase in phases if now - phase.since_unix_s >= _SHORTEST_PHASE_S]
        if self._spinner is not None:
            lasting.sort(key=lambda phase: phase.share is None)  # narrow terminals cut what comes last
            shares = [phase.share for phase in lasting if phase.share is not None]
            self._spinner.show([phase_text(phase, now=now) for phase in lasting], share=min(shares, default=None))
        elif self._json is None and self.last_step == self._first_step:
            self._say_what_lasts([phase for phase in lasting if not phase.name.startswith(_WAITS)], now=now)

    def _is_due(self, phase: Phase) -> bool:
        """Whether a phase is told by a line: how far it is only now and then, and not where that is drawn."""
        if phase.share is None:
            return True
        key, now = (phase.process, phase.name), time.monotonic()
        if self._spinner is not None or now - self._counted.get(key, -math.inf) < _LINE_EVERY_S - _COUNTED_EVERY_S:
            return False
        self._counted[key] = now
        return True

    def _say_what_lasts(self, phases: Sequence[Phase], *, now: float) -> None:
        if time.monotonic() - self._said < _LINE_EVERY_S:
            return
        for phase in phases:
            seconds = time.monotonic() - self._started
            self.say(f"{seconds:6.1f}s  {phase.process:<12}  still {phase_text(phase, now=now)[13:]}")


def _can_be_drawn_on(stream: TextIO | None) -> bool:
    """Whether `stream` is a terminal with this process in front; None is one that is closed (`2>&-`)."""
    try:
        return (
            stream is not None
            and stream.isatty()
            and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
            and os.tcgetpgrp(stream.fileno()) == os.getpgrp()
        )
    except (OSError, ValueError):  # it is closed, or not the terminal that controls this process
        return False


_BAR_COLUMNS = 21


class _Spinner:
    """A line below the others, on the terminal of stderr, while anything is waited for."""

    def __init__(self) -> None:
        self._live: Live | None = None
        self._spinner: Spinner | None = None

    def show(self, phases: list[str], *, share: float | None = None) -> None:
        """Show what is waited for; with nothing, nothing is left of the line.

        Args:
            share: of what counts, how much is done: a bar after the words.
        """
        if not phases:
            if self._live is not None:
                self._live.stop()
                self._live = None
            return
        from rich.console import Console as Terminal
        from rich.live import Live
        from rich.progress_bar import ProgressBar
        from rich.spinner import Spinner
        from rich.table import Table
        from rich.text import Text

        if self._live is None or self._spinner is None:
            # soft_wrap: lines that are printed meanwhile are broken by the terminal alone, as at other times.
            terminal = Terminal(stderr=True, highlight=False, soft_wrap=True)
            spinner = Spinner("line")  # ASCII: for any locale
            live = Live(spinner, console=terminal, transient=True, redirect_stdout=sys.stdout.isatty())
            live.start()
            terminal.show_cursor()  # a launcher that is killed leaves it as it is
            self._live, self._spinner = live, spinner
        words = printable(" | ".join(" ".join(phase.split()) for phase in phases))
        bar = _BAR_COLUMNS if share is not None and self._live.console.width > 2 * _BAR_COLUMNS else 0
        self._spinner.update(text=Text(words[: max(0, self._live.console.width - 5 - bar)], "dim"))
        shown = self._spinner
        if bar:
            shown = Table.grid(padding=(0, 1, 0, 0))
            shown.add_row(self._spinner, ProgressBar(total=1.0, completed=share or 0.0, width=bar - 1))
        self._live.update(shown)
