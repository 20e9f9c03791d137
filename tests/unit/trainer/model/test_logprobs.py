"""Log-probabilities in chunks: values and gradients are those of whole logits, and of truncated distributions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.protocol.rollouts import Sampling
from holdfast.trainer.model import logprobs as model_logprobs
from holdfast.trainer.model.logprobs import Reading, Readout, SamplingByToken, plain_head, token_logprobs

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
    best = (hidden @ head.T + (0 if used is None else used)).argmax(-1)
    targets[::3] = best[::3]
    logprobs, entropy, _, accuracy = token_logprobs(
        hidden, plain_head(head, bias_V=used, softcap=softcap), targets,
        Reading(Sampling(temperature), entropy=True, accuracy=True, entropy_gradient=entropy_gradient),
        chunk_tokens=chunk_tokens,
    )  # fmt: skip
    expected, expected_entropy = by_hand(hidden, head, targets, used, temperature, softcap)
    assert logprobs.dtype == torch.float32 and entropy is not None and entropy.requires_grad == entropy_gradient
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-5, atol=1e-5)
    assert accuracy is not None and accuracy.tolist() == (best == targets).tolist() and 0 < accuracy.sum() < N
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


def test_divergence_from_a_teacher_stays_finite_for_tokens_that_one_of_both_never_takes() -> None:
    extremes = torch.tensor([[300.0, 0.0, -300.0], [0.0, 0.0, 0.0]], requires_grad=True)
    head = plain_head(torch.eye(3))
    teacher = Readout(extremes.detach().flip(0), head)
    found = token_logprobs(extremes, head, torch.tensor([0, 1]), teacher=teacher)
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


def test_no_targets_give_no_values_and_zero_gradients_and_other_numbers_are_refused() -> None:
    hidden, head, _, targets = inputs()
    logprobs, entropy, *_ = token_logprobs(hidden[:0], plain_head(head), targets[:0], Reading(entropy=True))
    assert logprobs.shape == entropy.shape == (0,)
    (gradient,) = torch.autograd.grad(logprobs.sum(), head)
    assert torch.count_nonzero(gradient) == 0
    with pytest.raises(ValueError, match="11 hidden states for 10 targets"):
        token_logprobs(hidden, plain_head(head), targets[:-1])


W = 23
CUTS = [
    Sampling(), Sampling(0.7), Sampling(1.0, 0.9), Sampling(0.7, 1e-6), Sampling(top_k=2), Sampling(top_k=10 * W),
    Sampling(min_p=0.1), Sampling(min_p=0.999), Sampling(0.7, 0.4, 7, 0.1), Sampling(1.0, 0.9, W, 0.1),
]  # fmt: skip


def kept_tokens(logits: list[float], sampling: Sampling) -> set[int]:
    """The tokens that `sampling` leaves, each cut on what the one before has left."""
    scores = [math.exp((logit - max(logits)) / sampling.temperature) for logit in logits]
    kept = sorted(range(len(logits)), key=lambda token: -scores[token])
    if sampling.min_p > 0:  # Nguyen et al. 2024: p >= min_p * p_max
        kept = [token for token in kept if scores[token] >= sampling.min_p * scores[kept[0]]]
    if sampling.top_k > 0:
        kept = kept[: sampling.top_k]
    if sampling.top_p < 1:  # Holtzman et al. 2020, eq. 2: the smallest set whose mass reaches p
        total, mass, nucleus = math.fsum(scores[token] for token in kept), 0.0, []
        for token in kept:
            if mass >= sampling.top_p * total:
                break
            nucleus.append(token)
            mass += scores[token]
        kept = nucleus
    return set(kept)


def read(logits_CV: Tensor, targets: list[int], sampling: Sampling | SamplingByToken) -> tuple[Tensor, Tensor]:
    head, reading = plain_head(torch.eye(W)), Reading(sampling, entropy_gradient=True)
    logprobs, entropy, *_ = token_logprobs(logits_CV, head, torch.tensor(targets), reading, chunk_tokens=5)
    return logprobs, entropy


@settings(max_examples=60)
@given(
    sampling=st.builds(
        Sampling, st.sampled_from([1.0, 0.7, 0.2]), top_p=st.sampled_from([1.0, 1e-6]) | st.floats(0.05, 1.0),
        top_k=st.sampled_from([0, 1, 2, 7, W, 10 * W]), min_p=st.sampled_from([0.0, 0.999]) | st.floats(0.0, 0.9),
    ),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_values_and_gradients_are_those_of_the_kept_tokens(sampling: Sampling, seed: int) -> None:
    logits_CV = (3 * torch.randn(W, W, generator=torch.Generator().manual_seed(seed))).requires_grad_()
    targets = list(range(W))
    logprobs, entropy = read(logits_CV, targets, sampling)
    (gradient_CV,) = torch.autograd.grad((logprobs * torch.arange(1.0, W + 1)).sum(), logits_CV, retain_graph=True)
    (entropy_gradient_CV,) = torch.autograd.grad(entropy.sum(), logits_CV)
    for row, target in enumerate(targets):
        logits = logits_CV[row].tolist()
        # A sampled token always counts among the kept ones.
        kept = kept_tokens(logits, sampling) | {target}
        scores = {token: math.exp(logits[token] / sampling.temperature) for token in kept}
        probabilities = {token: score / math.fsum(scores.values()) for token, score in scores.items()}
        assert logprobs[row].item() == pytest.approx(math.log(probabilities[target]), rel=1e-5, abs=1e-6)
        expected = -math.fsum(p * math.log(p) for p in probabilities.values())
        assert entropy[row].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
        for token in range(W):
            p = probabilities.get(token, 0.0)
            slope = ((token == target) - p) / sampling.temperature
            assert gradient_CV[row, token].item() == pytest.approx((row + 1) * slope, rel=1e-4, abs=1e-5)
            slope = -p * (math.log(p) + expected) / sampling.temperature if p else 0.0
            assert entropy_gradient_CV[row, token].item() == pytest.approx(slope, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 60.0, 1e4])
@pytest.mark.parametrize(
    "sampling", [Sampling(0.01, 0.5), Sampling(2.0, 0.999999), Sampling(1.0, 0.9, 3, 0.5)], ids=str
)
def test_equal_and_extreme_logits_give_numbers(scale: float, sampling: Sampling) -> None:
    logits_CV = (scale * torch.linspace(-1, 1, W)).repeat(W, 1).requires_grad_()
    logprobs, entropy = read(logits_CV, list(range(W)), sampling)
    (gradient_CV,) = torch.autograd.grad((logprobs + entropy).sum(), logits_CV)
    for found in (logprobs, entropy, gradient_CV):
        assert found.isfinite().all()
    assert (logprobs <= 0).all() and (entropy >= 0).all()


def test_tokens_at_a_border_stay_but_for_those_that_top_p_needs_not() -> None:
    """Of equally likely ones: all that reach `min_p`, all that are as likely as number k, the fewest with the mass."""
    logits_CV = torch.zeros(4, 4)

    def sizes(sampling: Sampling) -> list[float]:
        found = token_logprobs(logits_CV, plain_head(torch.eye(4)), torch.arange(4), Reading(sampling, entropy=True))
        assert found.entropy_N is not None
        return found.entropy_N.exp().round().tolist()

    assert sizes(Sampling(min_p=1.0)) == sizes(Sampling(top_k=2)) == [4, 4, 4, 4]
    assert sorted(sizes(Sampling(top_p=0.5))) == [2, 2, 3, 3]  # two have the mass; a target that is cut comes back
    assert sorted(sizes(Sampling(top_p=0.51))) == [3, 3, 3, 4]


def test_a_target_at_the_border_has_one_log_probability_and_cut_tokens_weigh_nothing() -> None:
    """Whether rounding cuts the target or not makes no difference."""
    logits = torch.tensor([2.0, 1.0, 0.0, *[-1.0] * (W - 3)])
    first_two = float(logits.softmax(-1)[:2].sum())
    found = [read(logits[None], [2], Sampling(top_p=first_two + nudge))[0].item() for nudge in (-1e-4, 1e-4)]
    assert found[0] == found[1] == pytest.approx(logits[:3].log_softmax(-1)[2].item(), abs=1e-6)
    logits_CV = torch.arange(W).remainder(5).float().repeat(W, 1)
    found = [read(logits_CV + shift, list(range(W)), Sampling(top_p=0.5)) for shift in (0.0, -30_000.0)]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("size", [1, 511, 512, 513, 2000])
def test_running_sums_by_products_are_running_sums(size: int) -> None:
    """They take the place of `cumsum` where CUDA's must repeat."""
    values_CV = torch.rand(3, size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    torch.testing.assert_close(model_logprobs.sums_by_products(values_CV), values_CV.cumsum(-1))
    logits_CV = torch.randn(3, size, generator=torch.Generator().manual_seed(size)) * 4
    probs_CV = logits_CV.softmax(-1).sort(-1).values
    torch.testing.assert_close(model_logprobs.sums_by_products(probs_CV), probs_CV.cumsum(-1), rtol=0, atol=1e-6)


def test_tokens_of_several_distributions_are_read_as_those_of_each_alone() -> None:
    """Bit for bit, values and gradients, so that what else is in a batch changes nothing."""
    table = (*CUTS, Sampling(0.3), Sampling(1.7, min_p=0.5))
    generator = torch.Generator().manual_seed(2)
    rows_V = 3 * torch.randn(len(table), W, generator=generator)
    rows_V[:, 0] = -200.0  # without a probability in float32: only a cut may take it away
    targets = [number % W for number in range(len(table))]

    def read_all(sampling: Sampling | SamplingByToken) -> tuple[Tensor, ...]:
        logits_CV = rows_V.clone().requires_grad_()
        logprobs, entropy = read(logits_CV, targets, sampling)
        return logprobs, entropy, torch.autograd.grad((logprobs + entropy).sum(), logits_CV)[0]

    mixed = read_all(SamplingByToken(table, torch.arange(len(table))))
    for row, sampling in enumerate(table):
        for found, alone in zip(mixed, read_all(sampling), strict=True):
            assert torch.equal(found[row], alone[row]), sampling
    whole = (Sampling(0.5), Sampling(2.0))
    plain = SamplingByToken(whole, torch.arange(len(table)) % 2)
    assert not plain.is_truncated
    for row, found in enumerate(read_all(plain)[0]):
        assert torch.equal(found, read_all(whole[row % 2])[0][row])
