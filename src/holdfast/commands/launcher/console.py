"""What a user sees while a run goes on: one line per phase and per step, and on a terminal what is waited for.

Reads what the processes write (`events.jsonl`, `metrics.jsonl`), so it can neither slow them down
nor disagree with what is on disk.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from holdfast.commands.live.follow import Follower, Stepped
from holdfast.commands.live.output import json_lines
from holdfast.commands.live.plain import ENDS, event_line, phase_text, step_line
from holdfast.commands.live.state import LAUNCHER
from holdfast.shared.files.run_dir import RunDir
from holdfast.shared.printable import printable
from holdfast.shared.process import events

if TYPE_CHECKING:
    from rich.live import Live
    from rich.spinner import Spinner

# Shorter ones are told by their lines alone.
_SHORTEST_PHASE_S = 1.0


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
        self.last_step = first_step

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

    def note(self, what: str, **fields: Any) -> None:
        """Write what the launcher itself does into the events, for those who look at the run from elsewhere."""
        if os.path.isdir(self._events.parent):  # noqa: PTH112 - `Path.is_dir` raises where the storage fails
            events.append(self._events, LAUNCHER, what, **fields)

    def refresh(self) -> None:
        """Show what the processes have written since the last call."""
        for news in self._follower.news():
            if self._json is not None:
                self._json.tell_news(news, max_steps=self._max_steps)
            elif isinstance(news, Stepped):
                self.say(step_line(news.metrics, self._max_steps, left_s=news.left_s))
            else:
                self.say(event_line(news, seconds=time.monotonic() - self._started))
        # Also of steps that the storage gave too late for news; but those before the attempt are not its own.
        self.last_step = max(self.last_step, self._follower.state.step)
        if self._spinner is not None:
            now = time.time()
            phases = [phase for phase in self._follower.state.starting() if phase.name not in ENDS]
            lasting = [phase for phase in phases if now - phase.since_unix_s >= _SHORTEST_PHASE_S]
            self._spinner.show([phase_text(phase, now=now) for phase in lasting])


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


class _Spinner:
    """A line below the others, on the terminal of stderr, while anything is waited for."""

    def __init__(self) -> None:
        self._live: Live | None = None
        self._spinner: Spinner | None = None

    def show(self, phases: list[str]) -> None:
        """Show what is waited for; with nothing, nothing is left of the line."""
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
            # soft_wrap: lines that are printed meanwhile are broken by the terminal alone, as at other times.
            terminal = Terminal(stderr=True, highlight=False, soft_wrap=True)
            spinner = Spinner("line")  # ASCII: for any locale
            live = Live(spinner, console=terminal, transient=True, redirect_stdout=sys.stdout.isatty())
            live.start()
            terminal.show_cursor()  # a launcher that is killed leaves it as it is
            self._live, self._spinner = live, spinner
        words = printable(" | ".join(" ".join(phase.split()) for phase in phases))
        self._spinner.update(text=Text(words[: max(0, self._live.console.width - 4)], "dim"))
