"""Log-probabilities and entropies of chosen tokens, without the logits of the whole batch.

Shape legend: N predicted tokens, C tokens of one chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Head = Callable[[Tensor], Tensor]
"""From hidden states (C, H) to logits (C, V)."""


def plain_head(weight_VH: Tensor, *, bias_V: Tensor | None = None, softcap: float | None = None) -> Head:
    """Return the head that multiplies with an output embedding.

    Args:
        softcap: c in logits = c * tanh(logits / c), for models that have it.
    """

    def head(hidden_CH: Tensor) -> Tensor:
        logits_CV = torch.nn.functional.linear(hidden_CH, weight_VH, bias_V).float()
        return logits_CV if softcap is None else softcap * torch.tanh(logits_CV / softcap)

    return head


def token_logprobs(
    hidden_NH: Tensor, head: Head, target_ids_N: Tensor, *, temperature: float = 1.0, chunk_tokens: int = 4096
) -> tuple[Tensor, Tensor]:
    """Return log softmax(logits / temperature) at the targets, and the entropy there, in nats.

    Logits exist for at most `chunk_tokens` tokens at once: with more than one chunk, each is
    computed again in the backward pass.

    Args:
        hidden_NH: hidden states that predict the targets.
        head: makes logits of them.
        target_ids_N: token ids, long.
        temperature: softmax temperature, the same as the sampler's.

    Returns:
        (logprobs_N, entropy_N), float32. The entropy carries no gradient.
    """
    if hidden_NH.shape[0] != target_ids_N.shape[0]:
        raise ValueError(f"{hidden_NH.shape[0]} hidden states for {target_ids_N.shape[0]} targets")

    def one_chunk(hidden_CH: Tensor, target_ids_C: Tensor) -> tuple[Tensor, Tensor]:
        logits_CV = head(hidden_CH).float()
        if temperature != 1.0:
            logits_CV = logits_CV / temperature
        all_logprobs_CV = torch.log_softmax(logits_CV, dim=-1)
        with torch.no_grad():
            entropy_C = -(all_logprobs_CV.exp() * all_logprobs_CV).sum(-1)
        return all_logprobs_CV.gather(1, target_ids_C[:, None]).sum(-1), entropy_C

    count = hidden_NH.shape[0]
    if count <= chunk_tokens:
        return one_chunk(hidden_NH, target_ids_N)
    parts = [
        checkpoint(one_chunk, hidden_NH[start:stop], target_ids_N[start:stop], use_reentrant=False)
        for start, stop in ((s, min(s + chunk_tokens, count)) for s in range(0, count, chunk_tokens))
    ]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropy for _, entropy in parts])
