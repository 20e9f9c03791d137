"""Plans of a step: every sample once, within budget, the same number of forward passes on every rank, all with work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.trainer.data.packing import Arrangement, first_fit_decreasing, group_by_length, plan_rows, spread_by_cost

some_lengths = st.lists(st.integers(1, 60), min_size=1, max_size=80)


@given(lengths=some_lengths, budget=st.integers(1, 100))
def test_every_sample_goes_to_the_first_row_with_room(lengths: list[int], budget: int) -> None:
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = [row for row in rows if sum(lengths[i] for i in row) + lengths[index] <= budget]
        (fitting or rows[len(rows) :] or [rows.append([]) or rows[-1]])[0].append(index)
    assert first_fit_decreasing(lengths, budget) == rows


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
            lengths,
            costs=costs,
            arrangement=arrangement,
            budget=budget,
            rows_per_micro_batch=rows,
            world_size=ranks,
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


def test_costs_decide_what_goes_together_and_not_lengths_alone() -> None:
    """A long sample attends to more: as many tokens of short ones are less work, so they get company."""
    lengths = [100, 100, *[10] * 20]
    costs = [length + 0.1 * length * length for length in lengths]  # 1100 a long one, 20 a short one
    plan = plan_rows(lengths, costs=costs, arrangement="packed", budget=400, rows_per_micro_batch=1, world_size=3)
    assert sorted(len(rank[0]) for rank in plan) == [1, 1, 20]
    plan = plan_rows(lengths, arrangement="packed", budget=400, rows_per_micro_batch=1, world_size=3)
    assert sorted(sum(lengths[i] for i in rank[0]) for rank in plan) == [130, 130, 140]


def test_rounds_have_micro_batches_of_like_cost() -> None:
    """Ranks wait for one another in each round: two dear ones in one round cost less than in two."""
    plan = plan_rows([9, 1, 1, 9], arrangement="rows", budget=1, rows_per_micro_batch=1, world_size=2)
    assert plan == [[[0], [1]], [[3], [2]]]


def test_where_spreading_does_not_fit_rows_are_filled_as_for_one_rank() -> None:
    lengths, costs = [6, 4, 7, 3], [9, 8, 7, 6]  # the dearest two apart leave no row with room for 7
    assert spread_by_cost(lengths, costs, 10, 2) is None
    plan = plan_rows(lengths, costs=costs, arrangement="packed", budget=10, rows_per_micro_batch=1, world_size=2)
    assert plan == [[[0, 1]], [[2, 3]]]


def test_groups_of_one_length_are_as_small_as_the_rounds_allow() -> None:
    assert len(group_by_length([8] * 16, 64)) == 2
    plan = plan_rows([8] * 16, arrangement="grouped", budget=64, rows_per_micro_batch=1, world_size=4)
    assert [len(rank[0]) for rank in plan] == [4, 4, 4, 4]
