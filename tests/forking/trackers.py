"""The process that sends to a tracker, forked from a process that has imported what takes seconds."""

import atexit
import functools
import importlib
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.forking.popen import begin, run_module
from tests.forking.server import Fork, ForkServer
from tests.lanes.marks import require

_PROCESS = "holdfast.view.track"
# Not trackio, which reads at its import where it writes.
_IMPORTED = (_PROCESS, "holdfast.view.backends", "mlflow", "mlflow.store.tracking.sqlalchemy_store",
             "torch.utils.tensorboard")  # fmt: skip


def start_tracking(argv: list[str], log: Path, environment: Mapping[str, str]) -> Fork:
    require("launch")
    return _server().fork("tests.forking.trackers:be_process", log, environment=environment, argv=argv)


@functools.cache
def _server() -> ForkServer:
    server = ForkServer("tests.forking.trackers:prepare")
    atexit.register(server.close)
    return server


def prepare() -> None:
    """In the server: import, and hold SIGTERM back, as the launcher does, in what is forked."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    for name in _IMPORTED:
        importlib.import_module(name)


def be_process(argv: list[str]) -> None:
    begin()
    tempfile.tempdir = None  # an import has asked for it
    atexit._clear()  # what the server has to do at its end
    try:
        run_module([_PROCESS, *argv])
    finally:
        atexit._run_exitfuncs()
