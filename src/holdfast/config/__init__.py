"""Configuration models of every command, and how they are read from TOML files and flags.

Each model is imported when it is first asked for: a process pays for the settings that it reads. The modules with
models do without `from __future__ import annotations`: pydantic would compile each annotation again, at every start.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.config.base import CkptConfig as CkptConfig
    from holdfast.config.base import Command as Command
    from holdfast.config.base import ModelConfig as ModelConfig
    from holdfast.config.evaluation import EvaluateConfig as EvaluateConfig
    from holdfast.config.inference import InferenceConfig as InferenceConfig
    from holdfast.config.orchestrator import OrchestratorConfig as OrchestratorConfig
    from holdfast.config.preference import DpoConfig as DpoConfig
    from holdfast.config.preference import RewardTrainingConfig as RewardTrainingConfig
    from holdfast.config.rl import RlConfig as RlConfig
    from holdfast.config.rl_trainer import TrainerConfig as TrainerConfig
    from holdfast.config.training import SftConfig as SftConfig
    from holdfast.config.training import SupervisedCommand as SupervisedCommand
    from holdfast.config.training import TrainingCommand as TrainingCommand

PROGRAMS = {"sft": "SftConfig", "dpo": "DpoConfig", "reward-model": "RewardTrainingConfig", "rl": "TrainerConfig"}
"""Training program -> the name of its model of settings, see `program_config`."""

_NAMES_OF = {
    "base": ("CkptConfig", "Command", "ModelConfig"),
    "evaluation": ("EvaluateConfig",),
    "inference": ("InferenceConfig",),
    "orchestrator": ("OrchestratorConfig",),
    "preference": ("DpoConfig", "RewardTrainingConfig"),
    "rl": ("RlConfig",),
    "rl_trainer": ("TrainerConfig",),
    "training": ("SftConfig", "SupervisedCommand", "TrainingCommand"),
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from importlib import import_module

    found = globals()[name] = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    return found


def program_config(program: str) -> "type[TrainingCommand]":
    """Return the model of the settings of a training program, such as `sft`."""
    return __getattr__(PROGRAMS[program])  # pyright: ignore[reportReturnType] - a test holds that each is one
