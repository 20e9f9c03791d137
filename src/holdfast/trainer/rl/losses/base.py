"""What every policy loss takes and gives, and what the losses share: ratios, sequences and denominators.

A built-in loss is an objective per token. `build_policy_loss` makes the loss of it: minus its sum over the predicted
tokens of this forward pass, times correction and weight. The weights carry the denominator, which is
global: it counts the whole optimizer update over all ranks and micro-batches. So the sum over micro-batches and ranks
is the loss of the update, however it was split. A forward pass always holds whole sequences, so a loss may also work
on sequences.

Shape legend: N predicted tokens of the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.shared.config.losses import PolicyLossConfig
from holdfast.trainer.rl.regularization.kl import bounded


@dataclass(frozen=True)
class PolicyLossInput:
    """What a policy loss sees.

    Attributes:
        logprobs_N: log-probabilities under the weights being trained; carries the gradient.
        old_logprobs_N: the same under the trainer's weights at the start of this step, no gradient.
        sampler_logprobs_N: log-probabilities under the sampler when the tokens were drawn; each token
            under the version that drew it, also where a rollout spans versions.
        advantages_N: advantage of each token.
        entropy_N: entropy of the policy at each token, in nats; carries a gradient for a loss of the user, and where
            `loss.entropy` asks for it.
        weights_N: 1 / (sequences of the update * trained tokens of the sequence): sums to 1 over the update.
        correction_N: the factor of `loss.correction`, no gradient; 1 without one.
        sequence_N: which sequence of the update each token belongs to; those of a sequence are neighbours.
        sequence_lengths: tokens of each of these sequences, in their order, where the caller knows them: a loss that
            works on sequences counts them otherwise, for which it waits for the device.
        step_sequences: sequences of the whole update, over all ranks.
        step_tokens: trained tokens of the whole update, over all ranks.
        reference_logprobs_N: log-probabilities under the reference, where there is one.
        teacher_kl_N: KL of the policy from its teacher at each token, in nats, with `distillation.divergence = "full"`;
            carries a gradient.
    """

    logprobs_N: Tensor
    old_logprobs_N: Tensor
    sampler_logprobs_N: Tensor
    advantages_N: Tensor
    entropy_N: Tensor
    weights_N: Tensor
    correction_N: Tensor
    sequence_N: Tensor
    step_sequences: int
    step_tokens: int
    reference_logprobs_N: Tensor | None = None
    teacher_kl_N: Tensor | None = None
    sequence_lengths: tuple[int, ...] | None = None


Counts = dict[str, Tensor]
"""Numbers of tokens by name, which are logged as shares of all trained tokens. The names must be the same for every
input, also for one without tokens."""


PolicyLoss = Callable[[PolicyLossInput], tuple[Tensor, Counts]]
"""Returns the loss, a scalar, and counts."""


Objective = Callable[[PolicyLossInput], tuple[Tensor, Counts]]
"""Returns what each token adds to the objective, (N,), to be maximised, and counts."""


def log_ratios(data: PolicyLossInput, config: PolicyLossConfig) -> Tensor:
    """Return log(pi / base) per token, bounded; carries the gradient, (N,).

    The base is the sampler, or with `ratio_to = "old"` the trainer's own policy at the start of the step.
    """
    return bounded(data.logprobs_N - (data.old_logprobs_N if config.ratio_to == "old" else data.sampler_logprobs_N))


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
        assert config.constant_tokens is not None  # nothing starts without it
        return torch.full_like(data.weights_N, 1 / (max(1, data.step_sequences) * config.constant_tokens))
    return data.weights_N


def over_sequences(values_N: Tensor, data: PolicyLossInput, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Return, for each token, `reduce` of the values of its sequence, (N,).

    One sequence after the other: scattered sums have no fixed order on GPUs, and so no exact rerun.
    """
    if values_N.numel() == 0:
        return values_N
    lengths = data.sequence_lengths
    if lengths is None:
        lengths = tuple(torch.unique_consecutive(data.sequence_N, return_counts=True)[1].tolist())
    parts = values_N.split([length for length in lengths if length])
    return torch.cat([reduce(part).expand(len(part)) for part in parts])
