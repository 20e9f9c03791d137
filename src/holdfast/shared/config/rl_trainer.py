"""Configuration of the trainer of `rl`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from holdfast.shared.config.advantages import (
    EnvironmentTrainingConfig,
    check_advantages,
)
from holdfast.shared.config.alerts import AlertsConfig
from holdfast.shared.config.algorithm import (
    CriticConfig,
    DistillationConfig,
    EmaConfig,
    KlConfig,
    PretrainingConfig,
    ReplayConfig,
    RewardConfig,
    RewardModelConfig,
    UpdatesConfig,
)
from holdfast.shared.config.base import DType, Section
from holdfast.shared.config.losses import PolicyLossConfig
from holdfast.shared.config.registry import ADVANTAGES, GROUP_ADVANTAGES
from holdfast.shared.config.trainer import PolicyOptimConfig, TrainingCommand
from holdfast.shared.user_functions import check_name


class JournalConfig(Section):
    """What stays of the journal of batches, `rollouts/`, to be looked into."""

    keep: Annotated[int, Field(ge=0)] | Literal["all"] = 20
    """Keep this many of the newest trained batches, or `all`, though no checkpoint needs them any more. They are
    never trained again. Without checkpoints all stay: a trainer that dies starts again from the first."""


class TrainerConfig(TrainingCommand):
    """The trainer of an RL run; it trains on the batches that the orchestrator journals."""

    program = "rl"

    optim: PolicyOptimConfig = PolicyOptimConfig()  # pyright: ignore[reportIncompatibleVariableOverride] - only read
    """Optimizer and learning-rate schedule of the policy."""

    loss: PolicyLossConfig = PolicyLossConfig()
    """Policy loss."""

    advantage: str = Field(
        default="dr_grpo",
        description="; ".join(f"`{name}`: {one.help}" for name, one in ADVANTAGES.items()) + ". Or `module:function`.",
    )

    advantage_std: Literal["group", "batch"] = "group"
    """Whose standard deviation `grpo` divides by: that of the rewards of the group, or of the batch."""

    advantage_k: int | None = Field(default=None, ge=2)
    """The k of `pass_at_k`, at most `group_size`."""

    advantage_beta: float | None = Field(default=None, gt=0)
    """The beta of `online_dpo`: strength of the tie to the reference. Unset: 0.1."""

    environments: dict[str, EnvironmentTrainingConfig] = {}
    """`[environments.NAME]`: another `advantage`, and a `weight`, for one environment of the mix."""

    rewards: RewardConfig = RewardConfig()
    """What happens to rewards before advantages."""

    reward_model: RewardModelConfig | None = None
    """A learned reward model; unset: the rewards of the environments."""

    kl: KlConfig | None = None
    """Reference model and KL penalty; given without more, `ref_kld` is measured."""

    distillation: DistillationConfig | None = None
    """A teacher beside the rewards; with `advantage = distillation` it has no need to be given."""

    critic: CriticConfig | None = None
    """The critic of `advantage = gae`."""

    updates: UpdatesConfig = UpdatesConfig()
    """Passes and minibatches of one step."""

    ema: EmaConfig | None = None
    """Moving average of the policy's weights, in checkpoints and published at the end."""

    replay: ReplayConfig | None = None
    """Train groups of earlier batches again."""

    pretraining: PretrainingConfig | None = None
    """Supervised samples beside the rollouts."""

    alerts: AlertsConfig = AlertsConfig()
    """What metrics must look like for an alert."""

    mismatch_limit: float | None = Field(default=None, gt=0, allow_inf_nan=True)
    """Largest `mismatch_kl`, in nats a token, of rollouts by the very weights that a step trains: above it trainer and
    engine compute different models, and the run ends before it trains on them. Unset: 1e-6 in float32 (1e-3 where
    sampling cuts tokens), 0.05 where trainer or engines are in bfloat16; `inf`: never."""

    sampler_dtype: DType | None = None
    """Dtype of the engines, which decides what difference counts as rounding; unset: `model.dtype`. `rl` fills in that
    of its inference server."""

    journal: JournalConfig = JournalConfig()
    """Batches that stay after they are trained."""

    row_tokens: int = Field(default=4096, ge=2)
    """Token budget of one forward pass of one rank: a packed row, or with a model that cannot be packed
    (docs/models.md) rows of one sample each, with their padding."""

    async_level: int = Field(default=1, ge=0)
    """Batch N is made by the weights of step N - 1 - async_level; weights are kept that long."""

    batch_timeout_s: float = Field(default=1800.0, gt=0)
    """Give up when the orchestrator publishes no batch, and nobody gets anything else done, for this long."""

    hang_timeout_s: float = Field(default=1200.0, gt=0)
    """A rank that comes no further within a step for this long, from one micro-batch to the next, counts as hung."""

    startup_timeout_s: float = Field(default=7200.0, gt=0)
    """The same until the end of the first step: loading, and compiling where that is on."""

    save_timeout_s: float = Field(default=7200.0, gt=0)
    """The same while weights are published and checkpoints saved."""

    @property
    def numerics(self) -> DType:
        """The coarser of the dtypes of trainer and engines."""
        return "bfloat16" if "bfloat16" in (self.model.compute_dtype, self.sampler_dtype) else "float32"

    def advantage_of(self, environment: str) -> str:
        """Return the advantage of the groups of an environment, by its name."""
        section = self.environments.get(environment)
        return section.advantage or self.advantage if section is not None else self.advantage

    @property
    def advantages(self) -> tuple[str, ...]:
        """Every advantage that some environment may have."""
        return tuple(dict.fromkeys([self.advantage, *map(self.advantage_of, self.environments)]))

    def compares_rollouts_of(self, environment: str) -> bool:
        """Whether updates depend on how the rollouts of a problem compare; `loss.type = "sft"` imitates all of them."""
        return self.loss.type != "sft" and self.advantage_of(environment) in GROUP_ADVANTAGES

    @field_validator("advantage")
    @classmethod
    def _known_advantage(cls, name: str) -> str:
        return check_name(name, ADVANTAGES)

    @field_validator("environments")
    @classmethod
    def _known_advantages(cls, sections: dict[str, EnvironmentTrainingConfig]) -> dict[str, EnvironmentTrainingConfig]:
        for section in sections.values():
            if section.advantage is not None:
                check_name(section.advantage, ADVANTAGES)
        return sections

    @model_validator(mode="after")
    def _advantages_fit(self) -> TrainerConfig:
        check_advantages(self)
        return self

    @model_validator(mode="after")
    def _adapters_without_dropout(self) -> TrainerConfig:
        if self.model.lora is not None and self.model.lora.dropout > 0:
            raise ValueError(
                f"model.lora.dropout = {self.model.lora.dropout:g}: engines sample without dropout, so a policy that "
                "is trained with it is another one; set it to 0"
            )
        return self

    @model_validator(mode="after")
    def _parts_fit_together(self) -> TrainerConfig:
        if (self.advantage == "gae") != (self.critic is not None):
            missing = "set critic (critic = {} takes the defaults)" if self.critic is None else "set advantage = 'gae'"
            raise ValueError(f"advantage = 'gae' and a critic go together: {missing}")
        if self.critic is not None:
            self.critic.optim.check_warmup(self.max_steps, "critic.optim")
            if self.critic.warmup_steps >= self.max_steps:
                raise ValueError(
                    f"critic.warmup_steps ({self.critic.warmup_steps}) must be below max_steps ({self.max_steps}): "
                    "until then the policy is not trained"
                )
        if self.kl is not None and self.kl.refresh_interval is not None and self.model.lora is not None:
            raise ValueError(
                "kl.refresh_interval is for a policy that is trained whole, and model.lora trains adapters: leave one "
                "of them out"
            )
        if self.advantage == "distillation" and self.distillation is None:
            self.distillation = DistillationConfig()
        if self.distillation is not None:
            self._check_distillation()
        judges = self.distillation is not None and self.distillation.divergence == "sampled"
        if self.loss.type == "gspo" and (judges or self.advantage == "gae"):
            by = "distillation" if judges else "advantage = 'gae'"
            raise ValueError(
                f"loss.type = 'gspo' gives all tokens of a rollout one gradient, which averages away what {by} says of "
                "single tokens: set loss.type = 'gspo_token'"
            )
        return self

    def _check_distillation(self) -> None:
        assert self.distillation is not None
        if self.loss.type == "sft" and self.distillation.divergence == "sampled":
            raise ValueError(
                "distillation has no effect with loss.type = 'sft', which takes no advantages: set loss.type = "
                "'policy_gradient', or leave distillation out"
            )
        if self.loss.type == "gspo" and self.distillation.divergence == "sampled":
            raise ValueError(
                "loss.type = 'gspo' gives all tokens of a rollout one gradient, which averages the signals of "
                "distillation away: set loss.type = 'gspo_token', or distillation.divergence = 'full'"
            )
        if self.kl is None and self.distillation.divergence == "full":
            raise ValueError(
                "distillation.divergence = 'full' compares whole vocabularies, of which a teacher behind a server "
                "(orchestrator.teacher) gives single tokens: set kl.reference, or divergence = 'sampled'"
            )
        if self.kl is None:
            return  # the teacher is the orchestrator's
        if self.kl.reference is None:
            raise ValueError("distillation needs a teacher: set kl.reference; unset, it is model.name")
        if self.kl.refresh_interval is not None:
            raise ValueError("kl.refresh_interval would make the policy its own teacher (distillation): leave it out")
        if self.kl.place == "reward" and self.kl.coef > 0:
            raise ValueError(
                "kl.place = 'reward' is what distillation does, of which the reference is the teacher: leave kl.coef "
                "at 0, or set kl.place = 'loss'"
            )
