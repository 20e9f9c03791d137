"""Standard streams that are closed, or cannot be written to: what a command does about them.

Imports nothing that Python has not imported at its start: commands open their streams before all else.
"""

import os
import sys


def open_closed_streams() -> None:
    """Have stdin, stdout and stderr lead to /dev/null if they are closed (`>&-`). Otherwise the next file that is
    opened gets their number, and whatever a library or a child prints goes into it; and Python has None for them."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free is this one: those below are open by now.
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(number, mode, encoding="utf-8", errors="backslashreplace", closefd=False))


def end_output() -> None:
    """Write what was printed, or drop it: Python would report the failure again at its end, with another exit code."""
    try:
        sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)
