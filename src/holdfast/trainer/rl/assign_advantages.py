"""Gives the samples of a batch their advantages: chooses the function, and applies it.

`build_advantage` chooses an advantage for the rollouts of a batch: the choice of their environment, a built-in one of
`holdfast.trainer.rl.advantages`, or a user's function.

Shape legend: P problems of the batch, G rollouts of one problem, T sampled tokens of one rollout.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

import numpy as np

from holdfast.config.advantages import ADVANTAGES, GROUP_ADVANTAGES, SINGLE_ADVANTAGES, AdvantageConfig, GrpoAdvantage
from holdfast.config.algorithm import CriticConfig
from holdfast.config.rl_trainer import TrainerConfig
from holdfast.errors import DataError, TrainingError
from holdfast.process.imports import calling, load_function
from holdfast.trainer.data.packing import Sample
from holdfast.trainer.rl import advantages, batch
from holdfast.trainer.rl.advantages import AdvantageValue, batch_grpo, generalized_advantages, whiten, with_steps
from holdfast.trainer.rl.token_rewards import Groups, ScoredRollout

Advantage = Callable[[Groups], Sequence[Sequence[AdvantageValue]]]


def build_advantage(config: TrainerConfig) -> Advantage:
    """Return what gives every rollout of a batch the advantage of its environment, times the environment's weight.

    An advantage that normalises over the batch normalises over its own groups. Raise ConfigError if a function of the
    user cannot be loaded. The returned function raises TrainingError for a group of one where rollouts are compared."""
    sections: list[AdvantageConfig] = []
    for section in (config.advantage, *map(config.advantage_of, config.environments)):
        sections += [section] if section not in sections else []
    functions = [(section, build_named_advantage(section, config)) for section in sections]
    weights = {label: section.weight for label, section in config.environments.items()}

    def advantage(groups: Groups) -> list[list[AdvantageValue]]:
        found: dict[int, Sequence[AdvantageValue]] = {}
        for section, function in functions:
            own = {n: group for n, group in enumerate(groups) if config.advantage_of(group[0].environment) == section}
            if not own:
                continue
            if config.loss.type != "sft":
                require_siblings(list(own.values()), section.type)
            found |= dict(zip(own, function(list(own.values())), strict=True))
        scales = [weights.get(group[0].environment, 1.0) for group in groups]
        return [[_scaled(value, scale) for value in found[n]] for n, scale in enumerate(scales)]

    return advantage


def _scaled(value: AdvantageValue, scale: float) -> AdvantageValue:
    return scale * value if isinstance(value, int | float) else scale * np.asarray(value, dtype=np.float64)


def build_named_advantage(section: AdvantageConfig, config: TrainerConfig) -> Advantage:
    """Return the advantage of a type: a built-in one, or the user's `module:function`.

    A function of the user gets the rollouts of the batch as a list of lists of `ScoredRollout`, problem by problem, and
    returns as many values: finite numbers, or sequences of one for each sampled token. Raise ConfigError if the user's
    function cannot be loaded."""
    if section.type not in ADVANTAGES:
        return _user_advantage(section.type)
    built_in = ADVANTAGES[section.type]
    assert built_in.function is not None, f"{section.type} is not computed from rewards"
    if isinstance(section, GrpoAdvantage) and section.std == "batch":
        return batch_grpo  # its std is over problems, so it sees them all
    settings = section.model_dump(exclude={"type", "std"})
    if section.type == "gdpo":
        settings["weights"] = config.rewards.weights
    function = partial(getattr(advantages, built_in.function), **settings)
    if built_in.takes == "rewards":
        return lambda groups: [function([one.total_reward for one in group]) for group in groups]
    return partial(with_steps, function) if built_in.takes == "step_rewards" else function


def require_siblings(groups: Groups, name: str) -> None:
    """Refuse a group of one where the advantage `name` compares the rollouts of a group. Raise TrainingError that says
    which if there is one."""
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


def assign_advantages(samples: Sequence[Sample], advantages_PG: Sequence[Sequence[AdvantageValue]]) -> None:
    """Give every token of a sample the advantage of its rollout, or each target its own."""
    for sample, value in zip(samples, chain.from_iterable(advantages_PG), strict=True):
        if isinstance(value, int | float):
            sample.per_token[batch.ADVANTAGE] = np.full(len(sample.token_ids), value, dtype=np.float32)
        else:
            batch.assign_targets(sample, batch.ADVANTAGE, value)


def assign_gae_advantages(samples: Sequence[Sample], rollouts_PG: Groups, config: CriticConfig) -> None:
    """Give every target its advantage and return by GAE: penalties at each token, the reward at the last one.

    As in Ouyang et al. 2022, "Training language models to follow instructions with human feedback"."""
    for sample, rollout in zip(samples, chain.from_iterable(rollouts_PG), strict=True):
        advantages_T, returns_T = generalized_advantages(
            rollout.token_rewards, batch.target_values(sample, batch.VALUE), gamma=config.gamma, lam=config.lam
        )
        batch.assign_targets(sample, batch.ADVANTAGE, advantages_T)
        batch.assign_targets(sample, batch.RETURN, returns_T)


def whiten_advantages(samples: Sequence[Sample]) -> None:
    """Bring the advantages of all targets to mean 0 and variance 1, see `whiten`; a single one stays as it is."""
    found = [batch.target_values(sample, batch.ADVANTAGE) for sample in samples]
    if sum(map(len, found)) < 2:
        return
    for sample, whitened_T in zip(samples, whiten(found), strict=True):
        batch.assign_targets(sample, batch.ADVANTAGE, whitened_T)


def add_distillation(samples: Sequence[Sample], coef: float) -> dict[str, float]:
    """Add `coef (log teacher - log policy)` to the advantage of every target; return a metric.

    The policy is that before the step. The policy gradient with this advantage lowers KL(policy || teacher) token by
    token (Gu et al. 2024, "MiniLLM"; Agarwal et al. 2024, "On-Policy Distillation of Language Models"; without their
    corrections for later tokens).

    Returns:
        `distillation/kl`: the mean over the targets of `log policy - log teacher`, which estimates that divergence.

    Raise DataError if there are no log-probabilities of a teacher.
    """
    divergences = [0.0]
    for sample in samples:
        if batch.REFERENCE_LOGPROB not in sample.per_token:
            raise DataError(
                "trainer.distillation (and trainer.advantage = 'distillation') needs the log-probabilities of a "
                "teacher, and the batch has none: set orchestrator.teacher with mode = 'logprobs', or "
                "trainer.kl.reference"
            )
        divergence_T = batch.target_values(sample, batch.OLD_LOGPROB) - batch.target_values(
            sample, batch.REFERENCE_LOGPROB
        )
        batch.assign_targets(
            sample, batch.ADVANTAGE, batch.target_values(sample, batch.ADVANTAGE) - coef * divergence_T
        )
        divergences += divergence_T.tolist()
    return {"distillation/kl": math.fsum(divergences) / max(1, len(divergences) - 1)}


def mean_advantages(samples: Sequence[Sample]) -> list[float | None]:
    """Return the mean advantage over the trained tokens of each sample; None for a sample without any."""
    found = [batch.target_values(sample, batch.ADVANTAGE) for sample in samples]
    return [float(advantages_T.mean()) if len(advantages_T) else None for advantages_T in found]


def advantage_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return mean, population std and largest magnitude over the trained tokens."""
    found = np.concatenate([batch.target_values(sample, batch.ADVANTAGE) for sample in samples])
    if not len(found):
        return {}
    return {
        "advantage/mean": float(found.mean()),
        "advantage/std": float(found.std()),
        "advantage/max_abs": float(np.abs(found).max()),
    }
