"""Settings of the RL algorithm beside the policy loss: KL control, critic, rewards, updates, averages, distillation."""

from typing import Literal, Self

from pydantic import Field, model_validator

from holdfast.config.base import KlEstimator, Section
from holdfast.config.data import SftDataConfig
from holdfast.config.training import AdamWConfig, AnyOptim


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

    optim: AnyOptim = Field(default_factory=AdamWConfig)
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
