"""Longer than what was trained on: `uv run --group dev python -m benchmarks.learning.lengths --runs FOLDER`.

Judges the start and the ends of runs of `sort_letters`, which has words of three and four letters, on longer words.
Takes the weights that `python -m benchmarks.learning --runs FOLDER` kept, writes `lengths.csv` and prints a table.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks.learning.commands import environment_of
from benchmarks.learning.results import NUMBERS, Estimate
from benchmarks.learning.runs import TRL, Settings, estimates, weights_of
from benchmarks.learning.start import make_start

TASK = "sort_letters"


@dataclass(frozen=True)
class Judged:
    """What weights do with words of so many letters: `variant` and `seed` are those of the run, if there was one."""

    variant: str
    seed: int | None
    length: int
    numbers: dict[str, Estimate]


def main() -> None:
    """Judge, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="directory that the runs were kept in")
    parser.add_argument("--lengths", nargs="+", type=int, default=[5, 6, 7], metavar="LETTERS", help="(5 6 7)")
    parser.add_argument("--variants", nargs="+", default=["grpo", TRL], metavar="VARIANT", help=f"(grpo {TRL})")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="SEED", help="(0 1 2)")
    parser.add_argument("--steps", type=int, help="optimizer steps of the runs; unset: those of the recipe")
    parser.add_argument("--num-tasks", type=int, default=512, help="held-out words of each length (512)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="directory of lengths.csv")
    arguments = parser.parse_args()
    settings = Settings(arguments.runs.absolute(), arguments.steps, arguments.num_tasks)
    found: dict[tuple[str, int | None], Path] = {}
    for variant in arguments.variants:
        steps = settings.steps_of(TASK, variant)
        for seed in arguments.seeds:
            found[variant, seed] = weights_of(TASK, variant, settings.folder_of(TASK, variant, seed), steps)
    missing = [str(weights) for weights in found.values() if not weights.exists()]
    if missing:
        sys.exit(
            f"no weights at {', '.join(missing)}: `python -m benchmarks.learning --runs {arguments.runs}` makes them"
        )
    found = {("start", None): make_start(TASK, settings.folder / TASK / "start"), **found}
    judged = []
    for (variant, seed), weights in found.items():
        for length in arguments.lengths:
            kept = settings.folder / TASK / "lengths" / f"{variant}_{seed}_{settings.steps}_{length}"
            judged.append(Judged(variant, seed, length, estimates(TASK, weights, kept, settings, *words_of(length))))
            print(f"{variant} {seed} {length}: {judged[-1].numbers['pass@1'].value:.3f}", flush=True)
    write(arguments.output / "lengths.csv", judged)
    print(f"\n{table(judged)}")


def words_of(length: int) -> tuple[dict[str, Any], int]:
    """Return the environment of words of `length` letters, and how many more tokens an answer may have there."""
    played = environment_of(TASK)
    longest = played["args"]["max_length"]
    return {**played, "args": {**played["args"], "min_length": length, "max_length": length}}, length - longest


def write(path: Path, judged: Sequence[Judged]) -> None:
    """Write one line for each number."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["variant", "seed", "length", "number", "value", "low", "high"])
        for one in judged:
            for name in NUMBERS:
                numbers = one.numbers[name]
                shown = [f"{value:.5g}" for value in (numbers.value, numbers.low, numbers.high)]
                rows.writerow([one.variant, "" if one.seed is None else one.seed, one.length, name, *shown])


def read(path: Path) -> list[Judged]:
    """Return what `write` wrote."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    judged = []
    for (variant, seed, length), group in groupby(rows, key=itemgetter("variant", "seed", "length")):
        numbers = {row["number"]: Estimate(float(row["value"]), float(row["low"]), float(row["high"])) for row in group}
        judged.append(Judged(variant, int(seed) if seed else None, int(length), numbers))
    return judged


def table(judged: Sequence[Judged]) -> str:
    """Return a Markdown table: a line for each length, with the least and the largest over seeds of a variant."""
    variants = list(dict.fromkeys(one.variant for one in judged))
    columns = ["letters", *(f"{number}, {variant}" for number in ("greedy", "pass@1") for variant in variants)]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for length in dict.fromkeys(one.length for one in judged):
        cells = [str(length)]
        for number in ("greedy", "pass@1"):
            for variant in variants:
                values = [one.numbers[number].value for one in judged if (one.variant, one.length) == (variant, length)]
                ends = [f"{value:.2f}" for value in (min(values), max(values))]
                cells.append(ends[0] if ends[0] == ends[1] else " to ".join(ends))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
