"""Load the user's own loss and advantage of a configuration.

`python -m holdfast.launcher.check_functions < config.json`

The launcher runs it before it starts anything, where a setting names a `module:function`.
"""

from __future__ import annotations

import sys

from holdfast.config.rl_trainer import TrainerConfig
from holdfast.process.child import die_with_launcher, run_reporting_errors
from holdfast.process.imports import load_function, load_loss


def check_functions(config: TrainerConfig) -> None:
    """Load what the settings name, as the trainer will.

    Raises:
        ConfigError: a function cannot be loaded, or does not take `loss.args`.
    """
    for name in config.advantages:
        if ":" in name:
            load_function(name, key="advantage")
    if ":" in config.loss.type:
        load_loss(config.loss.type, config.loss.args)


if __name__ == "__main__":
    die_with_launcher()
    run_reporting_errors(lambda: check_functions(TrainerConfig.model_validate_json(sys.stdin.buffer.read())))
