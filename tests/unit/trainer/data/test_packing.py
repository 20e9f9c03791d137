"""Packing: tensors of a forward pass, and plans of a step. No loss depends on it: test_families and test_programs."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.trainer.data import packing
from holdfast.trainer.data.packing import Arrangement, Sample, build_micro_batch, plan_rows

CPU = torch.device("cpu")


def sample(tokens: list[int], trained: list[bool]) -> Sample:
    ids = np.asarray(tokens, dtype=np.int32)
    return Sample(ids, np.asarray(trained, dtype=bool), per_token={"advantage": ids.astype(np.float32) / 8})


SAMPLES = [
    sample([11, 12, 13, 14], [False, False, True, True]),
    sample([21, 22], [False, True]),
    sample([31, 32, 33], [False, True, False]),
]


def test_a_packed_micro_batch_by_hand_whose_first_tokens_are_no_targets() -> None:
    micro = build_micro_batch(SAMPLES, [2, 0], pack=True, device=CPU)
    assert micro.input_ids_BL.tolist() == [[31, 32, 33, 11, 12, 13, 14]]
    assert micro.position_ids_BL.tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert micro.predict_index_N.tolist() == [0, 4, 5] and micro.target_ids_N.tolist() == [32, 13, 14]
    assert micro.sample_index_N.tolist() == [2, 0, 0]
    assert micro.per_token["advantage"].tolist() == [32 / 8, 13 / 8, 14 / 8]
    assert micro.packed_index is not None and micro.packed_index.cu_seqlens.tolist() == [0, 3, 7]
    everything = sample([5, 6], [True, True])
    assert everything.num_targets == 1
    assert build_micro_batch([everything], [0], pack=True, device=CPU).target_ids_N.tolist() == [6]


def test_answers_that_share_a_prompt_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """11 12 is the prompt of three answers; the last sample has another, and so has the one that comes before it."""
    monkeypatch.setattr(packing, "SHORT", 1)  # as if the prompt were long, and that of the last sample short
    answers = [[13, 14], [15], [16, 17, 18]]
    samples = [sample([11, 12, *answer], [False, False] + [True] * len(answer)) for answer in answers]
    samples += [SAMPLES[2], sample([31, 34], [False, True])]
    micro = build_micro_batch(samples, [0, 2, 1, 3, 4], pack=True, share=True, device=CPU)
    assert micro.input_ids_BL.tolist() == [[11, 12, 13, 14, 16, 17, 18, 15, 31, 32, 33, 34]]
    assert micro.position_ids_BL.tolist() == [[0, 1, 2, 3, 2, 3, 4, 2, 0, 1, 2, 1]]
    assert micro.predict_index_N.tolist() == [1, 2, 1, 4, 5, 1, 8, 8], "the prompt's last token predicts every first"
    assert micro.target_ids_N.tolist() == [13, 14, 16, 17, 18, 15, 32, 34]
    assert micro.sample_index_N.tolist() == [0, 0, 2, 2, 2, 1, 3, 4]
    assert micro.per_token["advantage"].tolist() == [token / 8 for token in micro.target_ids_N.tolist()]
    index = micro.packed_index
    assert index is not None and index.seen_E is not None and index.max_len == 5
    assert index.cu_seqlens.tolist() == [0, 4, 7, 8, 11, 12]
    assert index.seen_E.tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 6, 0, 1, 7, 8, 9, 10, 8, 11]
    assert index.cu_seqlens_seen.tolist() == [0, 4, 9, 12, 15, 17]
    assert [prefix_P.tolist() for prefix_P in index.prefix_P] == [[], [], [0, 1], [0, 1]]
    rows = [gather_SL.tolist() for gather_SL in index.gather_SL]
    assert rows == [[[0, 1, 2, 3], [8, 9, 10, 0]], [[8, 11]], [[4, 5, 6]], [[7]]], "a short prompt attends again"
    gathered = torch.cat([gather_SL.flatten() for gather_SL in index.gather_SL])
    assert gathered[index.scatter_T].tolist() == list(range(12))
    apart = build_micro_batch(samples, [0, 3, 1], pack=True, share=True, device=CPU)
    assert apart.input_ids_BL.tolist() == [[11, 12, 13, 14, 31, 32, 33, 11, 12, 15]], "only neighbours share"


some_lengths = st.lists(st.integers(1, 60), min_size=1, max_size=80)


@given(lengths=some_lengths, budget=st.integers(1, 100))
def test_every_sample_goes_to_the_first_row_with_room(lengths: list[int], budget: int) -> None:
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = [row for row in rows if sum(lengths[i] for i in row) + lengths[index] <= budget]
        (fitting or rows[len(rows) :] or [rows.append([]) or rows[-1]])[0].append(index)
    assert packing.first_fit_decreasing(lengths, budget) == rows


@given(
    lengths=some_lengths,
    arrangement=st.sampled_from(["packed", "grouped", "rows"]),
    budget=st.integers(60, 300),
    rows=st.integers(1, 9),
    world_size=st.integers(1, 12),
    pair_cost=st.sampled_from([0.0, 0.1]),
)
def test_every_rank_gets_as_many_micro_batches_and_every_sample_is_trained_once(
    lengths: list[int], arrangement: Arrangement, budget: int, rows: int, world_size: int, pair_cost: float
) -> None:
    costs = [length + pair_cost * length * length for length in lengths]

    def plan_on(ranks: int) -> list[list[list[int]]]:
        return plan_rows(
            lengths, costs=costs, arrangement=arrangement, budget=budget, rows_per_micro_batch=rows, world_size=ranks
        )

    plan = plan_on(world_size)
    assert len(plan) == world_size
    assert len({len(rank) for rank in plan}) == 1, "each forward is a collective"
    assert sorted(i for rank in plan for micro in rank for i in micro) == list(range(len(lengths)))
    for micro in (micro for rank in plan for micro in rank):
        sizes = [lengths[i] for i in micro]
        if arrangement == "rows":
            assert len(sizes) <= rows
            assert micro == list(range(min(micro, default=0), max(micro, default=-1) + 1)), "the order of the data"
        elif arrangement == "packed":
            assert sum(sizes) <= budget
        else:
            assert len(sizes) * max(sizes, default=0) <= budget
    (alone,) = plan_on(1)
    assert len(plan[0]) == -(-len(alone) // world_size), "no more rounds than the fullest rows need"
    assert plan_on(world_size) == plan, "every rank must come to the same plan"


@given(lengths=some_lengths, world_size=st.integers(2, 12), budget=st.integers(1, 59))
def test_a_sample_over_budget_is_alone_on_any_number_of_ranks(lengths: list[int], world_size: int, budget: int) -> None:
    plan = plan_rows(lengths, arrangement="packed", budget=budget, rows_per_micro_batch=1, world_size=world_size)
    for micro in (micro for rank in plan for micro in rank):
        assert len(micro) < 2 or sum(lengths[i] for i in micro) <= budget


@pytest.mark.parametrize("arrangement", ["packed", "grouped", "rows"])
def test_every_rank_has_work_where_there_are_samples_enough(arrangement: Arrangement) -> None:
    """All samples would fit into one micro-batch, and one of them has half of all tokens."""
    lengths = [70, *range(3, 13)]
    for world_size in (2, 5, 8, 11):
        plan = plan_rows(lengths, arrangement=arrangement, budget=2000, rows_per_micro_batch=64, world_size=world_size)
        assert [len(rank) for rank in plan] == [1] * world_size
        if arrangement == "grouped" and world_size > 2:  # equal rows: groups of few lengths
            assert sum(not rank[0] for rank in plan) <= world_size // 2
        else:
            assert all(rank[0] for rank in plan)
    plan = plan_rows(lengths, arrangement=arrangement, budget=2000, rows_per_micro_batch=64, world_size=14)
    assert sum(bool(rank[0]) for rank in plan) == len(lengths), "one each, and nothing for three"


def test_costs_decide_what_goes_together_and_into_one_round() -> None:
    """A long sample attends to more: as many tokens of short ones are less work, so they get company."""
    lengths = [100, 100, *[10] * 20]
    costs = [length + 0.1 * length * length for length in lengths]  # 1100 a long one, 20 a short one
    plan = plan_rows(lengths, costs=costs, arrangement="packed", budget=400, rows_per_micro_batch=1, world_size=3)
    assert sorted(len(rank[0]) for rank in plan) == [1, 1, 20]
    plan = plan_rows(lengths, arrangement="packed", budget=400, rows_per_micro_batch=1, world_size=3)
    assert sorted(sum(lengths[i] for i in rank[0]) for rank in plan) == [130, 130, 140]
    # Ranks wait for one another in each round: two dear ones in one round cost less than in two.
    plan = plan_rows([9, 1, 1, 9], arrangement="rows", budget=1, rows_per_micro_batch=1, world_size=2)
    assert plan == [[[0], [1]], [[3], [2]]]


def test_where_spreading_does_not_fit_rows_are_filled_and_groups_are_as_small_as_rounds_allow() -> None:
    lengths, costs = [6, 4, 7, 3], [9, 8, 7, 6]  # the dearest two apart leave no row with room for 7
    assert packing.spread_by_cost(lengths, costs, 10, 2) is None
    plan = plan_rows(lengths, costs=costs, arrangement="packed", budget=10, rows_per_micro_batch=1, world_size=2)
    assert plan == [[[0, 1]], [[2, 3]]] and len(packing.group_by_length([8] * 16, 64)) == 2
    plan = plan_rows([8] * 16, arrangement="grouped", budget=64, rows_per_micro_batch=1, world_size=4)
    assert [len(rank[0]) for rank in plan] == [4, 4, 4, 4]
