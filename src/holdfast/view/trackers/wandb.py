"""Weights & Biases: the service, or files on this machine where WANDB_MODE=offline."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import wandb

from holdfast.run import atomic
from holdfast.view.trackers.interface import TrackedRun, Tracker

_MOST_CHARACTERS = 63
"""Of a title: W&B wants less than 64."""


class WandB(Tracker):
    """One run of W&B. Its own id is that of the run, so that it is resumed.

    The service says up to which step it has come. Offline nobody does, and what a killed process wrote last is lost:
    then every process begins the files of the run anew, from the first step, and removes those before. There is always
    one directory to `wandb sync`.
    """

    def begin(self, run: TrackedRun, *, after: int) -> int:
        """Begin or resume the run."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # to the makers of wandb
        directory = Path(os.environ.get("WANDB_DIR") or run.directory / "tracking")
        atomic.make_directory(directory)
        self._run = wandb.init(
            project=run.project,
            id=run.id,
            name=run.name,
            group=run.origin,
            tags=list(run.tags),
            resume="allow",
            dir=str(directory),
            settings=wandb.Settings(
                # Of this process, which is none that computes.
                console="off", disable_git=True, save_code=False, disable_job_creation=True,
                x_disable_meta=True, x_disable_stats=True,
            ),
        )  # fmt: skip
        self._row: int | None = None  # the step that was logged last
        self._has_evaluation = False
        self._run.config.update({**run.settings, "attempt": run.attempt, "origin": run.origin}, allow_val_change=True)
        if not self._run.offline:
            return max(after if self._run.disabled else 0, self._run.step - 1)
        self.begins_anew = True
        for old in directory.glob(f"wandb/offline-run-*-{run.id}"):
            if not Path(self._run.dir).is_relative_to(old):
                shutil.rmtree(old)
        return 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand over the step."""
        self._run.log(dict(metrics), step=step)
        self._row, self._has_evaluation = step, False

    def log_evaluation(self, step: int, metrics: Mapping[str, float], *, is_last: bool) -> bool:
        """Add it to the row of the last step, with its own as `eval/version`: W&B takes nothing at an older step.

        A row holds one. What is left when the run is over is in the summary.
        """
        if self._row is not None and not self._has_evaluation:
            self._run.log(dict(metrics), step=self._row)
            self._has_evaluation = True
            return True
        if is_last:
            self._run.summary.update({f"{name}/step_{step}": value for name, value in metrics.items()})
        return is_last

    def alert(self, kind: str, text: str, *, step: int | None) -> None:
        """Hand over an alert, which W&B passes on by mail or to Slack."""
        where = self._run.name or self._run.id
        title = f"{kind} in {where}" if step is None else f"{kind} in {where}, step {step}"
        level = "WARN" if kind == "alert" else "INFO"
        # Not 0, which it takes for a minute, in which alerts of the same title are dropped.
        self._run.alert(title[:_MOST_CHARACTERS], text, level=level, wait_duration=0.001)

    def flush(self) -> None:
        """Do nothing: what has arrived is asked of the service when a process begins."""

    def close(self) -> None:
        """Wait until everything is handed over."""
        self._run.finish()
