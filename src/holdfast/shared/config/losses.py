"""Configuration of the policy loss of `rl`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from holdfast.shared.config.base import Section
from holdfast.shared.config.registry import POLICY_LOSSES
from holdfast.shared.user_functions import check_name

_MASK_BOUNDS: dict[str, tuple[float, float]] = {
    "token": (0.5, 5.0),
    "sequence": (0.0, 3.0),
    "geometric": (0.99, 1.01),
}
"""The default `low` and `high` of a mask by level; docs/losses.md says where they are from."""
_TRUNCATE_HIGH = 2.0


class CorrectionConfig(Section):
    """Bounds the importance weights between sampler and trainer where their log-probabilities disagree."""

    type: Literal["none", "truncate", "mask"] | None = None
    """`none`: the loss's ratio is trainer over sampler. `truncate` and `mask`: the ratio starts at 1 in
    each step, and trainer over sampler becomes a factor without gradient, at most `high`
    (`truncate`: TIS) or 0 outside `low` to `high` (`mask`). Unset: `truncate` for `gspo` and `gspo_token`, else
    `none`."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """Weights of single tokens, their product over the sequence, or their geometric mean over it, which does not
    depend on its length."""

    low: float | None = Field(default=None, ge=0, le=1)
    """`mask` drops what weighs less. Unset: 0.5 for tokens, 0 for sequences, 0.99 for the geometric mean."""

    high: float | None = Field(default=None, ge=1)
    """The largest weight: `truncate` cuts to it, `mask` drops what weighs more. Unset: 2 for `truncate`; for `mask`
    5 for tokens, 3 for sequences, 1.01 for the geometric mean."""

    veto: float | None = Field(default=None, gt=0, lt=1)
    """A rollout with a token that weighs less than this is left out as a whole; 1e-4 is usual. Unset: none is."""

    def filled(self, default: Literal["none", "truncate"]) -> CorrectionConfig:
        """Return it with what is unset: `default` is the type.

        Raises:
            ValueError: a setting has no effect.
        """
        kind = self.type or default
        unused = {"none": ("level", "low", "high", "veto"), "truncate": ("low",), "mask": ()}[kind]
        for name in unused:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect with correction.type = '{kind}': leave it out")
        low, high = {"none": (None, None), "truncate": (None, _TRUNCATE_HIGH), "mask": _MASK_BOUNDS[self.level]}[kind]
        filled = {"low": low if self.low is None else self.low, "high": high if self.high is None else self.high}
        return self.model_copy(update={"type": kind, **filled})


class EntropyConfig(Section):
    """A bonus for the policy's entropy: `coef` times its mean over the trained tokens is taken from the loss."""

    coef: float = Field(default=0.0, ge=0)
    """Weight of the bonus; with a target, that of its beginning. 0.001 is usual."""

    target: float | None = Field(default=None, gt=0)
    """Steer the entropy to this many nats a token: the bonus acts after a step with at most this entropy, and its
    weight rises after such a step and falls after any other; unset: the weight stays `coef`."""

    step_size: float = Field(default=0.005, gt=0)
    """What the steered weight rises or falls by in one step."""

    largest: float = Field(default=1.0, gt=0)
    """The steered weight rises no further."""

    @model_validator(mode="after")
    def _has_an_effect(self) -> EntropyConfig:
        for name in ("step_size", "largest"):
            if self.target is None and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect without target: leave it out, or set target")
        if self.target is not None and self.coef > self.largest:
            raise ValueError(f"coef = {self.coef:g} is more than largest = {self.largest:g}")
        return self


class PolicyLossConfig(Section):
    """The policy loss by name, see docs/losses.md. What is unset takes the default of that loss."""

    type: str = Field(
        default="dapo",
        description=f"{', '.join(f'`{name}`' for name in POLICY_LOSSES)}, or `module:function` of your own. `sft` "
        "takes no advantages: every rollout is a demonstration.",
    )

    clip_low: float | None = Field(default=None, ge=0, le=1)
    """The importance ratio is clipped below at 1 - clip_low; 1: never. `dppo`: what a token's probability may fall.
    Unset: what `type` has in docs/losses.md."""

    clip_high: float | None = Field(default=None, ge=0)
    """The importance ratio is clipped above at 1 + clip_high. `dppo`: what a token's probability may rise. Unset: what
    `type` has in docs/losses.md."""

    dual_clip: float | None = Field(default=None, gt=1, allow_inf_nan=True)
    """The importance ratio of a token with negative advantage counts for at most this; `inf`: any ratio."""

    ratio_max: float | None = Field(default=None, ge=1, allow_inf_nan=True)
    """The largest weight that an importance ratio gives a token, in `policy_gradient` and `dppo`; `inf`: any ratio.
    Unset: 20."""

    ratio_to: Literal["sampler", "old"] | None = None
    """What the importance ratio compares the policy with: the `sampler`, as it drew the tokens, or the trainer's
    `old` weights, at the start of the step. Unset: `old` with a correction and for `gspo` and `gspo_token`, else
    `sampler`."""

    aggregation: Literal["sequence", "token", "constant"] | None = None
    """The denominator: every rollout counts the same (`sequence`), every token (`token`), or every
    token with `constant_tokens` for each rollout, whatever its length (`constant`). Unset: what `type` has in
    docs/losses.md."""

    constant_tokens: int | None = Field(default=None, ge=1)
    """Tokens of a rollout for `aggregation = constant`; unset: `rl` takes `orchestrator.sampling.max_tokens`. Where
    rollouts have several turns, `orchestrator.seq_len` is their bound."""

    correction: CorrectionConfig = CorrectionConfig()
    """Importance weights between sampler and trainer."""

    entropy: EntropyConfig = EntropyConfig()
    """A bonus for the policy's entropy."""

    args: dict[str, Any] = {}
    """Further arguments of a function of your own."""

    @field_validator("type")
    @classmethod
    def _known(cls, name: str) -> str:
        return check_name(name, POLICY_LOSSES)

    @model_validator(mode="after")
    def _with_defaults(self) -> PolicyLossConfig:
        defaults = POLICY_LOSSES[self.type].defaults if self.type in POLICY_LOSSES else {}
        self._settle_ratio(defaults)
        for name in ("clip_low", "clip_high", "dual_clip", "ratio_max", "ratio_to", "aggregation"):
            if getattr(self, name) is None:
                setattr(self, name, defaults.get(name))
            elif name not in defaults:
                raise ValueError(f"{name} has no effect with type = '{self.type}': leave it out")
        if self.aggregation != "constant" and self.constant_tokens is not None:
            raise ValueError("constant_tokens has no effect without aggregation = 'constant': leave it out")
        if defaults and self.args:
            raise ValueError(f"args are for a loss of your own, and type = '{self.type}' is built in: leave them out")
        return self

    def _settle_ratio(self, defaults: dict[str, Any]) -> None:
        """Fill in the correction, and what the ratio is to if there is one."""
        needs_one = defaults.get("ratio_to") == "old" and self.ratio_to != "sampler"
        self.correction = self.correction.filled("truncate" if needs_one else "none")
        if self.correction.type == "none":
            return
        if self.ratio_to == "sampler":
            raise ValueError(
                f"ratio_to = 'sampler' with correction.type = '{self.correction.type}' counts the difference to the "
                "sampler twice: leave ratio_to out, or set correction.type = 'none'"
            )
        if "ratio_to" in defaults:
            self.ratio_to = "old"

    @property
    def clip_range(self) -> tuple[float, float]:
        """The lowest and highest importance ratio, of a loss that clips."""
        assert self.clip_low is not None and self.clip_high is not None
        return 1 - self.clip_low, 1 + self.clip_high
