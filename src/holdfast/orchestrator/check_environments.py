"""Check the environments of a configuration without playing one.

    python -m holdfast.orchestrator.check_environments < config.json

The launcher runs it before it starts anything. Built-in environments are constructed: `jsonl` reads its file, here and
in the orchestrator again, so that a wrong row is reported before anything is started. Of a user's own the module is
imported and the arguments are held against the constructor's parameters.
"""

from __future__ import annotations

import sys

from holdfast.orchestrator.environments import find_environment, is_built_in, load_environment
from holdfast.orchestrator.evaluation.online import check_evaluation
from holdfast.shared.config.orchestrator import OrchestratorConfig
from holdfast.shared.process.child import die_with_launcher, run_reporting_errors


def check_environments(config: OrchestratorConfig) -> None:
    """Find every environment and check its arguments.

    Raises:
        ConfigError, DataError: there is no such environment, or its arguments do not fit.
        EnvironmentFailure: its module raised.
    """
    for position, section in enumerate(config.environments):
        find = load_environment if is_built_in(section.id) else find_environment
        find(section, key=f"environments[{position}]")
    if config.eval is not None:
        check_evaluation(config)


if __name__ == "__main__":
    die_with_launcher()
    run_reporting_errors(lambda: check_environments(OrchestratorConfig.model_validate_json(sys.stdin.buffer.read())))
