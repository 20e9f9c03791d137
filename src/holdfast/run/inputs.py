"""Checks models and data with local paths before anything loads them, so that mistakes show in a second.

The launcher checks before it starts a process, and each loader checks again; hub ids pass. In files, the checks only
read what identifies them: first and last bytes, and the headers of weights. When the trainer fills the model, it
compares every tensor again (`holdfast.trainer.checkpoint.init_from`).
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import msgspec

from holdfast.config.inference import InferenceConfig
from holdfast.config.training import SupervisedCommand, TrainedModelConfig
from holdfast.errors import CheckpointError, ConfigError, DataError, ReadError, is_storage_failure
from holdfast.process.events import report
from holdfast.run import manifest
from holdfast.run.checkpoints import Kind, kind_of, require_weights, verify_checkpoint
from holdfast.run.data_files import find_files
from holdfast.run.manifest import MANIFEST_NAME, Verification
from holdfast.run.run_dir import RunDir

_TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab*", "*.tiktoken", "tekken.json", "encoder.json", "spiece*")
_COPY = "Copy it again from where the model comes from."
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


def check_model_path(name: str, *, key: str) -> None:
    """Refuse a local path without config.json; names of a hub (`owner/model`) pass, if no directory has that name.
    Raise DataError if the directory does not exist, or holds no model."""
    path = Path(name)
    looks_local = name.startswith((".", "/", "~")) or name.count("/") != 1 or path.is_dir()
    if not looks_local:
        return
    if not (path / "config.json").is_file():
        what = "has no config.json" if path.is_dir() else "is not a directory"
        raise DataError(f"{key} = '{name}' {what} (from {Path.cwd()}). {_what_to_give(path)}")
    config = _read_object(path / "config.json", key=key)
    if not isinstance(config.get("model_type"), str):
        raise DataError(
            f"{key} = '{name}': its config.json names no model_type, such as \"qwen3\", so nothing says what kind of "
            "model it is. Copy config.json again from where the model comes from."
        )


def ask_hub(name: str, *, key: str, file: str = "config.json") -> None:
    """Ask the hub for a small file of a model that no directory holds, and print that: a hub may be slow, or silent.
    Raise DataError if the hub does not have the model, or cannot be reached while the cache has no model."""
    if os.path.isdir(name):  # noqa: PTH112 - whatever the text is
        return
    report(f"asking the hub for {name}")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError

    try:
        hf_hub_download(name, file)
    except LocalEntryNotFoundError:
        raise DataError(
            f"{key} = '{name}' is not a directory (from {Path.cwd()}), its {file} is not in the cache of the hub, and "
            "the hub cannot be reached or is not to be (HF_HUB_OFFLINE). Name a directory, or try again with a "
            "connection."
        ) from None
    except EntryNotFoundError:  # the hub has the model, without this file
        return
    except (HFValidationError, OSError) as error:
        if is_storage_failure(error):  # of this machine's cache
            raise
        reason = str(error).strip().splitlines()[0].rstrip(" .:")
        raise DataError(
            f"{key} = '{name}' is not a directory (from {Path.cwd()}), and the hub has no such model: {reason}."
        ) from None


def _what_to_give(path: Path) -> str:
    if path.suffix == ".gguf" or (path.is_dir() and any(path.glob("*.gguf"))):
        return "GGUF files cannot be trained or served here: give the directory with safetensors that they come from."
    adapter = path / "adapter_config.json"
    if adapter.is_file():
        try:
            base = _read_object(adapter, key="adapter").get("base_model_name_or_path")
        except (DataError, ReadError):
            base = None
        return (
            f"It holds an adapter{f' for {base}' if base else ''} and no model: give the model that the adapter is "
            f"for, with `--model.lora --ckpt.init-from {path}`; or merge the two (peft's merge_and_unload)."
        )
    for run in (path, *path.parents[:2]):
        if versions := RunDir(run).published_weights():
            where = "is" if run == path else "is in"
            newest = f"{run}/weights/step_{versions[-1]}"
            return f"It {where} the directory of a run: give weights of the run, the newest are {newest}."
    home = "`~` is not replaced here: write the whole path. " if path.parts[:1] and path.parts[0][:1] == "~" else ""
    maker = Path("examples", path.parent.name, "make_model.py")
    if path == Path("outputs", path.parent.name, "model") and maker.is_file():
        group, module = path.parent.name, ".".join(maker.with_suffix("").parts)
        home = f"Make it by `uv run --group {group} python -m {module}`, or name another model. "
    return f"{home}Give a directory with config.json, safetensors and tokenizer, or a hub id such as Qwen/Qwen3-0.6B."


def check_weights_path(name: str, *, key: str = "model.name", needs_index: bool = True) -> None:
    """Refuse a local directory without weights, or whose weights are not all there.

    Args:
        key: the setting that names the directory.
        needs_index: for transformers, which reads several files by their index; vLLM reads all that are there.

    Raise DataError if it has none that can be read, or a file is missing, cut or something else; ReadError if a file
    cannot be read.
    """
    path = Path(name)
    if not path.is_dir():
        return
    if (path / _WEIGHTS).is_file():
        files = [_WEIGHTS]
    elif (path / _INDEX).is_file():
        places = _read_object(path / _INDEX, key=key).get("weight_map")
        files = sorted({str(file) for file in places.values()}) if isinstance(places, dict) else []
        if lacking := [file for file in files if not (path / file).is_file()]:
            raise DataError(
                f"{key} = '{name}' lacks {len(lacking)} of the {len(files)} files that its {_INDEX} names: "
                f"{_some(lacking)}. Copy what is missing from where the model comes from."
            )
    elif needs_index or not any(path.glob("*.safetensors")):
        remedy = "Start with --model.load dummy, and push them."
        if needs_index:
            is_policy = key == "model.name"
            remedy = "Set model.init = random to train from scratch." if is_policy else "Name a directory with weights."
        raise DataError(f"{key} = '{name}' {_no_weights(path, remedy=remedy)}")
    else:
        files = sorted(file.name for file in path.glob("*.safetensors"))
    for file in files:
        if wrong := _wrong_with_weights(path / file):
            raise DataError(f"{key} = '{name}': {file} {wrong}")


def _no_weights(path: Path, *, remedy: str) -> str:
    """Say what a directory has in place of weights, and what to do; `remedy`: if there is nothing."""
    if there := sorted(file.name for file in path.glob("*.safetensors")):
        return (
            f"has neither {_WEIGHTS} nor {_INDEX}, which says what is in {_some(there)}. Copy what is missing from "
            "where the model comes from."
        )
    if any(path.glob("*.gguf")):
        return f"has no *.safetensors. {_what_to_give(path)}"
    if kind_of(path) is Kind.PICKLED:
        return "holds pickles, which may hold code and are never loaded: have transformers load and save the model"
    return f"has no *.safetensors. {remedy}"


def _wrong_with_weights(path: Path) -> str | None:
    """Return what a file of safetensors is instead, by its header; None for a whole file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            beginning = file.read(8)
            if beginning == b"version ":
                return "is a pointer of Git LFS in the place of the weights: run `git lfs pull` there."
            length = int.from_bytes(beginning, "little")
            if size < 8 or size < 8 + length:
                return f"is not a safetensors file, or was cut: it has {size} bytes. {_COPY}"
            header = json.loads(file.read(length))
            wanted = 8 + length + max(one["data_offsets"][1] for one in header.values() if "data_offsets" in one)
    except OSError as error:
        raise ReadError.of(path, error) from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return f"is not a safetensors file: its header cannot be read. {_COPY}"
    return None if size >= wanted else f"was cut: it has {size} bytes, and its header says {wanted}. {_COPY}"


def check_tokenizer_path(name: str, *, key: str) -> None:
    """Refuse a local directory without any file of a tokenizer; hub ids pass. Raise DataError if it has none."""
    path = Path(name)
    if path.is_dir() and not any(any(path.glob(pattern)) for pattern in _TOKENIZER_FILES):
        raise DataError(
            f"{key} = '{name}' has no tokenizer (no tokenizer.json). Copy it from where the model comes from into that "
            "directory, or name a directory that has one with --model.tokenizer."
        )


def check_data_path(name: str, *, key: str, split: str | None = None) -> None:
    """Refuse a local file, directory or glob that is not there, or whose files cannot hold rows; names of a hub pass.
    Raise DataError if so; ReadError if a file cannot be read. `split`: of a directory; unset: any."""
    find_files(name, key=key, split=split)


def _read_object(path: Path, *, key: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ReadError.of(path, error) from error
    except ValueError as error:
        raise DataError(f"{key}: {path} is not JSON: {error}. Copy it again from where it comes from.") from None
    if not isinstance(value, dict):
        raise DataError(f"{key}: {path} holds no JSON object. Copy it again from where it comes from.")
    return value


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")


_INTERPRETED = (b'"factor"', b'"model_max_length"')
_ALLOWS_LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
_REPLACE_THE_CONFIG = ("hf-", "config-format")  # arguments of vLLM, by their beginning


def check_max_len(config: InferenceConfig, model: str | Path, *, key: str) -> None:
    """Refuse a server for longer sessions than its model has positions for, which vLLM would refuse after it was
    imported. Names of a hub pass, and models whose positions vLLM has to interpret.

    Args:
        model: its directory.
        key: of the section of the served model, such as `inference.model`.

    Raise ConfigError, naming the setting and the file.
    """
    allows_longer = os.environ.get(_ALLOWS_LONGER, "0").strip().lower() in ("1", "true")
    if allows_longer or any(name.replace("_", "-").startswith(_REPLACE_THE_CONFIG) for name in config.engine.args):
        return
    path = Path(model) / "config.json"
    try:
        text = path.read_bytes()
        fields = json.loads(text)
    except (OSError, ValueError):  # the check of the model itself raises the error
        return
    # Scaled embeddings, and models of several parts, are for vLLM to interpret.
    is_plain = text.count(b'"max_position_embeddings"') == 1 and not any(word in text for word in _INTERPRETED)
    longest = fields.get("max_position_embeddings") if isinstance(fields, dict) and is_plain else None
    if not isinstance(longest, int) or config.model.max_len <= longest:
        return
    raise ConfigError(
        f"{key}.max_len = {config.model.max_len} is more than the {longest} positions of the model "
        f"(max_position_embeddings in {path}). Set --{key.replace('_', '-')}.max-len {longest}, or less, and any "
        f"seq_len to no more than that. If the model is known to take more, set {_ALLOWS_LONGER}=1 in the environment."
    )


def check_warm_start(path: Path, model: TrainedModelConfig, *, how: Verification) -> None:
    """Refuse weights that are damaged. Directories with a manifest are verified as `how` says; other safetensors files
    are checked for their length. The names and shapes of tensors are compared by the trainer, which fills its model
    with them. Raise CheckpointError, saying what was found and what is needed."""
    kind = require_weights(path)
    if kind is Kind.CHECKPOINT:
        verify_checkpoint(path, how=how)
    elif kind in (Kind.WEIGHTS, Kind.ADAPTER) and (path / MANIFEST_NAME).exists():
        manifest.verify(path, how=how)
    if kind is Kind.ADAPTER and model.lora is None:
        raise CheckpointError(
            f"{path} (ckpt.init_from) holds a LoRA adapter, and weights are needed. Train it on with --model.lora and "
            "the model that it belongs to as --model.name, or merge it: ckpt export RUN STEP --to DIR --base NAME."
        )
    if model.lora is not None:
        return  # the adapter's tensors follow from rank and targets, which only the trainer knows
    for file in [path] if kind is Kind.TENSORS else _read_by_the_trainer(path):
        if wrong := _wrong_with_weights(file):
            raise CheckpointError(f"{file} (ckpt.init_from) {wrong}")


def _read_by_the_trainer(directory: Path) -> list[Path]:
    """Return the weights files of a Hugging Face directory: by its index, the usual name, or all."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.is_file():
        return [directory / name for name in sorted(set(_read_json(index).get("weight_map", {}).values()))]
    return [single] if single.is_file() else sorted(directory.glob("*.safetensors"))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def count_parameters(name: str) -> int | None:
    """Return the parameters of a model in a local directory, by the headers of its files; None where none are there."""
    total = 0
    try:
        for path in _read_by_the_trainer(Path(name)):  # others beside them may hold the same weights once more
            with path.open("rb") as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            total += sum(math.prod(entry["shape"]) for key, entry in header.items() if key != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, CheckpointError):  # it was checked, or comes out
        return None
    return total or None


class Survey(msgspec.Struct, frozen=True):
    """Numbers of the training data.

    Attributes:
        kind: `samples`, `pairs` or `answers`.
        samples: how many, without those held out.
        held_out: how many are for validation.
        tokens: of the former, prompts included.
        first: the first one, or the row that was asked for, as text, by its name and side.
        notes: what was warned of.
        fingerprint: of the data as the trainer would read them; empty if it was not asked for.
    """

    kind: str
    samples: int
    held_out: int
    tokens: int
    first: dict[str, str]
    notes: list[str] = []
    fingerprint: str = ""


def steps_of(config: SupervisedCommand, survey: Survey, epochs: float) -> int:
    """Return the steps after which all data were trained `epochs` times; the last one may begin another time."""
    # Not by the product of floats: 0.1 of 30 samples are 3, and not 3.0000000000000004.
    samples = math.ceil(round(epochs * survey.samples, 6))
    return max(1, -(-samples // config.data.batch_size))


def steps_per_epoch(config: SupervisedCommand, survey: Survey) -> float:
    """Return the steps in which each sample is trained once."""
    return survey.samples / config.data.batch_size


def epochs_of(config: SupervisedCommand, survey: Survey) -> str:
    """Return how often the run trains each sample, in few digits."""
    return f"{config.max_steps / steps_per_epoch(config, survey):.3g}"


def in_short(count: int) -> str:
    """Return a number in few digits: `84k`."""
    for divisor, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= divisor:
            return f"{count / divisor:.3g}{unit}"
    return str(count)


def data_line(config: SupervisedCommand, survey: Survey) -> str:
    """Return what a dry run says of the data."""
    held_out = f" and {survey.held_out:,} held out" if survey.held_out else ""
    steps = steps_per_epoch(config, survey)
    return (
        f"data: {config.data.label}: {survey.samples:,} {survey.kind}{held_out}, {in_short(survey.tokens)} tokens, "
        f"{steps:,.4g} steps an epoch; this run: {epochs_of(config, survey)} epochs"
    )


def too_few_for_a_step(config: SupervisedCommand, survey: Survey) -> str | None:
    """Return a warning if one step trains some of the data more than once."""
    size = config.data.batch_size
    if size <= survey.samples:
        return None
    return (
        f"data.batch_size = {size} exceeds the {survey.samples:,} {survey.kind}: a step trains some of them twice or "
        "more, and epochs are rounded up to whole steps; lower data.batch_size"
    )
