"""Filling in the settings that a user left to the device, before anything is started."""

from __future__ import annotations

from typing import Any

from holdfast.shared.config.base import DType
from holdfast.shared.config.by_device import BY_DEVICE, DeviceType
from holdfast.shared.config.inference import InferenceConfig
from holdfast.shared.config.trainer import TrainingCommand

GPU_MEMORY_UTILIZATION = 0.9
SHARED_GPU_MEMORY_UTILIZATION = 0.4
"""Of a GPU on which the trainer lies as well."""


def choose_for_training(
    config: TrainingCommand, device: DeviceType, *, num_devices: int, dtype: DType | None = None
) -> dict[str, Any]:
    """Fill in, in place, what `config` leaves to the device; return what was chosen, by dotted key.

    Args:
        num_devices: GPUs that the trainer is given on this machine.
        dtype: of the run that goes on.
    """
    defaults = BY_DEVICE[device]
    chosen = _fill(config.parallel, "parallel", num_ranks=max(1, num_devices))
    if config.parallel.device == "auto":
        config.parallel.device = chosen["parallel.device"] = device
    return chosen | _fill(
        config.model,
        "model",
        dtype=dtype or defaults.dtype,
        activation_checkpointing=defaults.activation_checkpointing,
        logits_chunk_tokens=defaults.logits_chunk_tokens,
    )


def choose_for_engine(
    config: InferenceConfig, device: DeviceType, *, dtype: DType | None = None, shares_gpu: bool = False
) -> dict[str, Any]:
    """Fill in, in place, what `config` leaves to the device of its engine; return what was chosen, by dotted key.

    Args:
        dtype: of the trainer, where there is one.
        shares_gpu: the trainer lies on the same GPU.
    """
    chosen = _fill(config.model, "model", dtype=dtype or BY_DEVICE[device].dtype)
    chosen |= _fill(config.engine, "engine", eager=BY_DEVICE[device].eager)
    if device == "cuda":
        share = SHARED_GPU_MEMORY_UTILIZATION if shares_gpu else GPU_MEMORY_UTILIZATION
        chosen |= _fill(config.engine, "engine", gpu_memory_utilization=share)
    return chosen


def _fill(section: Any, prefix: str, **values: Any) -> dict[str, Any]:
    """Set what is unset in a section."""
    missing = {name: value for name, value in values.items() if getattr(section, name) is None}
    for name, value in missing.items():
        setattr(section, name, value)
    return {f"{prefix}.{name}": value for name, value in missing.items()}
