"""What the launcher needs of a host, and of a process on it: the same of this machine and of any other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol


class Process(Protocol):
    """One process with all that it starts."""

    @property
    def pid(self) -> int:
        """Its process id on its host, which is also that of its group; 0 before it has started."""
        ...

    @property
    def returncode(self) -> int | Any:
        """How it ended, as `subprocess` says it; None: `poll` and `wait` have not seen its end."""
        ...

    @property
    def loss(self) -> str | None:
        """How its host was lost, with whatever ran there; None where the process ended by itself."""
        ...

    def poll(self) -> int | None:
        """Return how it ended, without waiting; None while it runs."""
        ...

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for its end, at most so long; return how it ended, None if it runs still."""
        ...

    def signal(self, number: int) -> None:
        """Send a signal to it alone; one that has ended gets none."""
        ...

    def kill(self) -> None:
        """Kill it and what it started; also what it left behind when it ended."""
        ...

    def clear(self, timeout_s: float) -> None:
        """Kill it and what it started, and wait until they have let go of ports and memory."""
        ...

    def show_stacks(self, pids: Iterable[int], log: Path) -> None:
        """Have those of its processes that are called `pids` write into `log` what each of their threads does."""
        ...


class Host(Protocol):
    """Where processes can be started."""

    @property
    def name(self) -> str:
        """What it is called in messages."""
        ...

    def start(self, argv: list[str], log: Path, environment: Mapping[str, str]) -> Process:
        """Start a process in a group of its own, which dies with the launcher.

        Args:
            log: where its output goes, behind what is there.
            environment: on top of the launcher's own.
        """
        ...
