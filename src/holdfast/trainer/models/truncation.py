"""Cutting a distribution to its likelier tokens as the engine did when it sampled from it.

The rules, their order and their borders are those of vLLM, in its precision, so that equal logits give equal sets:
min-p (Nguyen et al. 2024, "Turning Up the Heat"), top-k (Fan et al. 2018, "Hierarchical Neural Story Generation"),
top-p (Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", eq. 2 and 3).

Shape legend: C tokens, V vocabulary; B blocks of K.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.shared.wire.sampling import Sampling

# A logit whose probability is 0 and whose log-probability is finite, so that 0 times it is no NaN.
_NEVER = -1e30
_BLOCK = 512  # of running sums; about the root of a vocabulary


def truncate(logits_CV: Tensor, target_ids_C: Tensor, sampling: Sampling) -> Tensor:
    """Return the logits with those of cut tokens so low that their probability is exactly 0.

    The sets are constants: gradients go through the kept logits alone. A target always stays, so that what was
    sampled has a log-probability when rounding, or weights other than those that sampled it, would cut it.

    Args:
        logits_CV: over the temperature already, float32.
        target_ids_C: token ids, long.
    """
    cut_CV = _cut(logits_CV.detach(), sampling).scatter_(1, target_ids_C[:, None], False)
    return logits_CV.masked_fill(cut_CV, _NEVER)


@torch.no_grad()
def _cut(logits_CV: Tensor, sampling: Sampling) -> Tensor:
    """Return which tokens are cut, (C, V), bool."""
    # The engine keeps its parameters in float32.
    min_p, top_p = (torch.full((), value, device=logits_CV.device) for value in (sampling.min_p, sampling.top_p))
    if sampling.min_p > 0:
        probabilities_CV = logits_CV.softmax(-1)
        is_unlikely_CV = probabilities_CV < probabilities_CV.amax(-1, keepdim=True) * min_p
        logits_CV = logits_CV.masked_fill(is_unlikely_CV, -torch.inf)
    if 0 < sampling.top_k < logits_CV.shape[1]:
        # Tokens as likely as number k stay, too.
        last_C1 = logits_CV.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits_CV = logits_CV.masked_fill(logits_CV < last_C1, -torch.inf)
    if sampling.top_p < 1:
        ascending_CV, order_CV = logits_CV.sort(dim=-1)
        probabilities_CV = ascending_CV.softmax(-1)
        # CUDA adds up a row in whatever order its blocks come, and refuses to where results must repeat.
        must_repeat = logits_CV.is_cuda and torch.are_deterministic_algorithms_enabled()
        sums_CV = sums_by_products(probabilities_CV) if must_repeat else probabilities_CV.cumsum(-1)
        is_tail_CV = sums_CV <= 1 - top_p
        is_tail_CV[:, -1] = False
        logits_CV = logits_CV.masked_fill(torch.zeros_like(is_tail_CV).scatter_(1, order_CV, is_tail_CV), -torch.inf)
    return logits_CV.isneginf()


def sums_by_products(values_CV: Tensor) -> Tensor:
    """Return the running sums over the last dimension, (C, V), by matrix products: within blocks, then over them."""
    padded_CV = F.pad(values_CV, (0, -values_CV.shape[1] % _BLOCK))
    ones = values_CV.new_ones(_BLOCK, _BLOCK)
    within_CBK = padded_CV.unflatten(1, (-1, _BLOCK)) @ ones.triu()
    num_blocks = within_CBK.shape[1]
    before_CB = within_CBK[..., -1] @ values_CV.new_ones(num_blocks, num_blocks).triu(1)
    return (within_CBK + before_CB[..., None]).flatten(1)[:, : values_CV.shape[1]]
