"""What a user sees while a run goes on: start-up phases, one aligned line per step, a progress bar.

Reads what the processes write (`events.jsonl`, `metrics.jsonl`), so it can neither slow them down
nor disagree with what is on disk.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from holdfast.shared.errors import is_storage_failure

_USUAL_TIMES = {
    "importing torch": "usually 3-10 s",
    "loading vllm": "usually 15-60 s, minutes on a cold disk",
    "loading model": "seconds for small models",
}


_RECENT_STEPS = 50


class TimeLeft:
    """How long the steps that are left will take, if they take as long as the last ones did by the wall clock."""

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._ends: deque[tuple[float, int]] = deque(maxlen=_RECENT_STEPS + 1)

    def after(self, step: int, *, now: float, step_s: float | None = None) -> float | None:
        """Return the seconds left after `step`, which was seen to end at `now`; None where nothing can be said.

        Args:
            step_s: how long the step says that it took itself; all there is to go by after the first.
        """
        if self._ends and step <= self._ends[-1][1]:  # the run went back to a checkpoint
            self._ends.clear()
        self._ends.append((now, step))
        first, first_step = self._ends[0]
        mean = (now - first) / (step - first_step) if step > first_step and now > first else step_s
        return None if mean is None else mean * max(0, self._max_steps - step)


def duration(seconds: float) -> str:
    """Return `0:42`, `12:05` or `3:07:20`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Tail:
    """Complete new lines of a growing file, as JSON."""

    def __init__(self, path: Path, *, from_end: bool) -> None:
        self._path = path
        self._offset = path.stat().st_size if from_end and path.exists() else 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            yield from self._new_lines()
        except OSError as error:
            if not is_storage_failure(error):
                raise  # else they are read when the storage gives them again

    def _new_lines(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            for line in file:
                # Half a line: it is read whole at the next look, as the offset stays before it.
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                try:
                    yield json.loads(line)
                except ValueError:  # a full disk took the first part of a line only, or a bit has flipped
                    continue


class Console:
    """The live view of one attempt; used as a context manager."""

    def __init__(self, *, metrics: Path, events: Path, first_step: int, max_steps: int) -> None:
        self._rich = RichConsole(highlight=False, soft_wrap=True)
        self._metrics = Tail(metrics, from_end=True)
        self._events = Tail(events, from_end=False)
        self._started = time.monotonic()
        self._first_step = first_step
        self._max_steps = max_steps
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._rich,
            disable=not self._rich.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=max_steps, completed=first_step, left="")
        self._time_left = TimeLeft(max_steps)
        self.last_step = first_step

    def __enter__(self) -> Console:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.refresh()
        self._progress.stop()

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        self._rich.print(text, markup=False)

    def refresh(self) -> None:
        """Show what the processes have written since the last call."""
        for event in self._events:
            phase, process = event["phase"], event["process"]
            details = {key: value for key, value in event.items() if key not in ("phase", "process", "time")}
            shown = " ".join(f"{key} {value}" for key, value in details.items())
            usual = f" ({_USUAL_TIMES[phase]})" if phase in _USUAL_TIMES else ""
            self.say(f"{time.monotonic() - self._started:6.1f}s  {process:<12}  {phase}{usual}  {shown}".rstrip())
            if self.last_step == self._first_step:
                self._progress.update(self._task, description=f"{process}: {phase}")
        for metrics in self._metrics:
            self.last_step = int(metrics["step"])
            left_s = self._time_left.after(self.last_step, now=time.monotonic(), step_s=metrics.get("time/step"))
            self.say(step_line(metrics, self._max_steps, left_s=left_s))
            left = "" if left_s is None else f"left {duration(left_s)}"
            self._progress.update(self._task, completed=self.last_step, description="training", left=left)


def step_line(metrics: dict[str, Any], max_steps: int, *, left_s: float | None = None) -> str:
    """Return the one line that a step gets; columns that a program lacks are left out."""
    width = len(str(max_steps))
    columns = [f"step {int(metrics['step']):>{width}}/{max_steps}"]
    for key, text in (
        ("reward/mean", "reward {:6.3f}"),
        ("loss", "loss {:8.4f}"),
        ("val/loss", "val {:7.4f}"),
        ("grad_norm", "grad {:7.3f}"),
        ("mismatch_kl", "mismatch {:8.1e}"),
        ("lr", "lr {:.1e}"),
        ("tokens_per_s", "{:7,.0f} tok/s"),
        ("time/step", "{:6.2f} s"),
        ("time/wait_for_batch", "wait {:5.2f} s"),
        ("memory_gib", "{:5.2f} GiB"),
    ):
        value = metrics.get(key)
        if value is not None:
            columns.append(text.format(value))
    if left_s:
        columns.append(f"left {duration(left_s)}")
    return "  ".join(columns)
