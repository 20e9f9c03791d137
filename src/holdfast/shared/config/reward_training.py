"""Configuration of reward model training: `reward-model`."""

from __future__ import annotations

from pydantic import Field, model_validator

from holdfast.shared.config.base import Section
from holdfast.shared.config.dpo import PreferenceDataConfig
from holdfast.shared.config.trainer import TrainingCommand


class RewardLossConfig(Section):
    """The loss of a reward model: Bradley-Terry, -log sigmoid(r(chosen) - r(rejected) - margin of the row)."""

    center_coef: float = Field(default=0.0, ge=0)
    """Weight of (r(chosen) + r(rejected))², which keeps rewards around 0 (Eisenstein et al. 2023; they
    take 0.01). The first term sees differences only."""


class RewardTrainingConfig(TrainingCommand):
    """Training of a reward model: `uv run reward-model @ configs/reverse_text/reward_model.toml`."""

    data: PreferenceDataConfig = PreferenceDataConfig()
    """Pairs and batches."""

    loss: RewardLossConfig = RewardLossConfig()
    """Loss of a pair."""

    val_interval: int | None = Field(default=None, ge=1)
    """Steps between validations; unset: after the final step only. Needs data.validation_fraction."""

    @model_validator(mode="after")
    def _settings_fit_together(self) -> RewardTrainingConfig:
        if self.val_interval is not None and self.data.validation_fraction == 0:
            raise ValueError(f"val_interval = {self.val_interval} needs data.validation_fraction above 0, got 0")
        if self.model.fp32_lm_head:
            raise ValueError(
                "model.fp32_lm_head is for language models; a reward model has no such layer: leave it out"
            )
        return self
