"""Alerts and warnings of a run, from the events of all its attempts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from holdfast.commands.live.follow import attempts_with_logs
from holdfast.commands.live.state import Alarm, RunState
from holdfast.commands.live.tails import Tail
from holdfast.shared.files.run_dir import RunDir


class Alarms:
    """Reads the alarms of a run as they come.

    Args:
        sent: how many of each attempt are left out, its first ones, by what `new` calls it.
        without: the process whose own warnings are left out.
    """

    def __init__(self, run_dir: RunDir, sent: Mapping[str, int], *, without: str) -> None:
        self._run_dir = run_dir
        self._left_out = dict(sent)
        self._without = without
        self._tails: dict[int, Tail] = {}
        self._begins: dict[int, str] = {}

    def new(self) -> Iterator[tuple[str, Alarm]]:
        """Yield attempt and alarm of what came since the last call, and was not sent.

        An attempt is called by its number and the time of its first event: on another machine numbers begin anew.
        """
        for number in attempts_with_logs(self._run_dir):
            if number not in self._tails:
                self._tails[number] = Tail(self._run_dir.logs(number) / "events.jsonl", from_end=False)
        for number, tail in sorted(self._tails.items()):
            for event in tail:
                attempt = self._begins.setdefault(number, f"{number} at {event.get('time')}")
                told = RunState().take_event(event, attempt=number)
                if not isinstance(told, Alarm) or told.process == self._without:
                    continue
                if self._left_out.get(attempt, 0) > 0:
                    self._left_out[attempt] -= 1
                    continue
                yield attempt, told
