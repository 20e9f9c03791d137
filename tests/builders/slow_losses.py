"""Policy losses in plain Python, from the papers: slow and obvious, to compare the real ones with."""

import math
import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.config import policy_losses
from holdfast.config.policy_losses import BuiltInLoss, Mask, NoCorrection, Truncation
from holdfast.trainer.rl.losses import PolicyLossInput, build_policy_loss
from tests.builders.policy_inputs import policy_input

CORRECTIONS: list[dict[str, Any]] = [
    {"type": "none"}, {"type": "truncate", "high": 1.2}, {"type": "mask", "low": 0.8, "high": 1.2},
    {"type": "truncate", "level": "sequence", "high": 1.2},
    {"type": "mask", "level": "sequence", "low": 0.6, "high": 1.5},
    {"type": "truncate", "level": "geometric", "high": 1.1, "veto": 0.7},
    {"type": "mask", "level": "geometric", "low": 0.9, "high": 1.2}, {"type": "mask", "veto": 0.6},
]  # fmt: skip

Token = dict[str, float]
Sequences = list[list[Token]]


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def bounded(log_ratio: float) -> float:
    return clip(log_ratio, -20.0, 20.0)


def correction_weight(sequence: list[Token], token: Token, config: Truncation | Mask) -> float:
    logs = [bounded(t["old"] - t["sampler"]) for t in sequence]
    own = bounded(token["old"] - token["sampler"])
    return math.exp(bounded({"token": own, "sequence": sum(logs), "geometric": sum(logs) / len(logs)}[config.level]))


def factor(sequence: list[Token], token: Token, config: policy_losses.Correction) -> float:
    if isinstance(config, NoCorrection):
        return 1.0
    logs = [bounded(t["old"] - t["sampler"]) for t in sequence]
    if config.veto is not None and math.exp(min(logs)) < config.veto:
        return 0.0
    weight = correction_weight(sequence, token, config)
    if isinstance(config, Truncation):
        return min(weight, config.high)
    assert config.low is not None and config.high is not None
    return weight if config.low <= weight <= config.high else 0.0


def clipped_surrogate(ratio: float, advantage: float, config: policy_losses.PpoLoss) -> float:
    value = min(ratio * advantage, clip(ratio, *config.clip_range) * advantage)
    return max(value, config.dual_clip * advantage) if advantage < 0 and config.dual_clip < math.inf else value


def slow_objective(sequence: list[Token], held: list[Token], place: int, config: BuiltInLoss) -> float:
    """Return what the token at `place` adds; `held` has the log-probs wherever the paper stops the gradient."""
    base = _base(config)
    token, advantage = sequence[place], sequence[place]["advantage"]
    frozen_ratio = math.exp(bounded(held[place]["new"] - token[base]))
    ratio = math.exp(bounded(token["new"] - token[base]))
    match config:
        case policy_losses.SftLoss():
            return token["new"]
        case policy_losses.DppoLoss():
            moved = math.exp(held[place]["new"]) - math.exp(token[base])
            if (advantage > 0 and moved > config.clip_high) or (advantage < 0 and moved < -config.clip_low):
                return 0.0
            return min(frozen_ratio, config.ratio_max) * advantage * token["new"]
        case policy_losses.PolicyGradientLoss():
            return min(frozen_ratio, config.ratio_max) * advantage * token["new"]
        case policy_losses.CispoLoss():
            return clip(frozen_ratio, *config.clip_range) * advantage * token["new"]
        case policy_losses.GspoLoss() if config.type == "gspo":
            ratio = math.exp(sum(bounded(t["new"] - t[base]) for t in sequence) / len(sequence))
        case policy_losses.GspoTokenLoss():
            mean = sum(bounded(t["new"] - t[base]) for t in held) / len(held)
            ratio = math.exp(mean) * math.exp(token["new"] - held[place]["new"])
        case _:
            assert config.type in ("grpo", "dr_grpo", "dapo", "ppo")
    assert isinstance(config, policy_losses.PpoLoss)
    return clipped_surrogate(ratio, advantage, config)


def _base(config: BuiltInLoss) -> str:
    return (config.ratio_to if isinstance(config, policy_losses.RatioLoss) else None) or "sampler"


def slow_loss(sequences: Sequences, config: BuiltInLoss, frozen: Sequences) -> float:
    """Return the loss in loops; `frozen` holds the log-probs wherever the paper stops the gradient."""
    num_tokens = sum(len(sequence) for sequence in sequences)
    total = 0.0
    for sequence, held in zip(sequences, frozen, strict=True):
        for place, token in enumerate(sequence):
            if config.aggregation == "sequence":
                weight = 1 / len(sequences) / len(sequence)
            elif config.aggregation == "token":
                weight = 1 / num_tokens
            else:
                assert config.constant_tokens is not None
                weight = 1 / len(sequences) / config.constant_tokens
            weight *= factor(sequence, token, config.correction)
            total -= weight * slow_objective(sequence, held, place, config)
    return total


def slow_counts(sequences: Sequences, config: BuiltInLoss) -> dict[str, int]:
    """Return how many tokens lie beyond each bound of the loss and of its correction."""
    base, counts, correction = _base(config), Counter[str](), config.correction
    veto = None if isinstance(correction, NoCorrection) else correction.veto
    for sequence in sequences:
        logs = [bounded(token["new"] - token[base]) for token in sequence]
        vetoed = veto is not None and any(
            math.exp(bounded(token["old"] - token["sampler"])) < veto for token in sequence
        )
        for token, log in zip(sequence, logs, strict=True):
            ratio, advantage = math.exp(sum(logs) / len(logs) if "gspo" in config.type else log), token["advantage"]
            if isinstance(config, policy_losses.ClippedLoss):
                is_dppo = isinstance(config, policy_losses.DppoLoss)
                moved = math.exp(token["new"]) - math.exp(token[base]) if is_dppo else ratio - 1
                counts["clip_fraction/low"] += moved < -config.clip_low and advantage < 0
                counts["clip_fraction/high"] += moved > config.clip_high and advantage > 0
            counts["clip_fraction/dual"] += ratio > getattr(config, "dual_clip", math.inf) and advantage < 0
            counts["ratio/truncated"] += ratio > getattr(config, "ratio_max", math.inf)
            if not isinstance(correction, NoCorrection):
                weight = correction_weight(sequence, token, correction)
                low = (correction.low if isinstance(correction, Mask) else None) or 0.0
                counts["correction/bounded"] += not low <= weight <= (correction.high or math.inf)
            counts["correction/vetoed"] += vetoed
    return counts


def random_step(seed: int, *, spread: float = 0.3, lengths: tuple[int, ...] = (1, 4, 0, 7, 2)) -> Sequences:
    """Sequences of several lengths, by default one empty; each token has an advantage of its own on odd seeds."""
    generator = random.Random(seed)
    sequences = []
    for length in lengths:
        advantage = generator.gauss(0, 1)
        sequence = []
        for _ in range(length):
            sampler = generator.uniform(-4, -0.1)
            old = sampler + generator.gauss(0, spread)
            own = generator.choice([advantage, generator.gauss(0, 1), 0.0]) if seed % 2 else advantage
            new = old + generator.gauss(0, spread)
            sequence.append({"sampler": sampler, "old": old, "new": new, "advantage": own})
        sequences.append(sequence)
    return sequences


def as_input(sequences: Sequences) -> PolicyLossInput:
    tokens = [token for sequence in sequences for token in sequence]

    def tensor(name: str) -> Tensor:
        return torch.tensor([token[name] for token in tokens], dtype=torch.float64)

    shares = [1 / len(sequences) / len(sequence) for sequence in sequences for _ in sequence]
    return policy_input(
        tensor("new").requires_grad_(), old_logprobs_N=tensor("old"), sampler_logprobs_N=tensor("sampler"),
        advantages_N=tensor("advantage"), weights_N=torch.tensor(shares, dtype=torch.float64),
        sequence_N=torch.tensor([index for index, sequence in enumerate(sequences) for _ in sequence]),
        step_sequences=len(sequences), step_tokens=len(tokens),
    )  # fmt: skip


def configured(name: str, **settings: Any) -> Any:
    """Return the configuration of a loss, with a constant where its denominator is one."""
    config = policy_losses.PolicyLossConfig.of(type=name, **settings)
    if isinstance(config, BuiltInLoss) and config.aggregation == "constant":
        config.constant_tokens = config.constant_tokens or 9
    return config


def random_config(name: str, draw: random.Random) -> Any:
    """Return some settings of a loss, of those that act on it."""
    known = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 1.4, "ratio_max": 1.3}
    defaults = policy_losses.POLICY_LOSSES[name].model_fields
    chosen: dict[str, Any] = {key: value for key, value in known.items() if key in defaults and draw.random() < 0.5}
    if "ratio_to" in defaults and draw.random() < 0.5:
        chosen["ratio_to"] = "old"
    own = {
        "type": draw.choice(["truncate", "mask"]), "level": draw.choice(["token", "sequence", "geometric"]),
        "veto": draw.choice([None, 1e-4]),
    }  # fmt: skip
    aggregation = draw.choice(["sequence", "token", "constant"])
    return configured(name, **chosen, correction=draw.choice([*CORRECTIONS, own]), aggregation=aggregation)


def check_policy_loss(name: str, seed: int) -> None:
    """Compare loss, counts and gradient with the slow ones: ragged lengths, zeros, log-ratios beyond 20 nats."""
    draw = random.Random(f"{name} {seed}")
    config = random_config(name, draw)
    lengths = draw.choice([(1, 4, 0, 7, 2), (9,), (1,), (1, 1, 1, 1), (4, 0, 2), (0, 0), ()])
    sequences = random_step(seed, spread=draw.choice([0.3, 0.3, 0.0, 1e-4, 20.0, 130.0]), lengths=lengths)
    step = as_input(sequences)
    loss, counts = build_policy_loss(config)(step)
    assert loss.item() == pytest.approx(slow_loss(sequences, config, sequences), rel=1e-9, abs=1e-12), config
    slow = slow_counts(sequences, config)
    assert {key: int(value) for key, value in counts.items()} == {key: slow[key] for key in counts}, config
    (gradient_N,) = torch.autograd.grad(loss, step.logprobs_N)
    along = [[draw.gauss(0, 1) for _ in sequence] for sequence in sequences]
    ends = []
    for by in (1e-6, -1e-6):
        moved = [[dict(token) for token in sequence] for sequence in sequences]
        for sequence, slopes in zip(moved, along, strict=True):
            for token, slope in zip(sequence, slopes, strict=True):
                token["new"] += by * slope
        ends.append(slow_loss(moved, config, sequences))
    found = math.fsum(a * b for a, b in zip(gradient_N.tolist(), [one for own in along for one in own], strict=True))
    # Differences of a large sum say little of its small parts.
    near = 1e-7 * max(1.0, abs(loss.item()))
    assert found == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-4, abs=near), config
