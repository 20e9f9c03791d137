"""Which rank trains which samples of a step together: micro-batches within a budget, balanced by cost.

Every rank computes the same plan from the same samples and takes its own part, so no rank needs to tell another what
it does. Ranks work in rounds, one micro-batch each, since every forward pass is a collective: a round takes as long as
its costliest micro-batch. So there are as few rounds as the budget allows, and the samples are spread over all
micro-batches of all rounds by what they cost.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

Arrangement = Literal["packed", "grouped", "rows"]
"""How samples become micro-batches: `packed` into one row up to a budget of tokens; `grouped`, one a row, up to
the same budget with the padding counted, for models whose tokens meet outside of attention; or in given numbers
of `rows`, in the order of the data."""


def plan_rows(
    lengths: Sequence[int],
    *,
    costs: Sequence[float] | None = None,
    arrangement: Arrangement,
    budget: int,
    rows_per_micro_batch: int,
    world_size: int,
) -> list[list[list[int]]]:
    """Return, for each rank, its micro-batches as lists of sample indices.

    Every rank gets the same number of micro-batches, as few as the budget allows; some of the last round may be
    empty. One rank fills rows as full as they get: costs do not matter there.

    Args:
        lengths: tokens of each sample; for `grouped`, of its row.
        costs: what each sample takes, in any unit, such as that of `Layout.cost`; unset: its length.
        budget: most tokens of a micro-batch, for `packed` and `grouped`; a longer sample is alone.
        rows_per_micro_batch: most samples of a micro-batch, for `rows`.
        world_size: ranks that train different samples.
    """
    costs = lengths if costs is None else costs
    if arrangement == "packed":
        groups = _packed(lengths, costs, budget, world_size)
    elif arrangement == "grouped":
        groups = _grouped(lengths, budget, world_size)
    else:
        groups = _in_order(len(lengths), rows_per_micro_batch, world_size)
    if world_size > 1:
        together = sum if arrangement == "packed" else _padded
        groups.sort(key=lambda group: -together([costs[index] for index in group]))  # equals keep their order
    return _dealt(groups, world_size)


def first_fit_decreasing(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return indices of samples grouped into rows of at most `budget` tokens.

    First-fit decreasing (Johnson 1973): at most 11/9 of the optimal number of rows. A sample longer
    than the budget gets a row of its own.
    """
    rows: list[list[int]] = []
    # A binary tree of the most room below each node: the first row with enough is found in log(samples) steps.
    leaves = 1 << max(0, len(lengths) - 1).bit_length()
    room = [budget] * (2 * leaves)
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = min(lengths[index], budget)
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= length else 2 * node + 1
        if node - leaves == len(rows):
            rows.append([])
        rows[node - leaves].append(index)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return rows


def group_by_length(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return indices of samples in groups whose number times the longest is at most `budget`, the longest first.

    A sample longer than the budget gets a group of its own.
    """
    groups: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups and (len(groups[-1]) + 1) * longest <= budget:
            groups[-1].append(index)
        else:
            groups.append([index])
            longest = lengths[index]
    return groups


def spread_by_cost(
    lengths: Sequence[int], costs: Sequence[float], budget: int, num_rows: int
) -> list[list[int]] | None:
    """Return indices of samples in `num_rows` rows of nearly equal cost and at most `budget` tokens.

    Longest processing time first (Graham 1969): the costliest sample goes to the row that has cost least so far and
    has room. None where it comes to a sample that no row has room for.
    """
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    cheapest = [(0.0, row) for row in range(num_rows)]
    room = [budget] * num_rows
    shortest = min(lengths)
    for index in sorted(range(len(lengths)), key=lambda i: (-costs[i], i)):
        passed = []
        while cheapest and room[cheapest[0][1]] < lengths[index]:
            passed.append(heapq.heappop(cheapest))
        if not cheapest:
            return None
        cost, row = heapq.heappop(cheapest)
        rows[row].append(index)
        room[row] -= lengths[index]
        for entry in (*passed, (cost + costs[index], row)):
            if room[entry[1]] >= shortest:
                heapq.heappush(cheapest, entry)
    return rows


def _packed(lengths: Sequence[int], costs: Sequence[float], budget: int, world_size: int) -> list[list[int]]:
    lengths = [min(length, budget) for length in lengths]  # what is longer fills a row
    fullest = first_fit_decreasing(lengths, budget)
    if world_size == 1:
        return fullest
    # Where the rows are nearly full anyway, no spreading by cost may fit, and little is to be won by it.
    return spread_by_cost(lengths, costs, budget, _places(len(fullest), len(lengths), world_size)) or fullest


def _grouped(lengths: Sequence[int], budget: int, world_size: int) -> list[list[int]]:
    groups = group_by_length(lengths, budget)
    if world_size == 1:
        return groups
    places = _places(len(groups), len(lengths), world_size)
    # The smallest budget that needs no more groups than there are places makes the most even ones.
    low, high = 1, budget
    while low < high:
        middle = (low + high) // 2
        if len(group_by_length(lengths, middle)) <= places:
            high = middle
        else:
            low = middle + 1
    return group_by_length(lengths, high)


def _in_order(num_samples: int, most: int, world_size: int) -> list[list[int]]:
    if world_size == 1:
        return [list(range(start, min(start + most, num_samples))) for start in range(0, num_samples, most)]
    places = _places(-(-num_samples // most), num_samples, world_size)
    borders = [place * num_samples // places for place in range(places + 1)]
    return [list(range(start, end)) for start, end in pairwise(borders)]


def _places(num_groups: int, num_samples: int, world_size: int) -> int:
    """Return how many micro-batches there are on all ranks in as many rounds as `num_groups` need."""
    return min(-(-num_groups // world_size) * world_size, num_samples)


def _padded(costs: Sequence[float]) -> float:
    return len(costs) * max(costs)


def _dealt(groups: list[list[int]], world_size: int) -> list[list[list[int]]]:
    """Return each rank's groups, round by round; in the last round some may have none."""
    ranks: list[list[list[int]]] = [[] for _ in range(world_size)]
    for number, group in enumerate(groups):
        ranks[number % world_size].append(group)
    longest = max(len(rank) for rank in ranks)
    return [rank + [[]] * (longest - len(rank)) for rank in ranks]
