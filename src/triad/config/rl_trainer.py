"""Configuration of the trainer of `rl`."""

from __future__ import annotations

from pydantic import Field, field_validator

from triad.config.losses import PolicyLossConfig
from triad.config.trainer import TrainingCommand
from triad.user_functions import check_name

ADVANTAGES = ("grpo", "dr_grpo", "rloo", "max_rl", "reinforce_pp", "reinforce_pp_baseline")


class TrainerConfig(TrainingCommand):
    """The trainer of an RL run; it trains on the batches that the orchestrator journals."""

    loss: PolicyLossConfig = PolicyLossConfig()
    """Policy loss."""

    advantage: str = "grpo"
    """Within the group, `grpo`: (reward - mean) / std; `dr_grpo`: reward - mean; `rloo`: reward - mean of
    the others; `max_rl`: (reward - mean) / mean. `reinforce_pp`: (reward - mean) / std over the batch;
    `reinforce_pp_baseline`: reward - mean of the group, over its std in the batch. Or `module:function`."""

    row_tokens: int = Field(default=4096, ge=2)
    """Token budget of one packed row (one forward pass of one rank)."""

    async_level: int = Field(default=1, ge=0)
    """Batch N is made by the weights of step N - 1 - async_level; weights are kept that long."""

    batch_timeout_s: float = Field(default=1800.0, gt=0)
    """Give up when the orchestrator publishes no batch for this long."""

    @field_validator("advantage")
    @classmethod
    def _known_advantage(cls, name: str) -> str:
        return check_name(name, ADVANTAGES)
