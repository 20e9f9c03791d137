"""KL divergence of the policy from its reference: estimators per token, the penalty of rewards, and the coefficients.

The coefficients of KL penalty and entropy bonus are fixed, or steered to a target.

Shape legend: N predicted tokens, T targets of one sample.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.config.base import KlEstimator
from holdfast.config.policy_losses import EntropyConfig
from holdfast.errors import TrainingError
from holdfast.trainer.checkpoint.state import State
from holdfast.trainer.data.packing import Sample
from holdfast.trainer.rl.batch import OLD_LOGPROB, REFERENCE_LOGPROB, target_values

MAX_LOG_RATIO = 20.0
"""No log-ratio counts for more, in either direction, as in verl and OpenRLHF: e^20 is finite in any dtype."""
MAX_KL_WEIGHT = 20.0
"""No importance ratio weighs a token of the KL term by more, as none does in `policy_gradient`."""


def bounded(log_ratio: Tensor) -> Tensor:
    """Return the log-ratio within `MAX_LOG_RATIO` of 0. Outside it carries no gradient."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def k3(log_ratio: Tensor) -> Tensor:
    """Return Schulman's k3 = r - 1 - log r per token, r = exp(log_ratio), in nats.

    With samples from q and r = p / q its mean estimates KL(q || p), without bias and never negative
    (J. Schulman, "Approximating KL divergence", 2020). expm1 keeps the digits near r = 1."""
    return torch.expm1(log_ratio) - log_ratio


def estimate_kl(
    logprobs_N: Tensor, reference_logprobs_N: Tensor, estimator: KlEstimator, *, base_logprobs_N: Tensor | None = None
) -> Tensor:
    """Return an estimate of KL(policy || reference) at every token sampled from the policy, in nats.

    With d = log policy - log reference: k1 = d (unbiased, may be negative), k2 = d^2 / 2 (biased, small variance),
    k3 = exp(-d) + d - 1 (unbiased, never negative; the ratio is reference over policy: exp(d) - d - 1 estimates
    nothing here). J. Schulman, "Approximating KL divergence", 2020. That holds for tokens of the current policy only.

    The gradient of a good estimate is not an estimate of the gradient, because the tokens, too, depend on the
    policy. As a term of the loss, on tokens of the current policy (Tang and Munos 2025, "On a few pitfalls in KL
    divergence gradient estimation for RL"):

    - k1 has a gradient of expectation zero: only noise. Subtract it from the reward instead.
    - k2 has the gradient of KL(policy || reference), without bias.
    - k3_unbiased = rho k3, rho = policy / base with its gradient, has the gradient of KL(policy || reference), without
      bias, on tokens of the base: rho d (DeepSeek-AI 2025, "DeepSeek-V3.2", section 3.1; TRL's
      `use_bias_correction_kl`). If rho is 1, its value is k3 and its gradient is the gradient of k2. rho counts for at
      most 20.
    - k3 has the gradient of KL(reference || policy), the other direction, which is close only near the reference.

    d counts for at most 20 nats in either direction, as in verl, and has no gradient beyond. Unlike verl, k3 is
    not cut at 10, where the reference holds a token 13 times likelier: it would be biased with such tokens.

    Args:
        logprobs_N: log-probabilities under the policy; the result is differentiable in them.
        reference_logprobs_N: log-probabilities of the same tokens under the reference.
        base_logprobs_N: of k3_unbiased, those under the policy that the tokens count as sampled by, no gradient.
    """
    log_ratio_N = bounded(logprobs_N - reference_logprobs_N)
    if estimator == "k1":
        return log_ratio_N
    if estimator == "k2":
        return log_ratio_N.square() / 2
    if estimator == "k3":
        return k3(-log_ratio_N)
    assert base_logprobs_N is not None, "the configuration has k3_unbiased in the loss alone"
    weight_N = (logprobs_N - base_logprobs_N).detach().clamp(max=math.log(MAX_KL_WEIGHT)).exp()
    # The two parts of its gradient, rho k3 and rho (1 - exp(-d)), are huge where d is far below 0, and nearly cancel.
    slope_N = log_ratio_N.detach() * (log_ratio_N - log_ratio_N.detach())
    return weight_N * (k3(-log_ratio_N.detach()) + slope_N)


@dataclass(frozen=True)
class KlPenalty:
    """The KL penalty of rewards: `coef` times the estimate, subtracted at each token."""

    coef: float
    estimator: KlEstimator

    def of(self, sample: Sample) -> np.ndarray:
        """Return the penalty of each target, (T,), float64."""
        old_T = torch.from_numpy(target_values(sample, OLD_LOGPROB))
        reference_T = torch.from_numpy(target_values(sample, REFERENCE_LOGPROB))
        return self.coef * estimate_kl(old_T, reference_T, self.estimator).numpy()


def kl_of_sequences(samples: Sequence[Sample]) -> list[float]:
    """Return, for each sample, k1 against the reference before the step, summed over its targets, in nats."""
    return [
        # Not bounded, as the penalty is: the mean of bounded ones would not estimate the divergence.
        math.fsum((target_values(sample, OLD_LOGPROB) - target_values(sample, REFERENCE_LOGPROB)).tolist())
        for sample in samples
    ]


class EntropyCoefficient(State):
    """The coefficient of the entropy bonus.

    Without a target it stays as configured. With a target it is c if the entropy of the last step was at most the
    target, else 0. After a step with at most the target, c rises by `step_size`, to `largest`. After any other step it
    falls by `step_size`, to 0 (He et al. 2025, "Skywork Open Reasoner 1 Technical Report", section 3.3; TRL's
    `use_adaptive_entropy`). Before the first step no entropy is known, and the bonus is 0."""

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
        steered = None if self._config.target is None else self._steered
        return {"steered": steered, "last": self._last, "configured": self._config.coef}

    def restore(self, values: dict[str, Any]) -> None:
        """Take over where the steering was. Configured values win: another `coef` is steered from there."""
        if values["steered"] is not None and values["configured"] == self._config.coef:
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
        self.coef = self._configured = coef
        self.target = target
        self.horizon = horizon
        self.num_updates = 0

    def update(self, kl: float, num_episodes: int) -> None:
        """Take over the divergence of one batch, once its rewards are penalised with the coefficient before.

        Args:
            kl: mean over the sequences of the batch of k1 summed over their tokens, at the time of the rollout.
            num_episodes: sequences of the batch, on all ranks.

        Raise TrainingError if `kl` is NaN or infinite.
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
        values = {"coef": self.coef, "target": self.target, "horizon": self.horizon, "num_updates": self.num_updates}
        return values | {"configured": self._configured}

    def restore(self, values: dict[str, Any]) -> None:
        """Take over count and steered coefficient. All else is configuration, as is a coefficient that was not steered:
        it may be 0, from which no steering leads away. Another configured coefficient is steered from there."""
        if self.target is not None and values["target"] is not None and values["configured"] == self._configured:
            self.coef = float(values["coef"])
        self.num_updates = int(values["num_updates"])
