"""Check what an evaluation asks without asking it.

    python -m holdfast.orchestrator.evaluation.check < config.json

`evaluate` runs it before it starts anything. Environments of the user's own are imported, and their constructors not
called; so how many tasks one has is checked by the evaluation itself.
"""

from __future__ import annotations

import sys

from holdfast.config.evaluation import EvaluateConfig
from holdfast.orchestrator.env.registry import find_environment, is_built_in
from holdfast.orchestrator.env.tool_loop import check_tools
from holdfast.orchestrator.evaluation.main import load_tasks
from holdfast.process.child import die_with_launcher, run_reporting_errors


def check(config: EvaluateConfig) -> None:
    """Find every environment, and check its arguments and the number of its tasks.

    Raises:
        ConfigError, DataError: what cannot be used, such as tools that a local model cannot call.
        EnvironmentFailure: a module raised.
    """
    for position, section in enumerate(config.environments):
        if not is_built_in(section.id):
            find_environment(section, key=f"environments[{position}]")
    built_in = [section for section in config.environments if is_built_in(section.id)]
    here = [section.model_copy(update={"workers": 0}) for section in built_in]
    tasks = load_tasks(config.model_copy(update={"environments": here}), {})
    if config.model is not None:
        check_tools(dict(tasks.environments), built_in, tokenizer_name=config.model.tokenizer_name)


if __name__ == "__main__":
    die_with_launcher()
    run_reporting_errors(lambda: check(EvaluateConfig.model_validate_json(sys.stdin.buffer.read())))
