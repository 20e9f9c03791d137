"""Preference losses and estimates of divergences in plain Python, from the papers, to compare the real ones with."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.config.base import KlEstimator
from holdfast.config.preference import PREFERENCE_LOSSES, PreferenceLossConfig
from holdfast.trainer.preference.losses import PairLogprobs, kto_loss, preference_loss
from holdfast.trainer.rl.kl import estimate_kl


def preference_config(kind: str, **settings: Any) -> Any:
    return PreferenceLossConfig.of(type=kind, **settings)


def variants(name: str) -> list[Any]:
    """Return a loss with every kind of setting that it has."""
    fields = PREFERENCE_LOSSES[name].model_fields
    settings: list[dict[str, Any]] = [{"beta": 2.5, "margin": 1.4} if "margin" in fields else {"beta": 0.3}]
    settings += [{"beta": 0.3, "label_smoothing": 0.2}] if "label_smoothing" in fields else []
    settings += [{"beta": 0.3, "odpo_alpha": 0.8}] if "odpo_alpha" in fields else []
    settings += [{"beta": 0.2, "rpo_alpha": 0.7}] if "rpo_alpha" in fields else []
    settings += [{"beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.7}] if name == "kto" else []
    return [preference_config(name, **one) for one in settings]


def pairs(policy_P2: Tensor, reference_P2: Tensor, tokens_P2: Tensor, margins_P: Tensor) -> PairLogprobs:
    return PairLogprobs(*policy_P2.unbind(1), *reference_P2.unbind(1), *tokens_P2.unbind(1), margins_P)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def slow_preference_loss(
    settings: Any, policy: list[float], reference: list[float], tokens: list[float], offset: float
) -> float:
    """The formulas as the papers print them, one pair at a time."""

    def of(name: str) -> float:
        return getattr(settings, name, 0.0)

    beta, smoothing, margin = settings.beta, of("label_smoothing"), of("margin")
    r_w, r_l = policy[0] - reference[0], policy[1] - reference[1]
    w, l = policy[0] / tokens[0], policy[1] / tokens[1]  # noqa: E741 - as in the papers
    odds = (math.exp(w) / (1 - math.exp(w))) / (math.exp(l) / (1 - math.exp(l)))
    h = beta * (r_w - r_l) - of("odpo_alpha") * offset
    right, wrong = -math.log(sigmoid(h)), -math.log(sigmoid(-h))
    values = {
        "dpo": (1 - smoothing) * right + smoothing * wrong,
        "ipo": (r_w / tokens[0] - r_l / tokens[1] - 1 / (2 * beta)) ** 2,
        "ipo_sum": (r_w - r_l - 1 / (2 * beta)) ** 2,
        "hinge": max(0.0, 1 - beta * (r_w - r_l)),
        "robust": ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing),
        "apo_zero": 1 - sigmoid(beta * r_w) + sigmoid(beta * r_l),
        "apo_down": sigmoid(beta * r_w) + 1 - sigmoid(beta * (r_w - r_l)),
        "simpo": -math.log(sigmoid(beta * w - beta * l - margin)),
        "orpo": -w - beta * math.log(sigmoid(math.log(odds))),
        # The answers are not a pair: a good one and a bad one, beside a divergence of `offset`.
        "kto": of("desirable_weight") * (1 - sigmoid(beta * (r_w - offset)))
        + of("undesirable_weight") * (1 - sigmoid(beta * (offset - r_l))),
    }
    return values[settings.type] - of("rpo_alpha") * w


def check_preference_loss(name: str, seed: int) -> None:
    """Compare loss and gradient of a pair with the slow one and its differences."""
    draw = random.Random(f"{name} {seed}")
    settings = draw.choice(variants(name))
    tokens = [float(draw.randint(1, 12)) for _ in range(2)]
    policy, reference = ([-n * draw.uniform(0.05, 2.0) for n in tokens] for _ in range(2))
    offset = draw.choice([0.0, draw.uniform(0, 5)])
    rows = [torch.tensor([values], dtype=torch.float64) for values in (policy, reference, tokens)]
    rows[0].requires_grad_()
    if name == "kto":
        labels_A = torch.tensor([True, False])
        loss = kto_loss((rows[0] - rows[1])[0], labels_A, offset, settings)[0].sum()
    else:
        loss = preference_loss(pairs(*rows, torch.tensor([offset], dtype=torch.float64)), settings).losses_P.sum()
    assert loss.item() == pytest.approx(slow_preference_loss(settings, policy, reference, tokens, offset), rel=1e-9)
    (gradient,) = torch.autograd.grad(loss, rows[0])
    for side in (0, 1):
        ends = []
        for move in (1e-5, -1e-5):
            moved = [value + move * (place == side) for place, value in enumerate(policy)]
            ends.append(slow_preference_loss(settings, moved, reference, tokens, offset))
        assert gradient[0, side].item() == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-5, abs=1e-7), settings


# Value and slope in log policy: of d = log policy - log reference, and rho = policy / base.
KL_ESTIMATES: dict[str, Callable[[float, float], tuple[float, float]]] = {
    "k1": lambda d, rho: (d, 1.0),
    "k2": lambda d, rho: (d * d / 2, d),
    "k3": lambda d, rho: (math.exp(-d) + d - 1, 1 - math.exp(-d)),
    "k3_unbiased": lambda d, rho: (min(rho, 20) * (math.exp(-d) + d - 1), min(rho, 20) * d),
}


def check_kl_estimate(name: KlEstimator, seed: int) -> None:
    """Compare estimate and slope with the formulas; beyond 20 nats there is no slope."""
    draw = random.Random(f"{name} {seed}")
    policy = -draw.expovariate(0.5)
    reference, base = (policy + draw.gauss(0, draw.choice([0.1, 1, 30])) for _ in range(2))
    logprob, others = torch.tensor(policy, dtype=torch.float64, requires_grad=True), torch.tensor([reference, base])
    found = estimate_kl(logprob, others[0].double(), name, base_logprobs_N=others[1].double())
    d, rho = policy - others[0].item(), math.exp(policy - others[1].item())
    value, slope = KL_ESTIMATES[name](max(-20.0, min(20.0, d)), rho)
    assert found.item() == pytest.approx(value, rel=1e-7, abs=1e-12)
    expected = slope if abs(d) < 20 else 0.0
    assert torch.autograd.grad(found, logprob)[0].item() == pytest.approx(expected, rel=1e-7, abs=1e-12)
