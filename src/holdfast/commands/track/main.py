"""`track`: send a run to trackers that have not got all of it, or none of it, yet."""

from __future__ import annotations

import time
from pathlib import Path

from holdfast.commands.subcommands import Parser
from holdfast.commands.track.sending import Sending
from holdfast.commands.track.settings import read_settings
from holdfast.commands.track.temporary_files import temporary_files_of
from holdfast.commands.track.trackers import check_tracker
from holdfast.shared.config import PROGRAMS
from holdfast.shared.config.tracking import TRACKERS, TrackingConfig
from holdfast.shared.errors import ConfigError
from holdfast.shared.files.run_dir import RunDir
from holdfast.shared.user_functions import check_name


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
