"""Divergence of the policy from its reference: per-token estimators, and the coefficient that holds it at a target.

Shape legend: N predicted tokens.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from torch import Tensor

from holdfast.shared.errors import TrainingError
from holdfast.trainer.checkpoints.plain_state import State
from holdfast.trainer.rl.losses.base import bounded
from holdfast.trainer.supervised.loss import k3

KlEstimator = Literal["k1", "k2", "k3"]

# Ziegler et al. 2019: the error counts for no more than this share of the target.
_MAX_ERROR = 0.2


def estimate_kl(logprobs_N: Tensor, reference_logprobs_N: Tensor, estimator: KlEstimator) -> Tensor:
    """Return an estimate of KL(policy || reference) at every token sampled from the policy, in nats.

    With d = log policy - log reference: k1 = d (unbiased, may be negative), k2 = d^2 / 2 (biased, small variance),
    k3 = exp(-d) + d - 1 (unbiased, never negative; the ratio is reference over policy: exp(d) - d - 1 estimates
    nothing here). J. Schulman, "Approximating KL divergence", 2020. That holds for tokens of the current policy only.

    The gradient of a good estimate is not an estimate of the gradient, because the tokens, too, depend on the
    policy. As a term of the loss, on tokens of the current policy (Tang and Munos 2025, "On a few pitfalls in KL
    divergence gradient estimation for RL"):

    - k1 has a gradient of expectation zero: noise alone. Subtract it from the reward instead.
    - k2 has the gradient of KL(policy || reference), without bias.
    - k3 has the gradient of KL(reference || policy), the other direction, which is close only near the reference.

    d counts for at most 20 nats in either direction, as in verl, and has no gradient beyond. (verl also cuts k3 at 10,
    from where the reference holds a token 13 times likelier on: with such tokens k3 would be biased.)

    Args:
        logprobs_N: log-probabilities under the policy; the result is differentiable in them.
        reference_logprobs_N: those of the same tokens under the reference.
    """
    log_ratio_N = bounded(logprobs_N - reference_logprobs_N)
    if estimator == "k1":
        return log_ratio_N
    if estimator == "k2":
        return log_ratio_N.square() / 2
    return k3(-log_ratio_N)


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
