"""Trackio: a database on this machine, or what TRACKIO_SPACE_ID or TRACKIO_SERVER_URL name."""

from __future__ import annotations

from collections.abc import Mapping

import trackio

from holdfast.view.trackers.interface import TrackedRun, Tracker


class Trackio(Tracker):
    """One run of Trackio, by its name, which has the id of the run behind it: names are what Trackio resumes by."""

    def begin(self, run: TrackedRun, *, after: int) -> int:
        """Begin or resume the run; its database says how far it has come."""
        self._about = run
        self._open()
        # It writes behind our back, a batch of steps at a time: what was noted as sent may not be there.
        return max(0, self._run._next_step - 1)

    def _open(self) -> None:
        run = self._about
        self._run = trackio.init(
            project=run.project,
            name=f"{run.name}-{run.id}",
            group=run.origin,
            config={**run.settings, "attempt": run.attempt, "tags": list(run.tags), "origin": run.origin},
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._owes = False  # what is not asked for when a process begins

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand over the step."""
        self._run.log(dict(metrics), step=step)

    def log_evaluation(self, step: int, metrics: Mapping[str, float], *, is_last: bool) -> bool:
        """Hand it over at its step, whatever came since."""
        self.log(step, metrics)
        self._owes = True
        return True

    def alert(self, kind: str, text: str, *, step: int | None) -> None:
        """Hand over an alert."""
        level = trackio.AlertLevel.WARN if kind == "alert" else trackio.AlertLevel.INFO
        self._run.alert(title=kind, text=text, level=level, step=step)
        self._owes = True

    def flush(self) -> None:
        """Have evaluations and alerts written, which only its end waits for. Steps are asked for when one begins."""
        if self._owes:
            self._run.finish()
            self._open()

    def close(self) -> None:
        """Wait until everything is handed over."""
        self._run.finish()
