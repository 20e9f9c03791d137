"""What the journal costs, and what the orchestrator does: `uv run python -m benchmarks.journal`.

Runs the orchestrator on one core against a server without a model (`stub.py`, on the other cores), for
10,000 rollouts of 1,000 tokens, with the journal and without: no log of finished generations and no
batches written. Rounds alternate, and each runs in a process of its own. Two paces:

- at once: the server takes no time, so nothing is slower than the orchestrator. This is how many
  rollouts/s a core can do, and the worst case for the journal, whose whole work shows.
- paced: the server samples --engine-rate rollouts/s, the pace of a large deployment, so the journal's
  work competes only with the time that the orchestrator waits for the engine.

Prints rollouts/s by the clock and by the core's own time (which other programs on the machine change
little), the ratios with / without, and the longest time that keeping one answer held up the event loop.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from benchmarks.journal.measure import MODEL, Measured, measure, publish_first_weights
from holdfast.run.run_dir import RunDir


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=1_000)
    parser.add_argument("--batch", type=int, default=1_000, help="rollouts of one batch (1000)")
    parser.add_argument("--engine-rate", type=float, default=1_000, help="rollouts/s of the paced server (1000)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write; unset: the directory of temporary files")
    parser.add_argument("--one", choices=("with", "without"), help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        _measure_here(arguments)
        return
    print(f"load of the machine: {', '.join(f'{load:.1f}' for load in os.getloadavg())}; cores: {os.cpu_count()}")
    for rate in (0.0, arguments.engine_rate):
        pace = f"paced, {rate:,.0f} rollouts/s" if rate else "at once"
        print(f"\nserver: {pace}; {arguments.rollouts:,} rollouts of {arguments.tokens:,} tokens")
        _report(
            [
                {journal: _in_process(journal, rate, arguments) for journal in ("with", "without")}
                for _ in range(arguments.rounds)
            ]
        )
    print(f"\nload of the machine: {', '.join(f'{load:.1f}' for load in os.getloadavg())}")


def _in_process(journal: str, rate: float, arguments: argparse.Namespace) -> Measured:
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        run_dir = RunDir(Path(folder) / "run")
        digest = publish_first_weights(run_dir)
        cores = sorted(os.sched_getaffinity(0))
        stub = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.journal.stub", MODEL, digest, str(arguments.tokens), str(rate)],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            os.sched_setaffinity(stub.pid, cores[1:] or cores)
            assert stub.stdout is not None
            url = f"http://127.0.0.1:{int(stub.stdout.readline())}"
            command = [sys.executable, "-m", "benchmarks.journal", "--one", journal, "--url", url]
            command += ["--rollouts", str(arguments.rollouts), "--tokens", str(arguments.tokens)]
            command += ["--batch", str(arguments.batch), "--folder", str(run_dir.path)]
            answer = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        finally:
            stub.kill()
            stub.communicate()
    measured = msgspec.json.decode(answer, type=Measured)
    print(f"{journal:>7} journal: {measured}", flush=True)
    return measured


def _measure_here(arguments: argparse.Namespace) -> None:
    """One round, in this process, on one core; the answer goes to stdout as JSON."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    measured = measure(
        RunDir(arguments.folder),
        arguments.url,
        num_rollouts=arguments.rollouts,
        num_tokens=arguments.tokens,
        batch_size=arguments.batch,
        journal=arguments.one == "with",
    )
    sys.stdout.buffer.write(msgspec.json.encode(measured))


def _report(rounds: list[dict[str, Measured]]) -> None:
    wall = statistics.median(taken["with"].wall_rate / taken["without"].wall_rate for taken in rounds)
    core = statistics.median(taken["with"].core_rate / taken["without"].core_rate for taken in rounds)
    clock_rate = statistics.median(taken["with"].wall_rate for taken in rounds)
    core_rate = statistics.median(taken["with"].core_rate for taken in rounds)
    print(
        f"rollouts/s on one core, with the journal: {clock_rate:,.0f} by the clock, {core_rate:,.0f} by the core's time"
    )
    print(f"rollouts/s with / without: {wall:.3f} by the clock, {core:.3f} by the core's time")


if __name__ == "__main__":
    main()
