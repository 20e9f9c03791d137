"""Configuration models of every command, and how they are read from TOML files and flags."""

from holdfast.shared.config.base import CkptConfig, Command, ModelConfig
from holdfast.shared.config.dpo import DpoConfig
from holdfast.shared.config.evaluation import EvaluateConfig
from holdfast.shared.config.inference import InferenceConfig
from holdfast.shared.config.orchestrator import OrchestratorConfig
from holdfast.shared.config.reward_training import RewardTrainingConfig
from holdfast.shared.config.rl import RlConfig
from holdfast.shared.config.rl_trainer import TrainerConfig
from holdfast.shared.config.trainer import SftConfig, SupervisedCommand, TrainingCommand

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
