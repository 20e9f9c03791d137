"""The weights of KL penalty and entropy bonus, held fixed or steered to a target."""

from __future__ import annotations

import math
from typing import Any

from holdfast.shared.config.losses import EntropyConfig
from holdfast.shared.errors import TrainingError
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
            # Within 0 and the largest: it must not wind up while the entropy stays on one side.
            self._steered = min(max(self._steered + by, 0.0), config.largest)
        self._last = entropy

    def values(self) -> dict[str, Any]:
        """Return all that a checkpoint holds of it."""
        return {"steered": self._steered, "last": self._last}

    def restore(self, values: dict[str, Any]) -> None:
        """Take over where the steering was. What is configured wins."""
        self._steered = min(float(values["steered"]), self._config.largest)
        self._last = None if values["last"] is None else float(values["last"])


# Ziegler et al. 2019: the error counts for no more than this share of the target.
_MAX_ERROR = 0.2


class KlCoefficient(State):
    """The weight of the KL penalty, held fixed or steered to a target.

    Ziegler et al. 2019, "Fine-tuning language models from human preferences", with the step size
    of its released code: `coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * num_episodes / horizon`.

    Args:
        coef: the coefficient of the first batch.
        target: nats per sequence to steer to; None keeps `coef`.
        horizon: episodes in which an error of 0.2, the most that counts, changes the coefficient by about a fifth.
    """

    def __init__(self, coef: float, *, target: float | None = None, horizon: float = 10_000) -> None:
        self.coef = coef
        self.target = target
        self.horizon = horizon
        self.num_updates = 0

    def update(self, kl: float, num_episodes: int) -> None:
        """Take over the divergence of one batch, once its rewards are penalised with the coefficient before.

        Args:
            kl: mean over the sequences of the batch of k1 summed over their tokens, at the time of the rollout.
            num_episodes: sequences of the batch, on all ranks.

        Raises:
            TrainingError: `kl` is NaN or infinite.
        """
        if not math.isfinite(kl):
            raise TrainingError(
                f"the divergence from the reference is {kl}: the KL coefficient cannot follow it. Look at this step's "
                "log-probabilities, or lower optim.lr"
            )
        if self.target is not None:
            error = min(max(kl / self.target - 1, -_MAX_ERROR), _MAX_ERROR)
            self.coef *= 1 + error * num_episodes / self.horizon
        self.num_updates += 1

    def values(self) -> dict[str, Any]:
        """Return all that a checkpoint holds of it."""
        return {"coef": self.coef, "target": self.target, "horizon": self.horizon, "num_updates": self.num_updates}

    def restore(self, values: dict[str, Any]) -> None:
        """Take over coefficient and count. Target and horizon are configuration, as is a coefficient without target."""
        if self.target is not None:
            self.coef = float(values["coef"])
        self.num_updates = int(values["num_updates"])
