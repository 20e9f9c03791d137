"""What tests ask of processes that may end at any moment."""

from __future__ import annotations

import psutil


def command_line(process: psutil.Process) -> list[str]:
    """Return the words of its command line; none once it has ended."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []
