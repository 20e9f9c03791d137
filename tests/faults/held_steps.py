"""Runs that wait for the test in the middle, however late it comes: a tiny model trains dozens of steps a second."""

from pathlib import Path

ASKED_TO_STOP = "STOP_REQUEST.signal_number()"
"""For `held_after`: a signal has reached one of the ranks."""
NEVER = "False"
"""For `held_after`: the run is to be killed before it ends."""


def exists(path: Path) -> str:
    """For `held_after`: the test has made a file."""
    return f"os.path.exists({str(path)!r})"


def held_after(step: int, *, until: str) -> str:
    """Return source of a fault for a trainer: rank 0 waits behind its line of `step` until an expression is true."""
    return (
        "import os, time\n"
        "from holdfast.run.metrics import MetricsWriter\n"
        "from holdfast.trainer.stop import STOP_REQUEST\n"
        "write = MetricsWriter.write\n"
        "def held(writer, step, metrics):\n"
        "    write(writer, step, metrics)\n"
        f"    while step == {step} and not {until}:\n"
        "        time.sleep(0.01)\n"
        "MetricsWriter.write = held\n"
    )


def held_commit(step: int) -> str:
    """Return source of a fault for a trainer: the checkpoint of `step` never gets its name, so the run does not end."""
    return (
        "import os, threading\n"
        "rename = os.rename\n"
        "def held(source, target, **options):\n"
        f"    if os.path.basename(target) == 'step_{step}':\n"
        "        threading.Event().wait()\n"
        "    rename(source, target, **options)\n"
        "os.rename = held\n"
    )


def at_start(fault: str) -> dict[str, str]:
    """Return variables for a command that is started as a user starts it: each of its processes begins with a fault."""
    return {"PYTHONPATH": str(Path(__file__).with_name("at_start")), "FAULT_AT_START": fault} if fault else {}
