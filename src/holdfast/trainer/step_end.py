"""The end of a step in every training program: hooks, the line of metrics, the early end, the save."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from holdfast.config.training import TrainingCommand
from holdfast.errors import TrainingError
from holdfast.run.hooks import HookReply
from holdfast.run.metrics import read_metrics
from holdfast.trainer.checkpoint.commit import Attachment
from holdfast.trainer.session import Stopwatch, TrainSession
from holdfast.trainer.stop import EarlyStopping


class StepEnd:
    """Ends each step of a run. All methods are collective. `attachments` returns more files of a checkpoint.

    Attributes:
        is_over: whether the run ends with the last step that was ended.
    """

    def __init__(
        self,
        config: TrainingCommand,
        session: TrainSession[Any],
        stopwatch: Stopwatch,
        attachments: Callable[[], Mapping[str, Attachment] | None],
    ) -> None:
        self._session, self._stopwatch, self._attachments = session, stopwatch, attachments
        step, hooks = session.progress.step, session.hooks
        reads = session.mesh.is_main and (config.stop is not None or hooks or hooks.pending is not None)
        lines = read_metrics(session.run_dir.metrics) if reads else []
        last = lines[-1] if lines and lines[-1]["step"] == step else {}
        self._is_written = bool(last) and hooks.pending is not None
        history = (lines[:-1] if self._is_written else lines) if config.stop is not None else ()
        self._early = EarlyStopping(config.stop, session.run_dir, session.mesh, history=history)
        self.is_over = self._early.has_ended(step)
        self._resume(step, {name: value for name, value in last.items() if name != "step"})

    def _resume(self, step: int, last: Mapping[str, float]) -> None:
        """Make the calls that the hooks lack of the step that the run resumes."""
        hooks = self._session.hooks
        metrics, hooks.pending = hooks.pending, None
        if metrics is not None:
            self.finish(step, metrics)
        elif hooks and hooks.saved == step:
            self._after_save(step, last)

    def finish(self, step: int, metrics: dict[str, float]) -> list[int]:
        """End `step`; return the steps committed since the last call. `metrics` gets the metrics of the hooks. Raise
        TrainingError if a hook fails; the step is saved then, if the run saves."""
        session, hooks = self._session, self._session.hooks
        reply = self._ask_hooks(step, metrics) if hooks else HookReply()
        metrics |= reply.metrics
        if not self._is_written:
            session.log(step, metrics)
        self._is_written = False
        is_over = self._early.after_step(step, metrics)
        self.is_over = self._early.end(step, reply.stop) or is_over or self.is_over
        with self._stopwatch.phase("checkpoint"):
            hooks.saved = step if hooks.waits else None
            committed = session.saver.after_step(
                step, metrics, self._attachments(), is_last=self.is_over, is_asked=reply.save
            )
            hooks.saved = None
            if hooks.waits and session.saver.due == step:
                committed += session.saver.settle()
        if hooks.waits and session.saver.due == step:
            self._after_save(step, metrics)
        return committed

    def _ask_hooks(self, step: int, metrics: dict[str, float]) -> HookReply:
        """Return what the hooks ask for; if one fails, save the step first, from which the next start calls again."""
        session = self._session
        try:
            with self._stopwatch.phase("hooks"):
                return session.hooks.after_step(step, metrics)
        except TrainingError as error:
            session.hooks.pending = dict(metrics)
            is_saved = session.saver.save_for_error(step, metrics, self._attachments())
            raise TrainingError(f"{error}{f'. Step {step} is saved' if is_saved else ''}") from error

    def _after_save(self, step: int, metrics: Mapping[str, float]) -> None:
        # Rank 0 knows whether the save failed, which `ckpt.on_failure` may allow.
        is_saved = self._session.mesh.max({"saved": float(self._session.saver.newest >= step)})["saved"]
        if is_saved:
            reply = self._session.hooks.after_save(step, metrics)
            self.is_over = self._early.end(step, reply.stop) or self.is_over
