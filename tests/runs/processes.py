"""What tests ask of processes that may end at any moment."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

import psutil

Answer = TypeVar("Answer")
HANG_S = 150.0
"""How long a test waits for what must come: longer than any busy machine takes, and a test that hangs still ends."""

WITH_STUB_ENGINE = {"PYTHONPATH": str(Path(__file__).resolve().parents[1] / "servers" / "in_place_of_vllm")}
"""Variables of processes whose inference servers, and those of what they start, are to be the stub engine."""


def end_with(program: Callable[[], int]) -> NoReturn:
    """End this process, a fork, with the exit code of `program`, and do nothing that its parent would do at its end."""
    code = 1
    try:
        code = program()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # noqa: BLE001 - this is the end of the process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def in_a_child(function: Callable[[], object]) -> int:
    """Start a fork that calls `function`; return its id. It ends with 0 if that returns."""
    pid = os.fork()
    if pid == 0:
        end_with(lambda: 0 * bool(function()))
    return pid


def command_line(process: psutil.Process) -> list[str]:
    """Return the words of its command line; none once it has ended."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def wait_until(ask: Callable[[], Answer], what: str = "what was waited for") -> Answer:
    """Return the first answer that is true, of what a test has brought about; `what` names it where none comes."""
    deadline = time.monotonic() + HANG_S
    while not (answer := ask()):
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.02)
    return answer


def answer_when(ask: Callable[[], Answer], is_so: Callable[[Answer], bool]) -> Answer:
    """Return the first answer for which `is_so` holds; who does not answer yet (OSError) is asked again."""
    deadline = time.monotonic() + HANG_S
    found: object = None
    while time.monotonic() < deadline:
        try:
            found = answer = ask()
            if is_so(answer):
                return answer
        except OSError as error:
            found = error
        time.sleep(0.05)
    raise AssertionError(f"never so: {found}")


def catches(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)
