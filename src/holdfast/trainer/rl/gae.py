"""Advantages and loss of a critic: generalized advantage estimation, clipped value loss, explained variance.

Shape legend: T sampled tokens of one sequence, N predicted tokens of a forward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor


def generalized_advantages(rewards_T: Tensor, values_T: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return advantages_T and returns_T of one finished sequence, float64, without gradient.

    `delta_t = r_t + gamma V_{t+1} - V_t` and `A_t = delta_t + gamma lam A_{t+1}`, both V and A being 0 after the
    last token; the returns, which the critic learns, are A + V (Schulman et al. 2016, "High-Dimensional
    Continuous Control Using Generalized Advantage Estimation").

    Args:
        rewards_T: reward for each token; a reward of the whole sequence belongs to its last.
        values_T: the critic's value before each token.
        gamma: discount per token.
        lam: 0 trusts the critic for all but one reward; 1 takes the rewards alone, less the value.
    """
    # Python floats: sums of float64 in one order, the same on every device.
    rewards, values = rewards_T.detach().double().tolist(), values_T.detach().double().tolist()
    advantages: list[float] = []
    advantage = next_value = 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + gamma * next_value - value + gamma * lam * advantage
        advantages.append(advantage)
        next_value = value
    advantages_T = torch.tensor(advantages[::-1], dtype=torch.float64, device=values_T.device)
    return advantages_T, advantages_T + values_T.detach().double()


def value_loss(
    values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, weights_N: Tensor, *, clip: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the critic's loss, and counts of tokens that are to be divided by the tokens of the step.

    `0.5 w max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)`, summed, as in PPO2 of OpenAI baselines and in
    TRL's PPOTrainer. The weights hold the denominator, which is the whole step's.

    Counts: `value_clip_fraction`, tokens whose clipped error is the larger one: they have no gradient.

    Args:
        values_N: the critic's values; the loss is differentiable in them.
        old_values_N: its values before the step.
        returns_N: what they should be, from `generalized_advantages`.
        weights_N: weight of each token; 0 where nothing was sampled.
        clip: how far a value may move in one step before moving further pays no more; inf for no limit.
    """
    errors_N = (values_N - returns_N).square()
    clipped_N = torch.clamp(values_N, old_values_N - clip, old_values_N + clip)
    clipped_errors_N = (clipped_N - returns_N).square()
    is_clipped_N = (clipped_errors_N > errors_N) & (weights_N != 0)
    loss = 0.5 * (weights_N * torch.maximum(errors_N, clipped_errors_N)).sum()
    return loss, {"value_clip_fraction": is_clipped_N.sum()}


def value_sums(returns_N: Tensor, values_N: Tensor) -> dict[str, Tensor | float]:
    """Return what `explained_variance` takes, of these tokens: sums, which add up over micro-batches and ranks.

    They are scalars on the device of the tokens.
    """
    returns_N, values_N = returns_N.detach().double(), values_N.detach().double()
    errors_N = returns_N - values_N
    return {
        "num_tokens": float(returns_N.numel()),
        "returns": returns_N.sum(),
        "squared_returns": returns_N.square().sum(),
        "errors": errors_N.sum(),
        "squared_errors": errors_N.square().sum(),
    }


def explained_variance(
    *, num_tokens: float, returns: float, squared_returns: float, errors: float, squared_errors: float
) -> float:
    """Return 1 - Var(returns - values) / Var(returns), from sums over tokens (`value_sums`).

    1: the critic is right but for a constant; 0: no better than a constant; below: worse. NaN where the returns
    do not differ, so that there is nothing to explain.
    """
    if num_tokens == 0:
        return float("nan")
    variance = squared_returns / num_tokens - (returns / num_tokens) ** 2
    error_variance = squared_errors / num_tokens - (errors / num_tokens) ** 2
    # What rounding leaves of equal returns is no variance.
    if variance <= 1e-14 * squared_returns / num_tokens:
        return float("nan")
    return 1 - error_variance / variance
