"""Loss and gradient of every policy loss against costs per token in float64, one autograd leaf per token.

Over ragged lengths, empty and single rollouts, advantages of exactly 0, and log-ratios from 0 to far beyond 20 nats.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.shared.config.losses import CorrectionConfig, PolicyLossConfig
from holdfast.shared.config.registry import POLICY_LOSSES
from holdfast.trainer.rl.losses.build import build_policy_loss
from tests.builders.policy_inputs import policy_input

SHAPES = ((3, 7, 1, 5), (1,), (4, 0, 2), (1, 1, 1, 1), (9, 2, 0, 0, 6), (0, 0), ())
SPREADS = (0.0, 1e-4, 0.3, 20.0, 130.0)
CORRECTIONS: list[dict[str, Any]] = [
    {},
    *(
        {"type": kind, "level": level, "veto": veto}
        for kind in ("truncate", "mask")
        for level in ("token", "sequence", "geometric")
        for veto in (None, 1e-4)
    ),
]


@dataclass(eq=False)
class Token:
    """One trained token; `new` is a leaf."""

    sampler: float
    old: float
    new: Tensor
    advantage: float
    covariant: bool

    def log_ratio(self, config: PolicyLossConfig) -> Tensor:
        return (self.new - (self.old if config.ratio_to == "old" else self.sampler)).clamp(-20, 20)


Rollouts = list[list[Token]]


def random_rollouts(seed: int, shape: tuple[int, ...], spread: float) -> Rollouts:
    draw = random.Random(seed)
    rollouts: Rollouts = []
    for length in shape:
        advantage = draw.choice([0.0, draw.gauss(0, 1), draw.gauss(0, 1)])
        rollouts.append([])
        for _ in range(length):
            sampler = -5 * draw.random()
            old = sampler + draw.uniform(-spread, spread)
            new = torch.tensor(old + draw.uniform(-spread, spread), dtype=torch.float64, requires_grad=True)
            rollouts[-1].append(Token(sampler, old, new, advantage, draw.random() < 0.3))
    return rollouts


def clipped(ratio: Tensor, token: Token, config: PolicyLossConfig) -> Tensor:
    """The cost as verl writes it: the larger of two, where the advantage is negative no more than a third."""
    costs = [-token.advantage * ratio, -token.advantage * ratio.clamp(*config.clip_range)]
    cost = costs[0] if costs[0] >= costs[1] else costs[1]
    assert config.dual_clip is not None
    return cost if token.advantage >= 0 else cost.clamp(max=-token.advantage * config.dual_clip)


def cost(rollout: list[Token], token: Token, config: PolicyLossConfig) -> Tensor:
    if config.type == "sft":
        return -token.new
    ratio = token.log_ratio(config).exp()
    score = -token.advantage * token.new
    if config.type in ("policy_gradient", "dppo"):
        base = token.old if config.ratio_to == "old" else token.sampler
        moved = math.exp(token.new.item()) - math.exp(base)
        assert config.ratio_max is not None
        far = (moved > (config.clip_high or 0) and token.advantage > 0) or (
            moved < -(config.clip_low or 0) and token.advantage < 0
        )
        return 0 * token.new if config.type == "dppo" and far else min(ratio.item(), config.ratio_max) * score
    if config.type == "cispo":
        return min(max(ratio.item(), config.clip_range[0]), config.clip_range[1]) * score
    if config.type.startswith("gspo"):
        mean = torch.stack([one.log_ratio(config) for one in rollout]).mean()
        ratio = (mean if config.type == "gspo" else mean.detach() + token.new - token.new.detach()).exp()
    if config.type == "clip_cov" and token.covariant:
        return 0 * token.new
    held_back = config.type == "kl_cov" and token.covariant
    penalty = (config.covariance.coef or 0) * token.log_ratio(config).abs() if held_back else 0
    return clipped(ratio, token, config) + penalty


def factor(rollout: list[Token], token: Token, config: CorrectionConfig) -> float:
    if config.type == "none":
        return 1.0
    logs = [min(max(one.old - one.sampler, -20), 20) for one in rollout]
    if config.veto is not None and min(logs) < math.log(config.veto):
        return 0.0
    by_level = {"token": logs[rollout.index(token)], "sequence": sum(logs), "geometric": sum(logs) / len(logs)}
    weight = math.exp(min(max(by_level[config.level], -20), 20))
    high = config.high or 0
    if config.type == "truncate":
        return min(weight, high)
    return weight if (config.low or 0) <= weight <= high else 0.0


def expected(rollouts: Rollouts, config: PolicyLossConfig) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    num_tokens = sum(map(len, rollouts))
    for rollout in rollouts:
        for token in rollout:
            denominator = {
                "sequence": len(rollouts) * len(rollout),
                "token": num_tokens,
                "constant": len(rollouts) * (config.constant_tokens or 0),
            }[config.aggregation or ""]
            total = total + factor(rollout, token, config.correction) * cost(rollout, token, config) / denominator
    return total


def numbers(tokens: list[Token], field: str) -> Tensor:
    values = [getattr(token, field) for token in tokens]
    return torch.tensor(
        [value.item() if isinstance(value, Tensor) else float(value) for value in values], dtype=torch.float64
    )


def gradient(loss: Tensor, leaves: list[Tensor]) -> Tensor:
    if not leaves or not loss.requires_grad:
        return torch.zeros(len(leaves), dtype=torch.float64)
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return torch.stack([torch.zeros((), dtype=torch.float64) if one is None else one for one in found])


def settings_of(name: str) -> list[dict[str, Any]]:
    variants: list[dict[str, Any]] = [{}]
    variants += [{"dual_clip": math.inf}] if "dual_clip" in POLICY_LOSSES[name].defaults else []
    variants += [{"ratio_to": "old"}] if "ratio_to" in POLICY_LOSSES[name].defaults else []
    constant = {"constant_tokens": 50} if POLICY_LOSSES[name].defaults["aggregation"] == "constant" else {}
    return [variant | constant for variant in variants]


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda one: "-".join(map(str, one.values())) or "default")
def test_loss_and_gradient_are_those_of_the_costs(name: str, correction: dict[str, Any]) -> None:
    for seed, shape in enumerate(SHAPES):
        spread = SPREADS[(seed + CORRECTIONS.index(correction)) % len(SPREADS)]
        for settings in settings_of(name):
            config = PolicyLossConfig.model_validate({"type": name, "correction": correction} | settings)
            rollouts = random_rollouts(seed, shape, spread)
            tokens = [token for rollout in rollouts for token in rollout]
            shares = [1 / (len(rollouts) * len(rollout)) for rollout in rollouts for _ in rollout]
            logprobs_N = numbers(tokens, "new").requires_grad_()
            data = policy_input(
                logprobs_N,
                old_logprobs_N=numbers(tokens, "old"),
                sampler_logprobs_N=numbers(tokens, "sampler"),
                advantages_N=numbers(tokens, "advantage"),
                weights_N=torch.tensor(shares, dtype=torch.float64),
                high_covariance_N=numbers(tokens, "covariant"),
                sequence_N=torch.tensor([n for n, rollout in enumerate(rollouts) for _ in rollout], dtype=torch.long),
                step_sequences=len(rollouts),
                step_tokens=len(tokens),
            )

            loss, _ = build_policy_loss(config)(data)

            want = expected(rollouts, config)
            torch.testing.assert_close(loss, want, rtol=1e-9, atol=1e-9)
            found = gradient(loss, [logprobs_N])[0] if tokens else logprobs_N.detach()
            torch.testing.assert_close(found, gradient(want, [token.new for token in tokens]), rtol=1e-9, atol=1e-9)
            assert torch.isfinite(loss) and torch.isfinite(found).all()
