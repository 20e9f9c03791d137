"""Learning curves of the algorithms on the quick start: `uv run --group dev python -m benchmarks.algorithms`.

Runs `rl` with configs/reverse_text/rl.toml and the algorithm's own file in configs/reverse_text/algorithms, and
`dpo` with configs/reverse_text/dpo.toml, each with several seeds, one after the other. Writes every step to
`curves.csv`, draws `curves.png` and prints a table. What the CSV already holds of other algorithms and seeds stays,
so a part can be measured again; it is written after every run.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

from benchmarks.algorithms.curves import Curve, draw, read_curves, summary, write_curves
from benchmarks.algorithms.runs import NAMES, Settings, measure


def main() -> None:
    """Run, write, draw and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=list(NAMES), default=list(NAMES), metavar="NAME",
                        help=f"of {', '.join(NAMES)} (all)")  # fmt: skip
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="SEED", help="(0 1 2)")
    parser.add_argument("--steps", type=int, help="optimizer steps of every run; unset: those of the TOML files")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="directory of CSV and PNG")
    parser.add_argument("--runs", type=Path, help="directory to keep the runs in; unset: they are removed")
    parser.add_argument("--port", type=int, default=8000, help="of the inference server (8000)")
    parser.add_argument("--threads", type=int, help="of the trainer; unset: half of the cores")
    arguments = parser.parse_args()
    table, picture = arguments.output / "curves.csv", arguments.output / "curves.png"
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        settings = Settings(arguments.runs or Path(temporary), arguments.steps, arguments.port, arguments.threads)
        for seed in arguments.seeds:
            for algorithm in arguments.algorithms:
                begin = time.monotonic()
                curve = Curve(algorithm, seed, measure(algorithm, seed, settings))
                seconds = time.monotonic() - begin
                write_curves(table, [curve, *(read_curves(table) if table.exists() else [])])
                print(f"{NAMES[algorithm]}, seed {seed}: {seconds:.0f} s, "
                      f"reward {curve.start:.3f} to {curve.end:.3f}", flush=True)  # fmt: skip
    curves = read_curves(table)
    draw(curves, picture)
    print(f"\n{summary(curves)}\n\n{os.path.relpath(table)}, {os.path.relpath(picture)}")


if __name__ == "__main__":
    main()
