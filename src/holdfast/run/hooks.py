"""The interface of hooks: classes of the user that are called after steps, evaluations and saves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class StepView:
    """A trained step, as a hook sees it.

    Attributes:
        metrics: numbers of the step, as in metrics.jsonl; without values that are not finite.
        run: the run directory.
        checkpoint: the committed checkpoint of the step; None before it is saved.
    """

    step: int
    max_steps: int
    metrics: Mapping[str, float]
    run: Path
    checkpoint: Path | None = None


@dataclass(frozen=True)
class HookReply:
    """The requests of a hook.

    Attributes:
        metrics: numbers to add to the step, as `hooks/NAME/METRIC`.
        save: save this step.
        stop: the reason to end the run with this step; empty: the run continues.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    save: bool = False
    stop: str = ""


class Hook:
    """Base class of hooks. Override what you need. `state_dict` is in every checkpoint."""

    def after_step(self, view: StepView) -> HookReply | None:
        """Take a trained step, before its metrics are written and before it is saved."""

    def after_evaluation(self, view: StepView) -> HookReply | None:
        """Take a step with a validation or an evaluation, before `after_step` of the same step."""

    def after_save(self, view: StepView) -> HookReply | None:
        """Take a step whose checkpoint is committed. Training waits for the commit. The reply may only have `stop`."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: numbers, texts, None, and lists and dicts of them."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. It is not called without a state."""
