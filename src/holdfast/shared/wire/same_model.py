"""Whether two names of models name the same: a server's, whatever it says, and that of a run."""

from __future__ import annotations

from pathlib import Path


def same_model(served: str, wanted: str) -> bool:
    """Whether both are equal, or paths of one directory."""
    try:
        return served == wanted or Path(served).samefile(wanted)
    except (OSError, ValueError):  # one is not there, or no path at all
        return False
