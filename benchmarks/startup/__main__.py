"""From command to first trained step: `uv run python -m benchmarks.startup`.

Runs `sft` and the quick start's `rl` for two steps, several times, and prints when each phase began
(from the run's own events) and when the first step was done. The first run of a command warms the caches. It is
printed, and the median leaves it out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    """Measure both commands and print phases and medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for program in ("sft", "rl"):
            taken = []
            for number in range(arguments.rounds + 1):
                label = "warm-up" if number == 0 else f"round {number}"
                taken.append(run_once(program, Path(folder) / f"{program}_{number}", label))
            print(f"{program}: command to first trained step: median {statistics.median(taken[1:]):.1f} s, "
                  f"the first time {taken[0]:.1f} s\n", flush=True)  # fmt: skip


def run_once(program: str, folder: Path, label: str) -> float:
    """Run one step of `program`; return the seconds from command to its line in metrics.jsonl."""
    command = [str(Path(sys.executable).parent / program), "@", f"configs/reverse_text/{program}.toml"]
    begin = time.time()
    process = subprocess.Popen(
        [*command, "--max-steps", "2", "--output-dir", str(folder),
         *(["--optim.warmup-steps", "0"] * (program == "sft"))],
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    first_step = next(time.time() - begin for line in process.stdout if line.startswith("step "))
    process.communicate()
    if process.returncode:
        sys.exit(f"{program} ended with exit code {process.returncode}")
    events = (folder / "logs" / "attempt_1" / "events.jsonl").read_text().splitlines()
    phases = ", ".join(
        f"{event['process']} {event['phase']} {event['time'] - begin:.1f}" for event in map(json.loads, events)
    )
    print(f"{program} {label}: first step after {first_step:.1f} s ({phases})", flush=True)
    return first_step


if __name__ == "__main__":
    main()
