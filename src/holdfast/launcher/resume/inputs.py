"""What a run computes with beside its settings, by content: libraries, tokenizer, models, named files and code.

Every attempt notes them beside its settings. The next one says in one line each what has changed. What was made with
the others is not used again: batches of the journal are made anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.config.preference import DpoConfig
from holdfast.config.rl_trainer import TrainerConfig
from holdfast.config.training import EvaluatedCommand, TrainingCommand
from holdfast.errors import DataError, ReadError
from holdfast.run import checked
from holdfast.run.manifest import content_digest, library_versions, read_manifest
from holdfast.run.run_dir import INPUTS_NAME
from holdfast.run.settings import file_of_object, files_of_environment, files_of_model

_TOKENIZER = "tokenizer, "
_OF_EVALUATIONS = "eval, "
_OF_TOKENIZERS = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model", "generation_config.json",
)  # fmt: skip


def find_inputs(trainer: TrainingCommand, orchestrator: OrchestratorConfig | None, *, is_fresh: bool) -> dict[str, str]:
    """Return versions and digests by the names that messages give them.

    Args:
        is_fresh: the run begins with the weights of `model.name`; else a checkpoint has all of them.

    Raises:
        ReadError: a file is there and cannot be read.
    """
    found = {name: number for name, number in library_versions().items() if number != "not installed"}
    files = {f"{_TOKENIZER}{path.name}": path for path in _tokenizer_files(trainer)}
    for key, model in _models(trainer, is_fresh=is_fresh).items():
        files |= {f"{key}, {path.name}": path for path in files_of_model(Path(model), has_weights=is_fresh)}
    for key, name in _functions(trainer):
        if (path := file_of_object(name)) is not None:
            files[f"{key} = {name}"] = path
    evaluations = trainer.eval if isinstance(trainer, EvaluatedCommand) else orchestrator and orchestrator.eval
    asked = [("", section) for section in (orchestrator.environments if orchestrator is not None else ())]
    asked += [(_OF_EVALUATIONS, section) for section in (evaluations.environments if evaluations else None) or ()]
    for asked_by, section in asked:
        of_section = files_of_environment(section)
        # A module is named by its own name, a file by its path.
        shown = {key if " = " in key else f"{key} = {path}": path for key, path in of_section.items()}
        files |= {f"{asked_by}environment '{section.label}', {key}": path for key, path in shown.items()}
    for name, path in files.items():
        try:
            found[name] = content_digest(path)
        except OSError as error:
            raise ReadError(f"{path} cannot be read: {error.strerror or error}") from None
    return found


def changed_inputs(now: Mapping[str, str], before: Mapping[str, str]) -> list[str]:
    """Return a line `name: old -> new` for each input that both have, and that is another one now.

    Of a tokenizer, a file that came or went, such as `chat_template.jinja`, changes what is computed as well.
    """
    knows = all(any(name.startswith(_TOKENIZER) for name in known) for known in (now, before))
    names = [*now, *(name for name in before if name not in now)]
    both = [name for name in names if (name in now and name in before) or (knows and name.startswith(_TOKENIZER))]
    pairs = [(name, before.get(name, "not there"), now.get(name, "not there")) for name in both]
    return [f"{name}: {old} -> {new}" for name, old, new in pairs if old != new]


def change_training(changed: list[str]) -> bool:
    """Whether lines of `changed_inputs` are about more than evaluations."""
    return any(not line.startswith(_OF_EVALUATIONS) for line in changed)


def inputs_of(configs: Path | None) -> dict[str, str]:
    """Return what the attempt with the settings in `configs` had noted; nothing where it has noted nothing.

    Raises:
        DataError: what it had noted is damaged.
        OSError: it cannot be read.
    """
    if configs is None or not (path := configs / INPUTS_NAME).exists():
        return {}
    try:
        return checked.decode(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}") from None


def libraries_of(checkpoint: Path | None) -> dict[str, str]:
    """Return the versions of libraries that saved `checkpoint`, a whole one."""
    return dict(read_manifest(checkpoint).libraries) if checkpoint is not None else {}


def _models(trainer: TrainingCommand, *, is_fresh: bool) -> dict[str, str]:
    """Return what names a model that the trainer loads, by dotted key."""
    found: dict[str, Path | str | None] = {"model.name": trainer.model.name}
    if trainer.ckpt is not None and is_fresh:
        found["ckpt.weights_only"] = trainer.ckpt.weights_only
    if isinstance(trainer, TrainerConfig):
        found["critic.name"] = trainer.critic and trainer.critic.name
        found["kl.reference"] = trainer.kl and trainer.kl.reference
        found["reward_model.name"] = trainer.reward_model and trainer.reward_model.name
    if isinstance(trainer, DpoConfig):
        found["loss.reference_model"] = trainer.loss.reference_model
    return {key: str(name) for key, name in found.items() if name}


def _functions(trainer: TrainingCommand) -> list[tuple[str, str]]:
    """Return what may name code that the trainer computes with, and its key."""
    if not isinstance(trainer, TrainerConfig):
        return []
    return [("loss.type", trainer.loss.type), *(("advantage", name) for name in trainer.advantages)]


def _tokenizer_files(trainer: TrainingCommand) -> list[Path]:
    directory = Path(trainer.model.tokenizer_name)
    templates = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    return [*(path for name in _OF_TOKENIZERS if (path := directory / name).is_file()), *templates]
