"""Reads training states of other programs, for `ckpt import`: weights, AdamW's moments, step and learning rate.

    model.safetensors or adapter_model.safetensors, optimizer.pt, trainer_state.json    Trainer of transformers, TRL
    pytorch_model_fsdp_0/, optimizer_0/, or pytorch_model_fsdp.bin, optimizer.bin       FSDP of accelerate
    .metadata                                                                           torch.distributed.checkpoint

No code of a source runs: pickles are read as tensors and plain values only.
"""

import io
import json
import pickle
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from holdfast.errors import CheckpointError
from holdfast.run.checkpoints import describe_found
from holdfast.run.weights import ADAPTER_NAME
from holdfast.trainer.checkpoint.dcp import IndexReader, some
from holdfast.trainer.checkpoint.init_from import DcpSource, Found, Source, local_part

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
MASTER = "master_param"
"""The name by which optimizers keep weights in float32 beside weights in bfloat16."""
_STATE = re.compile(r"(?:optim(?:izers?)?\.)?state\.(?P<place>.+)\.(?P<key>[^.]+)")
_GROUP = re.compile(r"(?:optim(?:izers?)?\.)?param_groups\.(?P<place>.+)\.(?P<key>[^.]+)")
_STATE_NAME = "trainer_state.json"
_SCHEDULERS = ("scheduler.pt", "scheduler.bin")
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".distcp")


class _Line(TypedDict):
    step: int
    learning_rate: NotRequired[float | None]
    num_tokens: NotRequired[float | None]


class _TrainerState(TypedDict):
    global_step: Annotated[int, msgspec.Meta(ge=1)]
    max_steps: NotRequired[int | None]
    epoch: NotRequired[float | None]
    log_history: NotRequired[list[_Line] | None]


class TensorSource:
    """Tensors in memory, or mapped from a file."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.found = {name: Found(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}

    def fill(self, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors of a single rank."""
        for name, target in targets.items():
            local_part(target)[0].copy_(self._tensors[name])


@dataclass(frozen=True)
class Moments:
    """The optimizer's state of every parameter.

    Attributes:
        names: of tensors in `source`, by place and key. A place is the name of a parameter, or its number.
        groups: settings of parameter groups; `params` are places. Empty: the source does not tell.
    """

    source: Source
    names: dict[str, dict[str, str]]
    groups: list[dict[str, Any]]


@dataclass(frozen=True)
class ForeignState:
    """A training state of another program.

    Attributes:
        weights: a path for `load_weights_only`, or tensors.
        step: optimizer steps done.
        rate: the learning rate of the next step; None if unknown.
        trainer: what `trainer_state.json` says, if there is one.
        untold: names of files that are not read.
    """

    directory: Path
    weights: Path | TensorSource
    moments: Moments
    step: int
    rate: float | None
    trainer: dict[str, Any] = field(default_factory=dict)
    untold: list[str] = field(default_factory=list)


def read_foreign(directory: Path) -> ForeignState:
    """Return the training state in `directory`. Raise CheckpointError if it is of another kind, incomplete or damaged,
    or holds something else than tensors and plain values."""
    trainer = _trainer_state(directory)
    if (directory / ".metadata").exists():
        weights, moments, used = directory, _sharded_moments(directory), [".metadata"]
    elif (directory / "pytorch_model_fsdp_0").is_dir():
        weights, moments = directory / "pytorch_model_fsdp_0", _sharded_moments(directory / "optimizer_0")
        used = ["pytorch_model_fsdp_0", "optimizer_0"]
    elif (directory / "pytorch_model_fsdp.bin").exists():
        weights = TensorSource(_tensors_of(directory / "pytorch_model_fsdp.bin"))
        moments, used = _whole_moments(directory / "optimizer.bin"), ["pytorch_model_fsdp.bin", "optimizer.bin"]
    elif any(directory.glob("global_step*/*_optim_states.pt")):
        raise CheckpointError(
            f"{directory} is a checkpoint of DeepSpeed ZeRO, whose pickles hold objects of DeepSpeed and are never "
            "loaded. DeepSpeed converts the weights: `python zero_to_fp32.py . OUT --safe_serialization` there, then "
            "--ckpt.init-from OUT. For the moments, save with FSDP or without ZeRO."
        )
    elif any(directory.glob("model*.safetensors")) or (directory / ADAPTER_NAME).exists():
        if not trainer:
            raise CheckpointError(
                f"{directory} has no {_STATE_NAME}, which transformers' Trainer writes last: the checkpoint is not "
                "whole, or only weights. Give an earlier checkpoint, or take the weights alone with --ckpt.init-from."
            )
        weights, moments, used = directory, _whole_moments(directory / "optimizer.pt"), ["optimizer.pt"]
    else:
        inside = ", ".join(sorted(one.name for one in directory.glob("checkpoint-*")))
        found = f"{describe_found(directory)}{' that has ' if inside else ''}{inside}"
        raise CheckpointError(
            f"{directory} is {found}. Needed: a checkpoint of transformers' Trainer or TRL "
            "(checkpoint-N), of accelerate with FSDP, or a directory of torch.distributed.checkpoint."
        )
    rates = [group["lr"] for group in moments.groups if "lr" in group] or _rates(directory)
    if len({float(rate) for rate in rates}) > 1:
        raise CheckpointError(f"{directory}: its parameter groups have several learning rates, and a run has one")
    used += [_STATE_NAME, *_SCHEDULERS]
    untold = [
        path.name for path in sorted(directory.iterdir()) if not (path.name in used or path.name.endswith(_WEIGHTS))
    ]
    return ForeignState(
        directory,
        weights,
        moments,
        int(trainer["global_step"]) if trainer else _steps_done(moments, directory),
        float(rates[0]) if rates else None,
        trainer,
        untold,
    )


def _trainer_state(directory: Path) -> dict[str, Any]:
    path = directory / _STATE_NAME
    if not path.exists():
        return {}
    try:  # not msgspec.json: transformers 4 writes NaN
        return dict(msgspec.convert(json.loads(path.read_bytes()), type=_TrainerState))
    except (msgspec.ValidationError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}. Give an earlier checkpoint.") from None


def _plain(path: Path) -> Any:
    """Return what a pickle of torch.save holds: tensors and plain values."""
    if not path.exists():
        raise CheckpointError(
            f"{path.parent} has no {path.name}, so no state of an optimizer: it was saved without it "
            "(save_only_model), or is not whole. --ckpt.init-from takes the weights alone."
        )
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "GLOBAL" in line), str(error).splitlines()[0])
        raise CheckpointError(
            f"{path} holds something else than tensors and plain values, or is damaged, and is not loaded: "
            f"{reason.strip()}. --ckpt.init-from takes the weights alone."
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read: {str(error).splitlines()[0]}. It may not be whole.") from None


def _tensors_of(path: Path) -> dict[str, Tensor]:
    found = _plain(path)
    if not isinstance(found, dict) or not all(isinstance(one, Tensor) for one in found.values()):
        raise CheckpointError(f"{path} does not hold tensors by name")
    return found


def _whole_moments(path: Path) -> Moments:
    found = _plain(path)
    if not (isinstance(found, dict) and isinstance(found.get("state"), dict) and "param_groups" in found):
        raise CheckpointError(f"{path} is not the state of one optimizer of torch (state, param_groups)")
    tensors: dict[str, Tensor] = {}
    names: dict[str, dict[str, str]] = {}
    try:
        for place, state in found["state"].items():
            for key, value in state.items():
                tensors[f"{place}.{key}"] = value if isinstance(value, Tensor) else torch.tensor(float(value or 0))
                names.setdefault(str(place), {})[key] = f"{place}.{key}"
        groups = [{**group, "params": [str(place) for place in group["params"]]} for group in found["param_groups"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} has state that AdamW of torch does not have: {error}") from None
    return Moments(TensorSource(tensors), names, groups)


def _sharded_moments(directory: Path) -> Moments:
    if not (directory / ".metadata").exists():
        raise CheckpointError(
            f"{directory} has no .metadata, which torch writes last: the checkpoint is not whole, or has no optimizer. "
            "Give an earlier checkpoint, or take the weights alone with --ckpt.init-from."
        )
    source = DcpSource(directory)
    names: dict[str, dict[str, str]] = {}
    for name in source.found:
        if match := _STATE.fullmatch(name):
            names.setdefault(match["place"], {})[match["key"]] = name
    if not names:
        raise CheckpointError(
            f"{directory} holds no state of an optimizer by names of parameters (optimizer.state.NAME.exp_avg); it "
            f"has {some(list(source.found))}. --ckpt.init-from takes the weights alone."
        )
    if all(place.isdecimal() for place in names):
        raise CheckpointError(
            f"{directory} holds the optimizer's state by numbers of parameters instead of names. Save what "
            "torch.distributed.checkpoint.state_dict.get_state_dict returns. --ckpt.init-from takes the weights alone."
        )
    return Moments(source, names, _sharded_groups(directory))


class _PlainValues(DefaultLoadPlanner):
    """Loads objects as plain values; torch's own planner would run their code."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)
        self.loaded: dict[str, Any] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.loaded[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def _sharded_groups(directory: Path) -> list[dict[str, Any]]:
    """Return the parameter groups, or one for each parameter if torch has stored them so; empty if it has not."""
    index, planner = IndexReader(directory), _PlainValues()
    entries = index.read_metadata().state_dict_metadata
    wanted = {name for name, one in entries.items() if isinstance(one, BytesStorageMetadata) and _GROUP.fullmatch(name)}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            torch_dcp.load(dict.fromkeys(wanted), storage_reader=index, planner=planner, no_dist=True)
    except torch_dcp.CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"{directory}: settings of the optimizer cannot be read: {reason}") from None
    groups: dict[str, dict[str, Any]] = {}
    for name, value in planner.loaded.items():
        match = _GROUP.fullmatch(name)
        assert match is not None
        groups.setdefault(match["place"], {"params": [match["place"]]})[match["key"]] = value
    return list(groups.values())


def _rates(directory: Path) -> list[float]:
    """Return the learning rates of the next step as a scheduler beside the tensors says."""
    path = next((directory / name for name in _SCHEDULERS if (directory / name).exists()), None)
    return [] if path is None else list(_plain(path).get("_last_lr", []))


def _steps_done(moments: Moments, directory: Path) -> int:
    """Return the largest step counter of the optimizer."""
    steps = {names["step"]: torch.zeros(()) for names in moments.names.values() if "step" in names}
    if not steps:
        raise CheckpointError(f"{directory} does not say how many steps were trained")
    moments.source.fill(steps)
    return int(max(step.item() for step in steps.values()))
