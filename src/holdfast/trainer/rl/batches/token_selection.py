"""Which tokens of an update a loss treats differently: those of high entropy, or of high covariance.

Chosen from what was measured before the step, over all tokens of the update and by every rank alike, so the choice does
not depend on how the update is split; a random one is a function of seed and update alone.

Shape legend: T trained tokens of the update.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from holdfast.shared.config.losses import CovarianceConfig, PolicyLossConfig
from holdfast.trainer.data.packing import Sample
from holdfast.trainer.rl.batches.minibatches import Minibatch
from holdfast.trainer.rl.batches.per_token import (
    ADVANTAGE,
    HIGH_COVARIANCE,
    OLD_ENTROPY,
    OLD_LOGPROB,
    SELECTED,
    assign_targets,
    target_values,
)


def select_tokens(minibatch: Minibatch, config: PolicyLossConfig, *, seed: int, update: int) -> None:
    """Give every sample what `config` selects, as `per_token[SELECTED]` and `per_token[HIGH_COVARIANCE]`, 1 or 0.

    Nothing is given where the loss selects nothing.

    Args:
        update: updates that the run has taken before.
    """
    samples = minibatch.samples
    if config.top_entropy_share < 1:
        _assign(SELECTED, samples, highest(_all_targets(OLD_ENTROPY, samples), config.top_entropy_share))
    if config.covariance.share is not None:
        covariances_T = covariances(_all_targets(OLD_LOGPROB, samples), _all_targets(ADVANTAGE, samples))
        # By the count of updates: every rank, and a resumed run, draws the same.
        keys_T = np.random.SeedSequence(seed, spawn_key=(update,)).generate_state(len(covariances_T), np.uint64)
        _assign(HIGH_COVARIANCE, samples, covariant(covariances_T, keys_T, config.covariance))


def highest(entropies_T: np.ndarray, share: float) -> np.ndarray:
    """Return which tokens have an entropy of at least the (1 - share)-quantile, (T,), bool.

    Wang et al. 2025, "Beyond the 80/20 Rule: High-Entropy Minority Tokens Drive Effective Reinforcement Learning for
    LLM Reasoning", eq. 6. The quantile is interpolated, as in TRL.
    """
    if not len(entropies_T):
        return np.zeros(0, dtype=bool)
    return entropies_T >= np.quantile(entropies_T, 1 - share)


def covariances(logprobs_T: np.ndarray, advantages_T: np.ndarray) -> np.ndarray:
    """Return (l - mean l) (A - mean A) of each token, (T,), float64: what it adds to their covariance.

    Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", eq. 10: tokens
    with a large one lower the entropy.
    """
    if not len(logprobs_T):
        return np.zeros(0)
    return (logprobs_T - logprobs_T.mean()) * (advantages_T - advantages_T.mean())


def covariant(covariances_T: np.ndarray, keys_T: np.ndarray, config: CovarianceConfig) -> np.ndarray:
    """Return which tokens are chosen, (T,), bool: `share` of all, but at least one of those that may be.

    With bounds (Clip-Cov, the same, eq. 11), those with the smallest keys among the tokens whose covariance lies
    between them; without (KL-Cov, eq. 12), those with the largest covariance.
    """
    assert config.share is not None  # the config fills it in
    count = max(1, int(config.share * len(covariances_T)))
    if config.low is None or config.high is None:
        # Stable: equal covariances must give the same choice on every machine.
        order_T = np.argsort(-covariances_T, kind="stable")
    else:
        allowed_T = np.flatnonzero((covariances_T > config.low) & (covariances_T < config.high))
        order_T = allowed_T[np.argsort(keys_T[allowed_T], kind="stable")]
    chosen_T = np.zeros(len(covariances_T), dtype=bool)
    chosen_T[order_T[:count]] = True
    return chosen_T


def _all_targets(key: str, samples: Sequence[Sample]) -> np.ndarray:
    return np.concatenate([target_values(sample, key) for sample in samples])


def _assign(key: str, samples: Sequence[Sample], chosen_T: np.ndarray) -> None:
    ends = np.cumsum([sample.num_targets for sample in samples])
    for sample, own in zip(samples, np.split(chosen_T, ends[:-1]), strict=True):
        assign_targets(sample, key, own)
