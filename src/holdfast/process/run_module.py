"""Run a module as a program, `python -P run_module.py MODULE ...`, as `python -m MODULE ...` does.

Unlike `-m`, it imports nothing before the user's modules come after all others: see `holdfast.process.imports`.
This file imports nothing that Python has not imported at its start.
"""

import os
import sys


def put_users_last() -> None:
    """Move what PYTHONPATH names behind everything else that is imported from."""
    users = pythonpath()
    sys.path[:] = [entry for entry in sys.path if entry not in users] + [entry for entry in sys.path if entry in users]


def pythonpath() -> "list[str]":
    """Return the entries of PYTHONPATH as `site` puts them into sys.path, less the one that holdfast is from."""
    words = [word for word in os.environ.get("PYTHONPATH", "").split(os.pathsep) if word]
    home = os.path.abspath(__file__).rpartition(f"{os.sep}holdfast{os.sep}")[0]  # noqa: PTH100 - see above
    return [entry for word in words if (entry := os.path.abspath(word)) != home]  # noqa: PTH100


if __name__ == "__main__":
    put_users_last()
    import runpy

    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
