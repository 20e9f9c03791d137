"""The bonus for the policy's entropy as a term of the loss."""

from __future__ import annotations

from torch import Tensor

from holdfast.trainer.rl.entropy import EntropyCoefficient
from holdfast.trainer.rl.losses.base import Counts, PolicyLoss, PolicyLossInput


def with_entropy_bonus(loss: PolicyLoss, coefficient: EntropyCoefficient) -> PolicyLoss:
    """Return `loss - coef * mean entropy` (Williams and Peng 1991, "Function optimization using connectionist ...").

    The mean is over all trained tokens of the update, whatever the denominator of the loss, as in TRL: so a coefficient
    means the same for every loss.
    """

    def rewarded(data: PolicyLossInput) -> tuple[Tensor, Counts]:
        value, counts = loss(data)
        return value - coefficient.coef * data.entropy_N.sum() / max(1, data.step_tokens), counts

    return rewarded
