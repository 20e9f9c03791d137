"""Runs that learn: `uv run --group dev python -m benchmarks.learning`.

For each task: `sft` on a few demonstrations makes the start, `rl` with the task's recipe trains from it, and `evaluate`
judges both on the same held-out tasks. Writes every run to `estimates.csv` and `curves.csv`, draws `curves.png` and
prints tables. What the CSV files hold of other runs stays. With `--runs` an interrupted benchmark goes on.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from benchmarks.learning.draw import FIRST_SCREEN, draw, draw_first_screen, first_screen_of, panels_of
from benchmarks.learning.results import read_runs, summary, table, write_runs
from benchmarks.learning.runs import DPO, OVERLAYS, SUPERVISED, TRL, Settings, measure
from benchmarks.learning.start import make_start
from benchmarks.learning.tasks import TASKS


def main() -> None:
    """Run, write, draw and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=["sort_letters"], metavar="TASK",
                        help=f"of {', '.join(TASKS)} (sort_letters)")  # fmt: skip
    variants = [*OVERLAYS, *SUPERVISED, TRL]
    parser.add_argument("--variants", nargs="+", choices=variants, default=["grpo"], metavar="VARIANT",
                        help=f"algorithms and controls, of {', '.join(variants)} (grpo)")  # fmt: skip
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="SEED", help="(0 1 2)")
    parser.add_argument("--steps", type=int, help="optimizer steps of every run; unset: those of the recipe")
    parser.add_argument("--num-tasks", type=int, default=512, help="held-out tasks before and after (512)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="directory of CSV files and PNG")
    parser.add_argument("--runs", type=Path, help="directory to keep the runs in; unset: they are removed")
    arguments = parser.parse_args()
    if TRL in arguments.variants and (others := [name for name in arguments.tasks if not TASKS[name].has_answers]):
        parser.error(f"--variants {TRL} is for tasks of one turn, which {', '.join(others)} is not")
    own = [name for name in arguments.tasks if not TASKS[name].is_pretrained]
    if own and (supervised := [name for name in arguments.variants if name in SUPERVISED and name != DPO]):
        parser.error(f"--variants {' '.join(supervised)} are for tasks of a pretrained model, not for {', '.join(own)}")
    if DPO in arguments.variants and (others := [name for name in arguments.tasks if not TASKS[name].has_answers]):
        parser.error(f"--variants {DPO} is for tasks of one turn, which {', '.join(others)} is not")
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        settings = Settings((arguments.runs or Path(temporary)).absolute(), arguments.steps, arguments.num_tasks)
        for task in arguments.tasks:
            start = make_start(task, settings.folder / task / "start")
            for seed in arguments.seeds:
                for variant in arguments.variants:
                    begin = time.monotonic()
                    run = measure(task, variant, seed, start, settings)
                    write_runs(arguments.output, [run, *read_runs(arguments.output)])
                    ends = [when["greedy"].value for when in (run.before, run.after)]
                    a_step = f", {run.step_s:.1f} s a step" if run.step_s else ""
                    print(f"{task}, {variant}, seed {seed}: {time.monotonic() - begin:.0f} s, "
                          f"greedy {ends[0]:.3f} to {ends[1]:.3f}{a_step}", flush=True)  # fmt: skip
    runs = read_runs(arguments.output)
    if panels := panels_of(runs):
        draw(panels, arguments.output / "curves.png")
    if first := first_screen_of(runs):
        draw_first_screen(first, FIRST_SCREEN, arguments.output / "smollm2.svg")
    print(f"\n{table(runs)}\n\n{summary(runs)}")


if __name__ == "__main__":
    main()
