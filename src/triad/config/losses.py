"""Configuration of the policy loss of `rl`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from triad.config.base import Section
from triad.user_functions import check_name


class CorrectionConfig(Section):
    """Bounds the importance weights between sampler and trainer where their log-probabilities disagree."""

    type: Literal["none", "truncate", "mask"] = "none"
    """`none`: the loss's ratio is trainer over sampler. `truncate` and `mask`: the ratio starts at 1 in
    each step, and trainer over sampler becomes a factor without gradient, at most `high`
    (`truncate`: TIS) or 0 outside `low` to `high` (`mask`)."""

    level: Literal["token", "sequence"] = "token"
    """Weights of single tokens, or their product over the sequence."""

    low: float = Field(default=0.5, ge=0, le=1)
    """`mask` drops what weighs less."""

    high: float = Field(default=2.0, ge=1)
    """The largest weight: `truncate` cuts to it, `mask` drops what weighs more."""

    @model_validator(mode="after")
    def _has_an_effect(self) -> CorrectionConfig:
        unused = {"none": ("level", "low", "high"), "truncate": ("low",), "mask": ()}[self.type]
        for name in unused:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect with correction.type = '{self.type}': leave it out")
        return self


LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"clip_low": 0.2, "clip_high": 0.2, "aggregation": "sequence"},
    "dr_grpo": {"clip_low": 0.2, "clip_high": 0.2, "aggregation": "constant"},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28, "aggregation": "token"},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence"},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0, "aggregation": "token"},
    "ppo": {"clip_low": 0.2, "clip_high": 0.2, "aggregation": "token"},
    "policy_gradient": {"aggregation": "token"},
    "sft": {"aggregation": "token"},
}
"""The defaults of each loss; docs/losses.md says where they are from."""


class PolicyLossConfig(Section):
    """The policy loss by name, see docs/losses.md. What is unset takes the default of that loss."""

    type: str = "grpo"
    """`grpo`, `dr_grpo`, `dapo`, `gspo`, `cispo`, `ppo`, `policy_gradient`, `sft` (no advantages: every rollout
    is a demonstration), or `module:function` of your own."""

    clip_low: float | None = Field(default=None, ge=0, le=1)
    """The importance ratio is clipped below at 1 - clip_low; 1: never."""

    clip_high: float | None = Field(default=None, ge=0)
    """The importance ratio is clipped above at 1 + clip_high."""

    aggregation: Literal["sequence", "token", "constant"] | None = None
    """The denominator: every rollout counts the same (`sequence`), every token (`token`), or every
    token with `constant_tokens` for each rollout, whatever its length (`constant`)."""

    constant_tokens: int | None = Field(default=None, ge=1)
    """Tokens of a rollout for `aggregation = constant`; unset: 128. The most sampled tokens is usual."""

    correction: CorrectionConfig = CorrectionConfig()
    """Importance weights between sampler and trainer."""

    args: dict[str, Any] = {}
    """Further arguments of a function of your own."""

    @field_validator("type")
    @classmethod
    def _known(cls, name: str) -> str:
        return check_name(name, LOSSES)

    @model_validator(mode="after")
    def _with_defaults(self) -> PolicyLossConfig:
        defaults = LOSSES.get(self.type, {})
        for name in ("clip_low", "clip_high", "aggregation"):
            if getattr(self, name) is None:
                setattr(self, name, defaults.get(name))
            elif name not in defaults:
                raise ValueError(f"{name} has no effect with type = '{self.type}': leave it out")
        if self.aggregation == "constant":
            self.constant_tokens = self.constant_tokens or 128
        elif self.constant_tokens is not None:
            raise ValueError("constant_tokens has no effect without aggregation = 'constant': leave it out")
        if defaults and self.args:
            raise ValueError(f"args are for a loss of your own, and type = '{self.type}' is built in: leave them out")
        if not defaults and self.correction != CorrectionConfig():
            raise ValueError(f"correction has no effect with type = '{self.type}': leave it out")
        return self

    @property
    def clip_range(self) -> tuple[float, float]:
        """The lowest and highest importance ratio, of a loss that clips."""
        assert self.clip_low is not None and self.clip_high is not None
        return 1 - self.clip_low, 1 + self.clip_high
