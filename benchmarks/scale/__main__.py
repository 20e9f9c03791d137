"""What a sharded save costs rank 0 on many ranks: `uv run python -m benchmarks.scale`.

A 70B and a 1T-parameter model with Adam on 64, 256 and 1024 ranks, without a machine that large:
meta tensors, a fake process group, and the plans of all ranks made in one process. Planning is pure
Python on rank 0. The first save plans; the later ones have the same plan. What every save pays is
the comparison with the plan before and `.metadata`. Times are of the processor; nothing of the network
is in them. All six take about twenty minutes and 11 GiB.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import zip_longest

from rich.console import Console
from rich.table import Table

from benchmarks.scale.measure import MEMORY_LIMIT_BYTES, Figures, measure
from benchmarks.scale.models import CONFIGS

ROWS = (
    "ranks",
    "items per rank",
    "local plan s",
    "plans in s",
    "plans in MB",
    "global plan s",
    "of it checks s",
    "plans out s",
    "same plan again s",
    "reports in s",
    "reports in MB",
    ".metadata s",
    ".metadata MB",
    "read it s",
    "manifest kB",
    "peak GiB",
)


def main() -> None:
    """Measure every configuration in a process of its own, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CONFIGS), help="of: " + ", ".join(CONFIGS))
    parser.add_argument("--ranks", default="64,256,1024")
    parser.add_argument("--quick", action="store_true", help="the 70B model on 8 and 64 ranks only")
    parser.add_argument("--collect-garbage", action="store_true", help="leave Python's garbage collector on")
    arguments = parser.parse_args()
    models, ranks = ("70b", "8,64") if arguments.quick else (arguments.models, arguments.ranks)
    unknown = set(models.split(",")) - set(CONFIGS)
    if unknown:
        parser.error(f"--models {','.join(sorted(unknown))}: there are {', '.join(CONFIGS)}")
    console = Console()
    found: dict[tuple[str, int], list[str]] = {}
    try:
        for model in models.split(","):
            for num_ranks in map(int, ranks.split(",")):
                with console.status(f"{model} on {num_ranks} ranks"):
                    found[model, num_ranks] = _column(model, num_ranks, arguments.collect_garbage)
    finally:
        console.print(table_of(found))


def table_of(found: Mapping[tuple[str, int], Sequence[str]]) -> Table:
    """Return a table with a column for each model and number of ranks."""
    table = Table("model", *(model for model, _ in found), title="A sharded save, on rank 0")
    for column in table.columns[1:]:
        column.justify = "right"
    columns = [[str(num_ranks), *cells] for (_, num_ranks), cells in found.items()]
    for row in zip_longest(ROWS, *columns, fillvalue=""):
        table.add_row(*row)
    return table


def _column(model: str, num_ranks: int, collect_garbage: bool) -> list[str]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            figures = pool.submit(measure, model, num_ranks, collect_garbage=collect_garbage).result()
        except MemoryError:
            return [f"more than {MEMORY_LIMIT_BYTES >> 30} GiB"]
    return cells(figures)


def cells(figures: Figures) -> list[str]:
    """Return one column of the table, without model and ranks."""
    again = figures.cached_local_s + figures.cached_global_s
    return [
        f"{figures.num_items}",
        f"{figures.local_s:.2f}",
        f"{figures.receive_s:.1f}",
        f"{figures.gathered_bytes / 1e6:.0f}",
        f"{figures.global_s:.1f}",
        f"{figures.validate_s:.1f}",
        f"{figures.send_s:.1f}",
        f"{again:.2f}",
        f"{figures.report_s:.1f}",
        f"{figures.reported_bytes / 1e6:.0f}",
        f"{figures.finish_s:.1f}",
        f"{figures.metadata_bytes / 1e6:.0f}",
        f"{figures.read_s:.1f}",
        f"{figures.manifest_bytes / 1e3:.0f}",
        f"{figures.peak_bytes / 2**30:.1f}",
    ]


if __name__ == "__main__":
    main()
