"""Check the environments of a configuration without playing one.

    python -m holdfast.orchestrator.check_environments < config.json

The launcher runs it before it starts anything. Built-in environments are constructed: `jsonl` reads its file, here and
in the orchestrator again, so that a wrong row is reported before anything is started, and tools that a local model
cannot call. Of a user's own the module is imported and the arguments are held against the constructor's parameters.
"""

from __future__ import annotations

import sys

from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.orchestrator.env.interface import Environment
from holdfast.orchestrator.env.registry import find_class, find_environment, is_built_in, load_levels, require_methods
from holdfast.orchestrator.env.tool_loop import check_tools
from holdfast.process.child import die_with_launcher, run_reporting_errors


def check_environments(config: OrchestratorConfig) -> None:
    """Find every environment and check its arguments.

    Raises:
        ConfigError, DataError: there is no such environment, or its arguments, or its tools and the model, do not fit.
        EnvironmentFailure: its module raised.
    """
    built_in: dict[str, Environment] = {}
    for position, section in enumerate(config.environments):
        key = f"environments[{position}]"
        if is_built_in(section.id):
            built_in[section.label] = load_levels(section, key=key)[0]
        else:
            cls = find_class(section.id, key=key)
            for own_key, level in section.at_levels(key).items():
                find_environment(level, key=own_key)
            require_methods(cls, section.id, key=key)
    check_tools(built_in, config.environments, tokenizer_name=config.model.tokenizer_name)
    if config.eval is not None:
        from holdfast.orchestrator.evaluation.online import check_evaluation  # takes 0.2 s

        check_evaluation(config)


if __name__ == "__main__":
    die_with_launcher()
    run_reporting_errors(lambda: check_environments(OrchestratorConfig.model_validate_json(sys.stdin.buffer.read())))
