"""Configuration models of every command, and how they are read from TOML files and flags."""

from holdfast.config.base import CkptConfig, Command, ModelConfig
from holdfast.config.evaluation import EvaluateConfig
from holdfast.config.inference import InferenceConfig
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.config.preference import DpoConfig, RewardTrainingConfig
from holdfast.config.rl import RlConfig
from holdfast.config.rl_trainer import TrainerConfig
from holdfast.config.training import SftConfig, SupervisedCommand, TrainingCommand

# The training programs, by the names that their configurations give them.
PROGRAMS: dict[str, type[TrainingCommand]] = {
    config.program: config for config in (SftConfig, DpoConfig, RewardTrainingConfig, TrainerConfig)
}

__all__ = [
    "PROGRAMS",
    "CkptConfig",
    "Command",
    "DpoConfig",
    "EvaluateConfig",
    "InferenceConfig",
    "ModelConfig",
    "OrchestratorConfig",
    "RewardTrainingConfig",
    "RlConfig",
    "SftConfig",
    "SupervisedCommand",
    "TrainerConfig",
    "TrainingCommand",
]
