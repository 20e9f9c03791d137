"""Settings that a command cannot do without, and no default could be right for: the model, the data, the environments.

If all are missing, the command prints lines to begin with; else it names the missing ones.
"""

from collections.abc import Iterator
from pathlib import Path

from holdfast.config import help
from holdfast.config.base import Command
from holdfast.config.evaluation import EvaluateConfig
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.config.preference import DpoConfig, PreferenceDataConfig
from holdfast.config.rl import RlConfig
from holdfast.config.training import SupervisedCommand
from holdfast.errors import ConfigError

_MODEL = "a directory with config.json, safetensors and tokenizer, or the name of a model on a hub"
_SECTION = '[[{key}]] with an `id` in a file, or --{flag} \'[{{"id": "NAME"}}]\'; docs/environments.md lists them'


def check_given(command: str, config: Command) -> None:
    """Check that a command has its model, data and environments. Raise ConfigError, with how to give them."""
    if isinstance(config, SupervisedCommand) and {"max_steps", "epochs"} <= config.model_fields_set:
        raise ConfigError(
            f"max_steps = {config.max_steps} and epochs = {config.epochs:g} both say how long to train: give one of "
            "them."
        )
    needed = dict(_needed(config))
    missing = {key: how for key, (is_given, how) in needed.items() if not is_given}
    if not missing:
        return
    if len(missing) < len(needed):
        raise ConfigError("\n       ".join(f"{key} is needed: {how}." for key, how in missing.items()))
    lines = [f"{command} needs {_listed([*missing])}. Begin with one of these lines:", *_first_lines(command)]
    raise ConfigError("\n         ".join(lines))


def _needed(config: Command) -> Iterator[tuple[str, tuple[bool, str]]]:
    """Yield the keys that a command needs, whether each is given, and what it takes."""
    if isinstance(config, RlConfig):
        own = [config.model] if config.model is not None else []
        models = [*own, config.trainer.model, config.orchestrator.model, config.inference.model]
        yield "model.name", (any(model.name for model in models), f"--model.name NAME, {_MODEL}")
        key = "orchestrator.environments"
        yield key, (bool(config.orchestrator.environments), _section(key))
        return
    if isinstance(config, EvaluateConfig):
        has_policy = bool(config.run or (config.model and config.model.name))
        yield "model.name or run", (has_policy, f"--model.name NAME, {_MODEL}; or --run DIRECTORY, of a run")
        if config.run is None:
            yield "environments", (bool(config.environments), _section("environments"))
        return
    yield "model.name", (bool(getattr(config, "model").name), f"--model.name NAME, {_MODEL}")  # noqa: B009
    if isinstance(config, SupervisedCommand):
        yield "data.name", (bool(config.data.label), f"--data.name NAME, {_rows(config)}")
    if isinstance(config, OrchestratorConfig):
        yield "environments", (bool(config.environments), _section("environments"))


def _section(key: str) -> str:
    return _SECTION.format(key=key, flag=key.replace("_", "-"))


def _rows(config: SupervisedCommand) -> str:
    rows = "`messages`, or `prompt` and `completion`"
    if isinstance(config.data, PreferenceDataConfig):
        is_kto = isinstance(config, DpoConfig) and config.loss.type == "kto"
        rows = "`prompt`, `completion` and `label`" if is_kto else "`prompt`, `chosen` and `rejected`"
    return f"a .jsonl, .json or .parquet file, or a dataset on a hub, with {rows} in a row"


def _first_lines(command: str) -> list[str]:
    """Return lines to begin with: the examples, and help."""
    examples = help.first(command)["examples"][:2]
    run = "uv run " if Path("pyproject.toml").is_file() else ""
    file = next((word for word in examples[0].split() if word.endswith(".toml")), None)
    if file is not None and not Path(file).is_file():
        examples[0] += "   (in a checkout of holdfast, which has the examples)"
    return [*(f"{run}{example}" for example in examples), f"{run}{command} --help"]


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
