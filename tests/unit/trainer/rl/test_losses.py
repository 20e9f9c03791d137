"""Policy losses by hand, at bounds, split, of the user; steered terms. By formula: test_every_name_computes."""

import inspect
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.config import TrainerConfig
from holdfast.config.base import KlEstimator
from holdfast.config.load import parse_command_line
from holdfast.config.policy_losses import POLICY_LOSSES, EntropyConfig, PolicyLossConfig
from holdfast.errors import ConfigError, TrainingError
from holdfast.trainer.rl.kl import EntropyCoefficient, KlCoefficient
from holdfast.trainer.rl.losses import PolicyLossInput, build_policy_loss, with_kl_term
from tests.builders.slow_losses import CORRECTIONS, as_input, configured, random_step
from tests.builders.slow_preferences import KL_ESTIMATES
from tests.conftest import ROOT

BUILT_IN = tuple(POLICY_LOSSES)


@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
@pytest.mark.parametrize("name", BUILT_IN)
def test_the_losses_of_micro_batches_sum_to_the_loss_of_the_step(name: str, correction: dict[str, Any]) -> None:
    loss_function = build_policy_loss(configured(name, correction=correction))
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


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_what_counts_as_clipped_is_what_has_no_gradient(name: str, advantage: float) -> None:
    """Bounds of 1/2 and 3/2; a ratio at a bound, to the last bit, is within it."""
    for ratio in (0.25, 0.499, 0.5, 1.0, 1.5, 1.501, 4.0):
        data = as_input([[{"sampler": 0.0, "old": 0.0, "new": math.log(ratio), "advantage": advantage}]])
        assert data.logprobs_N.exp().item() == ratio
        loss, counts = build_policy_loss(configured(name, clip_low=0.5, clip_high=0.5))(data)
        (gradient,) = torch.autograd.grad(loss, data.logprobs_N)
        assert sum(counts.values()) == (gradient.item() == 0.0), ratio


def test_weights_at_the_bounds_of_a_mask_are_kept() -> None:
    tokens = [{"sampler": -3.0, "old": -3.0 + w, "new": -3.0 + w, "advantage": 1.0} for w in (-1.0, 0.0, 1.0)]
    correction = {"type": "mask", "low": math.exp(-1.0), "high": math.exp(1.0)}
    _, counts = build_policy_loss(configured("grpo", correction=correction))(as_input([tokens]))
    assert counts["correction/bounded"] == 0


def test_a_veto_acts_below_the_bound_of_log_ratios() -> None:
    tokens = [{"sampler": -1.0, "old": -1.0 + w, "new": -1.0 + w, "advantage": 1.0} for w in (0.0, -30.0)]
    correction = {"type": "truncate", "veto": 1e-12}
    _, counts = build_policy_loss(configured("grpo", correction=correction))(as_input([tokens]))
    assert counts["correction/vetoed"] == 2


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_config_shows_the_defaults_of_the_loss_and_reads_them_back(name: str) -> None:
    config = PolicyLossConfig.of(type=name)
    for key in ("aggregation", "clip_low", "clip_high", "dual_clip", "ratio_max"):
        if (field := POLICY_LOSSES[name].model_fields.get(key)) is not None:
            assert getattr(config, key) == field.default
    assert PolicyLossConfig.of(**config.model_dump(exclude_none=True)) == config
    own = configured(name, correction={"type": "mask", "level": "geometric"})
    assert (own.correction.low, own.correction.high) == (0.99, 1.01)
    assert PolicyLossConfig.of(**own.model_dump(exclude_none=True)) == own


def test_the_ratio_of_gspo_is_to_the_old_policy_and_what_is_left_is_corrected() -> None:
    for name in ("gspo", "gspo_token"):
        config = PolicyLossConfig.of(type=name)
        assert (config.ratio_to, config.correction.type, config.correction.high) == ("old", "truncate", 2.0)
        config = configured(name, ratio_to="sampler")
        assert (config.ratio_to, config.correction.type) == ("sampler", "none")
        config = configured(name, correction={"type": "none"})
        assert (config.ratio_to, config.correction.type) == ("old", "none")
    assert PolicyLossConfig.of(type="dapo").ratio_to == "sampler"
    assert configured("dapo", correction={"type": "truncate"}).ratio_to == "old"
    assert configured("dapo", ratio_to="old").correction.type == "none"
    assert configured("dapo", clip_high=0.4).clip_range == (0.8, 1.4)


def test_the_bounds_of_a_correction_depend_on_type_and_level() -> None:
    for kind, level, low, high in (
        ("truncate", "token", None, 2.0),
        ("truncate", "sequence", None, 2.0),
        ("mask", "token", 0.5, 5.0),
        ("mask", "sequence", 0.0, 3.0),
        ("mask", "geometric", 0.99, 1.01),
    ):
        found = configured("grpo", correction={"type": kind, "level": level}).correction
        assert (getattr(found, "low", None), found.high) == (low, high)


@pytest.mark.parametrize(("settings", "message"), [
    ({"type": "cipso"}, "Did you mean 'cispo'.*Allowed: grpo, dr_grpo.*module:function"),
    ({"type": "policy_gradient", "clip_low": 0.1}, "clip_low' has no effect with loss.type = 'policy_gradient'"),
    ({"constant_tokens": 5}, "no effect without aggregation = 'constant'"),
    ({"type": "grpo", "args": {"a": 1}}, "args' has no effect .* belongs to 'module:function'"),
    ({"type": "a:b", "ratio_to": "old"}, "ratio_to' has no effect with loss.type = 'module:function'"),
    ({"type": "sft", "ratio_to": "old"}, "ratio_to' has no effect with loss.type = 'sft'"),
    ({"type": "cispo", "dual_clip": 3}, "dual_clip' has no effect with loss.type = 'cispo'"),
    ({"type": "grpo", "ratio_max": 3}, "ratio_max' has no effect with loss.type = 'grpo'"),
    ({"type": "grpo", "dual_clip": 1}, "greater than 1"),
    ({"entropy": {"step_size": 0.1}}, "step_size has no effect without target"),
    ({"entropy": {"target": 1, "coef": 2}}, "coef = 2 is more than largest = 1"),
    ({"ratio_to": "sampler", "correction": {"type": "mask"}}, "counts the difference to the sampler twice"),
    ({"correction": {"low": 0.1}}, "low' has no effect with loss.correction.type = 'none'"),
    ({"correction": {"veto": 0.1}}, "veto' has no effect with loss.correction.type = 'none'"),
    ({"type": "gspo", "correction": {"low": 0.1}}, "low' has no effect with loss.correction.type = 'truncate'"),
])  # fmt: skip
def test_settings_without_effect_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_command_line(TrainerConfig, ["--loss", json.dumps(settings)])


# The example of docs/losses.md.
def reinforce_with_entropy(data: PolicyLossInput, *, coef: float = 0.01) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE, corrected as `loss.correction` says, with a bonus for entropy; every sequence counts the same."""
    objective_N = data.correction_N * data.advantages_N * data.logprobs_N + coef * data.entropy_N
    good = (data.advantages_N > 0).sum()
    return -(data.weights_N * objective_N).sum(), {"good_tokens": good}


def without_counts(data: PolicyLossInput) -> Tensor:
    return data.logprobs_N.sum()


def test_a_loss_of_the_user_has_the_correction_and_a_gradient_of_the_entropy() -> None:
    data = as_input(random_step(0))
    entropy_N = torch.rand_like(data.logprobs_N).requires_grad_()
    data = replace(data, entropy_N=entropy_N)
    name = f"{__name__}:reinforce_with_entropy"
    correction = {"type": "mask", "level": "sequence"}
    settings = {"aggregation": "sequence", "correction": correction}
    on_policy = replace(data, logprobs_N=data.old_logprobs_N.clone().requires_grad_())  # REINFORCE's ratio is 1
    loss, counts = build_policy_loss(configured(name, args={"coef": 0.5}, correction=correction))(on_policy)
    built_in, own = build_policy_loss(configured("policy_gradient", **settings))(on_policy)
    assert counts["correction/bounded"] == own["correction/bounded"]
    assert counts["good_tokens"] == (data.advantages_N > 0).sum()
    assert (loss - built_in).item() == pytest.approx(-0.5 * (data.weights_N * entropy_N).sum().item())
    (gradient_N,) = torch.autograd.grad(loss, entropy_N)
    assert torch.equal(gradient_N, -0.5 * data.weights_N)


def test_a_wrong_loss_of_the_user_is_named() -> None:
    for name, args, message in (
        ("no_such_module:f", {}, "loss.type = 'no_such_module:f': there is no module 'no_such_module'"),
        (f"{__name__}:reinforce_with_entrop", {}, "has no function.*Did you mean 'reinforce_with_entropy'"),
        (f"{__name__}:reinforce_with_entropy", {"speed": 1}, "loss.args = {'speed': 1}.*unexpected keyword.*speed"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_policy_loss(configured(name, args=args))
    with pytest.raises(TrainingError, match="must return"):
        build_policy_loss(PolicyLossConfig.of(type=f"{__name__}:without_counts"))(as_input(random_step(0)))
    wrong = build_policy_loss(configured(f"{__name__}:reinforce_with_entropy", args={"coef": "0.1"}))
    lines = Path(__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "coef * data.entropy_N" in text)
    with pytest.raises(TrainingError) as caught:
        wrong(as_input(random_step(0)))
    assert str(caught.value).startswith(f"loss.type = '{__name__}:reinforce_with_entropy' failed: TypeError: ")
    assert str(caught.value).endswith(f"({__file__}:{line})"), "the user's own line, and not one of torch"


def on_a_lost_gpu(data: PolicyLossInput) -> tuple[Tensor, dict[str, Tensor]]:
    """A user's loss in which a fault of the machine comes up."""
    raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")


def test_a_fault_of_the_machine_is_none_of_the_user() -> None:
    # Such a trainer is started again, after a TrainingError none is.
    with pytest.raises(torch.AcceleratorError, match="uncorrectable"):
        build_policy_loss(PolicyLossConfig.of(type=f"{__name__}:on_a_lost_gpu"))(as_input(random_step(0)))


def test_the_documentation_shows_the_examples_and_defaults_that_are_tested() -> None:
    page = (ROOT / "docs" / "losses.md").read_text()
    assert inspect.getsource(reinforce_with_entropy) in page
    for name, built_in in POLICY_LOSSES.items():
        defaults = {key: field.default for key, field in built_in.model_fields.items()}
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |") and line.count("|") == 6]
        clips = f"{defaults['clip_low']:g}, {defaults['clip_high']:g}" if "clip_low" in defaults else "none"
        assert f"`{defaults['aggregation']}`" in row and clips.replace("0.0003, 0.0004", "3e-4, 4e-4") in row


@pytest.mark.parametrize(
    ("kl", "coef"), [(12.0, 0.201024), (6.0, 0.2), (3.0, 0.198976), (6.6, 0.200512), (-50.0, 0.198976)]
)
def test_the_coefficient_of_the_worked_examples(kl: float, coef: float) -> None:
    coefficient = KlCoefficient(0.2, target=6.0, horizon=10_000)
    coefficient.update(kl, 256)
    assert coefficient.coef == pytest.approx(coef, abs=1e-12) and coefficient.num_updates == 1


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_divergence_that_is_no_number_changes_nothing_and_is_told(kl: float) -> None:
    coefficient = KlCoefficient(0.2, target=6.0)
    with pytest.raises(TrainingError, match=f"divergence from the reference is {kl}"):
        coefficient.update(kl, 256)
    assert (coefficient.coef, coefficient.num_updates) == (0.2, 0)


def test_a_configured_coefficient_of_the_penalty_wins_over_the_checkpoint() -> None:
    saved = KlCoefficient(0.2, target=6.0, horizon=100)
    saved.update(12.0, 50)
    for before, expected in ((0.2, saved.coef), (0.5, 0.5)):
        changed = KlCoefficient(before, target=3.0, horizon=200)
        changed.restore(saved.values())
        assert (changed.coef, changed.target, changed.horizon, changed.num_updates) == (expected, 3.0, 200, 1)
    begun = KlCoefficient(0.2, target=6.0)
    begun.restore(KlCoefficient(0.0).values())
    assert begun.coef == 0.2, "the run was not steered before"
    fixed = KlCoefficient(0.5)
    fixed.restore(saved.values())
    fixed.update(100.0, 256)
    assert (fixed.coef, fixed.num_updates) == (0.5, 2), "without a target it stays, and updates count"


# Two sequences of two tokens and one: weights 1/4, 1/4, 1/2 by sequence, 1/3 each by token.
LOGPROBS, REFERENCE, ADVANTAGES = [-1.0, -2.0, -0.5], [-1.2, -1.5, -0.5], [0.5, 0.5, -1.0]
WEIGHTS = {"sequence": [0.25, 0.25, 0.5], "token": [1 / 3] * 3}


def value_and_gradient(loss: Any) -> tuple[float, list[float], dict[str, Tensor]]:
    columns = zip(LOGPROBS, ADVANTAGES, strict=True)
    tokens = [{"sampler": logprob, "old": logprob, "new": logprob, "advantage": own} for logprob, own in columns]
    reference_N = torch.tensor(REFERENCE, dtype=torch.float64)
    data = replace(as_input([tokens[:2], tokens[2:]]), reference_logprobs_N=reference_N)
    value, counts = loss(data)
    (gradient_N,) = torch.autograd.grad(value, data.logprobs_N)
    return float(value.detach()), gradient_N.tolist(), counts


@pytest.mark.parametrize("aggregation", ["sequence", "token"])
@pytest.mark.parametrize("estimator", [name for name in KL_ESTIMATES if name != "k1"])
def test_the_term_has_the_weights_of_the_loss(estimator: KlEstimator, aggregation: Any) -> None:
    config = PolicyLossConfig.of(type="policy_gradient", aggregation=aggregation)
    plain = build_policy_loss(config)
    penalised = with_kl_term(plain, config, KlCoefficient(0.3), estimator)
    (base, base_slopes, base_counts), (value, slopes, counts) = value_and_gradient(plain), value_and_gradient(penalised)
    weights, ds = WEIGHTS[aggregation], [p - r for p, r in zip(LOGPROBS, REFERENCE, strict=True)]
    term = sum(weight * KL_ESTIMATES[estimator](d, 1.0)[0] for weight, d in zip(weights, ds, strict=True))
    assert value == pytest.approx(base + 0.3 * term, rel=1e-12)
    for slope, before, weight, d in zip(slopes, base_slopes, weights, ds, strict=True):
        assert slope == pytest.approx(before + 0.3 * weight * KL_ESTIMATES[estimator](d, 1.0)[1], rel=1e-12)
    assert counts.keys() == base_counts.keys()


def test_a_fixed_bonus_stays_and_a_steered_one_is_that_of_the_slow_one_up_to_the_largest() -> None:
    coefficient = EntropyCoefficient(EntropyConfig(coef=0.3))
    coefficient.update(0.0)
    assert coefficient.coef == 0.3 and coefficient.tensors() == {}
    lower = EntropyCoefficient(EntropyConfig(target=0.5, largest=0.001))
    for before, expected in ((EntropyConfig().coef, 0.001), (0.5, EntropyConfig().coef)):
        lower.restore({"steered": 0.02, "last": 0.1, "configured": before})
        assert lower.coef == expected, "a changed coefficient is not that of the checkpoint"
        lower = EntropyCoefficient(EntropyConfig(target=0.5, largest=1.0))
    begun = EntropyCoefficient(EntropyConfig(coef=0.2, target=0.5))
    begun.restore(coefficient.values())
    assert begun.coef == 0.2, "the run was not steered before"
    generator = random.Random(0)
    steered = EntropyConfig(coef=0.01, target=0.5, step_size=0.004, largest=0.02)
    coefficient, expected, last = EntropyCoefficient(steered), 0.01, None
    for _ in range(200):
        assert coefficient.coef == pytest.approx(expected if last is not None and last <= 0.5 else 0.0, abs=1e-12)
        last = generator.choice([generator.random(), 0.5])
        expected = min(expected + 0.004, 0.02) if last <= 0.5 else max(expected - 0.004, 0.0)
        coefficient.update(last)
