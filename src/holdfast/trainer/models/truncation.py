"""Cutting a distribution to its likelier tokens as the engine did when it sampled from it.

The rules, their order and their borders are those of vLLM, in its precision, so that equal logits give equal sets:
min-p (Nguyen et al. 2024, "Turning Up the Heat"), top-k (Fan et al. 2018, "Hierarchical Neural Story Generation"),
top-p (Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", eq. 2 and 3).

Shape legend: C tokens, V vocabulary; B blocks of K.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.shared.wire.sampling import Sampling
from holdfast.trainer.data.packing import to_device

# A logit whose probability is 0 and whose log-probability is finite, so that 0 times it is no NaN.
_NEVER = -1e30
_BLOCK = 512  # of running sums; about the root of a vocabulary


@dataclass(frozen=True)
class SamplingByToken:
    """The distributions that tokens were sampled from, where they are several.

    Attributes:
        table: all of them.
        index_N: which of them each token was sampled from, long; empty before tokens are chosen.
    """

    table: tuple[Sampling, ...]
    index_N: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))

    @property
    def is_truncated(self) -> bool:
        """Whether anything can be cut of any."""
        return any(sampling.is_truncated for sampling in self.table)

    def of(self, tokens: slice | Tensor) -> SamplingByToken:
        """Return those of some of the tokens."""
        return replace(self, index_N=self.index_N[tokens])

    def column(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return one parameter of each token's distribution, (N, 1)."""
        values = torch.tensor([getattr(sampling, name) for sampling in self.table], dtype=dtype)
        return to_device(values, self.index_N.device)[self.index_N][:, None]


def truncate(logits_CV: Tensor, target_ids_C: Tensor, sampling: Sampling | SamplingByToken) -> Tensor:
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
def _cut(logits_CV: Tensor, sampling: Sampling | SamplingByToken) -> Tensor:
    """Return which tokens are cut, (C, V), bool."""
    if isinstance(sampling, SamplingByToken):
        return _cut_by_token(logits_CV, sampling)
    # The engine keeps its parameters in float32.
    min_p, top_p = (torch.full((), value, device=logits_CV.device) for value in (sampling.min_p, sampling.top_p))
    if sampling.min_p > 0:
        logits_CV = _without_unlikely(logits_CV, min_p)
    if 0 < sampling.top_k < logits_CV.shape[1]:
        # Tokens as likely as number k stay, too.
        last_C1 = logits_CV.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits_CV = logits_CV.masked_fill(logits_CV < last_C1, -torch.inf)
    if sampling.top_p < 1:
        logits_CV = _without_tail(logits_CV, 1 - top_p)
    return logits_CV.isneginf()


def _cut_by_token(logits_CV: Tensor, sampling: SamplingByToken) -> Tensor:
    """Return which tokens are cut where rows have parameters of their own; one that cuts nothing leaves its row."""
    logits_CV = _without_unlikely(logits_CV, sampling.column("min_p"))
    most_k = min(max(one.top_k for one in sampling.table), logits_CV.shape[1])
    if most_k > 0:
        top_k_C1 = sampling.column("top_k", torch.long)
        last_C1 = logits_CV.topk(most_k, dim=-1).values.gather(1, top_k_C1.clamp(1, most_k) - 1)
        logits_CV = logits_CV.masked_fill((logits_CV < last_C1) & (top_k_C1 > 0), -torch.inf)
    top_p_C1 = sampling.column("top_p")
    # Below every sum where nothing is to be cut: 1 - 1 would cut what has no probability in float32.
    border_C1 = torch.where(top_p_C1 < 1, 1 - top_p_C1, -1.0)
    return _without_tail(logits_CV, border_C1).isneginf()


def _without_unlikely(logits_CV: Tensor, min_p: Tensor) -> Tensor:
    """Return the logits without tokens that are less likely than `min_p` times the likeliest."""
    probabilities_CV = logits_CV.softmax(-1)
    is_unlikely_CV = probabilities_CV < probabilities_CV.amax(-1, keepdim=True) * min_p
    return logits_CV.masked_fill(is_unlikely_CV, -torch.inf)


def _without_tail(logits_CV: Tensor, border: Tensor) -> Tensor:
    """Return the logits without the least likely tokens, whose probabilities sum to at most `border`."""
    ascending_CV, order_CV = logits_CV.sort(dim=-1)
    probabilities_CV = ascending_CV.softmax(-1)
    # CUDA adds up a row in whatever order its blocks come, and refuses to where results must repeat.
    must_repeat = logits_CV.is_cuda and torch.are_deterministic_algorithms_enabled()
    sums_CV = sums_by_products(probabilities_CV) if must_repeat else probabilities_CV.cumsum(-1)
    is_tail_CV = sums_CV <= border
    is_tail_CV[:, -1] = False
    return logits_CV.masked_fill(torch.zeros_like(is_tail_CV).scatter_(1, order_CV, is_tail_CV), -torch.inf)


def sums_by_products(values_CV: Tensor) -> Tensor:
    """Return the running sums over the last dimension, (C, V), by matrix products: within blocks, then over them."""
    padded_CV = F.pad(values_CV, (0, -values_CV.shape[1] % _BLOCK))
    ones = values_CV.new_ones(_BLOCK, _BLOCK)
    within_CBK = padded_CV.unflatten(1, (-1, _BLOCK)) @ ones.triu()
    num_blocks = within_CBK.shape[1]
    before_CB = within_CBK[..., -1] @ values_CV.new_ones(num_blocks, num_blocks).triu(1)
    return (within_CBK + before_CB[..., None]).flatten(1)[:, : values_CV.shape[1]]
