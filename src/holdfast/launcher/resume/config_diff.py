"""Changes of a resumed run: its settings, its schedule, its model, and the content of the files that it uses.

Every attempt notes versions of libraries and digests of files: tokenizer, models, named files and code. The next
attempt prints a line for each that has changed. It does not use journaled batches that were made with other inputs.
"""

from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import tomli
from pydantic import ValidationError

from holdfast.config.base import Command
from holdfast.config.load import to_toml
from holdfast.config.marks import Mark, has_mark
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.config.preference import DpoConfig
from holdfast.config.resolved import is_free, slots_of
from holdfast.config.rl_trainer import TrainerConfig
from holdfast.config.training import EvaluatedCommand, SupervisedCommand, TrainingCommand, learning_rate, schedule_end
from holdfast.errors import CheckpointError, DataError, ReadError
from holdfast.run import checked
from holdfast.run.data_files import find_files
from holdfast.run.manifest import ONE_OF, content_digest, library_versions, read_manifest
from holdfast.run.run_dir import INPUTS_NAME
from holdfast.run.settings import file_of_object, files_of_environment, files_of_model, flat_settings, without_secrets

_TOKENIZER = "tokenizer, "
_OF_EVALUATIONS = "eval, "
_OF_TOKENIZERS = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model", "generation_config.json",
)  # fmt: skip

# Keys of a transformers config, at any depth, that are sizes of tensors or of their parts.
SIZES = {
    "hidden_size", "n_embd", "intermediate_size", "n_inner", "moe_intermediate_size",
    "num_hidden_layers", "n_layer", "num_attention_heads", "n_head", "num_key_value_heads", "head_dim",
    "vocab_size", "num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "q_lora_rank",
    "kv_lora_rank",
}  # fmt: skip
_SHAPING = SIZES | {"model_type", "tie_word_embeddings", "attention_bias", "mlp_bias"}


@dataclass(frozen=True)
class ConfigDiff:
    """Settings that differ, one line `key: old -> new` each.

    Attributes:
        computing: settings that change the computation from here on.
        free: settings that do not.
    """

    computing: list[str]
    free: list[str]

    def describe(self, name: str, since: str) -> list[str]:
        """Return the lines to print about the process `name`, if any."""
        lines = []
        for text, keys in (("changes what is computed from here on", self.computing), ("free to change", self.free)):
            if keys:
                lines += [f"{name}: differs from {since}; {text}:", *(f"  {key}" for key in keys)]
        return lines


def compare_settings(before: Mapping[str, Any], after: Command) -> ConfigDiff:
    """Return what differs between two resolved configurations of one process."""
    changed = changed_settings(before, settings_of(after), type(after))
    return ConfigDiff(
        computing=[line for key, line in changed.items() if not is_free(type(after), key)],
        free=[line for key, line in changed.items() if is_free(type(after), key)],
    )


def changed_settings(before: Mapping[str, Any], after: Mapping[str, Any], command: type[Command]) -> dict[str, str]:
    """Return a line `key: old -> new` for each setting that differs, by its key."""
    new = flat_settings(after)
    known = {key: "float32" for key in new if key.endswith("optim.moments_dtype")}  # what older runs did
    old = known | flat_settings(before)
    changed = {
        key: f"{key}: {_shown(old, key)} -> {_shown(new, key)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not has_mark(command, key, Mark.PLACE)
    }
    slots = slots_of(before), slots_of(after)
    if None not in slots and slots[0] != slots[1]:
        changed["slots"] = f"client.max_concurrency times engines, the slots of rounds: {slots[0]} -> {slots[1]}"
    return changed


def _shown(settings: dict[str, Any], key: str) -> str:
    return repr(without_secrets(settings)[key]) if key in settings else "unset"


def describe_stretch(before: Mapping[str, Any], after: TrainingCommand, *, step: int) -> str | None:
    """Return a line if another `max_steps` than in `before` moves the end of the schedule after `step`."""
    try:
        optim = type(after.optim).model_validate(before.get("optim", {}))
    except ValidationError:  # of another version, or another type
        return None
    old_max_steps = before.get("max_steps", after.max_steps)
    old_end, new_end = schedule_end(optim, old_max_steps), schedule_end(after.optim, after.max_steps)
    if after.optim.schedule_steps is not None or None in (old_end, new_end) or old_end == new_end:
        return None
    stretched = learning_rate(step + 1, after.optim, after.max_steps)
    kept = after.optim.model_copy(update={"schedule_steps": old_end})
    unchanged = learning_rate(step + 1, kept, after.max_steps)
    return (
        f"the {after.optim.schedule} schedule now ends at step {new_end} instead of {old_end}: the learning rate of "
        f"step {step + 1} is {stretched:.6g} instead of {unchanged:.6g}. Keep the old schedule with "
        f"--optim.schedule-steps {old_end}."
    )


def settings_of(config: Command) -> dict[str, Any]:
    """Return `config` as read back from its file."""
    return tomli.loads(to_toml(config))


def refuse_other_model(
    saved: Path,
    wanted: Path,
    *,
    model_name: str,
    what: str,
    keys: Set[str] = _SHAPING,
    remedy: str = "A run continues with its own model. Give that as --model.name.",
) -> None:
    """Refuse to load `what` into a model of another shape, by two files config.json, if both exist. Raise
    CheckpointError with the keys that differ, and the `remedy`. `keys`: that must be equal."""
    if not (saved.is_file() and wanted.is_file()):
        return
    try:
        old, new = (flat_settings(msgspec.json.decode(path.read_bytes(), type=dict)) for path in (saved, wanted))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{saved} or {wanted} is not JSON: {error}") from None
    changed = [
        f"{key}: {old[key]!r} -> {new[key]!r}"
        for key in sorted(old.keys() & new.keys())
        if key.rsplit(".", 1)[-1] in keys and None not in (old[key], new[key]) and old[key] != new[key]
    ]
    if changed:
        raise CheckpointError(
            f"{what} is of another model than model.name = '{model_name}':\n"
            + "".join(f"         {line}\n" for line in changed)
            + f"       {remedy}"
        )


def refuse_other_tensors(before: Mapping[str, Any], after: TrainingCommand, *, step: int) -> None:
    """Refuse to continue with other tensors than the checkpoint's: adapters, critic, average, reference. Raise
    CheckpointError with the differences. `before`: the resolved configuration until `step`."""
    old, lora = before.get("model", {}).get("lora"), after.model.lora
    new = lora.model_dump() if lora is not None else None
    if old is None or new is None:
        changed = [] if old is new else [f"model.lora: {'set' if old else 'unset'} -> {'set' if new else 'unset'}"]
    else:
        keys = [key for key in ("rank", "target_modules") if key in old and old[key] != new[key]]
        changed = [f"model.lora.{key}: {old[key]!r} -> {new[key]!r}" for key in keys]
    for part in ("critic", "ema"):
        had, has = part in before, getattr(after, part, None) is not None
        changed += [f"{part}: {'set' if had else 'unset'} -> {'set' if has else 'unset'}"] if had != has else []
    had, has = (settings.get("kl", {}).get("refresh_interval") for settings in (before, settings_of(after)))
    if (had is None) != (has is None):
        changed.append(f"kl.refresh_interval: {had or 'unset'} -> {has or 'unset'}")
    for prefix, of in (("", lambda table: table), ("critic.", lambda table: table.get("critic", {}))):
        optims = [of(settings).get("optim", {}) for settings in (before, settings_of(after))]
        for key, default in (("type", "adamw"), ("moments_dtype", "float32")):
            had, has = (optim.get(key, default) for optim in optims)
            changed += [f"{prefix}optim.{key}: {had!r} -> {has!r}"] if all(optims) and had != has else []
    if changed:
        raise CheckpointError(
            f"the checkpoint of step {step} holds other tensors than this configuration has:\n"
            + "".join(f"         {line}\n" for line in changed)
            + "       A run continues with its own tensors. For a new run from its weights, export them (ckpt export "
            "RUN STEP --to DIR, with --base NAME to merge adapters) and give that as --model.name."
        )


def find_inputs(trainer: TrainingCommand, orchestrator: OrchestratorConfig | None, *, is_fresh: bool) -> dict[str, str]:
    """Return versions and digests by the names that messages give them. Raise ReadError if a file cannot be read.
    `is_fresh`: the run begins with the weights of `model.name`; else with a checkpoint."""
    found = {name: number for name, number in library_versions().items() if number != "not installed"}
    files = {f"{_TOKENIZER}{path.name}": path for path in _tokenizer_files(trainer)}
    for key, model in models_of(trainer, is_fresh=is_fresh).items():
        files |= {f"{key}, {path.name}": path for path in files_of_model(Path(model), has_weights=is_fresh)}
    if isinstance(trainer, SupervisedCommand):
        with suppress(DataError):  # who loads the data refuses them
            for source in trainer.data.sources:
                data = find_files(source.name, key="data.name", split=source.split)
                # Files of several sources may have the same name.
                owner = "data.name" if source.name == trainer.data.name else f"data.mix, {source.name}"
                files |= {f"{owner}, {file.label}": file.path for file in data or ()}
    for key, name in _functions(trainer):
        if (path := file_of_object(name)) is not None:
            files[f"{key} = {name}"] = path
    evaluations = trainer.eval if isinstance(trainer, EvaluatedCommand) else orchestrator and orchestrator.eval
    asked = [("", section) for section in (orchestrator.environments if orchestrator is not None else ())]
    asked += [(_OF_EVALUATIONS, section) for section in (evaluations.environments if evaluations else None) or ()]
    for asked_by, section in asked:
        of_section = files_of_environment(section)
        shown = {key if " = " in key or ONE_OF in key else f"{key} = {path}": path for key, path in of_section.items()}
        files |= {f"{asked_by}environment '{section.label}', {key}": path for key, path in shown.items()}
    for name, path in files.items():
        try:
            found[name] = content_digest(path)
        except OSError as error:
            raise ReadError(f"{path} cannot be read: {error.strerror or error}") from None
    return found


def changed_inputs(now: Mapping[str, str], before: Mapping[str, str]) -> list[str]:
    """Return a line `name: old -> new` for each input that both have and that has changed, and for each file that has
    come to a tokenizer or a directory of tasks or is gone from it."""
    known = {_owner(name) for name in now} & {_owner(name) for name in before}
    both = [name for name in dict.fromkeys((*now, *before)) if _owner(name) in known]
    pairs = [(name, before.get(name, "not there"), now.get(name, "not there")) for name in both]
    return [f"{name}: {old} -> {new}" for name, old, new in pairs if old != new]


def _owner(name: str) -> str:
    return _TOKENIZER if name.startswith(_TOKENIZER) else name.partition(ONE_OF)[0]


def change_training(changed: list[str]) -> bool:
    """Whether lines of `changed_inputs` concern more than evaluations."""
    return any(not line.startswith(_OF_EVALUATIONS) for line in changed)


def inputs_of(configs: Path) -> dict[str, str]:
    """Return the inputs that an attempt noted beside its settings in `configs`, if any. Raise DataError if they are
    damaged. Raise OSError if they cannot be read."""
    path = configs / INPUTS_NAME
    if not path.exists():
        return {}
    try:
        return checked.decode(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}") from None


def libraries_of(checkpoint: Path | None) -> dict[str, str]:
    """Return the versions of libraries that saved `checkpoint`."""
    return dict(read_manifest(checkpoint).libraries) if checkpoint is not None else {}


def models_of(trainer: TrainingCommand, *, is_fresh: bool) -> dict[str, str]:
    """Return the models that the trainer loads, by dotted key."""
    found: dict[str, Path | str | None] = {"model.name": trainer.model.name}
    if trainer.ckpt is not None and is_fresh:
        found["ckpt.init_from"] = trainer.ckpt.init_from
    if isinstance(trainer, TrainerConfig):
        found["critic.name"] = trainer.critic and trainer.critic.name
        found["kl.reference"] = trainer.kl and trainer.kl.reference
        found["reward_model.name"] = trainer.reward_model and trainer.reward_model.name
    if isinstance(trainer, DpoConfig):
        found["loss.reference_model"] = trainer.reference_model
    return {key: str(name) for key, name in found.items() if name}


def _functions(trainer: TrainingCommand) -> list[tuple[str, str]]:
    """Return the key and name of settings that may name code of the user."""
    if not isinstance(trainer, TrainerConfig):
        return []
    return [("loss.type", trainer.loss.type), *(("advantage", name) for name in trainer.advantages)]


def _tokenizer_files(trainer: TrainingCommand) -> list[Path]:
    directory = Path(trainer.model.tokenizer_name)
    templates = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    return [*(path for name in _OF_TOKENIZERS if (path := directory / name).is_file()), *templates]
