"""What a report of a long run costs: `uv run python -m benchmarks.report [STEPS]`.

Makes a run of 10,000 steps with 100 rollouts each: 60 metrics and nine spans a step, a journal in which all batches are
listed and those are whole that a report shows. Then prints time, memory and size of `report` on it, as its own process.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.protocol.rollouts import Batch, Logprobs, LossMask, Rollout, TokenIds
from holdfast.run.journal import publish_batch
from holdfast.run.run_dir import RunDir

_ROLLOUTS = 100
_TOKENS = 500


@dataclass(frozen=True)
class Cost:
    """Of one report: seconds by the wall clock and of a core, the most memory, and bytes of the page."""

    wall_s: float
    cpu_s: float
    memory_bytes: int
    page_bytes: int


def make_journal(run_dir: RunDir, steps: int, *, num_whole: int = 4) -> None:
    """List a batch of every step; those that a report shows are whole."""
    whole = {1 + round((steps - 1) * part / (num_whole - 1)) for part in range(num_whole)}
    for step in range(1, steps + 1):
        if step not in whole:
            run_dir.batch(step).mkdir(parents=True)
            continue
        rollouts = [
            Rollout(
                environment="a", task_id=number // 8, sample_index=number % 8,
                token_ids=TokenIds([1 + number % 50] * _TOKENS), loss_mask=LossMask([True] * _TOKENS),
                logprobs=Logprobs([-0.5] * _TOKENS), versions=[], reward=number % 8 / 8,
            )
            for number in range(_ROLLOUTS)
        ]  # fmt: skip
        batch = Batch(step=step, policy_version=step - 1, weights_digest="d" * 32, rollouts=rollouts)
        publish_batch(run_dir, batch, msgspec.json.encode({}))


# A small process in between: of its children it knows nobody else's largest memory, and passes on none of its own.
_MEASURED = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, used.ru_maxrss)
"""


def measure(run: Path) -> Cost:
    """Report on the run in `run`, in a process of its own."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "holdfast", "report", str(run), "--to", str(run / "page.html")]
    found = subprocess.run([sys.executable, "-c", _MEASURED, *command], check=True, stdout=subprocess.PIPE, text=True)
    wall_s, (cpu_s, max_rss_kib) = time.perf_counter() - began, found.stdout.split()
    return Cost(wall_s, float(cpu_s), int(max_rss_kib) * 1024, (run / "page.html").stat().st_size)


def main() -> None:
    """Print one line."""
    from tests.builders.shown_runs import make_run

    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    with tempfile.TemporaryDirectory() as place:
        run_dir = make_run(Path(place) / "run", steps=steps, metrics=42)
        make_journal(run_dir, steps)
        cost = measure(run_dir.path)
    print(
        f"{steps:,} steps, {steps * _ROLLOUTS:,} rollouts: {cost.wall_s:.1f} s, {cost.cpu_s:.1f} s of a core, "
        f"{cost.memory_bytes / 2**20:.0f} MiB, page of {cost.page_bytes / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main()
