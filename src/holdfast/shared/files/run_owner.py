"""Who a run is to the inference servers that it uses: see `holdfast.inference.ownership`."""

from __future__ import annotations

import socket

import msgspec

from holdfast.shared.files.run_dir import RunDir

OWNER_HEADER = "x-holdfast-run"
"""Header with the run's id: a request with it is a sign of life of the run that owns the server."""


class Owner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run.

    Attributes:
        run_id: its id.
        directory: `host:path` of its directory, for people; one run at a time can hold a directory.
    """

    run_id: str
    directory: str


def owner_of(run_dir: RunDir) -> Owner:
    """Return the run in `run_dir` as the owner of servers."""
    return Owner(run_dir.run_id(), directory_name(run_dir))


def directory_name(run_dir: RunDir) -> str:
    """Return what people, and other machines, call the directory of a run."""
    return f"{socket.gethostname()}:{run_dir.path}"
