"""Checks the environments of a configuration without playing one. Prints warnings about rows that cannot be solved.

    python -m holdfast.orchestrator.check environments|evaluation < config.json

The launcher and `evaluate` run it before they start anything. Built-in environments are constructed, so that `jsonl`
reports a wrong row now. For a user's own environment the module is imported, and the arguments are compared with the
constructor's parameters.
"""

import asyncio
import sys
from collections.abc import Mapping, Sequence

from holdfast.config.environments import EnvironmentConfig
from holdfast.config.evaluation import EvaluateConfig
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.orchestrator.env.interface import Environment
from holdfast.orchestrator.env.registry import find_class, find_environment, is_built_in, load_levels, require_methods
from holdfast.orchestrator.env.solvable import warnings_of
from holdfast.orchestrator.env.tool_loop import check_tools
from holdfast.process.child import die_with_launcher, run_reporting_errors

_MOST_S = 10.0
"""For the rows of a file whose answers are slow to score."""
# The modules of evaluations take 0.2 s to import, and most runs have none: functions import them.


def check_environments(config: OrchestratorConfig) -> None:
    """Check every environment of an RL run, and of its evaluations.

    Raises ConfigError or DataError if one does not exist, or its arguments, or its tools and the model do not fit;
    EnvironmentFailure if its module raises an error."""
    built_in = _check_all(config.environments, key="environments")
    _warn(built_in, config.environments)
    check_tools(built_in, config.environments, tokenizer_name=config.model.tokenizer_name)
    if config.eval is None:
        return
    from holdfast.orchestrator.evaluation.evaluator import EVAL_KEY, eval_groups, held_out_tasks

    groups = eval_groups(config, config.eval)
    built_in = _check_all(groups.environments, key=EVAL_KEY)
    check_tools(built_in, groups.environments, tokenizer_name=config.model.tokenizer_name)
    there = [section for section in groups.environments if section.label in built_in]
    _warn(built_in, [section for section in there if section not in config.environments])
    held_out_tasks(config, config.eval, groups.model_copy(update={"environments": there}), built_in, {})


def _check_all(sections: Sequence[EnvironmentConfig], *, key: str) -> dict[str, Environment]:
    """Check the environments of the section `key`, and return the built-in environments by name."""
    built_in: dict[str, Environment] = {}
    for position, section in enumerate(sections):
        own_key = f"{key}[{position}]"
        if is_built_in(section.id):
            built_in[section.label] = load_levels(section, key=own_key)[0]
            continue
        cls = find_class(section.id, key=own_key)
        for level_key, level in section.at_levels(own_key).items():
            find_environment(level, key=level_key)
        require_methods(cls, section.id, key=own_key)
    return built_in


def _warn(environments: Mapping[str, Environment], sections: Sequence[EnvironmentConfig]) -> None:
    for section in sections:
        if section.label in environments:
            for line in asyncio.run(warnings_of(environments[section.label], section, most_s=_MOST_S)):
                print(line, file=sys.stderr)


def check_evaluation(config: EvaluateConfig) -> None:
    """Check the environments of `evaluate`, and how many tasks the built-in ones have; raises as above."""
    from holdfast.orchestrator.evaluation.main import load_tasks

    for position, section in enumerate(config.environments):
        if not is_built_in(section.id):
            find_environment(section, key=f"environments[{position}]")
    built_in = [section for section in config.environments if is_built_in(section.id)]
    here = [section.model_copy(update={"workers": 0}) for section in built_in]
    tasks = load_tasks(config.model_copy(update={"environments": here}), {})
    _warn(dict(tasks.environments), here)
    if config.model is not None:
        check_tools(dict(tasks.environments), built_in, tokenizer_name=config.model.tokenizer_name)


def _main(what: str, content: bytes) -> None:
    if what == "evaluation":
        check_evaluation(EvaluateConfig.model_validate_json(content))
    else:
        check_environments(OrchestratorConfig.model_validate_json(content))


if __name__ == "__main__":
    die_with_launcher()
    run_reporting_errors(lambda: _main(sys.argv[1], sys.stdin.buffer.read()))
