"""10,000 sessions at once, on one core: `uv run python -m benchmarks.sessions`.

Runs the orchestrator on one core against a server without a model (`stub.py`, on the other cores) that answers only
when all sessions of a batch wait for it, so that as many are in flight as there are, in every turn: sessions of one
turn, and sessions of the environment `ledger` that call a tool once. Kinds alternate in rounds, each in a process of
its own. When a run has ended every rollout is looked for in the journal, and has what was sampled for it.

Prints rollouts/s by the clock and by the core's own time (which other programs on the machine change little), and the
memory of a session.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from benchmarks.journal.measure import publish_first_weights
from benchmarks.sessions.measure import ENVIRONMENTS, TOOL_CALL, Measured, make_model, measure
from benchmarks.sessions.stub import SEED_DIGITS
from holdfast.run.run_dir import RunDir


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=10_000, help="in flight at once, and rollouts of a batch")
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256, help="most tokens of a turn")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", choices=list(ENVIRONMENTS), default=list(ENVIRONMENTS))
    parser.add_argument("--folder", type=Path, help="where to write; unset: the directory of temporary files")
    parser.add_argument("--one", choices=list(ENVIRONMENTS), help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.sessions % arguments.group_size:
        parser.error(f"--sessions {arguments.sessions} are no whole groups of --group-size {arguments.group_size}")
    if arguments.tokens <= (least := SEED_DIGITS + len(TOOL_CALL) + 1):
        parser.error(f"--tokens {arguments.tokens}: a turn with a call has more than {least}")
    if arguments.one is not None:
        _measure_here(arguments)
        return
    print(f"load of the machine: {', '.join(f'{load:.1f}' for load in os.getloadavg())}; cores: {os.cpu_count()}")
    print(
        f"{arguments.sessions:,} sessions at once, turns of {arguments.tokens} tokens, groups of {arguments.group_size}"
    )
    for _ in range(arguments.rounds):
        for kind in arguments.kinds:
            print(f"{kind:>7}: {_in_process(kind, arguments)}", flush=True)
    print(f"load of the machine: {', '.join(f'{load:.1f}' for load in os.getloadavg())}")


def _in_process(kind: str, arguments: argparse.Namespace) -> Measured:
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        run_dir, model = RunDir(Path(folder) / "run"), Path(folder) / "model"
        digest = publish_first_weights(run_dir)
        make_model(model)
        cores = sorted(os.sched_getaffinity(0))
        call = TOOL_CALL if kind == "tool" else ""
        letters = arguments.tokens - SEED_DIGITS - len(TOOL_CALL) - 1  # a character is a token
        command = [sys.executable, "-m", "benchmarks.sessions.stub", str(model), digest]
        command += [str(arguments.sessions), str(letters), call]
        stub = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            os.sched_setaffinity(stub.pid, cores[1:] or cores)
            assert stub.stdout is not None
            url = f"http://127.0.0.1:{int(stub.stdout.readline())}"
            command = [sys.executable, "-m", "benchmarks.sessions", "--one", kind, "--url", url]
            command += ["--sessions", str(arguments.sessions), "--batches", str(arguments.batches)]
            command += ["--tokens", str(arguments.tokens), "--group-size", str(arguments.group_size)]
            command += ["--folder", folder]
            answer = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
        finally:
            stub.kill()
            stub.communicate()
    return msgspec.json.decode(answer, type=Measured)


def _measure_here(arguments: argparse.Namespace) -> None:
    """One run, in this process, on one core; the answer goes to stdout as JSON."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    measured = measure(
        RunDir(arguments.folder / "run"),
        arguments.url,
        model=arguments.folder / "model",
        kind=arguments.one,
        num_sessions=arguments.sessions,
        num_batches=arguments.batches,
        num_tokens=arguments.tokens,
        size=arguments.group_size,
    )
    sys.stdout.buffer.write(msgspec.json.encode(measured))


if __name__ == "__main__":
    main()
