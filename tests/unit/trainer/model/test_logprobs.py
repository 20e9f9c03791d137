"""Log-probabilities in chunks: the same values and gradients as from the whole logits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.protocol.rollouts import Sampling
from holdfast.trainer.model.logprobs import Reading, Readout, plain_head, token_logprobs

N, H, V = 11, 6, 17


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=generator, dtype=dtype, requires_grad=True)
    head = torch.randn(V, H, generator=generator, dtype=dtype, requires_grad=True)
    bias = torch.randn(V, generator=generator, dtype=dtype, requires_grad=True)
    return hidden, head, bias, torch.randint(0, V, (N,), generator=generator)


def by_hand(
    hidden: Tensor, head: Tensor, targets: Tensor, bias: Tensor | None, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    logits = (hidden @ head.T + (0 if bias is None else bias)).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    probabilities = torch.exp(logits / temperature) / torch.exp(logits / temperature).sum(-1, keepdim=True)
    entropy = -(probabilities * probabilities.log()).sum(-1)
    return probabilities.log()[torch.arange(N), targets], entropy


@pytest.mark.parametrize("chunk_tokens", [1, 4, 10, 11, 4096])
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.7, None), (1.0, 2.0), (1.3, 5.0)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_values_and_gradients_do_not_depend_on_the_chunks(
    chunk_tokens: int, temperature: float, softcap: float | None, with_bias: bool, entropy_gradient: bool
) -> None:
    hidden, head, bias, targets = inputs()
    used = bias if with_bias else None
    logprobs, entropy, _ = token_logprobs(
        hidden,
        plain_head(head, bias_V=used, softcap=softcap),
        targets,
        Reading(Sampling(temperature), entropy=True, entropy_gradient=entropy_gradient),
        chunk_tokens=chunk_tokens,
    )
    expected, expected_entropy = by_hand(hidden, head, targets, used, temperature, softcap)
    assert logprobs.dtype == torch.float32 and entropy is not None and entropy.requires_grad == entropy_gradient
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-5, atol=1e-5)
    upstream = torch.linspace(-1, 1, N)
    leaves = (hidden, head, bias) if with_bias else (hidden, head)
    ours, theirs = (
        torch.autograd.grad((values * upstream + entropy_gradient * entropies * upstream.flip(0)).sum(), leaves)
        for values, entropies in ((logprobs, entropy), (expected, expected_entropy))
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        found = token_logprobs(hidden, plain_head(head), targets, Reading(entropy_gradient=True))
        assert found.entropy_N is not None and not found.entropy_N.requires_grad


@pytest.mark.parametrize("chunk_tokens", [2, N])
def test_entropies_that_nobody_asks_for_are_not_computed(chunk_tokens: int) -> None:
    hidden, head, _, targets = inputs()
    plain = token_logprobs(hidden, plain_head(head), targets, chunk_tokens=chunk_tokens)
    asked = token_logprobs(hidden, plain_head(head), targets, Reading(entropy=True), chunk_tokens=chunk_tokens)
    assert plain.entropy_N is None and asked.entropy_N is not None
    assert torch.equal(plain.logprobs_N, asked.logprobs_N)


def kl_by_hand(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """KL(student || teacher) of two rows of logits, token by token of the vocabulary, in float64."""
    rows = []
    for own_V, other_V in zip(student.double() / temperature, teacher.double() / temperature, strict=True):
        total, own_sum, other_sum = own_V.new_zeros(()), own_V.exp().sum(), other_V.exp().sum()
        for own, other in zip(own_V, other_V, strict=True):
            total = total + own.exp() / own_sum * ((own - own_sum.log()) - (other - other_sum.log()))
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("chunk_tokens", [1, 2, 10, 4096])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_divergence_from_a_teacher_is_that_of_whole_vocabularies(chunk_tokens: int, temperature: float) -> None:
    hidden, weight, bias, targets = inputs()
    generator = torch.Generator().manual_seed(5)
    taught = torch.randn(N, H + 3, generator=generator, dtype=torch.float64)  # a wider model
    taught_weight = torch.randn(V, H + 3, generator=generator, dtype=torch.float64, requires_grad=True)
    found = token_logprobs(
        hidden,
        plain_head(weight, bias_V=bias, softcap=5.0),
        targets,
        Reading(Sampling(temperature)),
        chunk_tokens=chunk_tokens,
        teacher=Readout(taught, plain_head(taught_weight)),
    )
    logits = 5.0 * torch.tanh((hidden @ weight.T + bias) / 5.0)
    expected = kl_by_hand(logits, (taught @ taught_weight.T).detach(), temperature)
    assert found.teacher_kl_N is not None and expected.min() > 0.1
    torch.testing.assert_close(found.teacher_kl_N.double(), expected, rtol=1e-6, atol=1e-6)
    upstream = torch.linspace(-1, 1, N)
    leaves = (hidden, weight, bias)
    ours = torch.autograd.grad((found.teacher_kl_N * upstream).sum(), leaves, retain_graph=True)
    theirs = torch.autograd.grad((expected * upstream).sum(), leaves)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert torch.autograd.grad(found.teacher_kl_N.sum(), taught_weight, allow_unused=True) == (None,)


def test_divergence_from_a_teacher_stays_finite_for_tokens_that_one_of_both_never_takes() -> None:
    extremes = torch.tensor([[300.0, 0.0, -300.0], [0.0, 0.0, 0.0]], requires_grad=True)
    found = token_logprobs(
        extremes,
        plain_head(torch.eye(3)),
        torch.tensor([0, 1]),
        teacher=Readout(extremes.detach().flip(0), plain_head(torch.eye(3))),
    )
    assert found.teacher_kl_N is not None
    torch.testing.assert_close(found.teacher_kl_N, torch.tensor([math.log(3), 300 - math.log(3)]), rtol=1e-5, atol=0)
    (gradient,) = torch.autograd.grad(found.teacher_kl_N.sum(), extremes)
    assert gradient.isfinite().all()


def test_whole_logits_never_exist_with_chunks() -> None:
    """The largest tensor that forward and backward make has `chunk_tokens` rows of the vocabulary, not N."""
    hidden, head, _, targets = inputs()
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple) else (out,):
                if isinstance(tensor, Tensor) and tensor.shape[-1:] == (V,) and tensor.shape != (H, V):
                    largest = max(largest, tensor.shape[0])
            return out

    for chunk_tokens, rows in ((3, 3), (4096, N)):
        largest = 0
        with Watch():
            teacher = Readout(hidden.detach(), plain_head(head))
            found = token_logprobs(hidden, plain_head(head), targets, chunk_tokens=chunk_tokens, teacher=teacher)
            assert found.teacher_kl_N is not None
            (found.logprobs_N + found.teacher_kl_N).sum().backward()
        assert largest == rows


def test_no_targets_give_no_values_and_zero_gradients() -> None:
    hidden, head, _, _ = inputs()
    logprobs, entropy, _ = token_logprobs(
        hidden[:0], plain_head(head), torch.zeros(0, dtype=torch.long), Reading(entropy=True)
    )
    assert logprobs.shape == entropy.shape == (0,)
    (gradient,) = torch.autograd.grad(logprobs.sum(), head)
    assert torch.count_nonzero(gradient) == 0


def test_shapes_that_do_not_fit_are_refused() -> None:
    hidden, head, _, targets = inputs()
    with pytest.raises(ValueError, match="11 hidden states for 10 targets"):
        token_logprobs(hidden, plain_head(head), targets[:-1])
