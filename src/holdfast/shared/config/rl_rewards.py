"""What of rewards and advantages trainer and orchestrator must agree on; `rl` knows the settings of both."""

from __future__ import annotations

from holdfast.shared.config.orchestrator import OrchestratorConfig
from holdfast.shared.config.registry import SINGLE_ADVANTAGES
from holdfast.shared.config.rl_trainer import TrainerConfig
from holdfast.shared.errors import ConfigError, nearest

# Environments with one sampled turn; those of users may have several.
_SINGLE_TURN = ("reverse_text", "python_code", "jsonl")


def check_rewards(trainer: TrainerConfig, orchestrator: OrchestratorConfig) -> None:
    """Refuse what would come out in the middle of a run, or have no effect.

    Raises:
        ConfigError: says what, and what to change.
    """
    _check_environments(trainer, orchestrator)
    _check_group_size(trainer, orchestrator)
    _check_dynamic_sampling(trainer, orchestrator)
    _check_length_penalty(trainer, orchestrator)


def _check_environments(trainer: TrainerConfig, orchestrator: OrchestratorConfig) -> None:
    labels = [environment.label for environment in orchestrator.environments]
    for name in trainer.environments:
        if name not in labels:
            raise ConfigError(
                f"trainer.environments names '{name}', which is none of the mix.{nearest(name, labels)} "
                f"There are: {', '.join(labels)}"
            )


def _check_group_size(trainer: TrainerConfig, orchestrator: OrchestratorConfig) -> None:
    for environment in orchestrator.environments:
        name, size = trainer.advantage_of(environment.label), orchestrator.rollouts_of(environment).group_size
        if size == 1 and trainer.compares_rollouts_of(environment.label):
            raise ConfigError(
                f"trainer.advantage = '{name}' compares the rollouts of one problem, and orchestrator.group_size = 1 "
                f"gives each of environment '{environment.label}' a single one: set group_size to 2 or more, or take "
                f"an advantage that needs no group: {', '.join(SINGLE_ADVANTAGES)}, or one of your own"
            )
        if name == "pass_at_k" and trainer.advantage_k is not None and trainer.advantage_k > size:
            raise ConfigError(
                f"trainer.advantage_k = {trainer.advantage_k} is more than the {size} rollouts of a problem of "
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
