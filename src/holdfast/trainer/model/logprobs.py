"""Log-probabilities and entropies of chosen tokens, without the logits of the whole batch in memory.

`truncate` cuts a distribution to its likelier tokens, as the engine did when it sampled: with vLLM's rules, order and
precision, so that equal logits give equal sets. The rules are min-p (Nguyen et al. 2024, "Turning Up the Heat"), top-k
(Fan et al. 2018, "Hierarchical Neural Story Generation") and top-p (Holtzman et al. 2020, "The Curious Case of Neural
Text Degeneration", eq. 2 and 3).

Shape legend: N predicted tokens, C tokens of one chunk, H hidden size, V vocabulary; B blocks of K.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from holdfast.protocol.rollouts import PLAIN_SAMPLING, Sampling
from holdfast.trainer.data.packing import to_device

# The probability is 0 and the log-probability finite, so their product is not NaN.
_NEVER = -1e30
_BLOCK = 512  # of running sums; about the root of a vocabulary


@dataclass(frozen=True)
class SamplingByToken:
    """Several distributions, and the index of each token's distribution, long; empty before tokens are chosen."""

    table: tuple[Sampling, ...]
    index_N: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))

    @property
    def is_truncated(self) -> bool:
        """Whether any distribution is truncated."""
        return any(sampling.is_truncated for sampling in self.table)

    def of(self, tokens: slice | Tensor) -> Self:
        """Return the distributions of some of the tokens."""
        return replace(self, index_N=self.index_N[tokens])

    def column(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return one parameter of each token's distribution, (N, 1)."""
        values = torch.tensor([getattr(sampling, name) for sampling in self.table], dtype=dtype)
        return to_device(values, self.index_N.device)[self.index_N][:, None]


def truncate(logits_CV: Tensor, target_ids_C: Tensor, sampling: Sampling | SamplingByToken) -> Tensor:
    """Return the logits; the probability of cut tokens is exactly 0.

    The sets are constants: gradients go through kept logits only. A target always stays: it has a log-probability even
    if rounding, or other weights than at sampling, would cut it.

    Args:
        logits_CV: divided by the temperature, float32.
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
        # Ties with token k stay, too.
        last_C1 = logits_CV.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits_CV = logits_CV.masked_fill(logits_CV < last_C1, -torch.inf)
    if sampling.top_p < 1:
        logits_CV = _without_tail(logits_CV, 1 - top_p)
    return logits_CV.isneginf()


def _cut_by_token(logits_CV: Tensor, sampling: SamplingByToken) -> Tensor:
    """Return which tokens are cut if rows have parameters of their own."""
    logits_CV = _without_unlikely(logits_CV, sampling.column("min_p"))
    most_k = min(max(one.top_k for one in sampling.table), logits_CV.shape[1])
    if most_k > 0:
        top_k_C1 = sampling.column("top_k", torch.long)
        last_C1 = logits_CV.topk(most_k, dim=-1).values.gather(1, top_k_C1.clamp(1, most_k) - 1)
        logits_CV = logits_CV.masked_fill((logits_CV < last_C1) & (top_k_C1 > 0), -torch.inf)
    top_p_C1 = sampling.column("top_p")
    # -1 cuts nothing; 1 - 1 would cut tokens whose probability is 0 in float32.
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
    # CUDA's cumsum has no fixed order, and raises in deterministic mode.
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


Head = Callable[[Tensor], Tensor]
"""From hidden states (C, H) to logits (C, V)."""


def plain_head(
    weight_VH: Tensor, *, bias_V: Tensor | None = None, softcap: float | None = None, in_float32: bool = False
) -> Head:
    """Return the head that multiplies with an output embedding.

    Args:
        softcap: c in logits = c * tanh(logits / c).
        in_float32: multiply in float32, whatever the dtype of the factors.
    """
    if in_float32:
        weight_VH, bias_V = weight_VH.float(), None if bias_V is None else bias_V.float()

    def head(hidden_CH: Tensor) -> Tensor:
        # .float() after the product: the softmax over the vocabulary needs more than bfloat16.
        logits_CV = torch.nn.functional.linear(hidden_CH.to(weight_VH.dtype), weight_VH, bias_V).float()
        return logits_CV if softcap is None else softcap * torch.tanh(logits_CV / softcap)

    return head


@dataclass(frozen=True)
class Reading:
    """Numbers to compute from the logits that predict a target, beside its log-probability under `sampling`."""

    sampling: Sampling | SamplingByToken = PLAIN_SAMPLING
    entropy: bool = False
    accuracy: bool = False
    entropy_gradient: bool = False  # entropy with a gradient, which keeps as much memory as the logits

    def of(self, tokens: slice | Tensor) -> Self:
        """Return the reading of a part of the targets."""
        if isinstance(self.sampling, Sampling):
            return self
        return replace(self, sampling=self.sampling.of(tokens))


@dataclass(frozen=True)
class Readout:
    """Hidden states of another model, the teacher, at the same targets, and its head over the same vocabulary."""

    hidden_NH: Tensor
    head: Head


class Predicted(NamedTuple):
    """Results at each target, in nats, float32.

    Attributes:
        logprobs_N: of the target, in the distribution `Reading.sampling`.
        entropy_N: of that distribution, if `Reading` asks for it.
        teacher_kl_N: KL of that distribution from the teacher's, over the whole vocabulary, if there is a teacher.
        accuracy_N: 1.0 if no other token is likelier than the target, else 0.0, if `Reading` asks for it.
    """

    logprobs_N: Tensor
    entropy_N: Tensor | None = None
    teacher_kl_N: Tensor | None = None
    accuracy_N: Tensor | None = None

    def columns(self) -> dict[str, Tensor]:
        """Return the results that are not None, by name."""
        return {name: column for name, column in self._asdict().items() if column is not None}


PLAIN = Reading()


def token_logprobs(
    hidden_NH: Tensor,
    head: Head,
    target_ids_N: Tensor,
    reading: Reading = PLAIN,
    *,
    chunk_tokens: int = 4096,
    teacher: Readout | None = None,
) -> Predicted:
    """Return what `reading` asks for at each target.

    Logits exist for at most `chunk_tokens` tokens at once, also of a teacher. If there are several chunks, the backward
    pass computes each chunk again.

    Args:
        hidden_NH: hidden states that predict the targets.
        target_ids_N: token ids, long.
        teacher: another model to measure the divergence from.
    """
    if hidden_NH.shape[0] != target_ids_N.shape[0]:
        raise ValueError(f"{hidden_NH.shape[0]} hidden states for {target_ids_N.shape[0]} targets")

    def one_chunk(hidden_CH: Tensor, target_ids_C: Tensor, taught_CH: Tensor | None, own_reading: Reading) -> Predicted:
        predicted, all_logprobs_CV = _read(head(hidden_CH).float(), target_ids_C, own_reading)
        if teacher is None or taught_CH is None:
            return predicted
        with torch.no_grad():
            teacher_CV = _all_logprobs(teacher.head(taught_CH).float(), target_ids_C, own_reading)
        return predicted._replace(teacher_kl_N=_divergence(all_logprobs_CV, teacher_CV))

    count, taught_NH = hidden_NH.shape[0], teacher.hidden_NH if teacher is not None else None
    # Recomputing a single chunk would save no memory.
    if count <= chunk_tokens:
        return one_chunk(hidden_NH, target_ids_N, taught_NH, reading)
    parts = list[Predicted]()
    for start in range(0, count, chunk_tokens):
        own = slice(start, min(start + chunk_tokens, count))
        taught_CH = taught_NH[own] if taught_NH is not None else None
        columns = checkpoint(
            one_chunk, hidden_NH[own], target_ids_N[own], taught_CH, reading.of(own), use_reentrant=False
        )
        parts.append(Predicted(*columns))
    named = [part.columns() for part in parts]
    return Predicted(**{name: torch.cat([columns[name] for columns in named]) for name in named[0]})


def _read(logits_CV: Tensor, target_ids_C: Tensor, reading: Reading) -> tuple[Predicted, Tensor]:
    all_logprobs_CV = _all_logprobs(logits_CV, target_ids_C, reading)
    entropy_C = None
    if reading.entropy or reading.entropy_gradient:
        # The graph would keep as much memory as the logits.
        with torch.set_grad_enabled(torch.is_grad_enabled() and reading.entropy_gradient):
            entropy_C = -(all_logprobs_CV.exp() * all_logprobs_CV).sum(-1)
    logprobs_C = all_logprobs_CV.gather(1, target_ids_C[:, None]).sum(-1)
    accuracy_C = None
    if reading.accuracy:
        with torch.no_grad():
            accuracy_C = (logprobs_C >= all_logprobs_CV.amax(-1)).float()
    return Predicted(logprobs_C, entropy_C, accuracy_N=accuracy_C), all_logprobs_CV


def _all_logprobs(logits_CV: Tensor, target_ids_C: Tensor, reading: Reading) -> Tensor:
    """Return the log-probability of every token of the vocabulary, (C, V)."""
    sampling = reading.sampling
    if isinstance(sampling, SamplingByToken):
        logits_CV = logits_CV / sampling.column("temperature")
    elif sampling.temperature != 1.0:
        logits_CV = logits_CV / sampling.temperature
    if sampling.is_truncated:
        logits_CV = truncate(logits_CV, target_ids_C, sampling)
    return torch.log_softmax(logits_CV, dim=-1)


def _divergence(logprobs_CV: Tensor, teacher_CV: Tensor) -> Tensor:
    """Return KL(p || q) = sum_v p_v (log p_v - log q_v), (C,)."""
    return (logprobs_CV.exp() * (logprobs_CV - teacher_CV)).sum(-1)
