"""Configuration models of every command, and how they are read from TOML files and flags."""

from triad.config.base import CkptConfig, Command, ModelConfig
from triad.config.dpo import DpoConfig
from triad.config.inference import InferenceConfig
from triad.config.orchestrator import OrchestratorConfig
from triad.config.reward_training import RewardTrainingConfig
from triad.config.rl import RlConfig
from triad.config.rl_trainer import TrainerConfig
from triad.config.trainer import SftConfig, TrainingCommand

__all__ = [
    "CkptConfig",
    "Command",
    "DpoConfig",
    "InferenceConfig",
    "ModelConfig",
    "OrchestratorConfig",
    "RewardTrainingConfig",
    "RlConfig",
    "SftConfig",
    "TrainerConfig",
    "TrainingCommand",
]
