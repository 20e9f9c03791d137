"""Which advantage the rollouts of a batch get: that of their environment, a built-in one or a function of the user."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from operator import attrgetter

import numpy as np

from holdfast.shared.config.registry import ADVANTAGES, GROUP_ADVANTAGES, SINGLE_ADVANTAGES
from holdfast.shared.config.rl_trainer import TrainerConfig
from holdfast.shared.errors import TrainingError
from holdfast.shared.user_functions import calling, load_built_in, load_function
from holdfast.trainer.rl.advantages.base import Advantage, AdvantageValue
from holdfast.trainer.rl.advantages.group import batch_grpo, with_steps
from holdfast.trainer.rl.advantages.scored_rollouts import Groups, ScoredRollout


def build_advantage(config: TrainerConfig) -> Advantage:
    """Return what gives every rollout of a batch the advantage of its environment, times the environment's weight.

    What an advantage normalises over the batch it normalises over the groups that it is the advantage of.

    Raises:
        ConfigError: a function of the user cannot be loaded.
        TrainingError: (of the returned function) a group of one where rollouts are compared.
    """
    functions = {name: build_named_advantage(name, config) for name in config.advantages}
    weights = {label: section.weight for label, section in config.environments.items()}

    def advantage(groups: Groups) -> list[list[AdvantageValue]]:
        found: dict[int, Sequence[AdvantageValue]] = {}
        for name, function in functions.items():
            own = {n: group for n, group in enumerate(groups) if config.advantage_of(group[0].environment) == name}
            if not own:
                continue
            if config.loss.type != "sft":
                require_siblings(list(own.values()), name)
            found |= dict(zip(own, function(list(own.values())), strict=True))
        scales = [weights.get(group[0].environment, 1.0) for group in groups]
        return [[_scaled(value, scale) for value in found[n]] for n, scale in enumerate(scales)]

    return advantage


def _scaled(value: AdvantageValue, scale: float) -> AdvantageValue:
    return scale * value if isinstance(value, int | float) else scale * np.asarray(value, dtype=np.float64)


def build_named_advantage(name: str, config: TrainerConfig) -> Advantage:
    """Return the advantage that `name` stands for: a built-in one, or the user's `module:function`.

    A function of the user gets the rollouts of the batch as a list of lists of `ScoredRollout`, problem by problem,
    and returns as many values: finite numbers, or sequences of one for each sampled token.

    Raises:
        ConfigError: the user's function cannot be loaded.
    """
    if name not in ADVANTAGES:
        return _user_advantage(name)
    built_in = ADVANTAGES[name]
    assert built_in.function is not None, f"{name} is not computed from rewards"
    settings = {argument: attrgetter(setting)(config) for argument, setting in built_in.settings.items()}
    function = partial(load_built_in(built_in.function, package="holdfast.trainer.rl.advantages"), **settings)
    if name == "grpo" and config.advantage_std == "batch":
        return batch_grpo  # its std is over problems, so it sees them all
    if built_in.takes == "rewards":
        return lambda groups: [function([one.total_reward for one in group]) for group in groups]
    return partial(with_steps, function) if built_in.takes == "step_rewards" else function


def require_siblings(groups: Groups, name: str) -> None:
    """Refuse a group of one where the advantage `name` compares the rollouts of a group.

    Raises:
        TrainingError: there is one; says which.
    """
    alone = next((group[0] for group in groups if len(group) < 2), None)
    if name in GROUP_ADVANTAGES and alone is not None:
        raise TrainingError(
            f"advantage = '{name}' compares the rollouts of one problem, and task {alone.task_id} of environment "
            f"'{alone.environment}' has a single one: set orchestrator.group_size to 2 or more, or take an advantage "
            f"that needs no group: {', '.join(SINGLE_ADVANTAGES)}"
        )


def _user_advantage(name: str) -> Advantage:
    function = load_function(name, key="advantage")

    def advantage(groups: Groups) -> list[list[float | np.ndarray]]:
        with calling(name, key="advantage"):
            returned = [[_plain(value) for value in group] for group in function([list(group) for group in groups])]
        sizes, wanted = [len(group) for group in returned], [len(group) for group in groups]
        if sizes != wanted:
            raise TrainingError(f"advantage = '{name}' returned groups of {sizes} values for groups of {wanted}")
        for value, one in zip(chain.from_iterable(returned), chain.from_iterable(groups), strict=True):
            _check(value, one, name)
        return returned

    return advantage


def _plain(value: AdvantageValue) -> float | np.ndarray:
    numbers = np.asarray(value, dtype=np.float64)
    return numbers if numbers.ndim else float(numbers)


def _check(value: float | np.ndarray, one: ScoredRollout, name: str) -> None:
    """Refuse what is neither one finite number nor one for each sampled token."""
    whose = f"task {one.task_id} of environment '{one.environment}'"
    if isinstance(value, np.ndarray) and value.shape != (one.num_tokens,):
        raise TrainingError(
            f"advantage = '{name}' returned an array of shape {value.shape} for a rollout of {whose} with "
            f"{one.num_tokens} sampled tokens: return one number, or one for each sampled token"
        )
    if not np.isfinite(value).all():
        raise TrainingError(f"advantage = '{name}' returned a number that is not finite for {whose}: {value}")
