"""The weight of the entropy bonus, held fixed or steered to a target."""

from __future__ import annotations

from typing import Any

from holdfast.shared.config.losses import EntropyConfig
from holdfast.trainer.checkpoints.plain_state import State


class EntropyCoefficient(State):
    """The coefficient of the entropy bonus.

    Without a target it stays as configured. With one it is c where the entropy of the last step was at most the target,
    else 0; and c rises by `step_size` after a step with at most the target, to `largest`, and falls by it after any
    other, to 0 (He et al. 2025, "Skywork Open Reasoner 1 Technical Report", section 3.3; TRL's `use_adaptive_entropy`).
    Before the first step no entropy is known, and there is no bonus.
    """

    def __init__(self, config: EntropyConfig) -> None:
        self._config = config
        self._steered = config.coef
        self._last: float | None = None

    @property
    def coef(self) -> float:
        """The coefficient of the next step."""
        target = self._config.target
        if target is None:
            return self._config.coef
        return self._steered if self._last is not None and self._last <= target else 0.0

    def update(self, entropy: float) -> None:
        """Take over the mean entropy of the tokens of one step, in nats."""
        config = self._config
        if config.target is not None:
            by = config.step_size if entropy <= config.target else -config.step_size
            self._steered = min(max(self._steered + by, 0.0), config.largest)
        self._last = entropy

    def values(self) -> dict[str, Any]:
        """Return all that a checkpoint holds of it."""
        return {"steered": self._steered, "last": self._last}

    def restore(self, values: dict[str, Any]) -> None:
        """Take over where the steering was. What is configured wins."""
        self._steered = min(float(values["steered"]), self._config.largest)
        self._last = None if values["last"] is None else float(values["last"])
