"""What tests ask of processes that may end at any moment."""

from __future__ import annotations

import psutil

HANG_S = 150.0
"""How long a test waits for what must come: longer than any busy machine takes, and a test that hangs still ends."""


def command_line(process: psutil.Process) -> list[str]:
    """Return the words of its command line; none once it has ended."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []
