"""Fills in settings that depend on the device, before any process starts, and computes a fingerprint of the settings.

The fingerprint leaves out free settings, which do not change what is computed. `rl` may pick some settings so that a
training step fits a GPU that it shares with an engine.
"""

from collections.abc import Mapping
from functools import reduce
from typing import Any, TypeVar

import msgspec
import xxhash

from holdfast.config.base import BY_DEVICE, Command, DeviceType, DType
from holdfast.config.inference import InferenceConfig
from holdfast.config.marks import Mark, Picked, has_mark, marks_of
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.config.rl_trainer import TrainerConfig
from holdfast.config.training import LoraConfig, TrainingCommand, schedule_end

C = TypeVar("C", OrchestratorConfig, InferenceConfig)


def fingerprint(config: TrainingCommand) -> str:
    """Return the xxh3-128 of the settings that decide what a training step computes. `max_steps` does not count, but
    where the learning-rate schedules end does."""
    settings = _computing(config)
    settings["optim"]["schedule_steps"] = schedule_end(config.optim, config.max_steps)
    if isinstance(config, TrainerConfig) and config.critic is not None:
        settings["critic"]["optim"]["schedule_steps"] = schedule_end(config.critic.optim, config.max_steps)
    return xxhash.xxh3_128(msgspec.json.encode(settings, order="sorted")).hexdigest()


def makes_same_batches(before: C, after: C) -> bool:
    """Return whether two orchestrators, or two engines, make the same batches when the same weights sample them."""
    return _computing(before) == _computing(after)


def is_free(command: type[Command], key: str) -> bool:
    """Return whether a setting of `command`, such as `environments[0].on_error`, may change on resume."""
    return has_mark(command, key, Mark.FREE)


def slots_of(settings: Mapping[str, Any]) -> int | None:
    """Return how many answers an orchestrator with these settings samples at once, if that decides what it samples."""
    client = settings.get("client", {})
    is_counted = settings.get("schedule") == "rounds" and {"max_concurrency", "urls"} <= client.keys()
    return client["max_concurrency"] * len(client["urls"]) if is_counted else None


def _computing(config: Command) -> dict[str, Any]:
    settings = config.model_dump(mode="json")
    slots = slots_of(settings)
    return _without_free(type(config), settings, "") | ({} if slots is None else {"slots": slots})


def _without_free(command: type[Command], value: Any, key: str) -> Any:
    if isinstance(value, dict):
        places = {name: f"{key}.{name}" if key else name for name in value}
        kept = {name: place for name, place in places.items() if not is_free(command, place)}
        return {name: _without_free(command, value[name], place) for name, place in kept.items()}
    if isinstance(value, list):
        return [_without_free(command, item, f"{key}[]") for item in value]
    return value


GPU_MEMORY_UTILIZATION = 0.9
SHARED_GPU_MEMORY_UTILIZATION = 0.4
"""Share of a GPU that the trainer uses, too, if no plan says what the trainer needs."""


def choose_for_training(
    config: TrainingCommand, device: DeviceType, *, num_devices: int, dtype: DType | None = None
) -> dict[str, Any]:
    """Fill in, in place, what `config` leaves to the device; return what was chosen, by dotted key.

    Args:
        num_devices: GPUs that the trainer is given on this machine.
        dtype: of the run that is resumed.
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
        shares_gpu: the trainer is on the same GPU.
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


_COSTS = {
    key: mark.cost for key, marks in marks_of(TrainerConfig).items() for mark in marks if isinstance(mark, Picked)
}
PICKABLE = tuple(sorted((key for key in _COSTS if not key.startswith("model.lora.")), key=_COSTS.__getitem__))
"""By dotted key, the cheapest first."""


def open_settings(config: TrainingCommand) -> tuple[str, ...]:
    """Return the settings that may be picked, and that nobody has set."""
    return tuple(key for key in PICKABLE if _place(config, key)[1] not in _place(config, key)[0].model_fields_set)


def set_values(config: TrainingCommand, values: Mapping[str, Any]) -> None:
    """Set values by dotted key, in place; adapters are given as a table."""
    for key, value in values.items():
        section, name = _place(config, key)
        setattr(section, name, LoraConfig.model_validate(value) if name == "lora" else value)


def shown_setting(key: str, value: Any) -> str:
    """Return the setting and its value for a line."""
    return f"{key}.rank = {value['rank']}" if key == "model.lora" else f"{key} = {str(value).lower()}"


def _place(config: TrainingCommand, key: str) -> tuple[Any, str]:
    *sections, name = key.split(".")
    return reduce(getattr, sections, config), name
