"""Every policy loss against a slow, obvious one in plain Python, its gradient against finite differences."""

from __future__ import annotations

import inspect
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from trainer.policy.losses import PolicyLossInput, policy_loss
from triad.config.losses import LOSSES, CorrectionConfig, PolicyLossConfig
from triad.errors import ConfigError, TrainingError

BUILT_IN = tuple(LOSSES)
CORRECTIONS = [
    CorrectionConfig(),
    CorrectionConfig(type="truncate", high=1.2),
    CorrectionConfig(type="mask", low=0.8, high=1.2),
    CorrectionConfig(type="truncate", level="sequence", high=1.2),
    CorrectionConfig(type="mask", level="sequence", low=0.6, high=1.5),
]
Sequences = list[list[dict[str, float]]]


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def factor(sequence: list[dict[str, float]], token: dict[str, float], config: CorrectionConfig) -> float:
    over = sequence if config.level == "sequence" else [token]
    weight = math.prod(math.exp(t["old"] - t["sampler"]) for t in over)
    if config.type == "none":
        return 1.0
    if config.type == "truncate":
        return min(weight, config.high)
    return weight if config.low <= weight <= config.high else 0.0


def slow_loss(sequences: Sequences, config: PolicyLossConfig, frozen: Sequences) -> float:
    """Return the loss in loops; `frozen` holds the log-probs wherever the paper stops the gradient."""
    base = "sampler" if config.correction.type == "none" else "old"
    num_tokens = sum(len(sequence) for sequence in sequences)
    total = 0.0
    for sequence, held in zip(sequences, frozen, strict=True):
        for token, held_token in zip(sequence, held, strict=True):
            if config.aggregation == "sequence":
                weight = 1 / len(sequences) / len(sequence)
            elif config.aggregation == "token":
                weight = 1 / num_tokens
            else:
                assert config.constant_tokens is not None
                weight = 1 / len(sequences) / config.constant_tokens
            advantage = token["advantage"]
            if config.type == "sft":
                objective = token["new"]
            elif config.type == "policy_gradient":
                objective = advantage * token["new"]
            elif config.type == "cispo":
                ratio = math.exp(held_token["new"] - token[base])
                objective = clip(ratio, *config.clip_range) * advantage * token["new"]
            else:
                ratio = math.exp(token["new"] - token[base])
                if config.type == "gspo":
                    ratio = math.exp(sum(t["new"] - t[base] for t in sequence) / len(sequence))
                objective = min(ratio * advantage, clip(ratio, *config.clip_range) * advantage)
            total -= weight * factor(sequence, token, config.correction) * objective
    return total


def random_step(seed: int) -> Sequences:
    generator = random.Random(seed)
    sequences = []
    for length in (1, 4, 7, 2):
        advantage = generator.gauss(0, 1)
        sampler = [generator.uniform(-4, -0.1) for _ in range(length)]
        old = [logprob + generator.gauss(0, 0.3) for logprob in sampler]
        sequences.append(
            [
                {"sampler": s, "old": o, "new": o + generator.gauss(0, 0.3), "advantage": advantage}
                for s, o in zip(sampler, old, strict=True)
            ]
        )
    return sequences


def as_input(sequences: Sequences, *, dtype: torch.dtype = torch.float64) -> PolicyLossInput:
    tokens = [token for sequence in sequences for token in sequence]

    def tensor(name: str) -> Tensor:
        return torch.tensor([token[name] for token in tokens], dtype=dtype)

    shares = [1 / len(sequences) / len(sequence) for sequence in sequences for _ in sequence]
    return PolicyLossInput(
        logprobs_N=tensor("new").requires_grad_(),
        old_logprobs_N=tensor("old"),
        sampler_logprobs_N=tensor("sampler"),
        advantages_N=tensor("advantage"),
        weights_N=torch.tensor(shares, dtype=dtype),
        sequence_N=torch.tensor([index for index, sequence in enumerate(sequences) for _ in sequence]),
        step_sequences=len(sequences),
        step_tokens=len(tokens),
    )


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: f"{c.type}-{c.level}")
@pytest.mark.parametrize("aggregation", ["sequence", "token", "constant"])
@pytest.mark.parametrize("name", BUILT_IN)
def test_loss_and_gradient_are_those_of_the_slow_one(name: str, aggregation: Any, correction: CorrectionConfig) -> None:
    clips: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.3} if "clip_low" in LOSSES[name] else {}
    config = PolicyLossConfig(type=name, aggregation=aggregation, correction=correction, **clips)
    for seed in range(3):
        sequences = random_step(seed)
        data = as_input(sequences)
        loss, _ = policy_loss(config)(data)
        assert loss.item() == pytest.approx(slow_loss(sequences, config, sequences), rel=1e-9, abs=1e-12)
        gradient = torch.autograd.grad(loss, data.logprobs_N)[0].tolist()
        for index, place in enumerate((i, j) for i, sequence in enumerate(sequences) for j in range(len(sequence))):
            moved = []
            for by in (1e-6, -1e-6):
                copy = [[dict(token) for token in sequence] for sequence in sequences]
                copy[place[0]][place[1]]["new"] += by
                moved.append(slow_loss(copy, config, sequences))
            assert gradient[index] == pytest.approx((moved[0] - moved[1]) / 2e-6, rel=1e-4, abs=1e-8)


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: f"{c.type}-{c.level}")
@pytest.mark.parametrize("name", BUILT_IN)
def test_the_losses_of_micro_batches_sum_to_the_loss_of_the_step(name: str, correction: CorrectionConfig) -> None:
    loss_function = policy_loss(PolicyLossConfig(type=name, correction=correction))
    data = as_input(random_step(1))
    whole, counts = loss_function(data)
    parts, part_counts = [], dict.fromkeys(counts, 0.0)
    # The last part is empty, as on a rank without work.
    for chosen in (data.sequence_N < 2, data.sequence_N >= 2, data.sequence_N > 9):
        tensors = {key: value[chosen] for key, value in vars(data).items() if isinstance(value, Tensor)}
        loss, some = loss_function(replace(data, **tensors))
        parts.append(loss)
        assert some.keys() == counts.keys()
        part_counts = {key: part_counts[key] + float(some[key]) for key in counts}
    assert torch.stack(parts).sum().item() == pytest.approx(whole.item(), rel=1e-12)
    assert part_counts == {key: float(value) for key, value in counts.items()}
    assert torch.autograd.grad(parts[-1], data.logprobs_N)[0].abs().sum() == 0


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name != "sft"])
def test_a_good_token_becomes_likelier_and_a_bad_one_less_likely(name: str) -> None:
    """The sign trap: a step against the gradient follows the advantage, for fresh samples."""
    for correction in CORRECTIONS:
        for advantage in (1.5, -1.5):
            token = {"sampler": -1.0, "old": -1.0, "new": -1.0, "advantage": advantage}
            data = as_input([[token]])
            loss, _ = policy_loss(PolicyLossConfig(type=name, correction=correction))(data)
            (gradient,) = torch.autograd.grad(loss, data.logprobs_N)
            assert math.copysign(1, -gradient.item()) == math.copysign(1, advantage)


def test_likelihood_makes_every_token_likelier_whatever_its_advantage() -> None:
    for advantage in (1.5, 0.0, -1.5):
        data = as_input([[{"sampler": -1.0, "old": -1.0, "new": -1.0, "advantage": advantage}] * 2])
        loss, _ = policy_loss(PolicyLossConfig(type="sft"))(data)
        assert torch.autograd.grad(loss, data.logprobs_N)[0].tolist() == [-0.5, -0.5] and loss.item() == 1.0


def test_dr_grpo_and_grpo_and_dapo_differ_in_the_denominator() -> None:
    """Two sequences of 1 and 3 tokens, all at ratio 1 with advantage 1: the gradient is minus the weight."""
    token = {"sampler": -1.0, "old": -1.0, "new": -1.0, "advantage": 1.0}
    for name, expected in (
        ("grpo", [1 / 2, 1 / 6, 1 / 6, 1 / 6]),
        ("dapo", [1 / 4] * 4),
        ("dr_grpo", [1 / (2 * 10)] * 4),
    ):
        extra: dict[str, Any] = {"constant_tokens": 10} if name == "dr_grpo" else {}
        data = as_input([[token], [token] * 3])
        loss, _ = policy_loss(PolicyLossConfig(type=name, **extra))(data)
        (gradient,) = torch.autograd.grad(loss, data.logprobs_N)
        assert gradient.tolist() == pytest.approx([-value for value in expected])


def at(*ratios: float, advantage: float) -> PolicyLossInput:
    """One sequence whose tokens lie at these ratios to sampler and old policy alike."""
    return as_input(
        [[{"sampler": -2.0, "old": -2.0, "new": -2.0 + math.log(r), "advantage": advantage} for r in ratios]]
    )


def test_dapo_clips_higher_above_than_below() -> None:
    for ratio, advantage, clipped in ((1.25, 1.0, False), (1.29, 1.0, True), (0.79, -1.0, True), (0.81, -1.0, False)):
        data = at(ratio, advantage=advantage)
        loss, counts = policy_loss(PolicyLossConfig(type="dapo"))(data)
        (gradient,) = torch.autograd.grad(loss, data.logprobs_N)
        assert (gradient.item() == 0) == clipped
        assert counts["clip_fraction/low"] + counts["clip_fraction/high"] == clipped


def test_gspo_clips_whole_sequences_by_the_geometric_mean_of_their_ratios() -> None:
    """Ratios 1.5 and 1 / 1.5 cancel: GRPO would clip the first, GSPO neither."""
    data = at(1.5, 1 / 1.5, advantage=1.0)
    loss, counts = policy_loss(PolicyLossConfig(type="gspo"))(data)
    assert loss.item() == pytest.approx(-1.0) and counts["clip_fraction/high"] == 0
    assert torch.autograd.grad(loss, data.logprobs_N)[0].tolist() == pytest.approx([-0.5, -0.5])
    data = at(1.5, 1.0, advantage=1.0)
    loss, counts = policy_loss(PolicyLossConfig(type="gspo"))(data)
    assert loss.item() == pytest.approx(-1.0004) and counts["clip_fraction/high"] == 2
    assert torch.autograd.grad(loss, data.logprobs_N)[0].tolist() == [0.0, 0.0]


def test_cispo_bounds_a_tokens_weight_but_keeps_its_gradient() -> None:
    data = at(8.0, advantage=1.0)
    loss, counts = policy_loss(PolicyLossConfig(type="cispo"))(data)
    assert torch.autograd.grad(loss, data.logprobs_N)[0].item() == pytest.approx(-5.0)
    assert counts["clip_fraction/high"] == 1


@pytest.mark.parametrize("name", BUILT_IN)
def test_corrections_by_hand(name: str) -> None:
    """The trainer gives the tokens 4, 1 and 1/4 times the sampler's probability; nothing was updated yet."""
    tokens = [
        {"sampler": -3.0, "old": -3.0 + math.log(w), "new": -3.0 + math.log(w), "advantage": 1.0} for w in (4, 1, 0.25)
    ]

    def gradient(correction: CorrectionConfig) -> tuple[list[float], float]:
        data = as_input([tokens])
        loss, counts = policy_loss(PolicyLossConfig(type=name, aggregation="sequence", correction=correction))(data)
        per_token = torch.autograd.grad(loss, data.logprobs_N)[0] * -3
        return per_token.tolist(), float(counts["correction/bounded"])

    # GSPO shares the gradient of each token's ratio among the tokens of the sequence.
    mean = name == "gspo"
    got, bounded = gradient(CorrectionConfig(type="truncate", high=2.0))
    assert got == pytest.approx([3.25 / 3] * 3 if mean else [2.0, 1.0, 0.25]) and bounded == 1
    got, bounded = gradient(CorrectionConfig(type="mask", low=0.5, high=2.0))
    assert got == pytest.approx([1 / 3] * 3 if mean else [0.0, 1.0, 0.0]) and bounded == 2
    got, bounded = gradient(CorrectionConfig(type="mask", level="sequence"))
    assert got == pytest.approx([1.0] * 3) and bounded == 0  # 4 * 1 * 1/4 = 1


def test_a_correction_of_whole_sequences_by_hand() -> None:
    """The weights 4 and 1/2 of two tokens make 2 of the sequence; the other sequence weighs 1/4."""
    sequences = [
        [{"sampler": -3.0, "old": -3.0 + math.log(w), "new": -3.0 + math.log(w), "advantage": 1.0} for w in weights]
        for weights in ((4, 0.5), (0.25,))
    ]
    for kind, expected, num_bounded in (("truncate", [1.5, 1.5, 0.25], 2), ("mask", [0.0, 0.0, 0.25], 2)):
        low = {"low": 0.2} if kind == "mask" else {}
        correction = CorrectionConfig.model_validate({"type": kind, "level": "sequence", "high": 1.5, **low})
        data = as_input(sequences)
        loss, counts = policy_loss(PolicyLossConfig(aggregation="token", correction=correction))(data)
        gradient = torch.autograd.grad(loss, data.logprobs_N)[0] * -3
        assert gradient.tolist() == pytest.approx(expected) and counts["correction/bounded"] == num_bounded


def test_weights_at_the_bounds_of_a_mask_are_kept() -> None:
    tokens = [{"sampler": -3.0, "old": -3.0 + w, "new": -3.0 + w, "advantage": 1.0} for w in (-1.0, 0.0, 1.0)]
    correction = CorrectionConfig(type="mask", low=math.exp(-1.0), high=math.exp(1.0))
    _, counts = policy_loss(PolicyLossConfig(correction=correction))(as_input([tokens]))
    assert counts["correction/bounded"] == 0


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_what_counts_as_clipped_is_what_has_no_gradient(name: str, advantage: float) -> None:
    """Bounds of 1/2 and 3/2; a ratio at a bound, to the last bit, is within it."""
    for ratio in (0.25, 0.499, 0.5, 1.0, 1.5, 1.501, 4.0):
        data = as_input([[{"sampler": 0.0, "old": 0.0, "new": math.log(ratio), "advantage": advantage}]])
        assert data.logprobs_N.exp().item() == ratio
        loss, counts = policy_loss(PolicyLossConfig(type=name, clip_low=0.5, clip_high=0.5))(data)
        (gradient,) = torch.autograd.grad(loss, data.logprobs_N)
        assert counts["clip_fraction/low"] + counts["clip_fraction/high"] == (gradient.item() == 0.0), ratio


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: f"{c.type}-{c.level}")
@pytest.mark.parametrize("name", BUILT_IN)
def test_weights_of_a_token_carry_no_gradient(name: str, correction: CorrectionConfig) -> None:
    """Neither a correction's factor nor the ratio of CISPO: the sampler is in nothing else."""
    if correction.type == "none" and "clip_low" in LOSSES[name] and name != "cispo":
        return  # here the sampler is in the ratio that the loss differentiates
    data = as_input(random_step(0))
    sampler_N = data.sampler_logprobs_N.clone().requires_grad_()
    loss, _ = policy_loss(PolicyLossConfig(type=name, correction=correction))(
        replace(data, sampler_logprobs_N=sampler_N)
    )
    assert torch.autograd.grad(loss, sampler_N, allow_unused=True) == (None,)


def test_an_overflowing_sequence_weight_is_bounded_not_nan() -> None:
    tokens = [{"sampler": -400.0, "old": -1.0, "new": -1.0, "advantage": 1.0}] * 3
    for kind, expected in (("truncate", -2.0), ("mask", 0.0)):
        correction = CorrectionConfig.model_validate({"type": kind, "level": "sequence"})
        loss, _ = policy_loss(PolicyLossConfig(correction=correction))(as_input([tokens], dtype=torch.float32))
        assert loss.item() == pytest.approx(expected)


def test_the_default_is_grpo_of_the_quick_start_bit_for_bit() -> None:
    for seed in range(5):
        data = as_input(random_step(seed), dtype=torch.float32)
        ratio = torch.exp(data.logprobs_N - data.sampler_logprobs_N)
        clipped = ratio.clamp(1 - 0.2, 1 + 0.2)
        expected = -(data.weights_N * torch.minimum(ratio * data.advantages_N, clipped * data.advantages_N)).sum()
        loss, _ = policy_loss(PolicyLossConfig())(data)
        assert torch.equal(loss, expected)
        gradients = [torch.autograd.grad(value, data.logprobs_N)[0] for value in (loss, expected)]
        assert torch.equal(*gradients)


def test_the_config_shows_the_defaults_of_the_loss_and_reads_them_back() -> None:
    for name in BUILT_IN:
        config = PolicyLossConfig(type=name)
        assert {key: getattr(config, key) for key in LOSSES[name]} == LOSSES[name]
        assert PolicyLossConfig.model_validate(config.model_dump(exclude_none=True)) == config
    assert PolicyLossConfig(type="dapo", clip_high=0.4).clip_range == (0.8, 1.4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"type": "cipso"}, "Did you mean 'cispo'.*Allowed: grpo, dr_grpo.*module:function"),
        ({"type": "policy_gradient", "clip_low": 0.1}, "clip_low has no effect with type = 'policy_gradient'"),
        ({"constant_tokens": 5}, "no effect without aggregation = 'constant'"),
        ({"args": {"a": 1}}, "'grpo' is built in"),
        ({"type": "a:b", "correction": {"type": "mask"}}, "correction has no effect"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PolicyLossConfig.model_validate(settings)


# The example of docs/extending.md.
def linear_advantage_loss(data: PolicyLossInput, *, strength: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE; every sequence counts the same."""
    objective_N = strength * data.advantages_N * data.logprobs_N
    good = (data.advantages_N > 0).sum()
    return -(data.weights_N * objective_N).sum(), {"good_tokens": good}


def without_counts(data: PolicyLossInput) -> Tensor:
    return data.logprobs_N.sum()


def test_a_loss_of_the_user() -> None:
    data = as_input(random_step(0))
    name = f"{__name__}:linear_advantage_loss"
    loss, counts = policy_loss(PolicyLossConfig(type=name, args={"strength": 2.0}))(data)
    built_in, _ = policy_loss(PolicyLossConfig(type="policy_gradient", aggregation="sequence"))(data)
    assert loss.item() == pytest.approx(2 * built_in.item())
    assert counts["good_tokens"] == (data.advantages_N > 0).sum()


def test_a_wrong_loss_of_the_user_is_named() -> None:
    for name, args, message in (
        ("no_such_module:f", {}, "loss.type = 'no_such_module:f': there is no module 'no_such_module'"),
        (f"{__name__}:linear_advantage", {}, "has no function.*Did you mean 'linear_advantage_loss'"),
        (f"{__name__}:linear_advantage_loss", {"speed": 1}, "loss.args = {'speed': 1}.*unexpected keyword.*speed"),
    ):
        with pytest.raises(ConfigError, match=message):
            policy_loss(PolicyLossConfig(type=name, args=args))
    with pytest.raises(TrainingError, match="must return"):
        policy_loss(PolicyLossConfig(type=f"{__name__}:without_counts"))(as_input(random_step(0)))


def test_the_documentation_shows_the_examples_and_defaults_that_are_tested() -> None:
    docs = Path(__file__).parents[2] / "docs"
    assert inspect.getsource(linear_advantage_loss) in (docs / "extending.md").read_text()
    page = (docs / "losses.md").read_text()
    for name, defaults in LOSSES.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |") and line.count("|") == 6]
        clips = f"{defaults['clip_low']:g}, {defaults['clip_high']:g}" if "clip_low" in defaults else "none"
        assert f"`{defaults['aggregation']}`" in row and clips.replace("0.0003, 0.0004", "3e-4, 4e-4") in row
