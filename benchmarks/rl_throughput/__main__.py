"""Rollouts/s and trained tokens/s of the quick start: `uv run python -m benchmarks.rl_throughput`.

Runs the quick start's `rl` command, and beside it a synchronous trainer that generates with
transformers on all cores (`synchronous.py`), on the same task, in the same call. Prints the time per
step of both and their ratio, and, for `rl` in steady state, how busy trainer and engine are: the
share of time that the trainer waits for batches, and that no request is in flight at the engine. With `--engines 2`
also `rl` with two engines beside `rl` with one, which share the same cores: more of both is what it would take to gain.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from holdfast import read_metrics
from holdfast.shared.process.child import available_cores

SYNCHRONOUS = Path(__file__).parent / "synchronous.py"
SKIPPED_STEPS = 5
PROBLEMS, GROUP_SIZE = 16, 8


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--engines", type=int, default=1, help="of another run of `rl`, beside that with one")
    parser.add_argument("--model", default="examples/reverse_text/model")
    arguments = parser.parse_args()
    ratios, of_engines = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            synchronous = run_synchronous(arguments)
            ours = run_rl(Path(folder) / str(number), arguments)
            ratios.append(ours / synchronous)
            print(f"synchronous trainer: {synchronous:.3f} s a step; rl: {ours:.3f} s a step, ratio {ratios[-1]:.2f}\n")
            if arguments.engines > 1:
                several = run_rl(Path(folder) / f"{number}_engines", arguments, engines=arguments.engines)
                of_engines.append(several / ours)
                print(f"rl with {arguments.engines} engines: {several:.3f} s a step, ratio {of_engines[-1]:.2f}\n")
    print(f"time per step, rl / synchronous: median {statistics.median(ratios):.2f} of {len(ratios)} rounds")
    if of_engines:
        what = f"time per step, {arguments.engines} engines / one"
        print(f"{what}: median {statistics.median(of_engines):.2f} of {len(of_engines)} rounds")


def run_rl(folder: Path, arguments: argparse.Namespace, *, engines: int = 1) -> float:
    """Run the quick start, print how busy its parts are, and return the median seconds per step."""
    command = [str(Path(sys.executable).parent / "rl"), "@", "configs/reverse_text/rl.toml"]
    command += ["--output-dir", str(folder), "--max-steps", str(arguments.steps), "--model.name", arguments.model]
    command += ["--inference.engines", str(engines)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    steps = read_metrics(folder / "metrics.jsonl")
    # The run begins with the first engine that is ready.
    begin = next(
        number
        for number, step in enumerate(steps)
        if all(step[f"engine/{engine}/requests"] for engine in range(engines))
    )
    # The last batches are made with no training left to overlap with, so they are left out too.
    steps = steps[begin + SKIPPED_STEPS : -2]
    wall = sum(step["time/step"] for step in steps)
    waiting = sum(step["time/wait_for_batch"] for step in steps)
    idle = sum(step["engine/idle_share"] * step["time/batch"] for step in steps)
    made = sum(step["time/batch"] for step in steps)
    rollouts = PROBLEMS * GROUP_SIZE * len(steps)
    tokens = steps[-1]["tokens"] - steps[0]["tokens"]
    print(f"rl: {rollouts / wall:,.0f} rollouts/s, {tokens / wall:,.0f} trained tokens/s")
    print(f"rl: trainer busy {1 - waiting / wall:.0%} (waits for batches {waiting / wall:.0%})")
    in_flight = [statistics.mean(step[f"engine/{engine}/in_flight"] for step in steps) for engine in range(engines)]
    print(f"rl: sequences in flight: {', '.join(f'{number:.1f}' for number in in_flight)}")
    print(f"rl: engine busy {1 - idle / made:.0%} (no request in flight {idle / made:.0%})")
    return statistics.median(step["time/step"] for step in steps)


def run_synchronous(arguments: argparse.Namespace) -> float:
    """Return the median seconds per step of the synchronous trainer."""
    settings = {
        "model": arguments.model,
        "steps": arguments.steps,
        "threads": available_cores(),
        "lr": 2e-4,
        "problems": PROBLEMS,
        "group_size": GROUP_SIZE,
        "max_tokens": 24,
    }
    done = subprocess.run(
        [sys.executable, str(SYNCHRONOUS), json.dumps(settings)], check=True, capture_output=True, text=True
    )
    steps = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")][SKIPPED_STEPS:]
    return statistics.median(step["seconds"] for step in steps)


if __name__ == "__main__":
    main()
