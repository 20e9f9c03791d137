"""What a user sees while a run goes on: start-up phases, one line per step, and on a terminal a live view below them.

Reads what the processes write (`events.jsonl`, `metrics.jsonl`), so it can neither slow them down
nor disagree with what is on disk.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import Any

from holdfast.commands.live.charts import glyphs_for
from holdfast.commands.live.follow import Follower, Stepped
from holdfast.commands.live.output import json_lines
from holdfast.commands.live.plain import event_line, step_line
from holdfast.commands.live.region import Region, is_terminal
from holdfast.commands.live.state import LAUNCHER
from holdfast.commands.live.time_left import duration
from holdfast.commands.live.view import Shown, run_view
from holdfast.shared.files.run_dir import RunDir
from holdfast.shared.process import events

_log = logging.getLogger("holdfast")
_DRAW_S = 0.25
# The rest of the terminal is for lines.
_MOST_OF_TERMINAL = 2 / 3


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
        self._drawn = 0.0
        self._json = json_lines()
        self._glyphs = glyphs_for(getattr(sys.stdout, "encoding", None))
        is_live = self._json is None and is_terminal(sys.stdout)
        self._region = Region(sys.stdout, self._glyphs) if is_live else None
        self.last_step = first_step

    def __enter__(self) -> Console:
        if self._region is not None:
            self._region.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.refresh()
        finally:
            if self._region is not None:
                self._region.__exit__()

    def say(self, text: str) -> None:
        """Print a line, above the live view where there is one."""
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
                width = self._region.size[0] if self._region is not None else None
                self.say(step_line(news.metrics, self._max_steps, left_s=news.left_s, width=width))
            else:
                self.say(event_line(news, seconds=time.monotonic() - self._started))
        # Also of steps that the storage gave too late for news; but those before the attempt are not its own.
        self.last_step = max(self.last_step, self._follower.state.step)
        if self._region is not None and time.monotonic() - self._drawn >= _DRAW_S:
            self._drawn = time.monotonic()
            try:
                self._draw(self._region)
            except Exception:  # noqa: BLE001 - a bug in what is drawn; said once
                region, self._region = self._region, None
                region.__exit__()
                _log.warning("nothing is drawn any more; the run goes on, and its steps are told", exc_info=True)

    def _draw(self, region: Region) -> None:
        width, height = region.size
        shown = Shown(
            str(self._run_dir.path.name),
            "running",
            self._follower.state,
            self._follower.checkpoints,
            since=duration(time.monotonic() - self._started),
        )
        # One line stays empty.
        room = max(1, int(height * _MOST_OF_TERMINAL) - 1)
        region.draw(run_view(shown, width=width - 1, height=room, glyphs=self._glyphs, now=time.time()))
