"""What the advantages of `rl` cannot be combined with. Which there are: `holdfast.shared.config.registry`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from holdfast.shared.config.base import Section
from holdfast.shared.config.registry import MODEL_ADVANTAGES, REWARD_ADVANTAGES

if TYPE_CHECKING:
    from holdfast.shared.config.rl_trainer import TrainerConfig


class EnvironmentTrainingConfig(Section):
    """How the rollouts of one environment of the mix are trained."""

    advantage: str | None = None
    """The advantage of this environment's groups; unset: `trainer.advantage`. What is normalised over the batch is
    so over the groups with the same advantage."""

    weight: float = Field(default=1.0, gt=0)
    """Factor of its advantages."""


def check_advantages(config: TrainerConfig) -> None:
    """Refuse settings that an advantage cannot work with.

    Raises:
        ValueError: says which, why, and what to change.
    """
    used = set(config.advantages)
    if needless := sorted(used & set(MODEL_ADVANTAGES)) if config.environments else []:
        raise ValueError(
            f"environments chooses among advantages that are computed from rewards, and '{needless[0]}' needs a model: "
            f"leave environments out, or take one of {', '.join(REWARD_ADVANTAGES)} or your own"
        )
    if (config.advantage_k is not None) != ("pass_at_k" in used):
        missing = "set advantage_k" if config.advantage_k is None else "set advantage, or leave advantage_k out"
        raise ValueError(f"advantage = 'pass_at_k' and advantage_k go together: {missing}")
    if config.advantage_std == "batch" and "grpo" not in used:
        raise ValueError(
            f"advantage_std says by what advantage = 'grpo' divides, and advantage is '{config.advantage}': set "
            "advantage = 'grpo', or leave advantage_std out"
        )
    if "max_rl" in used and (cause := next((name for name, is_on in _that_may_be_negative(config) if is_on), None)):
        raise ValueError(
            f"advantage = 'max_rl' divides by the mean reward and needs rewards of at least 0, which {cause} can make "
            "negative: leave that out, or choose another advantage"
        )
    if "gdpo" in used:
        _check_gdpo(config)
    if config.advantage_beta is not None and "online_dpo" not in used:
        raise ValueError("advantage_beta is the beta of advantage = 'online_dpo': set that, or leave it out")
    if "online_dpo" in used:
        _check_online_dpo(config)
    if config.loss.type == "sft":
        _check_imitation(config)


def _check_imitation(config: TrainerConfig) -> None:
    """Refuse what acts through advantages alone, where the loss takes none."""
    for name, is_on in (
        ("environments", bool(config.environments)),
        ("critic", config.critic is not None),
        ("kl.place = 'reward'", _penalises_rewards(config)),
    ):
        if is_on:
            raise ValueError(
                f"{name} has no effect with loss.type = 'sft', which takes no advantages: leave it out, or choose "
                "another loss"
            )


def _that_may_be_negative(config: TrainerConfig) -> list[tuple[str, bool]]:
    """Return what can make a reward negative that was none, and whether it is on."""
    return [
        ("kl.place = 'reward'", _penalises_rewards(config)),
        ("rewards.length_buffer_tokens", config.rewards.length_buffer_tokens is not None),
        ("reward_model", config.reward_model is not None),
        ("rewards.weights below 0", any(weight < 0 for weight in config.rewards.weights.values())),
    ]


def _check_gdpo(config: TrainerConfig) -> None:
    if not config.rewards.weights:
        raise ValueError(
            "advantage = 'gdpo' normalises every reward by itself: name them in rewards.weights, such as "
            "weights = { exact = 1.0, reward = 0.5 }"
        )
    for name, is_on in (
        ("kl.place = 'reward'", _penalises_rewards(config)),
        ("reward_model", config.reward_model is not None),
        ("rewards.length_buffer_tokens", config.rewards.length_buffer_tokens is not None),
        ("rewards.clip", config.rewards.clip is not None),
        ("rewards.scale", config.rewards.scale != "none"),
    ):
        if is_on:
            raise ValueError(
                f"advantage = 'gdpo' is computed from the rewards of rewards.weights as the environments give them, so "
                f"{name} would have no effect: leave it out, or choose another advantage"
            )


def _check_online_dpo(config: TrainerConfig) -> None:
    """Refuse what makes the gradient another than that of DPO's loss."""
    if config.kl is None:
        raise ValueError("advantage = 'online_dpo' compares with a reference: set kl (kl = {} takes model.name)")
    loss = config.loss
    found = (loss.type, loss.ratio_to, loss.aggregation, loss.constant_tokens, loss.correction.type)
    if found != ("policy_gradient", "old", "constant", 1, "none"):
        raise ValueError(
            "advantage = 'online_dpo' gives the gradient of DPO's loss with this policy loss alone: loss = { type = "
            "'policy_gradient', ratio_to = 'old', aggregation = 'constant', constant_tokens = 1, correction = { type = "
            "'none' } }"
        )
    for name, is_on in (
        ("updates of more than one epoch or minibatch", config.updates.epochs * config.updates.minibatches > 1),
        ("kl.coef above 0 (advantage_beta is the tie to the reference)", config.kl.coef > 0),
        ("rewards.truncated = 'mask', which would leave half pairs", config.rewards.truncated == "mask"),
    ):
        if is_on:
            raise ValueError(f"advantage = 'online_dpo' does not go with {name}: leave that out")


def _penalises_rewards(config: TrainerConfig) -> bool:
    return config.kl is not None and config.kl.place == "reward" and config.kl.coef > 0
