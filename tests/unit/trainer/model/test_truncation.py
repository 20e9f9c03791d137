"""Truncated distributions against their definitions, in float64 and in loops, without sorting tensors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.protocol.rollouts import Sampling
from holdfast.trainer.model.logprobs import Reading, SamplingByToken, plain_head, sums_by_products, token_logprobs

V = 23
CUTS = [
    Sampling(), Sampling(0.7), Sampling(1.0, 0.9), Sampling(0.7, 1e-6), Sampling(top_k=2), Sampling(top_k=10 * V),
    Sampling(min_p=0.1), Sampling(min_p=0.999), Sampling(0.7, 0.4, 7, 0.1), Sampling(1.0, 0.9, V, 0.1),
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


def read(
    logits_CV: torch.Tensor, targets: list[int], sampling: Sampling | SamplingByToken
) -> tuple[torch.Tensor, torch.Tensor]:
    reading = Reading(sampling, entropy_gradient=True)
    logprobs, entropy, *_ = token_logprobs(
        logits_CV, plain_head(torch.eye(V)), torch.tensor(targets), reading, chunk_tokens=5
    )
    return logprobs, entropy


@settings(max_examples=60)
@given(
    sampling=st.builds(
        Sampling, st.sampled_from([1.0, 0.7, 0.2]), top_p=st.sampled_from([1.0, 1e-6]) | st.floats(0.05, 1.0),
        top_k=st.sampled_from([0, 1, 2, 7, V, 10 * V]), min_p=st.sampled_from([0.0, 0.999]) | st.floats(0.0, 0.9),
    ),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_values_and_gradients_are_those_of_the_kept_tokens(sampling: Sampling, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits_CV = (3 * torch.randn(V, V, generator=generator)).requires_grad_()
    targets = list(range(V))
    logprobs, entropy = read(logits_CV, targets, sampling)
    (gradient_CV,) = torch.autograd.grad((logprobs * torch.arange(1.0, V + 1)).sum(), logits_CV, retain_graph=True)
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
        for token in range(V):
            p = probabilities.get(token, 0.0)
            slope = ((token == target) - p) / sampling.temperature
            assert gradient_CV[row, token].item() == pytest.approx((row + 1) * slope, rel=1e-4, abs=1e-5)
            slope = -p * (math.log(p) + expected) / sampling.temperature if p else 0.0
            assert entropy_gradient_CV[row, token].item() == pytest.approx(slope, rel=1e-4, abs=1e-5)


def test_nothing_is_cut_where_nothing_may_be() -> None:
    logits_CV = torch.randn(4, V, generator=torch.Generator().manual_seed(0))
    plain, loose = read(logits_CV, [0, 1, 2, 3], Sampling()), read(logits_CV, [0, 1, 2, 3], Sampling(top_k=V))
    assert all(torch.equal(one, other) for one, other in zip(plain, loose, strict=True))


@pytest.mark.parametrize("scale", [0.0, 1e-3, 60.0, 1e4])
@pytest.mark.parametrize(
    "sampling", [Sampling(0.01, 0.5), Sampling(2.0, 0.999999), Sampling(1.0, 0.9, 3, 0.5)], ids=str
)
def test_equal_and_extreme_logits_give_numbers(scale: float, sampling: Sampling) -> None:
    logits_CV = (scale * torch.linspace(-1, 1, V)).repeat(V, 1).requires_grad_()
    logprobs, entropy = read(logits_CV, list(range(V)), sampling)
    (gradient_CV,) = torch.autograd.grad((logprobs + entropy).sum(), logits_CV)
    for found in (logprobs, entropy, gradient_CV):
        assert found.isfinite().all()
    assert (logprobs <= 0).all() and (entropy >= 0).all()


def test_cut_tokens_weigh_nothing_however_low_the_others_are() -> None:
    logits_CV = torch.arange(V).remainder(5).float().repeat(V, 1)
    found = [read(logits_CV + shift, list(range(V)), Sampling(top_p=0.5)) for shift in (0.0, -30_000.0)]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_tokens_at_a_border_stay_but_for_those_that_top_p_needs_not() -> None:
    """Of equally likely ones: all that reach `min_p`, all that are as likely as number k, the fewest with the mass."""
    logits_CV = torch.zeros(4, 4)

    def sizes(sampling: Sampling) -> list[float]:
        head = plain_head(torch.eye(4))
        found = token_logprobs(logits_CV, head, torch.arange(4), Reading(sampling, entropy=True))
        assert found.entropy_N is not None
        return found.entropy_N.exp().round().tolist()

    assert sizes(Sampling(min_p=1.0)) == sizes(Sampling(top_k=2)) == [4, 4, 4, 4]
    assert sorted(sizes(Sampling(top_p=0.5))) == [2, 2, 3, 3]  # two have the mass; a target that is cut comes back
    assert sorted(sizes(Sampling(top_p=0.51))) == [3, 3, 3, 4]


def test_a_target_at_the_border_has_one_log_probability_on_both_sides() -> None:
    """Whether rounding cuts the target or not makes no difference."""
    logits = torch.tensor([2.0, 1.0, 0.0, *[-1.0] * (V - 3)])
    first_two = float(logits.softmax(-1)[:2].sum())
    found = [read(logits[None], [2], Sampling(top_p=first_two + nudge))[0].item() for nudge in (-1e-4, 1e-4)]
    assert found[0] == found[1] == pytest.approx(logits[:3].log_softmax(-1)[2].item(), abs=1e-6)


def test_how_people_write_it() -> None:
    assert str(Sampling()) == "temperature 1" and not Sampling(0.3).is_truncated
    assert str(Sampling(0.5, 0.9, 40, 0.05)) == "temperature 0.5, top_p 0.9, top_k 40, min_p 0.05"
    assert Sampling(0.5, 0.9, 40, 0.05).whole() == Sampling(0.5)


@pytest.mark.parametrize("size", [1, 511, 512, 513, 2000])
def test_running_sums_by_products_are_running_sums(size: int) -> None:
    """They take the place of `cumsum` where CUDA's must repeat."""
    values_CV = torch.rand(3, size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    torch.testing.assert_close(sums_by_products(values_CV), values_CV.cumsum(-1))
    logits_CV = torch.randn(3, size, generator=torch.Generator().manual_seed(size)) * 4
    probabilities_CV = logits_CV.softmax(-1).sort(-1).values
    torch.testing.assert_close(sums_by_products(probabilities_CV), probabilities_CV.cumsum(-1), rtol=0, atol=1e-6)


def test_tokens_of_several_distributions_are_read_as_those_of_each_alone() -> None:
    """Bit for bit, values and gradients, so that what else is in a batch changes nothing."""
    table = (*CUTS, Sampling(0.3), Sampling(1.7, min_p=0.5))
    generator = torch.Generator().manual_seed(2)
    rows_V = 3 * torch.randn(len(table), V, generator=generator)
    rows_V[:, 0] = -200.0  # without a probability in float32: only a cut may take it away
    targets = [number % V for number in range(len(table))]

    def read_all(sampling: Sampling | SamplingByToken) -> tuple[torch.Tensor, ...]:
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
