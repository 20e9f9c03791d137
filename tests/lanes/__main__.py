"""Run a lane of the tests.

    python -m tests.lanes                 the everyday lane, on two processes
    python -m tests.lanes nightly         everything else, on two workers
    python -m tests.lanes touched         the nightly tests of the parts that differ from --base
    python -m tests.lanes bound           everyday tests that took too long once more, one at a time: which still do
    python -m tests.lanes slowest 30      the slowest tests of the last runs

Which test is in which lane, its marks say: see `tests.lanes.marks`. Each run writes `.durations.json`, and the next
one starts with what takes longest. Options that are not of this program are pytest's, such as `-k` and `-x`; a file is
run by `uv run pytest FILE`. A lane fails if a file of the repository was written meanwhile."""

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from queue import Empty, SimpleQueue

from tests.coverage import __main__ as coverage
from tests.lanes import parts, written
from tests.lanes.durations import BOUND_S, COMMAND_BOUND_S, ROOT, recorded, slowest, too_long
from tests.lanes.marks import EVERYDAY
from tests.lanes.shares import Share, longest_first
from tests.lanes.wheel_label import correct_wheel_label

_PYTEST = (sys.executable, "-m", "pytest")
_WORDS = ("everyday", "nightly", "touched", "bound", "slowest")
_TRIES = 3
_NO_TESTS = 5
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|error)")


class EverydayRun:
    """The shares of the everyday lane, so many at a time. Their lines are printed as they come, with their names."""

    def __init__(self, shares: list[Share], words: list[str], *, processes: int) -> None:
        self._waiting: SimpleQueue[Share] = SimpleQueue()
        for share in shares:
            self._waiting.put(share)
        self._names = [share.name for share in shares]
        self._words = words
        self._is_stopped = False
        self._lock = threading.Lock()
        self._running: list[subprocess.Popen[str]] = []
        self.codes: dict[str, int] = {}
        self.counts: Counter[str] = Counter()
        self._ended: list[threading.Thread] = []
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._work) for _ in range(processes)]

    @property
    def failed(self) -> list[str]:
        """The shares that have not passed, be it that they were not run; a choice of tests may have none in a share."""
        good = (0, _NO_TESTS) if self._words else (0,)
        return sorted(name for name in self._names if self.codes.get(name) not in good)

    def wait(self) -> None:
        for thread in self._threads:
            thread.start()
        try:
            self._join()
        except KeyboardInterrupt:
            with self._lock:
                self._is_stopped = True
                for process in self._running:
                    process.send_signal(signal.SIGINT)
            self._join()
            raise

    def _join(self) -> None:
        # Not by `join` of threads: one that a signal interrupts takes its thread for ended from then on (bpo-45274).
        while len(self._ended) < len(self._threads):
            self._bell.get()

    def _work(self) -> None:
        try:
            while True:
                self._run(self._waiting.get(block=False))
        except Empty:
            return
        finally:
            self._ended.append(threading.current_thread())
            self._bell.put(None)

    def _run(self, share: Share) -> None:
        begin, last = time.monotonic(), ""
        command = [*_PYTEST, "--lane", "everyday", "-p", "no:xdist", *self._words, *share.options()]
        with self._lock:
            if self._is_stopped:
                return
            # In a group of its own: Ctrl-C reaches it once, through `wait`.
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, errors="replace", process_group=0,
            )  # fmt: skip
            self._running.append(process)
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                last = line.strip() or last
                print(f"{share.name:12} | {line}", end="", flush=True)
        with self._lock:
            self._running.remove(process)
            self.codes[share.name] = process.returncode
            self.counts.update({word: int(number) for number, word in _COUNT.findall(last)})
        print(f"{share.name:12} | exit code {process.returncode} after {time.monotonic() - begin:.0f} s", flush=True)


def everyday(words: list[str], processes: int) -> int:
    begin = time.monotonic()
    run = EverydayRun(longest_first(recorded()), words, processes=processes)
    run.wait()
    failed = run.failed
    if failed:
        print(f"failed: {', '.join(failed)}")
    print(f"the everyday lane took {time.monotonic() - begin:.0f} s")
    counts = run.counts
    print(f"{counts['passed']} passed, {counts['failed'] + counts['error']} failed, {counts['skipped']} skipped")
    if set(run.codes.values()) == {_NO_TESTS}:
        print(f"no test of the everyday lane matches {' '.join(words)}")
        return _NO_TESTS
    if failed:
        return 1
    if not words:
        coverage.passed("everyday")
    return 0


def workers(lane: str, words: list[str], processes: int) -> int:
    """Run tests of a lane on workers that take file after file; return pytest's exit code."""
    command = [*_PYTEST, "--lane", lane, "-n", str(processes), "--dist", "loadfile", *words]
    # In a group of its own, like the shares: Ctrl-C and SIGTERM reach it once, and it has the time to say what failed.
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, process_group=0) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise


def bound() -> int:
    """Run the everyday tests that took too long again, up to three times; return 1 if one of them always does."""
    bounds = _bounds_of([name for name, took in recorded().items() if took > BOUND_S])
    slow = _slower(bounds)
    print(f"everyday tests that took too long: {' '.join(slow) or 'none'}")
    for _ in range(_TRIES):
        if not slow:
            return 0
        code = subprocess.call([*_PYTEST, "--lane", "everyday", "-p", "no:xdist", "-q", *slow], cwd=ROOT)
        if code:
            return code
        slow = _slower({name: bounds[name] for name in slow})
    took = recorded()
    for line in too_long({name: took[name] for name in slow}, bounds):
        print(f"error: {line}")
    return 1 if slow else 0


def _slower(bounds: dict[str, float]) -> list[str]:
    took = recorded()
    return [name for name, bound_s in bounds.items() if took[name] > bound_s]


def _bounds_of(names: list[str]) -> dict[str, float]:
    """Return the seconds that each of these tests has, if it is one of the everyday lane."""
    every = _everyday_of(names)
    return dict.fromkeys(every, BOUND_S) | dict.fromkeys(_everyday_of(every, "-m", EVERYDAY), COMMAND_BOUND_S)


def _everyday_of(names: list[str], *words: str) -> list[str]:
    files = sorted({name.partition("::")[0] for name in names})
    if not files:
        return []
    command = [*_PYTEST, "--lane", "everyday", "-p", "no:xdist", "--collect-only", "-q", *words, *files]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, _NO_TESTS):
        raise SystemExit(f"error: the tests that took too long cannot be collected:\n{done.stdout}")
    return sorted(set(names) & set(done.stdout.splitlines()))


def touched(base: str, words: list[str], processes: int) -> int:
    """Run the nightly tests of the parts that differ from `base`; return pytest's exit code, 0 if there are none."""
    tests = parts.tests_of(parts.changed_files(base))
    print(f"parts that differ from {base}: nightly tests {' '.join(tests) or 'none'}")
    return workers("nightly", [*words, *tests], processes) if tests else 0


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    correct_wheel_label()
    parser = argparse.ArgumentParser(
        prog="python -m tests.lanes", usage="%(prog)s [LANE] [--processes N] [--base COMMIT] [options of pytest]",
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--processes", type=int, default=2, help="at a time (2)")
    parser.add_argument("--base", default="HEAD~1", help="what `touched` compares with (HEAD~1)")
    lane, rest = (argv[0], argv[1:]) if argv and argv[0] in _WORDS else ("everyday", argv)
    arguments, words = parser.parse_known_args(rest)
    if lane == "slowest":
        print("\n".join(slowest(recorded(), int(words[0]) if words else 20)))
        return 0
    if words and not words[0].startswith("-"):
        parser.error(f"{words[0]!r}: the lane comes first ({', '.join(_WORDS)}), and `uv run pytest FILE` runs a file")
    if lane == "bound":
        return bound()
    # Hundreds of processes import torch and transformers: without bytecode each compiles them again, in 6 s.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    before = written.state()
    if lane == "everyday":
        code = everyday(words, arguments.processes)
    elif lane == "touched":
        code = touched(arguments.base, words, arguments.processes)
    else:
        code = workers("nightly", words, arguments.processes)
    changed = written.differing(before, written.state())
    if changed:
        print(f"error: written in the repository while its tests ran, by a test or by you: {', '.join(changed)}")
    return code or bool(changed)


def _stop(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    for stopping in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(stopping) is not signal.SIG_IGN:  # as under `nohup`
            signal.signal(stopping, _stop)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
