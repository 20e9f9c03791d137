"""Writes training states for other programs, for `ckpt export --format trainer` and `dcp`: `ckpt import` reversed.

trainer    a checkpoint of transformers' Trainer and TRL: weights, optimizer.pt, scheduler.pt, trainer_state.json
dcp        torch.distributed.checkpoint of {"model": ..., "optimizer": ...}, as torch's `get_model_state_dict` and
           `get_optimizer_state_dict` name them; parameter groups also in the flattened form
"""

import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from transformers import PreTrainedModel

from holdfast.config.training import AdamWConfig, LoraConfig, learning_rate, schedule_end
from holdfast.errors import ConfigError
from holdfast.run import atomic, manifest
from holdfast.run.checkpoints import MODEL_DIR, TRAINER_DIR
from holdfast.run.metrics import read_metrics
from holdfast.run.run_dir import RunDir
from holdfast.run.settings import read_settings
from holdfast.trainer.checkpoint.dcp import DigestFiles
from holdfast.trainer.export import Export, TensorReader, Written, export, meta_model, new_directory
from holdfast.trainer.foreign import MOMENTS
from holdfast.trainer.importing import split_by_decay
from holdfast.trainer.model.build import trained_parameters
from holdfast.trainer.model.lora import inject_adapters
from holdfast.trainer.optimizer import build_optimizer

_LOGGED = {"step": "step", "loss": "loss", "grad_norm": "grad_norm", "lr": "learning_rate", "epoch": "epoch"}
_LEFT = "  not there: random generators, order and position in the data"


def export_state(request: Export, form: str) -> Written:
    """Write the training state of a committed checkpoint, which the caller has verified, as `trainer` or `dcp`. Raise
    ConfigError if the step is of another program or optimizer, or options do not fit; SaveError if the storage failed;
    no file is left."""
    step, reader = request.step_directory, TensorReader(request.step_directory / TRAINER_DIR)
    listing, path = manifest.read_manifest(step), step / TRAINER_DIR / "config.toml"
    settings: dict[str, Any] = read_settings(path) if path.exists() else {}
    program, lora = listing.program or "another loop", settings.get("model", {}).get("lora")
    kind = settings.get("optim", {}).get("type", "no optimizer")
    if program not in ("sft", "dpo") or kind != "adamw":
        told = f"--format {form} takes steps of sft and dpo with AdamW, and this step is of {program} with {kind}"
        raise ConfigError(f"{told}: use --format hf")
    if request.dtype is not None or request.base is not None:
        raise ConfigError(f"--format {form} writes what is trained, in float32: leave out --dtype and --base")
    if lora and form == "dcp":
        raise ConfigError(f"--format dcp takes whole weights, and {step} has adapters: use --format trainer or hf")
    model, optim = meta_model(str(step / MODEL_DIR)), AdamWConfig.model_validate(settings["optim"])
    if lora:
        inject_adapters(model, LoraConfig.model_validate(lora))
    names = {id(parameter): name for name, parameter in trained_parameters(model).items()}
    rates = {"lr": learning_rate(listing.step + 1, optim, settings["max_steps"]), "initial_lr": optim.lr}
    groups = build_optimizer(model, optim).param_groups
    for group in groups:
        group |= {**rates, "params": [names[id(one)] for one in group["params"]]}
    if form == "dcp":
        return _write_dcp(request.target, reader, model, groups)
    end, batch = schedule_end(optim, settings["max_steps"]) or settings["max_steps"], settings["data"]["batch_size"]
    metrics = RunDir(step.parent.parent).metrics
    lines = [line for line in (read_metrics(metrics) if metrics.exists() else []) if line["step"] <= listing.step]
    saves, validations = settings.get("ckpt", {}).get("interval") or end, settings.get("val_interval") or end
    every = {"logging_steps": 1, "save_steps": saves, "eval_steps": validations}
    trainer = every | {
        "global_step": listing.step, "max_steps": end, "train_batch_size": batch,
        "epoch": lines[-1].get("epoch", 0) if lines else 0,
        "stateful_callbacks": {"TrainerControl": {"args": {}, "attributes": {}}},  # Trainer adds to this when it saves
        "log_history": [{to: line[key] for key, to in _LOGGED.items() if key in line} for line in lines],
    }  # fmt: skip

    def add(directory: Path) -> None:
        _write_optimizer(directory, reader, split_by_decay(model, [*names.values()]), groups[0], listing.step)
        (directory / "trainer_state.json").write_text(json.dumps(trainer, indent=2) + "\n", encoding="utf-8")

    written = export(replace(request, dtype=None if lora else "float32", add=add))
    told = [
        *filter(None, [written.remark]),
        f"{_LEFT}. Give Trainer learning_rate {optim.lr:g}, a {optim.schedule} schedule down to {optim.min_lr_ratio:g} "
        f"of it, warmup_steps {optim.warmup_steps}, max_steps {end}, batches of {batch}, max_grad_norm "
        f"{optim.max_grad_norm:g}, and the loss of this run. It keeps {every}",
    ]
    if listing.step < optim.warmup_steps:
        told.append(f"  warm-up: from step {listing.step + 2} on, Trainer's rate is a step behind")
    if program == "dpo":
        told.append("  DPOTrainer's reference is the model that it is given: give it --model.name of this run")
    return replace(written, remark="\n".join(told))


def _moments(reader: TensorReader, name: str) -> dict[str, Tensor]:
    return {key: reader.read(f"optim.{name}.{key}").float() for key in MOMENTS}


def _write_optimizer(to: Path, reader: TensorReader, split: Sequence[Any], own: dict[str, Any], step: int) -> None:
    """Write optimizer.pt and scheduler.pt, with numbers and groups as transformers makes them."""
    numbers = {name: number for number, name in enumerate(chain.from_iterable(split))}
    groups = [
        {**own, "weight_decay": decay, "params": [numbers[name] for name in names]}
        for names, decay in zip(split, (own["weight_decay"], 0.0), strict=True)
    ]
    scheduler = {
        "base_lrs": [own["initial_lr"]] * 2, "last_epoch": step, "_step_count": step + 1, "_is_initial": False,
        "_get_lr_called_within_step": False, "_last_lr": [own["lr"]] * 2, "lr_lambdas": [None] * 2,
    }  # fmt: skip
    optimizer = {"state": {number: _moments(reader, name) for name, number in numbers.items()}, "param_groups": groups}
    files = DigestFiles()
    for name, saved in (("optimizer.pt", optimizer), ("scheduler.pt", scheduler)):
        with files.telling(), files.create_stream(to / name, "wb") as file:
            torch.save(saved, cast(Any, file))


def _write_dcp(target: Path, reader: TensorReader, model: PreTrainedModel, groups: list[dict[str, Any]]) -> Written:
    tensors = {name.removeprefix("model."): reader.read(name) for name in reader.saved if name.startswith("model.")}
    in_memory = model.state_dict(keep_vars=True)
    by_id = {id(in_memory[name]): tensor for name, tensor in tensors.items()}
    whole = {name: by_id[id(tensor)] for name, tensor in in_memory.items()}  # tied tensors have several names
    optimizer: dict[str, Any] = {"state": {}, "param_groups": groups}
    for group in groups:
        for name in group["params"]:
            optimizer["state"][name] = _moments(reader, name)
            optimizer |= {f"param_groups.{name}.{key}": value for key, value in group.items() if key != "params"}
    with new_directory(target) as directory:
        files = FileSystemWriter(directory, sync_files=True, overwrite=False, per_thread_copy_ahead=0)
        files.fs = opened = DigestFiles()
        with opened.telling(), warnings.catch_warnings(action="ignore", category=UserWarning):
            torch_dcp.save({"model": whole, "optimizer": optimizer}, storage_writer=files, no_dist=True)
        atomic.publish_directory(directory, target)
    elements, size = (
        sum(one.numel() for one in tensors.values()),
        sum(one.size_bytes for one in opened.entries.values()),
    )
    return Written(str(target), "float32", len(tensors), elements, 1, size, f"{_LEFT}, the schedule")
