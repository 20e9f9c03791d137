"""What a run computes on, and the settings that follow from it: chosen once, written into its configuration, and told.

A run that goes on keeps the dtype that it has, on whatever device: of all that depends on the device it is the one
that changes what is learned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.commands.launcher.placement import Machine, Placement
from holdfast.commands.resume.attempt import CONFIG_NAME
from holdfast.commands.track.settings import read_settings
from holdfast.shared.config.base import DType
from holdfast.shared.config.by_device import BY_DEVICE
from holdfast.shared.config.device_defaults import choose_for_engine, choose_for_training
from holdfast.shared.config.inference import InferenceConfig
from holdfast.shared.config.rl import RlConfig
from holdfast.shared.config.trainer import ParallelConfig, TrainingCommand
from holdfast.shared.errors import ConfigError
from holdfast.shared.files.checkpoints import TRAINER_DIR
from holdfast.shared.files.run_dir import RunDir
from holdfast.shared.process.child import available_cores
from holdfast.shared.process.gpus import Gpu

# A few more than cores may be meant, to try out what many ranks do.
_RANKS_PER_CORE = 4


def choose_training(config: TrainingCommand, placement: Placement, *, clean: bool) -> dict[str, Any]:
    """Fill in, in place, what a training program's settings leave to its device; return it by dotted key.

    Args:
        clean: the run that the directory holds is removed, and nothing of it kept.

    Raises:
        ConfigError: as many ranks as there are GPUs cannot be divided as the settings say.
    """
    device = placement.trainer_device
    dtype = dtype_of_run(config) if config.model.dtype is None and not clean else None
    chosen = choose_for_training(config, device, num_devices=len(placement.trainer), dtype=dtype)
    try:
        config.parallel.check_ranks(config.parallel.world_size)
    except ValueError as error:
        raise ConfigError(f"parallel.{error}") from None
    if dtype not in (None, BY_DEVICE[device].dtype):
        print(
            f"model.dtype = {dtype}, as the run has it; a new one on {device} would have {BY_DEVICE[device].dtype} "
            f"(--model.dtype {BY_DEVICE[device].dtype} changes it)"
        )
    return chosen


def choose_rl(config: RlConfig, placement: Placement, machine: Machine) -> dict[str, Any]:
    """Fill in, in place, what the settings of trainer and engines leave to their devices; return it by dotted key."""
    chosen = {
        f"trainer.{key}": value for key, value in choose_training(config.trainer, placement, clean=config.clean).items()
    }
    of_engine = choose_for_engine(
        config.inference,
        machine.engine_device,
        dtype=config.trainer.model.compute_dtype,
        shares_gpu=placement.shares,
    )
    if config.trainer.sampler_dtype is None:
        config.trainer.sampler_dtype = config.inference.model.dtype
    return chosen | {f"inference.{key}": value for key, value in of_engine.items()}


def choose_inference(config: InferenceConfig, machine: Machine) -> dict[str, Any]:
    """Fill in, in place, what the settings of an engine by itself leave to its device; return it by dotted key."""
    return choose_for_engine(config, machine.engine_device)


def dtype_of_run(config: TrainingCommand) -> DType | None:
    """Return the dtype of the run that `config` goes on with, or forks; None where there is none to be seen here."""
    run_dir, ckpt = RunDir(config.output_dir), config.ckpt
    name = "trainer" if config.program == "rl" else config.program
    candidates = [run_dir.configs(number) / f"{name}.toml" for number in range(run_dir.next_attempt() - 1, 0, -1)]
    if ckpt is not None and ckpt.resume_dir is not None:
        candidates.append(ckpt.resume_dir / TRAINER_DIR / CONFIG_NAME)
    for path in candidates:
        if path.is_file():
            return read_settings(path).get("model", {}).get("dtype")
    return None


def describe(placement: Placement, chosen: Mapping[str, Any], *, engines: Sequence[str] = ()) -> str:
    """Return the line that says what a run computes on, and what was chosen by that.

    Args:
        engines: what the engines compute on.
    """
    where = ", ".join([f"trainer on {_gpus(placement.trainer)}", *(f"engine on {engine}" for engine in engines)])
    settings = ", ".join(f"{key} = {str(value).lower()}" for key, value in chosen.items())
    return where + (f"; set by that: {settings}" if settings else "")


def describe_rl(placement: Placement, chosen: Mapping[str, Any], machine: Machine, *, starts_inference: bool) -> str:
    """Return the same for `rl`, with a warning where GPUs are there that the engine is not built for."""
    if not starts_inference:
        return describe(placement, {key: value for key, value in chosen.items() if key.startswith("trainer.")})
    line = describe(placement, chosen, engines=[_gpus(gpus) for gpus in placement.engines or ((),)])
    if machine.inventory.gpus and not placement.engines:
        line += (
            "\nWARNING: the engine computes on the CPU, as the installed vLLM is its build for CPUs: with "
            "`uv sync --no-group cpu --group gpu` it takes GPUs (docs/installation.md)"
        )
    return line


def tell_of_turns(parallel: ParallelConfig, placement: Placement, *, key: str = "parallel") -> None:
    """Print a warning where a trainer on the CPU has many more ranks than cores: they are slow, and nothing else.

    Args:
        key: of `parallel`, for the message.
    """
    cores = available_cores()
    if not placement.trainer and parallel.ranks > _RANKS_PER_CORE * cores:
        print(
            f"WARNING: {key}.num_ranks = {parallel.ranks} on the CPU, and this command may use {_cores(cores)}: the "
            f"ranks take turns and wait for one another, so a step takes longer than with --{key.replace('_', '-')}"
            f".num-ranks {cores}, and each has the memory of a process with PyTorch"
        )


def _cores(count: int) -> str:
    return "1 core" if count == 1 else f"{count} cores"


def _gpus(gpus: Sequence[Gpu]) -> str:
    """Return `GPU 0-3 (4 x NVIDIA H100)`, or `the CPU`."""
    if not gpus:
        return "the CPU"
    model = gpus[0].model or "NVIDIA"
    return f"GPU {names_of(gpus)} ({len(gpus)} x {model})"


def names_of(gpus: Sequence[Gpu]) -> str:
    """Return the names of GPUs, numbers that follow each other as `0-3`."""
    names = [gpu.name for gpu in gpus]
    if len(names) > 2 and all(name.isdecimal() for name in names):
        numbers = [int(name) for name in names]
        if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
            return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(names)
