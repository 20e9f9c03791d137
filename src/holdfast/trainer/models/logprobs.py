"""Log-probabilities and entropies of chosen tokens, without the logits of the whole batch.

Shape legend: N predicted tokens, C tokens of one chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from holdfast.shared.wire.sampling import PLAIN_SAMPLING, Sampling
from holdfast.trainer.models.truncation import SamplingByToken, truncate

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
        # .float() behind the product: the softmax over the vocabulary needs more than bfloat16.
        logits_CV = torch.nn.functional.linear(hidden_CH.to(weight_VH.dtype), weight_VH, bias_V).float()
        return logits_CV if softcap is None else softcap * torch.tanh(logits_CV / softcap)

    return head


@dataclass(frozen=True)
class Reading:
    """What is read off the logits that predict a target.

    Attributes:
        sampling: the distribution that the targets were sampled from: one of all, or by token.
        entropy: whether their entropies are computed, which takes as much memory as the logits once more.
        entropy_gradient: whether they are, and carry a gradient.
    """

    sampling: Sampling | SamplingByToken = PLAIN_SAMPLING
    entropy: bool = False
    entropy_gradient: bool = False

    def of(self, tokens: slice | Tensor) -> Reading:
        """Return the reading of some of the targets."""
        if isinstance(self.sampling, Sampling):
            return self
        return replace(self, sampling=self.sampling.of(tokens))


@dataclass(frozen=True)
class Readout:
    """What makes the logits of another model at the same targets, the teacher, without gradient.

    Attributes:
        hidden_NH: its hidden states.
        head: makes logits of them, over the same vocabulary.
    """

    hidden_NH: Tensor
    head: Head


class Predicted(NamedTuple):
    """What was read off the logits of each target, in nats, float32.

    Attributes:
        logprobs_N: of the target, in the distribution that `Reading.sampling` says.
        entropy_N: of that distribution, where the reading asks for it; with a gradient only where it asks for that.
        teacher_kl_N: KL of that distribution from the teacher's, over the whole vocabulary, where there is a teacher.
    """

    logprobs_N: Tensor
    entropy_N: Tensor | None = None
    teacher_kl_N: Tensor | None = None

    def columns(self) -> dict[str, Tensor]:
        """Return what there is, by name."""
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

    Logits exist for at most `chunk_tokens` tokens at once, those of a teacher too: with more than one chunk, each is
    computed again in the backward pass.

    Args:
        hidden_NH: hidden states that predict the targets.
        head: makes logits of them.
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
    # One chunk is not computed twice: recomputing would save no memory.
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
    entropies = [part.entropy_N for part in parts if part.entropy_N is not None]
    divergences = [part.teacher_kl_N for part in parts if part.teacher_kl_N is not None]
    return Predicted(
        torch.cat([part.logprobs_N for part in parts]),
        torch.cat(entropies) if entropies else None,
        torch.cat(divergences) if divergences else None,
    )


def _read(logits_CV: Tensor, target_ids_C: Tensor, reading: Reading) -> tuple[Predicted, Tensor]:
    all_logprobs_CV = _all_logprobs(logits_CV, target_ids_C, reading)
    entropy_C = None
    if reading.entropy or reading.entropy_gradient:
        # Without a gradient unless it is asked for: the graph would keep as much as the logits once more.
        with torch.set_grad_enabled(torch.is_grad_enabled() and reading.entropy_gradient):
            entropy_C = -(all_logprobs_CV.exp() * all_logprobs_CV).sum(-1)
    return Predicted(all_logprobs_CV.gather(1, target_ids_C[:, None]).sum(-1), entropy_C), all_logprobs_CV


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
    """Return KL(p || q) = sum_v p_v (log p_v - log q_v), (C,); exactly 0 where both are the same numbers."""
    return (logprobs_CV.exp() * (logprobs_CV - teacher_CV)).sum(-1)
