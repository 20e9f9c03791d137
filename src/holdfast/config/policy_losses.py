"""The policy losses and their settings: a model for each type, with the defaults of that loss.

To add a loss, write its model here with its settings, add the model to `AnyPolicyLoss`, and write its function in
`holdfast.trainer.rl.losses`. Tests ask for a row in docs/losses.md and for a slow reference in
`tests.builders.slow_losses`. docs/losses.md says where the defaults are from.
"""

# Types narrow the type of their base, which nobody sets.
# pyright: reportIncompatibleVariableOverride=false

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, TypeAdapter, field_validator, model_validator

from holdfast.config.base import Section
from holdfast.config.by_type import ByType, models_by_type
from holdfast.process.imports import check_name

Aggregation = Literal["sequence", "token", "constant"]
RatioTo = Literal["sampler", "old"]


class _AnyCorrection(Section):
    type: str
    """`none`: the loss's ratio is trainer over sampler. `truncate` and `mask`: the ratio starts at 1 in
    each step, and trainer over sampler becomes a factor without gradient, at most `high`
    (`truncate`: TIS) or 0 outside `low` to `high` (`mask`). Unset: `truncate` for `gspo` and `gspo_token`, else
    `none`."""


class NoCorrection(_AnyCorrection):
    """No correction."""

    type: Literal["none"] = "none"


class _Weights(_AnyCorrection):
    level: Literal["token", "sequence", "geometric"] = "token"
    """Weights of single tokens, their product over the sequence, or their geometric mean over it, which does not
    depend on its length."""

    high: float | None = Field(default=None, ge=1)
    """The largest weight: `truncate` cuts to it, `mask` drops what weighs more. Unset, for `mask`: 5 for tokens, 3 for
    sequences, 1.01 for the geometric mean."""

    veto: float | None = Field(default=None, gt=0, lt=1)
    """A rollout with a token that weighs less than this is left out as a whole; 1e-4 is usual. Unset: none is."""


class Truncation(_Weights):
    """Weights are cut to `high`."""

    type: Literal["truncate"] = "truncate"
    high: float = Field(default=2.0, ge=1)


class Mask(_Weights):
    """Tokens that weigh less than `low` or more than `high` are dropped."""

    type: Literal["mask"] = "mask"

    low: float | None = Field(default=None, ge=0, le=1)
    """`mask` drops what weighs less. Unset: 0.5 for tokens, 0 for sequences, 0.99 for the geometric mean."""

    @model_validator(mode="after")
    def _with_bounds_of_its_level(self) -> Self:
        """Fill in the bounds; docs/losses.md says where they are from."""
        low, high = {"token": (0.5, 5.0), "sequence": (0.0, 3.0), "geometric": (0.99, 1.01)}[self.level]
        self.low = low if self.low is None else self.low
        self.high = high if self.high is None else self.high
        return self


Correction = Annotated[NoCorrection | Truncation | Mask, ByType("none")]


class EntropyConfig(Section):
    """A bonus for the policy's entropy: `coef` times its mean over the trained tokens is taken from the loss."""

    coef: float = Field(default=0.0, ge=0)
    """Weight of the bonus; with a target, the weight at the beginning. 0.001 is usual."""

    target: float | None = Field(default=None, gt=0)
    """Steer the entropy to this many nats a token: the bonus acts after a step with at most this entropy, and its
    weight rises after such a step and falls after any other; unset: the weight stays `coef`."""

    step_size: float = Field(default=0.005, gt=0)
    """Rise or fall of the steered weight in one step."""

    largest: float = Field(default=1.0, gt=0)
    """The steered weight rises no further."""

    @model_validator(mode="after")
    def _has_an_effect(self) -> Self:
        for name in ("step_size", "largest"):
            if self.target is None and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect without target: leave it out, or set target")
        if self.target is not None and self.coef > self.largest:
            raise ValueError(f"coef = {self.coef:g} is more than largest = {self.largest:g}")
        return self


class PolicyLossConfig(Section):
    """The policy loss, see docs/losses.md."""

    type: str
    """The loss by name, or `module:function` of your own. `sft` takes no advantages: every rollout is a
    demonstration."""

    correction: Correction = Field(default_factory=NoCorrection)
    """Importance weights between sampler and trainer, bounded if their log-probabilities disagree."""

    entropy: EntropyConfig = Field(default_factory=EntropyConfig)
    """A bonus for the policy's entropy."""

    @staticmethod
    def of(**settings: Any) -> "AnyPolicyLoss":
        """Return the loss that `type` names, with these settings. Raise pydantic's ValidationError for others."""
        return TypeAdapter[AnyPolicyLoss](AnyPolicyLoss).validate_python(settings)


class OwnLoss(PolicyLossConfig):
    """A loss of your own."""

    args: dict[str, Any] = {}
    """Arguments of your own function."""

    @field_validator("type")
    @classmethod
    def _is_a_function(cls, name: str) -> str:
        return check_name(name, POLICY_LOSSES)


class BuiltInLoss(PolicyLossConfig):
    """A loss of this library."""

    function: ClassVar[str]
    """Name of an `Objective` in `holdfast.trainer.rl.losses`."""

    aggregation: Aggregation = "token"
    """The denominator: every rollout counts the same (`sequence`), every token counts the same (`token`), or a token
    counts 1 / `constant_tokens` of a rollout (`constant`)."""

    constant_tokens: int | None = Field(default=None, ge=1)
    """Tokens of a rollout for `aggregation = constant`. Unset: `rl` takes `orchestrator.sampling.max_tokens`. If
    rollouts have several turns, set it to `orchestrator.seq_len`."""

    @model_validator(mode="after")
    def _has_a_constant(self) -> Self:
        if self.aggregation != "constant" and self.constant_tokens is not None:
            raise ValueError("constant_tokens has no effect without aggregation = 'constant': leave it out")
        return self


class SftLoss(BuiltInLoss):
    """The likelihood of the rollouts."""

    function = "likelihood_objective"
    type: Literal["sft"] = "sft"


class RatioLoss(BuiltInLoss):
    """A loss with an importance ratio."""

    usual_ratio_to: ClassVar[RatioTo] = "sampler"
    """`ratio_to` if it is unset and there is no correction."""

    ratio_to: RatioTo | None = None
    """The importance ratio is to the `sampler`, or to the trainer's `old` weights at the start of the step. Unset:
    `old` with a correction and for `gspo` and `gspo_token`, else `sampler`."""

    @model_validator(mode="after")
    def _counts_the_sampler_once(self) -> Self:
        if self.correction.type == "none":
            self.ratio_to = self.ratio_to or self.usual_ratio_to
            return self
        if self.ratio_to == "sampler":
            raise ValueError(
                f"ratio_to = 'sampler' with correction.type = '{self.correction.type}' counts the difference to the "
                "sampler twice: leave ratio_to out, or set correction.type = 'none'"
            )
        self.ratio_to = "old"
        return self


class PolicyGradientLoss(RatioLoss):
    """REINFORCE with truncated importance sampling."""

    function = "policy_gradient_objective"
    type: Literal["policy_gradient"] = "policy_gradient"

    ratio_max: float = Field(default=20.0, ge=1, allow_inf_nan=True)
    """The largest weight that an importance ratio gives a token; `inf`: any ratio."""


class ClippedLoss(RatioLoss):
    """A loss that clips the importance ratio."""

    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The importance ratio is clipped below at 1 - clip_low; 1: never. `dppo`: how far a token's probability may
    fall."""

    clip_high: float = Field(default=0.2, ge=0)
    """The importance ratio is clipped above at 1 + clip_high. `dppo`: how far a token's probability may rise."""

    @property
    def clip_range(self) -> tuple[float, float]:
        """The lowest and highest importance ratio."""
        return 1 - self.clip_low, 1 + self.clip_high


class CispoLoss(ClippedLoss):
    """Clipped weights that keep their gradient."""

    function = "cispo_objective"
    type: Literal["cispo"] = "cispo"
    clip_low: float = Field(default=1.0, ge=0, le=1)
    clip_high: float = Field(default=4.0, ge=0)


class DppoLoss(ClippedLoss, PolicyGradientLoss):
    """A bound for the probability of a token in place of its ratio."""

    function = "dppo_objective"
    type: Literal["dppo"] = "dppo"


class PpoLoss(ClippedLoss):
    """The clipped surrogate of PPO."""

    function = "clipped_objective"
    type: Literal["ppo"] = "ppo"

    dual_clip: float = Field(default=3.0, gt=1, allow_inf_nan=True)
    """The importance ratio of a token with negative advantage counts for at most this; `inf`: any ratio."""


class DapoLoss(PpoLoss):
    """PPO's loss with a higher bound above."""

    type: Literal["dapo"] = "dapo"
    clip_high: float = Field(default=0.28, ge=0)


class GrpoLoss(PpoLoss):
    """PPO's loss; all rollouts count the same."""

    type: Literal["grpo"] = "grpo"
    aggregation: Aggregation = "sequence"


class DrGrpoLoss(PpoLoss):
    """PPO's loss without lengths."""

    type: Literal["dr_grpo"] = "dr_grpo"
    aggregation: Aggregation = "constant"


class GspoLoss(PpoLoss):
    """A ratio for the whole sequence, to the old weights, and a correction for the rest."""

    function = "gspo_objective"
    type: Literal["gspo"] = "gspo"
    correction: Annotated[NoCorrection | Truncation | Mask, ByType("truncate")] = Field(default_factory=Truncation)
    aggregation: Aggregation = "sequence"
    usual_ratio_to = "old"
    clip_low: float = Field(default=3e-4, ge=0, le=1)
    clip_high: float = Field(default=4e-4, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _needs_no_correction_to_the_sampler(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("ratio_to") == "sampler":
            correction = given.get("correction", {})
            return {
                **given,
                "correction": {"type": "none", **correction} if isinstance(correction, dict) else correction,
            }
        return given


class GspoTokenLoss(GspoLoss):
    """GSPO for advantages that differ within a sequence."""

    function = "gspo_token_objective"
    type: Literal["gspo_token"] = "gspo_token"


AnyPolicyLoss = Annotated[
    GrpoLoss
    | DrGrpoLoss
    | DapoLoss
    | GspoLoss
    | GspoTokenLoss
    | CispoLoss
    | DppoLoss
    | PpoLoss
    | PolicyGradientLoss
    | SftLoss
    | OwnLoss,
    ByType("dapo"),
]

POLICY_LOSSES: dict[str, type[BuiltInLoss]] = models_by_type(AnyPolicyLoss, BuiltInLoss)
"""The model of each built-in loss."""
