"""Rollouts as samples, minibatches, and what is measured in the same forward passes as it is trained in."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.config.algorithm import UpdatesConfig
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.config.rl_trainer import TrainerConfig
from holdfast.errors import DataError
from holdfast.launcher.preflight import _shared_prompts
from holdfast.protocol.rollouts import Rollout, VersionSpan
from holdfast.trainer.data.packing import Sample, build_micro_batch, plan_rows
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.packing_check import PACKED
from holdfast.trainer.model.policy import cross_entropy
from holdfast.trainer.rl import batch
from holdfast.trainer.rl.assign_advantages import assign_advantages
from holdfast.trainer.rl.batch import ADVANTAGE, AGE, Minibatch, plan_epochs, plan_shared_prompts, to_samples
from holdfast.trainer.rl.kl import k3
from tests.builders.sampled_rollouts import answered


def make_samples() -> list[Sample]:
    """Samples with a prompt of a token, one of them with nothing to train."""
    generator, lengths = np.random.default_rng(3), (9, 4, 12, 6, 3, 8, 5)
    return [Sample(generator.integers(5, 100, n).astype(np.int32), (np.arange(n) >= 1) & (n != 6)) for n in lengths]


def plan(samples: list[Sample], mesh: Mesh, *, row_tokens: int = 20, **settings: int) -> list[list[Minibatch]]:
    seed, step = settings.pop("seed", 7), settings.pop("step", 3)
    updates = UpdatesConfig.model_validate(settings)
    return plan_epochs(samples, updates, row_tokens=row_tokens, mesh=mesh, seed=seed, step=step, layout=PACKED)


def members(samples: list[Sample], epochs: list[list[Minibatch]]) -> list[list[list[int]]]:
    """The samples' numbers, by epoch and minibatch."""
    number = {id(sample): index for index, sample in enumerate(samples)}
    return [[[number[id(sample)] for sample in part.samples] for part in epoch] for epoch in epochs]


def test_every_epoch_has_every_sample_once_in_parts_of_nearly_one_size(mesh: Mesh) -> None:
    samples = make_samples()
    epochs = members(samples, plan(samples, mesh, epochs=3, minibatches=3))
    assert [[len(part) for part in epoch] for epoch in epochs] == [[3, 2, 2]] * 3
    for epoch in epochs:
        assert sorted(index for part in epoch for index in part) == list(range(7))
    assert len({str(epoch) for epoch in epochs}) == 3, "each epoch has an order of its own"


def test_the_parts_depend_on_seed_step_and_epoch_alone(mesh: Mesh) -> None:
    samples = make_samples()

    def parts(**settings: int) -> list[list[list[int]]]:
        return members(samples, plan(samples, mesh, **{"epochs": 2, "minibatches": 2} | settings))

    base = parts()
    torch.rand(3), np.random.rand(3)  # drawn numbers must not matter
    assert parts() == base == parts(row_tokens=5) and parts(epochs=1) == base[:1]
    assert parts(seed=8) != base != parts(step=4)


def test_one_minibatch_keeps_the_order_of_the_batch_and_no_minibatch_is_empty(mesh: Mesh) -> None:
    samples = make_samples()
    assert members(samples, plan(samples, mesh, epochs=2)) == [[list(range(7))]] * 2
    assert [[len(part.samples) for part in epoch] for epoch in plan(samples[:2], mesh, minibatches=5)] == [[1, 1]]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_parts_and_deal_out_their_forward_passes(mesh: Mesh, world_size: int) -> None:
    samples = make_samples()
    alone = plan(samples, mesh, epochs=2, minibatches=2)
    meshes = [replace(mesh, rank=rank, world_size=world_size) for rank in range(world_size)]
    ranks = [plan(samples, one, epochs=2, minibatches=2) for one in meshes]
    for rank in ranks:
        assert members(samples, rank) == members(samples, alone)
    for epoch, whole in enumerate(alone):
        for place, part in enumerate(whole):
            shares = [rank[epoch][place].micro_batches for rank in ranks]
            assert len({len(share) for share in shares}) == 1, "every forward pass is a collective"
            dealt = [index for share in shares for indices in share for index in indices]
            assert sorted(dealt) == list(range(len(part.samples))), "every sample on one rank"


def make_groups(sizes: Sequence[int], *, prompt: int, answer: int) -> list[Sample]:
    """Groups of so many answers to a prompt of their own, of the same lengths."""
    generator = np.random.default_rng(5)
    mask, found = np.arange(prompt + answer) >= prompt, []
    for size in sizes:
        tokens = generator.integers(5, 100, prompt)
        answers = (generator.integers(5, 100, answer) for _ in range(size))
        found += [Sample(np.concatenate([tokens, own]).astype(np.int32), mask) for own in answers]
    return found


def tokens_of(samples: list[Sample], row: list[int]) -> int:
    """Return how many tokens a row computes whose answers share their prompts."""
    return build_micro_batch(samples, row, pack=True, share=True, device=torch.device("cpu")).input_ids_BL.numel()


SHARES = replace(PACKED, shares=True, pair_cost=0.001)


@pytest.mark.parametrize(("sizes", "num_ranks", "tokens"), [
    ((8,), 1, [36 + 8 * 20]),
    ((8,), 2, [36 + 4 * 20] * 2),  # one group keeps two ranks busy
    ((8, 8), 2, [36 + 8 * 20] * 2),
    ((8, 8, 8), 2, [3 * 36 + 12 * 20] * 2),  # two ranks cannot take three groups whole
    ((4, 2), 3, [36 + 2 * 20] * 3),
    ((1, 1), 1, [2 * 56]),
])  # fmt: skip
def test_answers_share_prompts_while_ranks_stay_busy(sizes: tuple[int, ...], num_ranks: int, tokens: list[int]) -> None:
    samples = make_groups(sizes, prompt=36, answer=20)
    plan = plan_shared_prompts(samples, row_tokens=400, layout=SHARES, num_ranks=num_ranks)
    assert sorted(index for rank in plan for row in rank for index in row) == list(range(len(samples)))
    assert [tokens_of(samples, row) for rank in plan for row in rank] == tokens


def test_groups_are_divided_by_rows_and_by_what_a_shared_prompt_costs() -> None:
    samples = make_groups((11, 11, 11), prompt=4, answer=20)
    whole, halves = (plan_shared_prompts(samples, row_tokens=n, layout=SHARES, num_ranks=1)[0] for n in (230, 400))
    assert [len(row) for row in whole] == [11] * 3
    assert len(halves) == 2 and sorted(index for row in halves for index in row) == list(range(33))
    samples = make_groups((8,), prompt=100, answer=5) + make_groups((8,), prompt=20, answer=40)
    plan = plan_shared_prompts(samples, row_tokens=1000, layout=replace(SHARES, pair_cost=1.0), num_ranks=2)
    assert sorted(row for rank in plan for row in rank) == [list(range(8)), list(range(8, 16))]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("row_tokens", [50, 100, 400])
def test_rows_of_shared_prompts_keep_to_their_budget_and_take_no_longer(num_ranks: int, row_tokens: int) -> None:
    samples = make_groups((5, 3, 7, 1), prompt=30, answer=12)
    plan = plan_shared_prompts(samples, row_tokens=row_tokens, layout=SHARES, num_ranks=num_ranks)
    assert sorted(index for rank in plan for row in rank for index in row) == list(range(len(samples)))
    assert len({len(rank) for rank in plan}) == 1, "every forward pass is a collective"
    rounds = [max(tokens_of(samples, row) for row in rows) for rows in zip(*plan, strict=True)]
    assert max(rounds) <= row_tokens
    lengths, how = [len(one.token_ids) for one in samples], {"rows_per_micro_batch": 1, "world_size": num_ranks}
    apart = plan_rows(lengths, arrangement="packed", budget=row_tokens, **how)
    assert sum(rounds) <= sum(max(sum(lengths[i] for i in row) for row in rows) for rows in zip(*apart, strict=True))


@pytest.mark.parametrize(("row_tokens", "tokens"), [(4096, 36_000), (8192, 12_000), (16_384, 8_000)])
def test_a_prompt_that_almost_fills_a_row_is_computed_again_for_each_answer(row_tokens: int, tokens: int) -> None:
    samples = make_groups((8,), prompt=4000, answer=500)
    (plan,) = plan_shared_prompts(samples, row_tokens=row_tokens, layout=SHARES, num_ranks=1)
    assert sum(tokens_of(samples, row) for row in plan) == tokens
    config = TrainerConfig(output_dir=Path("run"), row_tokens=row_tokens)
    values = {"environments": [{"id": "addition"}], "seq_len": 4500, "sampling": {"max_tokens": 500}}
    orchestrator = OrchestratorConfig.model_validate(values)
    times = (tokens - 8 * 500) // 4000
    (line,) = _shared_prompts(config, orchestrator)
    assert f"computed {times} times" in line.replace("once for", "1 times for")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_long_prompt_with_short_answers_takes_no_memory_beyond_the_budget(num_ranks: int) -> None:
    """Attention has keys and values of the prompt for each answer."""
    samples = make_groups((16, 16, 3), prompt=250, answer=5)
    plan = plan_shared_prompts(samples, row_tokens=600, layout=SHARES, num_ranks=num_ranks)
    rows = [row for rank in plan for row in rank if row]
    assert sorted(index for row in rows for index in row) == list(range(len(samples)))
    assert 600 < max(sum(len(samples[index].token_ids) for index in row) for row in rows) <= 4 * 600


def test_cross_entropy_is_the_weighted_negative_log_likelihood() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -4.0], requires_grad=True)
    weights = torch.tensor([0.5, 0.25, 0.25])
    loss = cross_entropy(logprobs, weights)
    assert loss.item() == pytest.approx(2.0) and torch.equal(torch.autograd.grad(loss, logprobs)[0], -weights)


def rollout(length: int, sampled: int, *, index: int = 0) -> Rollout:
    ids, prompt = range(5, 5 + length), length - sampled
    versions = [VersionSpan(2, prompt, length - 1), VersionSpan(3, length - 1, length)]
    logprobs = [-0.5 - k for k in range(sampled)]
    return answered(ids[:prompt], ids[prompt:], logprobs, sample_index=index, versions=versions)


def test_rollouts_become_samples_token_by_token() -> None:
    (sample,) = to_samples([rollout(5, 3)], trained_version=3)
    assign_advantages([sample], [[-1.5]])
    assert sample.token_ids.tolist() == [5, 6, 7, 8, 9] and sample.num_targets == 3
    assert sample.per_token[batch.SAMPLER_LOGPROB].tolist() == [0.0, 0.0, -0.5, -1.5, -2.5]
    assert sample.per_token[ADVANTAGE][sample.loss_mask].tolist() == [-1.5] * 3
    assert sample.per_token[AGE][sample.loss_mask].tolist() == [1.0, 1.0, 0.0]


def test_a_rollout_that_sampled_nothing_trains_nothing_and_one_whose_arrays_do_not_fit_is_refused() -> None:
    assert to_samples([rollout(3, 0), rollout(3, 2, index=1)], trained_version=3)[0].num_targets == 0
    for name in ("loss_mask", "logprobs"):
        broken = rollout(5, 3)
        getattr(broken, name).pop()
        with pytest.raises(DataError, match="sample 0: 5 tokens"):
            to_samples([broken], trained_version=3)


def test_k3_is_exact_near_equality_and_never_negative() -> None:
    assert k3(torch.tensor([1e-7, -1e-7], dtype=torch.float64)).tolist() == pytest.approx([5e-15, 5e-15], rel=1e-6)
    assert (k3(torch.linspace(-1e-3, 1e-3, 1001)) >= 0).all()
