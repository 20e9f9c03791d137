"""`track`: send to experiment trackers the steps of a run that they lack."""

from __future__ import annotations

import atexit
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.arguments import Parser
from holdfast.config import PROGRAMS
from holdfast.config.view import TRACKERS, TrackingConfig
from holdfast.errors import ConfigError
from holdfast.process.imports import check_name
from holdfast.process.scratch import SHORT_HOME, drop, make_scratch, scratch_name
from holdfast.run.run_dir import RunDir
from holdfast.run.settings import read_settings
from holdfast.view.trackers.interface import BUILT_IN, check_tracker
from holdfast.view.trackers.sending import Sending

_log = logging.getLogger("holdfast")
# Of a Unix socket's path, with what W&B puts behind the directory, and eight random characters in its name.
_MOST_BYTES_OF_HOME = 107 - 48 - 8


@contextmanager
def temporary_files_of(tracker: str) -> Iterator[None]:
    """Have a tracker's library put its temporary files into a directory that goes with this process, however it ends.

    Not for trackers of users, who may keep something there.
    """
    scratch = _scratch() if tracker in BUILT_IN else None
    if scratch is None:
        yield
        return
    atexit.register(drop, scratch)  # behind what the libraries do at the end: they are imported later
    before = os.environ.get("TMPDIR")
    _put_into(str(scratch))
    try:
        yield
    finally:
        _put_into(before)


def _scratch() -> Path | None:
    try:
        home = Path(tempfile.gettempdir())
        return make_scratch(home if len(os.fsencode(home / scratch_name())) <= _MOST_BYTES_OF_HOME else SHORT_HOME)
    except OSError as error:  # the library may need none
        _log.warning("there is no directory for temporary files: %s", error)
        return None


def _put_into(directory: str | None) -> None:
    if directory is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = directory
    tempfile.tempdir = None  # so that it looks again


def main(argv: list[str]) -> int:
    """Send the run to each tracker, one after the other; return 0.

    A run that is being trained is followed to its end.

    Raises:
        ConfigError: there is no such run or tracker, or its package is missing.
        RunDirError: the run itself sends there.
        TrackerFailed: a tracker did.
    """
    parser = Parser(prog="track", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", type=Path, help="the run directory")
    parser.add_argument("--to", nargs="+", metavar="TRACKER", help="unset: those of the run's own settings (tracking)")
    parser.add_argument("--project", help="unset: that of the run's settings")
    parser.add_argument("--name", help="unset: that of the run's settings")
    arguments = parser.parse_args(argv)
    run_dir = RunDir(arguments.run)
    if not run_dir.holds_run():
        raise ConfigError(
            f"{arguments.run} is no run directory: it has no run.json (from {Path.cwd()}). "
            "Name the output directory of one."
        )
    if (run_dir.path / "config" / "evaluate.toml").exists():
        raise ConfigError(f"{arguments.run} is of `evaluate`: it has no steps to send. `report` makes a page of it")
    config = _settings(run_dir, arguments.to)
    for name in ("project", "name"):
        if (value := getattr(arguments, name)) == "":
            raise ConfigError(f"--{name} is empty: give a name, or leave it out")
        if value is not None:
            setattr(config, name, value)
    for name in config.backends:
        check_tracker(name, key="--to")
    for name in config.backends:
        with temporary_files_of(name):  # W&B makes some as soon as it is imported
            sending = Sending(run_dir, name, config)
            sending.send(lambda: not run_dir.is_under_way(), time.sleep)
        print(f"{name} has everything up to step {sending.step} of {run_dir.path}", flush=True)
    return 0


def _settings(run_dir: RunDir, names: list[str] | None) -> TrackingConfig:
    """Return the settings of the newest attempt that has some, with other trackers if they are named.

    Raises:
        ConfigError: there is nothing of that kind.
    """
    found = {}
    for attempt in range(run_dir.next_attempt() - 1, 0, -1):
        paths = [run_dir.configs(attempt) / f"{'trainer' if name == 'rl' else name}.toml" for name in PROGRAMS]
        found = next((read_settings(path).get("tracking", {}) for path in paths if path.exists()), {})
        if found:
            break
    if names is None and not found:
        raise ConfigError(f"{run_dir.path} has no tracking in its settings: say where to, such as --to tensorboard")
    for name in names or []:
        try:
            check_name(name, TRACKERS)
        except ValueError as error:
            raise ConfigError(f"--to: {error}") from None
    return TrackingConfig.model_validate(found | ({"backends": names} if names is not None else {}))
