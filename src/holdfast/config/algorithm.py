"""Settings of the RL algorithm: policy loss, KL control, critic, rewards, updates, averages, distillation."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from holdfast.config.base import KlEstimator, Section
from holdfast.config.losses_and_advantages import POLICY_LOSSES
from holdfast.config.training import OptimConfig, SftDataConfig
from holdfast.process.imports import check_name


class KlConfig(Section):
    """A reference model, and a penalty for the policy's divergence from it."""

    reference: str | None = Field(default=None, min_length=1)
    """Model directory or hub name of the reference (or teacher); unset: `model.name`. It must not change
    while the run lasts: its digest is in every checkpoint."""

    refresh_interval: int | None = Field(default=None, ge=1)
    """After every this many steps the reference takes over the weights of the policy; unset: it stays as it is."""

    coef: float = Field(default=0.0, ge=0)
    """Weight of the penalty; 0: `ref_kld` is measured, nothing is penalised."""

    place: Literal["loss", "reward"] = "loss"
    """A term of the loss (GRPO), or taken from the reward of each token before advantages (PPO, RLOO)."""

    estimator: KlEstimator | None = None
    """Per-token estimator; unset: `k3_unbiased` in the loss, where it is `k3` times the importance ratio, `k1` in the
    reward. `k1` in the loss is refused: its gradient is zero on average."""

    target: float | None = Field(default=None, gt=0)
    """Steer the coefficient towards this divergence, in nats per sequence (Ziegler et al. 2019); unset: it
    stays `coef`."""

    horizon: float = Field(default=10_000.0, gt=0)
    """Sequences over which the steering acts; smaller is faster."""

    @model_validator(mode="after")
    def _has_an_effect(self) -> Self:
        if self.estimator is None:
            self.estimator = "k3_unbiased" if self.place == "loss" else "k1"
        if self.estimator == "k1" and self.place == "loss" and self.coef > 0:
            raise ValueError(
                "estimator = 'k1' with place = 'loss' has a gradient that is zero on average: take 'k3_unbiased', 'k2' "
                "or 'k3', or place = 'reward'"
            )
        if self.estimator == "k3_unbiased" and self.place == "reward":
            raise ValueError(
                "estimator = 'k3_unbiased' mends the gradient of a term of the loss, and a reward has none: take 'k1', "
                "'k2' or 'k3', or place = 'loss'"
            )
        if self.target is not None and self.coef == 0:
            raise ValueError("target steers coef by multiplying it: set coef above 0 (0.2 is usual)")
        if self.target is None and self.horizon != type(self).model_fields["horizon"].default:
            raise ValueError("horizon has no effect without target: leave it out, or set target")
        return self


class DistillationConfig(Section):
    """A teacher's judgement of the policy's own rollouts: beside rewards, or without (`advantage = distillation`)."""

    coef: float = Field(default=1.0, gt=0)
    """Weight of the teacher, whose signal is in nats, beside the advantages of rewards."""

    divergence: Literal["sampled", "full"] = "sampled"
    """`sampled`: a token's log-probability under the teacher minus that under the policy is added to its advantage.
    `full`: KL(policy || teacher) over the whole vocabulary is a term of the loss; needs `kl.reference`."""


class CriticConfig(Section):
    """A critic beside the policy: a model of its own with its own optimizer, for `advantage = gae` (PPO)."""

    name: str | None = Field(default=None, min_length=1)
    """Model directory or hub name to start from, also a reward model; unset: `model.name`."""

    optim: OptimConfig = Field(default_factory=OptimConfig)
    """The critic's optimizer and learning-rate schedule."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps at the start of the run that train only the critic: the policy samples, and stays as it is."""

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per token."""

    lam: float = Field(default=0.95, ge=0, le=1)
    """GAE's lambda: 1 trusts only rewards, 0 only the critic."""

    clip: float = Field(default=0.2, gt=0, allow_inf_nan=True)
    """A value may move this far from the one before the step, further is not learned; `inf`: any distance."""

    whiten: bool = True
    """Bring the advantages of the batch to mean 0 and standard deviation 1, over its tokens."""


class RewardModelConfig(Section):
    """A learned reward model that scores every rollout on the trainer."""

    name: str = Field(min_length=1)
    """Directory that `reward-model` published, or a hub model with one score."""

    weight: float = 1.0
    """Weight of the score in the reward."""

    rules_weight: float = 0.0
    """Weight of the environment's own reward beside it, or of the sum of `rewards.weights`."""

    missing_eos_penalty: float = Field(default=0.0, ge=0)
    """Taken from the score of a rollout that a token limit ended: it is scored in the middle of a sentence."""


class RewardConfig(Section):
    """Changes of rewards before advantages are computed, in this order."""

    weights: dict[str, float] = {}
    """The reward of a rollout is the sum of these metrics of its environment, each times its weight; `reward` is the
    environment's own. Unset: only the environment's own."""

    length_buffer_tokens: int | None = Field(default=None, ge=1)
    """DAPO's soft punishment of overlong answers: over the last this many tokens before `length_max_tokens`
    it grows from 0 to -1; unset: none."""

    length_max_tokens: int | None = Field(default=None, ge=1)
    """Sampled tokens, of all turns, from which the punishment is -1; usually orchestrator.sampling.max_tokens."""

    length_penalty: float = Field(default=1.0, gt=0)
    """Factor of the punishment of overlong answers."""

    clip: float | None = Field(default=None, gt=0)
    """Rewards are cut to [-clip, clip]."""

    scale: Literal["none", "running"] = "none"
    """`running`: divide by the standard deviation of all rewards of the run so far (the moments are in
    every checkpoint). Normalisation within groups or the batch is a matter of `advantage`."""

    truncated: Literal["keep", "mask"] = "keep"
    """Effect of rollouts that a token limit ended. `keep`: their reward counts, as any other; `mask`: they count only
    in baselines, and are not trained on (DAPO's overlong filtering). `length_buffer_tokens` penalises long ones."""

    @model_validator(mode="after")
    def _whole_punishment(self) -> Self:
        if (self.length_buffer_tokens is None) != (self.length_max_tokens is None):
            raise ValueError("length_buffer_tokens and length_max_tokens go together: set both or neither")
        if self.length_buffer_tokens is None and self.length_penalty != 1:
            raise ValueError("length_penalty has no effect without length_buffer_tokens: leave it out, or set both")
        if self.length_buffer_tokens and self.length_max_tokens and self.length_buffer_tokens > self.length_max_tokens:
            raise ValueError(
                f"length_buffer_tokens ({self.length_buffer_tokens}) is more than length_max_tokens "
                f"({self.length_max_tokens})"
            )
        return self


class UpdatesConfig(Section):
    """How often a batch is trained on within its step."""

    epochs: int = Field(default=1, ge=1)
    """Passes over the batch."""

    minibatches: int = Field(default=1, ge=1)
    """Optimizer updates of one pass, each on its share of the rollouts."""


class EmaConfig(Section):
    """An exponential moving average of the policy's weights."""

    decay: float = Field(default=0.992, gt=0, lt=1)
    """Share of the average that stays at each step."""


class PretrainingConfig(Section):
    """Supervised samples beside the rollouts (PPO-ptx of InstructGPT)."""

    coef: float = Field(default=1.0, gt=0)
    """Weight of their mean cross-entropy in the loss."""

    data: SftDataConfig = Field(default_factory=SftDataConfig)
    """The samples; `batch_size` of them in every update."""

    @model_validator(mode="after")
    def _has_data(self) -> Self:
        if not self.data.name:
            raise ValueError("needs data.name: a file of rows, or a dataset of a hub")
        if self.data.validation_fraction:
            raise ValueError("data.validation_fraction holds samples out, and nothing validates here: leave it out")
        return self


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

    def filled(self, default: Literal["none", "truncate"]) -> Self:
        """Return it with unset values filled in: `default` is the type.

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
    """The policy loss by name, see docs/losses.md. Unset settings take the default of that loss."""

    type: str = Field(
        default="dapo",
        description=f"{', '.join(f'`{name}`' for name in POLICY_LOSSES)}, or `module:function` of your own. `sft` "
        "takes no advantages: every rollout is a demonstration.",
    )

    clip_low: float | None = Field(default=None, ge=0, le=1)
    """The importance ratio is clipped below at 1 - clip_low; 1: never. `dppo`: how far a token's probability may
    fall. Unset: the default of `type` in docs/losses.md."""

    clip_high: float | None = Field(default=None, ge=0)
    """The importance ratio is clipped above at 1 + clip_high. `dppo`: how far a token's probability may rise. Unset:
    the default of `type` in docs/losses.md."""

    dual_clip: float | None = Field(default=None, gt=1, allow_inf_nan=True)
    """The importance ratio of a token with negative advantage counts for at most this; `inf`: any ratio."""

    ratio_max: float | None = Field(default=None, ge=1, allow_inf_nan=True)
    """The largest weight that an importance ratio gives a token, in `policy_gradient` and `dppo`; `inf`: any ratio.
    Unset: 20."""

    ratio_to: Literal["sampler", "old"] | None = None
    """The importance ratio is to the `sampler`, or to the trainer's `old` weights at the start of the step. Unset:
    `old` with a correction and for `gspo` and `gspo_token`, else `sampler`."""

    aggregation: Literal["sequence", "token", "constant"] | None = None
    """The denominator: every rollout counts the same (`sequence`), every token counts the same (`token`), or a token
    counts 1 / `constant_tokens` of a rollout (`constant`). Unset: the default of `type` in docs/losses.md."""

    constant_tokens: int | None = Field(default=None, ge=1)
    """Tokens of a rollout for `aggregation = constant`. Unset: `rl` takes `orchestrator.sampling.max_tokens`. If
    rollouts have several turns, set it to `orchestrator.seq_len`."""

    correction: CorrectionConfig = Field(default_factory=CorrectionConfig)
    """Importance weights between sampler and trainer."""

    entropy: EntropyConfig = Field(default_factory=EntropyConfig)
    """A bonus for the policy's entropy."""

    args: dict[str, Any] = {}
    """Arguments of your own function."""

    @field_validator("type")
    @classmethod
    def _known(cls, name: str) -> str:
        return check_name(name, POLICY_LOSSES)

    @model_validator(mode="after")
    def _with_defaults(self) -> Self:
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
