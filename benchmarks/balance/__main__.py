"""How busy ranks are, by the plan of a step: `uv run python -m benchmarks.balance`.

Ranks go through a step in rounds of one forward and backward pass each, and wait in each for the one with the most
work. Of the time that all of them spend so, the share that is work is printed: for the micro-batches as `sft` and `rl`
plan them at their defaults, beside the plan that fills rows as full as they get and deals them to the ranks in turn,
and beside what no plan can exceed, since a sample is on one rank. Only plans are made; no model is run.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from holdfast.config import SftConfig, TrainerConfig
from holdfast.trainer.data.packing import first_fit_decreasing, plan_rows

RANKS = (2, 8, 64)
LENGTHS = ("equal", "log-normal", "long tail")
HIDDEN_SIZE = 4096
"""Of the model that the costs are of: attention costs as much as the rest at 12 times as many tokens, about."""


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=50, help="steps that each figure is the mean of")
    parser.add_argument("--hidden-size", type=int, default=HIDDEN_SIZE)
    arguments = parser.parse_args()
    data, rl = SftConfig().data, TrainerConfig()
    programs = {  # samples of a step, most tokens of one, of a micro-batch
        "sft": (data.batch_size, data.seq_len, data.seq_len * data.micro_batch_size),
        "sft, 512 samples": (512, data.seq_len, data.seq_len * data.micro_batch_size),
        "rl, 128 rollouts": (128, 1024, rl.row_tokens),
        "rl, 512 rollouts": (512, 1024, rl.row_tokens),
    }
    table = Table("samples", "lengths", "ranks", "rows dealt in turn", "balanced", "at most", "rounds")
    for name, (count, longest, budget) in programs.items():
        for kind in LENGTHS:
            generator = np.random.default_rng(0)
            batches = [draw_lengths(kind, count, longest, generator) for _ in range(arguments.batches)]
            for ranks in RANKS:
                table.add_row(name, kind, str(ranks), *figures(batches, budget, ranks, arguments.hidden_size))
    Console(width=120).print(table)


def draw_lengths(kind: str, count: int, longest: int, generator: np.random.Generator) -> list[int]:
    """Return lengths of samples in tokens, from 8 to `longest`."""
    drawn = {
        "equal": lambda: np.full(count, longest / 4),
        "log-normal": lambda: generator.lognormal(np.log(longest / 6), 0.6, count),
        "long tail": lambda: (generator.pareto(1.5, count) + 1) * longest / 16,
    }[kind]()
    return drawn.clip(8, longest).astype(int).tolist()


def figures(batches: Sequence[Sequence[int]], budget: int, ranks: int, hidden_size: int) -> list[str]:
    """Return the columns of one row of the table, means over batches."""
    before, after, most, rounds = [], [], [], []
    for lengths in batches:
        costs = [length + length * length / (12 * hidden_size) for length in lengths]
        plan = plan_rows(
            lengths, costs=costs, arrangement="packed", budget=budget, rows_per_micro_batch=1, world_size=ranks
        )
        before.append(useful_share(dealt_in_turn(lengths, budget, ranks), costs))
        after.append(useful_share(plan, costs))
        most.append(min(1.0, sum(costs) / (ranks * max(costs))))
        rounds.append(len(plan[0]))
    shares = [f"{statistics.mean(column):.2f}" for column in (before, after, most)]
    return [*shares, f"{statistics.mean(rounds):.1f}"]


def dealt_in_turn(lengths: Sequence[int], budget: int, ranks: int) -> list[list[list[int]]]:
    """Return the plan that knows no costs: the fullest rows there are, each to the next rank."""
    rows = first_fit_decreasing(lengths, budget)
    rows += [[] for _ in range(-len(rows) % ranks)]
    return [rows[rank::ranks] for rank in range(ranks)]


def useful_share(plan: Sequence[Sequence[Sequence[int]]], costs: Sequence[float]) -> float:
    """Return the work of all ranks as a share of what they could do in the time that the step takes."""
    rounds = [max(sum(costs[i] for i in micro) for micro in of_ranks) for of_ranks in zip(*plan, strict=True)]
    return sum(costs) / (len(plan) * sum(rounds))


if __name__ == "__main__":
    main()
