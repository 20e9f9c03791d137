"""Terms that are added to a policy loss: KL from the reference, divergence from a teacher, entropy bonus."""

from __future__ import annotations

from torch import Tensor

from holdfast.shared.config.losses import PolicyLossConfig
from holdfast.trainer.rl.losses.base import Counts, PolicyLoss, PolicyLossInput, token_weights
from holdfast.trainer.rl.regularization.coefficients import EntropyCoefficient, KlCoefficient
from holdfast.trainer.rl.regularization.kl import KlEstimator, estimate_kl


def with_entropy_bonus(loss: PolicyLoss, coefficient: EntropyCoefficient) -> PolicyLoss:
    """Return `loss - coef * mean entropy` (Williams and Peng 1991, "Function optimization using connectionist ...").

    The mean is over all trained tokens of the update, whatever the denominator of the loss, as in TRL: so a coefficient
    means the same for every loss.
    """

    def rewarded(data: PolicyLossInput) -> tuple[Tensor, Counts]:
        value, counts = loss(data)
        # At least 1: an update may have no trained token on any rank.
        return value - coefficient.coef * data.entropy_N.sum() / max(1, data.step_tokens), counts

    return rewarded


def with_kl_term(
    loss: PolicyLoss, config: PolicyLossConfig, coefficient: KlCoefficient, estimator: KlEstimator
) -> PolicyLoss:
    """Return `loss + coef * sum_t w_t KL_t` (Shao et al. 2024, "DeepSeekMath", which has k3 there).

    The weights w, and so the denominator, are those of the loss itself.
    """

    def penalised(data: PolicyLossInput) -> tuple[Tensor, dict[str, Tensor]]:
        assert data.reference_logprobs_N is not None, "a KL term needs a reference"
        value, counts = loss(data)
        kl_N = estimate_kl(data.logprobs_N, data.reference_logprobs_N, estimator)
        return value + coefficient.coef * (token_weights(data, config) * kl_N).sum(), counts

    return penalised


def with_distillation_term(loss: PolicyLoss, config: PolicyLossConfig, coef: float) -> PolicyLoss:
    """Return `loss + coef * sum_t w_t KL(policy || teacher)_t`, the divergence over the whole vocabulary at each token.

    The reverse KL of Gu et al. 2024, "MiniLLM", and Agarwal et al. 2024, "On-Policy Distillation of Language Models",
    on rollouts of the policy; how an earlier token leads to a later one carries no gradient. The weights w are those
    of the loss itself.
    """

    def taught(data: PolicyLossInput) -> tuple[Tensor, dict[str, Tensor]]:
        assert data.teacher_kl_N is not None, "a distillation term needs a teacher"
        value, counts = loss(data)
        term = (token_weights(data, config) * data.teacher_kl_N).sum()
        return value + coef * term, counts | {"distillation/kl": data.teacher_kl_N.detach().sum()}

    return taught
