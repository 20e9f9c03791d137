"""The command `track`, and the process that sends a run to one tracker while it is trained.

`python -m holdfast.view.track RUN TRACKER SETTINGS` is that process; SETTINGS is the section `tracking` as JSON.
SIGTERM means that no further step comes: it sends the rest and ends. Without arguments it loads the trackers of the
settings on stdin, to check them.
"""

import atexit
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.arguments import Parser
from holdfast.config.base import read_section
from holdfast.config.view import TrackingConfig
from holdfast.errors import ConfigError
from holdfast.process.child import NotedSignals, die_with_launcher, run_reporting_errors, set_up_logging
from holdfast.process.scratch import SHORT_HOME, drop, make_scratch, scratch_name
from holdfast.run.choose_run import add_run, command_line, is_evaluation, no_run, parse_run, refuse_flags
from holdfast.run.run_dir import RunDir
from holdfast.run.settings import settings_of_trainers
from holdfast.view.load_tracker import BUILT_IN, check_tracker
from holdfast.view.sending import Sending, TrackerFailed

_log = logging.getLogger("holdfast")
_MAX_HOME_BYTES = 107 - 48 - 8
"""Most bytes of a Unix socket's path, less W&B's own part and eight random characters."""


def main(argv: list[str]) -> int:
    """Send the run to each tracker, one after the other; return 0.

    A run that is being trained is followed to its end. Raise ConfigError if the run or the tracker does not exist, or
    the package of the tracker is missing; RunDirError if the run itself sends there; TrackerFailed if a tracker did."""
    parser = Parser(prog="track", description="Send to experiment trackers the steps of a run that they lack.")
    add_run(parser)
    parser.add_argument("--to", nargs="+", metavar="TRACKER", help="unset: those of the run's own settings (tracking)")
    parser.add_argument("--project", help="unset: that of the run's settings")
    parser.add_argument("--name", help="unset: that of the run's settings")
    refuse_flags(parser, argv)
    arguments = parse_run(parser, argv)
    run_dir = RunDir(arguments.run)
    if not run_dir.holds_run():
        raise no_run(arguments.run)
    if is_evaluation(run_dir.path):
        raise ConfigError(
            f"{arguments.run} is of `evaluate`: it has no steps to send. "
            f"`{command_line('report', arguments.run)}` makes a page of it"
        )
    given = {"backends": arguments.to, "project": arguments.project, "name": arguments.name}
    config = _settings(run_dir, {name: value for name, value in given.items() if value is not None})
    for name in config.backends:
        check_tracker(name, key="--to")
    use_scratch()
    for name in config.backends:
        sending = Sending(run_dir, name, config)
        sending.send(lambda: not run_dir.is_under_way(), time.sleep)
        print(f"{name} has everything up to step {sending.step} of {run_dir.path}", flush=True)
    return 0


def _settings(run_dir: RunDir, given: dict[str, Any]) -> TrackingConfig:
    """Return the settings of the newest attempt that has some, with the `given` values in their place. Raise
    ConfigError if there are none, or no tracker has such a name."""
    of_attempts = (settings.get("tracking") for _, settings in settings_of_trainers(run_dir))
    found: dict[str, Any] = next(filter(None, of_attempts), {})
    if "backends" not in given and not found:
        raise ConfigError(
            f"{run_dir.path} has no tracking in its settings: say where to, such as\n"
            f"  {command_line('track', run_dir.path, ['--to', 'tensorboard'])}"
        )
    return read_section(TrackingConfig, found | given, key="tracking.")


def use_scratch() -> None:
    """Put temporary files into a directory that goes with this process, however it ends.

    W&B creates some at its import."""
    try:
        home = Path(tempfile.gettempdir())
        is_short = len(os.fsencode(home / scratch_name())) <= _MAX_HOME_BYTES
        scratch = make_scratch(home if is_short else SHORT_HOME)
    except OSError as error:  # the library may need none
        _log.warning("there is no directory for temporary files: %s", error)
        return
    atexit.register(drop, scratch)  # runs after the exit handlers of the libraries, which register later
    os.environ["TMPDIR"], tempfile.tempdir = str(scratch), None


def _send(run_dir: RunDir, name: str, config: TrackingConfig) -> None:
    """Send until SIGTERM. Raise TrackerFailed, after which the launcher starts this process again."""
    with NotedSignals(signal.SIGTERM) as stop:
        # Only the launcher says when the run is over: a scheduler may signal every process.
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # held back by the launcher until now
        try:
            Sending(run_dir, name, config).send(lambda: bool(stop.came), stop.wait)
        except TrackerFailed as failure:
            _log.warning("%s", failure, exc_info=failure.__cause__)
            raise


def _be_process(argv: Sequence[str]) -> None:
    if not argv:
        for name in TrackingConfig.model_validate_json(sys.stdin.buffer.read()).backends:
            check_tracker(name, key="tracking.backends")
        return
    run, name, settings = argv
    set_up_logging("tracking")
    if name in BUILT_IN:  # a user's own tracker may want to keep its files
        use_scratch()
    _send(RunDir(Path(run)), name, TrackingConfig.model_validate_json(settings))


if __name__ == "__main__":
    die_with_launcher()
    run_reporting_errors(lambda: _be_process(sys.argv[1:]))
