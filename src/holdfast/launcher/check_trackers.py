"""Load the user's own trackers of a configuration.

`python -m holdfast.launcher.check_trackers < tracking.json`
"""

from __future__ import annotations

import sys

from holdfast.config.view import TrackingConfig
from holdfast.process.child import die_with_launcher, run_reporting_errors
from holdfast.view.trackers.interface import check_tracker


def check_trackers(config: TrackingConfig) -> None:
    """Load what the settings name.

    Raises:
        ConfigError: a class cannot be loaded, or is no tracker.
    """
    for name in config.backends:
        check_tracker(name, key="tracking.backends")


if __name__ == "__main__":
    die_with_launcher()
    run_reporting_errors(lambda: check_trackers(TrackingConfig.model_validate_json(sys.stdin.buffer.read())))
