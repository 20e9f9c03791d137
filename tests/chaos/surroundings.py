"""What a chaos run depends on beside its disk, and how it fails: an object store, and reading."""

from __future__ import annotations

import logging
import threading
import uuid
from pathlib import Path

from tests.servers.s3 import BUCKET, GONE, S3Server

_PREFIX = "chaos"


class Store:
    """An object store that goes away and comes back. Use as a context manager. `environment`: variables of the
    processes that use it.
    """

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for every request otherwise
        self._server = S3Server()
        self._back: threading.Timer | None = None
        self.url = f"s3://{BUCKET}/{_PREFIX}"  # for `--ckpt.dir`
        self.environment = {
            "AWS_ENDPOINT_URL": self._server.url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        if self._back is not None:
            self._back.join()
        self._server.close()

    def go_away(self, seconds: float) -> None:
        if self._back is not None:
            self._back.join()
        self._server.spoil = lambda method, path: GONE
        self._back = threading.Timer(seconds, self._come_back)
        self._back.start()

    def _come_back(self) -> None:
        self._server.spoil = lambda method, path: None

    def holds(self, step: int) -> bool:
        return any(name.endswith(f"/step_{step}/manifest.json") for name in self._server.names())


class ReadErrors:
    """Makes the next files that a process of the run opens to read fail. `environment`: variables of the processes that
    are to meet them.
    """

    def __init__(self, folder: Path, run_dir: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True)
        self.environment = {
            "PYTHONPATH": str(Path(__file__).with_name("read_errors")),
            "CHAOS_READ_ERRORS": str(folder),
            "CHAOS_RUN_DIR": str(run_dir),
        }

    def inject(self, count: int) -> None:
        for _ in range(count):
            (self._folder / uuid.uuid4().hex).touch()
