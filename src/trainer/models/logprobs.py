"""Log-probabilities and entropies of chosen tokens, without the logits of the whole batch.

Shape legend: N predicted tokens, C tokens of one chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trainer.models.truncation import truncate
from triad.sampling import PLAIN_SAMPLING, Sampling

Head = Callable[[Tensor], Tensor]
"""From hidden states (C, H) to logits (C, V)."""


def plain_head(
    weight_VH: Tensor, *, bias_V: Tensor | None = None, softcap: float | None = None, in_float32: bool = False
) -> Head:
    """Return the head that multiplies with an output embedding.

    Args:
        softcap: c in logits = c * tanh(logits / c), for models that have it.
        in_float32: sum and keep the products in float32, whatever the dtype of the factors.
    """
    if in_float32:
        weight_VH, bias_V = weight_VH.float(), None if bias_V is None else bias_V.float()

    def head(hidden_CH: Tensor) -> Tensor:
        logits_CV = torch.nn.functional.linear(hidden_CH.to(weight_VH.dtype), weight_VH, bias_V).float()
        return logits_CV if softcap is None else softcap * torch.tanh(logits_CV / softcap)

    return head


@dataclass(frozen=True)
class Reading:
    """What is read off the logits that predict a target.

    Attributes:
        sampling: the distribution that the targets were sampled from.
        entropy_gradient: whether entropies carry a gradient.
    """

    sampling: Sampling = PLAIN_SAMPLING
    entropy_gradient: bool = False


class Predicted(NamedTuple):
    """What was read off the logits of each target, in nats, float32.

    Attributes:
        logprobs_N: of the target, in the distribution that `Reading.sampling` says.
        entropy_N: of that distribution; carries a gradient only where the reading asks for it.
    """

    logprobs_N: Tensor
    entropy_N: Tensor


PLAIN = Reading()


def token_logprobs(
    hidden_NH: Tensor, head: Head, target_ids_N: Tensor, reading: Reading = PLAIN, *, chunk_tokens: int = 4096
) -> Predicted:
    """Return what `reading` asks for at each target.

    Logits exist for at most `chunk_tokens` tokens at once: with more than one chunk, each is
    computed again in the backward pass.

    Args:
        hidden_NH: hidden states that predict the targets.
        head: makes logits of them.
        target_ids_N: token ids, long.
    """
    if hidden_NH.shape[0] != target_ids_N.shape[0]:
        raise ValueError(f"{hidden_NH.shape[0]} hidden states for {target_ids_N.shape[0]} targets")

    def one_chunk(hidden_CH: Tensor, target_ids_C: Tensor) -> Predicted:
        return _read(head(hidden_CH).float(), target_ids_C, reading)

    count = hidden_NH.shape[0]
    if count <= chunk_tokens:
        return one_chunk(hidden_NH, target_ids_N)
    parts = [
        Predicted(*checkpoint(one_chunk, hidden_NH[start:stop], target_ids_N[start:stop], use_reentrant=False))
        for start, stop in ((s, min(s + chunk_tokens, count)) for s in range(0, count, chunk_tokens))
    ]
    return Predicted(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _read(logits_CV: Tensor, target_ids_C: Tensor, reading: Reading) -> Predicted:
    sampling = reading.sampling
    if sampling.temperature != 1.0:
        logits_CV = logits_CV / sampling.temperature
    if sampling.is_truncated:
        logits_CV = truncate(logits_CV, target_ids_C, sampling)
    all_logprobs_CV = torch.log_softmax(logits_CV, dim=-1)
    with torch.set_grad_enabled(torch.is_grad_enabled() and reading.entropy_gradient):
        entropy_C = -(all_logprobs_CV.exp() * all_logprobs_CV).sum(-1)
    return Predicted(all_logprobs_CV.gather(1, target_ids_C[:, None]).sum(-1), entropy_C)
