"""Settings that `rl` may pick so that a training step fits a GPU that it shares with an engine."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

from holdfast.config.marks import Picked, marks_of
from holdfast.config.rl_trainer import TrainerConfig
from holdfast.config.training import LoraConfig, TrainingCommand

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


def shown(key: str, value: Any) -> str:
    """Return the setting and its value for a line."""
    return f"{key}.rank = {value['rank']}" if key == "model.lora" else f"{key} = {str(value).lower()}"


def _place(config: TrainingCommand, key: str) -> tuple[Any, str]:
    *sections, name = key.split(".")
    return reduce(getattr, sections, config), name
