"""Who a run is to the inference servers that it uses: see `holdfast.inference.ownership`."""

from __future__ import annotations

import socket

from holdfast.shared.files.run_dir import RunDir
from holdfast.shared.wire.inference_api import Owner


def owner_of(run_dir: RunDir) -> Owner:
    """Return the run in `run_dir` as the owner of servers."""
    return Owner(run_dir.run_id(), directory_name(run_dir))


def directory_name(run_dir: RunDir) -> str:
    """Return what people, and other machines, call the directory of a run."""
    return f"{socket.gethostname()}:{run_dir.path}"
