"""Configuration of reward model training: `reward-model`."""

from __future__ import annotations

from pydantic import Field, model_validator

from holdfast.shared.config.base import Section
from holdfast.shared.config.dpo import PreferenceDataConfig
from holdfast.shared.config.trainer import SupervisedCommand


class RewardLossConfig(Section):
    """The loss of a reward model: Bradley-Terry, -log sigmoid(r(chosen) - r(rejected) - margin of the row)."""

    center_coef: float = Field(default=0.0, ge=0)
    """Weight of (r(chosen) + r(rejected))², which keeps rewards around 0 (Eisenstein et al. 2023; they
    take 0.01). The first term sees differences only."""


class RewardTrainingConfig(SupervisedCommand):
    """Training of a reward model: `uv run reward-model @ configs/reverse_text/reward_model.toml`."""

    program = "reward-model"

    data: PreferenceDataConfig = PreferenceDataConfig()  # pyright: ignore[reportIncompatibleVariableOverride]
    """Pairs and batches."""

    loss: RewardLossConfig = RewardLossConfig()
    """Loss of a pair."""

    @model_validator(mode="after")
    def _is_no_language_model(self) -> RewardTrainingConfig:
        if self.model.fp32_lm_head:
            raise ValueError(
                "model.fp32_lm_head is for language models; a reward model has no such layer: leave it out"
            )
        return self
