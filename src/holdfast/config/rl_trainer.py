"""Settings of the trainer of `rl`, and the checks of advantages and rewards.

The checks refuse advantages that cannot be combined with other settings. `rl` knows the settings of trainer and
orchestrator, so it also checks what the two must agree on. `holdfast.config.advantages` lists
the advantages.
"""

# Types narrow the type of their base, which nobody sets.
# pyright: reportIncompatibleVariableOverride=false

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from holdfast.config import algorithm
from holdfast.config.advantages import (
    ADVANTAGES,
    GROUP_ADVANTAGES,
    MODEL_ADVANTAGES,
    REWARD_ADVANTAGES,
    SINGLE_ADVANTAGES,
    AdvantageConfig,
    AnyAdvantage,
    PassAtK,
    PlainAdvantage,
)
from holdfast.config.base import DType, Section
from holdfast.config.by_type import ByType
from holdfast.config.marks import Mark, Picked
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.config.policy_losses import AnyPolicyLoss, DapoLoss
from holdfast.config.training import TrainingCommand
from holdfast.config.view import AlertsConfig
from holdfast.errors import ConfigError, nearest


class EnvironmentTrainingConfig(Section):
    """How the rollouts of one environment of the mix are trained."""

    advantage: AnyAdvantage | None = None
    """The advantage of this environment's groups; unset: `trainer.advantage`. Normalising over the batch means: over
    the groups with the same advantage."""

    weight: float = Field(default=1.0, gt=0)
    """Factor of its advantages."""


def check_advantages(config: "TrainerConfig") -> None:
    """Refuse settings that an advantage cannot work with. Raise ValueError that says which, why, and what to change."""
    used = set(config.advantages)
    if needless := sorted(used & set(MODEL_ADVANTAGES)) if config.environments else []:
        raise ValueError(
            f"environments chooses among advantages that are computed from rewards, and '{needless[0]}' needs a model: "
            f"leave environments out, or take one of {', '.join(REWARD_ADVANTAGES)} or your own"
        )
    penalises_rewards = config.kl is not None and config.kl.place == "reward" and config.kl.coef > 0
    may_change_rewards = {
        "kl.place = 'reward'": penalises_rewards,
        "reward_model": config.reward_model is not None,
        "rewards.length_buffer_tokens": config.rewards.length_buffer_tokens is not None,
    }
    if "max_rl" in used:
        _refuse(
            "advantage = 'max_rl' divides by the mean reward and needs rewards of at least 0, which {} can make "
            "negative: leave that out, or choose another advantage",
            may_change_rewards
            | {"rewards.weights below 0": any(weight < 0 for weight in config.rewards.weights.values())},
        )
    if "gdpo" in used:
        if not config.rewards.weights:
            raise ValueError(
                "advantage = 'gdpo' normalises every reward by itself: name them in rewards.weights, such as "
                "weights = { exact = 1.0, reward = 0.5 }"
            )
        _refuse(
            "advantage = 'gdpo' is computed from the rewards of rewards.weights as the environments give them, so {} "
            "would have no effect: leave it out, or choose another advantage",
            may_change_rewards
            | {"rewards.clip": config.rewards.clip is not None, "rewards.scale": config.rewards.scale != "none"},
        )
    if "online_dpo" in used:
        _check_online_dpo(config)
    if config.loss.type == "sft":
        _refuse(
            "{} has no effect with loss.type = 'sft', which takes no advantages: leave it out, or choose another loss",
            {
                "environments": bool(config.environments),
                "critic": config.critic is not None,
                "reward_model": config.reward_model is not None,
                "kl.place = 'reward'": penalises_rewards,
            },
        )


def _refuse(message: str, settings: dict[str, bool]) -> None:
    """Refuse the first of the settings that is on; `{}` in the message is its name."""
    for name, is_on in settings.items():
        if is_on:
            raise ValueError(message.format(name))


def _check_online_dpo(config: "TrainerConfig") -> None:
    """Refuse settings whose gradient is not the gradient of DPO's loss."""
    if config.kl is None:
        raise ValueError("advantage = 'online_dpo' compares with a reference: set kl (kl = {} takes model.name)")
    needed = {"ratio_to": "old", "aggregation": "constant", "constant_tokens": 1, "correction": {"type": "none"}}
    found = config.loss.model_dump(include=set(needed))
    if config.loss.type != "policy_gradient" or found != needed:
        raise ValueError(
            "advantage = 'online_dpo' gives the gradient of DPO's loss with this policy loss alone: loss = { type = "
            "'policy_gradient', ratio_to = 'old', aggregation = 'constant', constant_tokens = 1, correction = { type = "
            "'none' } }"
        )
    _refuse(
        "advantage = 'online_dpo' does not go with {}: leave that out",
        {
            "updates of more than one epoch or minibatch": config.updates.epochs * config.updates.minibatches > 1,
            "kl.coef above 0 (advantage.beta is the tie to the reference)": config.kl.coef > 0,
            "rewards.truncated = 'mask', which would leave half pairs": config.rewards.truncated == "mask",
        },
    )


class JournalConfig(Section):
    """Batches that stay in the journal, `rollouts/`, to be looked into."""

    keep: Annotated[int, Field(ge=0)] | Literal["all"] = 20
    """Keep this many of the newest trained batches, or `all`, though no checkpoint needs them any more. They are
    never trained again. Without checkpoints all stay: a trainer that dies starts again from the first."""


class WeightsConfig(Section):
    """How new weights reach the engines."""

    transport: str
    """`directory`: engines read `weights/step_N`. `collective`: the trainer sends each version from its memory over
    torch.distributed (gloo, or NCCL between GPUs), before the directory is written; rank 0 holds it in memory until
    it is sent or the next version is there. An engine that cannot take it reads the directory."""


class DirectoryWeights(WeightsConfig):
    """Weights in files."""

    transport: Literal["directory"] = "directory"


class CollectiveWeights(WeightsConfig):
    """Weights by messages."""

    transport: Literal["collective"] = "collective"

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address of the machine of the trainer's rank 0, at which engines reach it."""

    stall_timeout_s: float = Field(default=60.0, gt=0)
    """Give a transfer up after so long without bytes."""


AnyWeights = Annotated[DirectoryWeights | CollectiveWeights, ByType("directory", key="transport")]

ATTENDED_TOKENS = 4
"""Most tokens that attention holds for each token of a row's budget. It holds a shared prompt once for each answer."""


class TrainerConfig(TrainingCommand):
    """The trainer of an RL run; it trains on the batches that the orchestrator journals."""

    program = "rl"
    rates = {"lr": 1e-6}

    loss: AnyPolicyLoss = Field(default_factory=DapoLoss)
    """Policy loss."""

    advantage: AnyAdvantage = Field(default_factory=PlainAdvantage)
    """How much better a rollout is than others."""

    environments: dict[str, EnvironmentTrainingConfig] = {}
    """`[environments.NAME]`: another `advantage`, and a `weight`, for one environment of the mix."""

    rewards: algorithm.RewardConfig = Field(default_factory=algorithm.RewardConfig)
    """Changes of rewards before advantages."""

    reward_model: algorithm.RewardModelConfig | None = None
    """A learned reward model; unset: the rewards of the environments."""

    kl: algorithm.KlConfig | None = None
    """Reference model and KL penalty; given without more, `ref_kld` is measured."""

    distillation: algorithm.DistillationConfig | None = None
    """A teacher beside the rewards; with `advantage = distillation` it has no need to be given."""

    critic: algorithm.CriticConfig | None = None
    """The critic of `advantage = gae`."""

    updates: algorithm.UpdatesConfig = Field(default_factory=algorithm.UpdatesConfig)
    """Passes and minibatches of one step."""

    ema: algorithm.EmaConfig | None = None
    """Moving average of the policy's weights, in checkpoints and published at the end."""

    pretraining: algorithm.PretrainingConfig | None = None
    """Supervised samples beside the rollouts."""

    alerts: Annotated[AlertsConfig, Mark.FREE] = Field(default_factory=AlertsConfig)
    """Values of metrics that raise an alert."""

    mismatch_limit: Annotated[float | None, Mark.FREE] = Field(default=None, gt=0, allow_inf_nan=True)
    """Largest `mismatch_kl`, in nats a token, of rollouts by the very weights that a step trains: above it trainer and
    engine compute different models, and the run ends before it trains on them. Unset: 1e-6 in float32 (1e-3 where
    sampling cuts tokens), 0.05 where trainer or engines are in bfloat16; `inf`: never."""

    sampler_dtype: Annotated[DType | None, Mark.FREE] = None
    """Dtype of the engines, which decides what difference counts as rounding; unset: `model.dtype`. `rl` fills in the
    value of its inference server."""

    journal: Annotated[JournalConfig, Mark.FREE] = Field(default_factory=JournalConfig)
    """Batches that stay after they are trained."""

    weights: Annotated[AnyWeights, Mark.FREE] = Field(default_factory=DirectoryWeights)
    """How new weights reach the engines."""

    row_tokens: Annotated[int, Picked(2)] = Field(default=4096, ge=2)
    """Token budget of one forward pass of one rank: a packed row, or with a model that cannot be packed
    (docs/models.md) rows of one sample each, with their padding."""

    picked: Annotated[list[str], Mark.FREE] = []
    """Written by `rl`: the settings that it picked so that a step fits the GPU that trainer and engine share. A resumed
    run keeps their values."""

    share_prompts: bool = True
    """Whether the answers to one prompt share its tokens in a row. The prompt is then computed once for all answers, if
    the model allows it (docs/models.md) and as far as they fit `row_tokens`. With a prompt that almost fills a row,
    each answer computes it again. Without dropout losses and gradients are the same up to rounding."""

    async_level: int = Field(default=1, ge=0)
    """Weights of step max(0, N - 1 - async_level) make batch N, except in rounds; they are kept that long."""

    batch_timeout_s: Annotated[float, Mark.FREE] = Field(default=1800.0, gt=0)
    """Give up when the orchestrator publishes no batch, and nobody gets anything else done, for this long."""

    hang_timeout_s: Annotated[float, Mark.FREE] = Field(default=1200.0, gt=0)
    """A rank that makes no progress within a step for this long, from one micro-batch to the next, counts as hung."""

    startup_timeout_s: Annotated[float, Mark.FREE] = Field(default=7200.0, gt=0)
    """The same until the end of the first step: loading, and compiling where that is on."""

    save_timeout_s: Annotated[float, Mark.FREE] = Field(default=7200.0, gt=0)
    """The same while weights are published and checkpoints saved."""

    @property
    def numerics(self) -> DType:
        """The coarser of the dtypes of trainer and engines."""
        return "bfloat16" if "bfloat16" in (self.model.compute_dtype, self.sampler_dtype) else "float32"

    def advantage_of(self, environment: str) -> AdvantageConfig:
        """Return the advantage of the groups of an environment."""
        section = self.environments.get(environment)
        return section.advantage or self.advantage if section is not None else self.advantage

    @property
    def advantages(self) -> tuple[str, ...]:
        """The types of the advantages that some environment may have."""
        return tuple(dict.fromkeys(one.type for one in (self.advantage, *map(self.advantage_of, self.environments))))

    @property
    def tells_tokens_apart(self) -> bool:
        """Whether some environment may have an advantage that rewards of turns and tokens make differ in a rollout."""
        return any(name not in ADVANTAGES or ADVANTAGES[name].tells_tokens_apart for name in self.advantages)

    def compares_rollouts_of(self, environment: str) -> bool:
        """Whether updates depend on how the rollouts of a problem compare; `loss.type = "sft"` imitates all of them."""
        return self.loss.type != "sft" and self.advantage_of(environment).type in GROUP_ADVANTAGES

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Self:
        check_advantages(self)
        if self.stop is not None and self.stop.is_validated:
            raise ValueError(
                f"stop.metric = '{self.stop.metric}' comes from validation, which rl does not have: name a metric such "
                "as reward/mean, or one of its evaluations, such as eval/NAME/avg@4 (docs/metrics.md)"
            )
        self._check_adapters()
        self._check_critic()
        if self.advantage.type == "distillation" and self.distillation is None:
            self.distillation = algorithm.DistillationConfig()
        if self.distillation is not None:
            self._check_distillation()
        judges = self.distillation is not None and self.distillation.divergence == "sampled"
        by_token = next((name for name in ("gae", "grpo_process") if name in self.advantages), None)
        if self.loss.type == "gspo" and (judges or by_token):
            by = "distillation" if judges else f"advantage = '{by_token}'"
            raise ValueError(
                f"loss.type = 'gspo' gives all tokens of a rollout one gradient, which averages away what {by} says of "
                "single tokens: set loss.type = 'gspo_token'"
            )
        return self

    def _check_adapters(self) -> None:
        if self.model.lora is None:
            return
        if isinstance(self.weights, CollectiveWeights):
            raise ValueError(
                "weights.transport = 'collective' sends whole models, and model.lora gives engines a small adapter: "
                "leave one of them out"
            )
        if self.model.lora.dropout > 0:
            raise ValueError(
                f"model.lora.dropout = {self.model.lora.dropout:g}: engines sample without dropout, so a policy that "
                "is trained with it is another one; set it to 0"
            )
        if self.kl is not None and self.kl.refresh_interval is not None:
            raise ValueError(
                "kl.refresh_interval is for a policy that is trained whole, and model.lora trains adapters: leave one "
                "of them out"
            )

    def _check_critic(self) -> None:
        if (self.advantage.type == "gae") != (self.critic is not None):
            missing = "set critic (critic = {} takes the defaults)" if self.critic is None else "set advantage = 'gae'"
            raise ValueError(f"advantage = 'gae' and a critic go together: {missing}")
        if self.critic is not None:
            self.critic.optim.check_warmup(self.max_steps, "critic.optim")
            self.critic.optim.check_schedule("critic.optim")
            if self.parallel.expert_parallel > 1 and self.critic.optim.type == "muon":
                raise ValueError(
                    "critic.optim.type = 'muon' does not go with parallel.expert_parallel above 1: set it to 'adamw', "
                    "or leave parallel.expert_parallel out"
                )
            if self.critic.warmup_steps >= self.max_steps:
                raise ValueError(
                    f"critic.warmup_steps ({self.critic.warmup_steps}) must be below max_steps ({self.max_steps}): "
                    "until then the policy is not trained"
                )

    def _check_distillation(self) -> None:
        assert self.distillation is not None
        if self.loss.type == "sft" and self.distillation.divergence == "sampled":
            raise ValueError(
                "distillation has no effect with loss.type = 'sft', which takes no advantages: set loss.type = "
                "'policy_gradient', or leave distillation out"
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


# Environments with one sampled turn; environments of users may have several.
_SINGLE_TURN = ("reverse_text", "jsonl")


def check_rewards(trainer: TrainerConfig, orchestrator: OrchestratorConfig) -> None:
    """Refuse what would come out in the middle of a run, or have no effect. Raise ConfigError that says what, and what
    to change."""
    _check_environments(trainer, orchestrator)
    _check_group_size(trainer, orchestrator)
    _check_dynamic_sampling(trainer, orchestrator)
    _check_length_penalty(trainer, orchestrator)


def _check_environments(trainer: TrainerConfig, orchestrator: OrchestratorConfig) -> None:
    labels = [environment.label for environment in orchestrator.environments]
    for name in trainer.environments:
        if name not in labels:
            raise ConfigError(
                f"trainer.environments names '{name}', which is not an environment of the run.{nearest(name, labels)} "
                f"There are: {', '.join(labels)}"
            )


def _check_group_size(trainer: TrainerConfig, orchestrator: OrchestratorConfig) -> None:
    for environment in orchestrator.environments:
        own, size = trainer.advantage_of(environment.label), orchestrator.rollouts_of(environment).group_size
        if size == 1 and trainer.compares_rollouts_of(environment.label):
            raise ConfigError(
                f"trainer.advantage = '{own.type}' compares the rollouts of one problem, and orchestrator.group_size = "
                f"1 gives each of environment '{environment.label}' a single one: set group_size to 2 or more, or take "
                f"an advantage that needs no group: {', '.join(SINGLE_ADVANTAGES)}, or one of your own"
            )
        if isinstance(own, PassAtK) and own.k > size:
            raise ConfigError(
                f"trainer.advantage.k = {own.k} is more than the {size} rollouts of a problem of "
                f"environment '{environment.label}' (group_size): lower the one or raise the other"
            )


def _check_dynamic_sampling(trainer: TrainerConfig, orchestrator: OrchestratorConfig) -> None:
    """Refuse to choose groups by a reward that nothing is learned from."""
    if orchestrator.dynamic_sampling is None:
        return
    weights = trainer.rewards.weights
    cause = None
    if trainer.reward_model is not None and trainer.reward_model.rules_weight == 0:
        cause = "trainer.reward_model.rules_weight = 0 leaves it out"
    elif weights and not weights.get("reward"):
        cause = "trainer.rewards.weights leaves 'reward' out"
    if cause is not None:
        raise ConfigError(
            "orchestrator.dynamic_sampling drops groups in which the environment's own reward is equal, and "
            f"{cause}: it would draw more problems to no effect. Leave dynamic_sampling off, or let that reward count"
        )


def _check_length_penalty(trainer: TrainerConfig, orchestrator: OrchestratorConfig) -> None:
    """Refuse a length that no rollout can reach."""
    most, reached, key = trainer.rewards.length_max_tokens, 0, ""
    for environment in orchestrator.environments:
        settings = orchestrator.rollouts_of(environment)
        is_single = environment.id in _SINGLE_TURN and not environment.mcp_servers
        branches = environment.max_branches if environment.history == "split" and not is_single else 1
        own, own_key = branches * (settings.seq_len - 1), f"orchestrator.seq_len = {settings.seq_len} with a prompt"
        if branches > 1:
            own_key += f", in up to {branches} branches,"
        if is_single and settings.max_tokens <= own:
            own, own_key = settings.max_tokens, "orchestrator.sampling.max_tokens"
        if own > reached:
            reached, key = own, own_key
    if most is not None and most > reached:
        raise ConfigError(
            f"trainer.rewards.length_max_tokens = {most} is never reached: {key} allows {reached} sampled tokens. "
            f"Lower it to at most {reached}"
        )
