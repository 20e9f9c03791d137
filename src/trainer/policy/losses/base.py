"""What every policy loss takes and gives, and the denominators they share.

Every loss is a weighted sum over the predicted tokens of this forward pass; the weights carry the
denominator, which is global: it counts the whole optimizer update over all ranks and micro-batches.
So the sum over micro-batches and ranks is the loss of the update, however it was split. A forward pass
always holds whole sequences, so a loss may also work on sequences.

Shape legend: N predicted tokens of the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from triad.config.losses import PolicyLossConfig


@dataclass(frozen=True)
class PolicyLossInput:
    """What a policy loss sees.

    Attributes:
        logprobs_N: log-probabilities under the weights being trained; carries the gradient.
        old_logprobs_N: the same under the trainer's weights at the start of this step, no gradient.
        sampler_logprobs_N: log-probabilities under the sampler when the tokens were drawn; each token
            under the version that drew it, also where a rollout spans versions.
        advantages_N: advantage of each token.
        weights_N: 1 / (sequences of the update * trained tokens of the sequence): sums to 1 over the update.
        sequence_N: which sequence of the update each token belongs to; those of a sequence are neighbours.
        step_sequences: sequences of the whole update, over all ranks.
        step_tokens: trained tokens of the whole update, over all ranks.
        reference_logprobs_N: log-probabilities under the reference, where there is one.
    """

    logprobs_N: Tensor
    old_logprobs_N: Tensor
    sampler_logprobs_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    sequence_N: Tensor
    step_sequences: int
    step_tokens: int
    reference_logprobs_N: Tensor | None = None


PolicyLoss = Callable[[PolicyLossInput], tuple[Tensor, dict[str, Tensor]]]
"""Returns the loss and counts of tokens by name, which are logged as shares of all trained tokens.
The names must be the same for every input, also for one without tokens."""


def token_weights(data: PolicyLossInput, config: PolicyLossConfig) -> Tensor:
    """Return the weight of each token, (N,), by `config.aggregation`.

    `sequence`: 1 / (sequences of the step * tokens of the sequence): every sequence counts the same
    (GRPO). `token`: 1 / tokens of the step: every token counts the same (DAPO, Yu et al. 2025, eq. 8).
    `constant`: 1 / (sequences of the step * constant_tokens): no length enters (Dr.GRPO, Liu et al.
    2025, "Understanding R1-Zero-Like Training", section 3.2).
    """
    if config.aggregation == "token":
        return torch.full_like(data.weights_N, 1 / max(1, data.step_tokens))
    if config.aggregation == "constant":
        assert config.constant_tokens is not None  # the config fills it in
        return torch.full_like(data.weights_N, 1 / (max(1, data.step_sequences) * config.constant_tokens))
    return data.weights_N


def over_sequences(values_N: Tensor, sequence_N: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Return, for each token, `reduce` of the values of its sequence, (N,).

    One sequence after the other: scattered sums have no fixed order on GPUs, and so no exact rerun.
    """
    if values_N.numel() == 0:
        return values_N
    _, lengths = torch.unique_consecutive(sequence_N, return_counts=True)
    return torch.cat([reduce(part).expand(len(part)) for part in values_N.split(lengths.tolist())])


def clip_counts(ratio_N: Tensor, advantages_N: Tensor, low: float, high: float) -> dict[str, Tensor]:
    """Return how many tokens the clip of [low, high] takes the gradient from, sign-aware.

    Clipping stops the gradient only where it lowers the objective, hence the signs.
    """
    with torch.no_grad():
        below = (ratio_N < low) & (advantages_N < 0)
        above = (ratio_N > high) & (advantages_N > 0)
        return {"clip_fraction/low": below.sum(), "clip_fraction/high": above.sum()}
