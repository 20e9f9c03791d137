"""From SIGKILL to the next trained step, beside a cold start: `uv run --group dev python -m benchmarks.recovery`.

Each round is one run of the quick start on vLLM, with a smaller batch. Each process is killed once, and the clock
runs from the signal until the run trains a step that it has not trained before the signal. A killed launcher is
started again at once, with `--ckpt.resume-step auto`. The cold start is the time from the command to the first trained
step of the same run. A round fails if another process has not taken the place of the killed process.

The trainer has up to two batches on hand when somebody else dies, so the next step may come at once. The second
column is therefore the time until a step is trained whose batch nobody had begun at the signal.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import tempfile
import time
from pathlib import Path

from holdfast.run.run_dir import RunDir
from tests.faults.blows import find_process
from tests.runs.ports import free_port
from tests.runs.rl import SMALL_BATCH, RlRun, last_step

_VICTIMS = {
    "orchestrator": "orchestrator",
    "rank_0": "trainer, a rank",
    "trainer": "trainer, its launcher of ranks",
    "inference": "inference server",
    "engine": "engine of the inference server",
    "launcher": "launcher",
}
_POLL_S = 0.005
_TIMEOUT_S = 300.0
_STEPS_BETWEEN = 4
# At async_level 1: one batch in the trainer's hands, one in the journal, one that is being made.
_STEPS_AHEAD = 4
# Far beyond what is trained here; the last run is stopped.
_MAX_STEPS = 100_000


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--victims", nargs="+", choices=list(_VICTIMS), default=list(_VICTIMS), metavar="PROCESS",
                        help=f"of {', '.join(_VICTIMS)} (all)")  # fmt: skip
    arguments = parser.parse_args()
    taken: dict[str, list[tuple[float, float]]] = {victim: [] for victim in arguments.victims}
    cold: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, arguments.rounds + 1):
            # A round is a run of its own, so that no delay before a restart counts earlier rounds.
            cold.append(_round(Path(folder) / f"run_{number}", taken))
            shown = (f"{victim} {seconds[-1][0]:.1f} {seconds[-1][1]:.1f}" for victim, seconds in taken.items())
            print(f"round {number}: cold start {cold[-1]:.1f} s, {', '.join(shown)}", flush=True)
    _print_medians(cold, taken)


def _print_medians(cold: list[float], taken: dict[str, list[tuple[float, float]]]) -> None:
    start = statistics.median(cold)
    print(f"\nmedians of {len(cold)}; in brackets as a share of a cold start")
    print(f"{'':37s} {'next step':>16s} {'step of a new batch':>22s}")
    print(f"{'cold start':37s} {start:7.1f} s")
    for victim, seconds_of_rounds in taken.items():
        first, fresh = (statistics.median(column) for column in zip(*seconds_of_rounds, strict=True))
        shares = (f"{seconds:7.1f} s ({seconds / start:.2f})" for seconds in (first, fresh))
        print(f"{_VICTIMS[victim] + ' killed':37s} " + "      ".join(shares))


def _round(output_dir: Path, taken: dict[str, list[tuple[float, float]]]) -> float:
    """Kill every process once in one run; return the seconds of its cold start."""
    flags = (*SMALL_BATCH, "--max-steps", str(_MAX_STEPS), "--ckpt.interval", "2", "--ckpt.keep", "2")
    flags = (*flags, "--inference.server.port", str(free_port()), "--ckpt.resume-step", "auto")
    run_dir = RunDir(output_dir)
    begin = time.monotonic()
    run = RlRun(output_dir, *flags, starts_python=True)  # forks start faster than the processes of a user
    try:
        _wait(1, run)
        cold = time.monotonic() - begin
        for victim, seconds in taken.items():
            _wait(last_step(run_dir) + _STEPS_BETWEEN, run)
            process = find_process(run, victim)
            if process is None:
                raise SystemExit(f"there is no {_VICTIMS[victim]} to kill:\n{run.output[-4000:]}")
            step, killed = last_step(run_dir), time.monotonic()
            process.kill()
            if victim == "launcher":
                run.wait()
                run = RlRun(output_dir, *flags, starts_python=True)
            _wait(step + 1, run, busy=victim)
            first = time.monotonic() - killed
            _wait(step + _STEPS_AHEAD, run, busy=victim)
            seconds.append((first, time.monotonic() - killed))
            if find_process(run, victim) in (None, process):
                raise SystemExit(f"nothing has taken the place of the {_VICTIMS[victim]}:\n{run.output[-4000:]}")
        run.interrupt(signal.SIGTERM)
        run.wait()
        return cold
    finally:
        run.__exit__()


def _wait(step: int, run: RlRun, *, busy: str = "") -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while last_step(run.run_dir) < step:
        if run.ended() or time.monotonic() > deadline:
            raise SystemExit(f"no step {step} {busy}:\n{run.output[-4000:]}")
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main()
