"""The types of the names that `__init__.py` loads when they are asked for."""

from holdfast.chat.messages import Message
from holdfast.chat.tokenizer import Tokenizer, load_tokenizer
from holdfast.config.environments import JudgeConfig
from holdfast.config.policy_losses import PolicyLossConfig
from holdfast.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    HoldfastError,
    ProcessKilled,
    RankLost,
    ReadError,
    SaveError,
)
from holdfast.orchestrator.env.harness import Endpoint, HarnessEnvironment
from holdfast.orchestrator.env.interface import Environment, Score, Session, SessionFull, Task
from holdfast.orchestrator.env.judge import Judge, Judgement
from holdfast.orchestrator.judge_client import judging
from holdfast.orchestrator.state import TaskSeed
from holdfast.protocol.inference import Completion
from holdfast.protocol.rollouts import Logprobs, TokenIds
from holdfast.run.checkpoints import BestMetric, Retention
from holdfast.run.hooks import Hook, HookReply, StepView
from holdfast.run.metrics import read_metrics
from holdfast.runs import Rows, Run, RunFailed, dpo, evaluate, open_run, reward_model, rl, sft
from holdfast.trainer.checkpoint.checkpointer import Checkpointer, load_state_with_optimizer, save_state
from holdfast.trainer.checkpoint.init_from import load_weights_only
from holdfast.trainer.checkpoint.state import module_tensors
from holdfast.trainer.rl.advantages import grpo
from holdfast.trainer.rl.losses import PolicyLossInput, build_policy_loss
from holdfast.trainer.rl.token_rewards import ScoredRollout
from holdfast.view.tracker import TrackedRun, Tracker

__all__ = [
    "BestMetric",
    "CheckpointError",
    "Checkpointer",
    "Completion",
    "ConfigError",
    "DataError",
    "Endpoint",
    "Environment",
    "HarnessEnvironment",
    "HoldfastError",
    "Hook",
    "HookReply",
    "Judge",
    "JudgeConfig",
    "Judgement",
    "Logprobs",
    "Message",
    "PolicyLossConfig",
    "PolicyLossInput",
    "ProcessKilled",
    "RankLost",
    "ReadError",
    "Retention",
    "Rows",
    "Run",
    "RunFailed",
    "SaveError",
    "Score",
    "ScoredRollout",
    "Session",
    "SessionFull",
    "StepView",
    "Task",
    "TaskSeed",
    "TokenIds",
    "Tokenizer",
    "TrackedRun",
    "Tracker",
    "build_policy_loss",
    "dpo",
    "evaluate",
    "grpo",
    "judging",
    "load_state_with_optimizer",
    "load_tokenizer",
    "load_weights_only",
    "module_tensors",
    "open_run",
    "read_metrics",
    "reward_model",
    "rl",
    "save_state",
    "sft",
]

__version__: str
open = open_run
