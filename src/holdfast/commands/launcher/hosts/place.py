"""What is done on a host for the launcher of another: start one process after the other, watch it, end it.

It is an actor of Ray's, or a step of SLURM's that is spoken to over its stdin. What it starts dies with it.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from holdfast.commands.launcher.hosts.local import LocalProcess, start_here
from holdfast.commands.launcher.ports import Reservation, reserve_first_free
from holdfast.shared.errors import ConfigError
from holdfast.shared.process.import_path import module_command

# What a host has of its own; everything else of the launcher's environment comes along, as with `srun`.
_OWN = ("PATH", "HOME", "HOSTNAME", "LD_LIBRARY_PATH", "PWD", "OLDPWD", "SHLVL", "TMPDIR", "_", "VIRTUAL_ENV")
_OWN_PREFIXES = ("RAY_", "SLURM_", "SLURMD_", "PMI", "CUDA_VISIBLE_", "ROCR_VISIBLE_", "XDG_", "SSH_", "KUBERNETES_")


def travelling(environment: dict[str, str]) -> dict[str, str]:
    """Return what of the launcher's environment goes to processes on other hosts."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _OWN and not name.startswith(_OWN_PREFIXES) and name.isprintable()
    }


class Place:
    """The launcher's hand on a host. Arguments and results are plain values, which any wire takes."""

    def __init__(self) -> None:
        self._process: LocalProcess | None = None
        self._reservations: list[Reservation] = []

    def about(self) -> dict[str, str]:
        """Return what this host is called, and what runs there."""
        return {
            "name": socket.gethostname(),
            "version": version("holdfast"),
            "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        }

    def missing(self, paths: list[str]) -> list[str]:
        """Return those of `paths` that are not there on this host."""
        # By its directory: that a file is not there may be remembered for a while on a network's filesystem.
        return [path for path in paths if not _is_there(Path(path))]

    def reserve(self, first: int) -> int:
        """Return the first free port from `first` on; it is held until this place ends."""
        (reservation,) = reserve_first_free("0.0.0.0", first)
        self._reservations.append(reservation)
        return reservation.port

    def start(self, module: list[str], log: str, environment: dict[str, str], directory: str) -> int:
        """Start one of our modules; return its process id.

        Args:
            module: its name and its arguments.
            environment: on top of what this host has.
            directory: where it works, as the launcher does.

        Raises:
            ConfigError: the directory is not there.
        """
        try:
            os.chdir(directory)
        except OSError as error:
            raise ConfigError(
                f"{socket.gethostname()} has no directory {directory} ({error.strerror}), from which the run was "
                "started: start it from a directory that all hosts share"
            ) from None
        self._process = start_here(module_command(*module), Path(log), {**os.environ, **environment})
        return self._process.pid

    def wait(self) -> int:
        """Wait for the end of the process that was started last; return how it ended."""
        code = self._started().wait()
        assert code is not None
        return code

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self._started().signal(number)

    def kill(self) -> None:
        """Kill it and what it started."""
        self._started().kill()

    def clear(self, timeout_s: float) -> None:
        """Kill it and what it started, and wait until they are gone."""
        self._started().clear(timeout_s)

    def show_stacks(self, pids: Iterable[int], log: str) -> None:
        """Have its processes write their stacks into `log`."""
        self._started().show_stacks(pids, Path(log))

    def _started(self) -> LocalProcess:
        assert self._process is not None
        return self._process


def _is_there(path: Path) -> bool:
    try:
        return path.name in os.listdir(path.parent)  # noqa: PTH208 - names are all that is asked for
    except OSError:
        return False
