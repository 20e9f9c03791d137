"""Run a module as a program, `python -P run_module.py MODULE ...`, as `python -m MODULE ...` does; and open and close
the standard streams of a command.

Unlike `-m`, it imports nothing before the user's modules come after all others: see `holdfast.process.imports`.
This file imports nothing that Python has not imported at its start.
"""

import os
import sys


def put_users_last() -> None:
    """Move the entries of PYTHONPATH to the end of `sys.path`."""
    users = pythonpath()
    sys.path[:] = [entry for entry in sys.path if entry not in users] + [entry for entry in sys.path if entry in users]


def pythonpath() -> "list[str]":
    """Return the entries of PYTHONPATH as `site` puts them into sys.path, without the entry that holdfast is from."""
    words = [word for word in os.environ.get("PYTHONPATH", "").split(os.pathsep) if word]
    home = os.path.abspath(__file__).rpartition(f"{os.sep}holdfast{os.sep}")[0]  # noqa: PTH100 - see above
    return [entry for word in words if (entry := os.path.abspath(word)) != home]  # noqa: PTH100


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


if __name__ == "__main__":
    put_users_last()
    import runpy

    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
