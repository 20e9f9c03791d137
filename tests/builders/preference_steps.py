"""Ragged preference pairs, and what a step on such samples must be however it is split, for all programs of pairs."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from holdfast.trainer.data.packing import Sample
from holdfast.trainer.preference.pairs import Pair


def ragged_pairs(count: int, *, margin: float = 0.0) -> list[Pair]:
    """Return pairs of random tokens and lengths; the margin grows by `margin` from pair to pair."""
    random, pairs = np.random.default_rng(0), []
    for number in range(count):
        prompt, sides = random.integers(5, 40, random.integers(1, 6)), []
        for _ in range(2):
            answer = random.integers(5, 40, random.integers(1, 9))
            mask = np.repeat([False, True], [len(prompt), len(answer)])
            sides.append(Sample(np.concatenate([prompt, answer]).astype(np.int32), mask, value=margin * number))
        pairs.append(Pair(sides[0], sides[1], number=number))
    return pairs


def taken_gradients(model: nn.Module) -> Tensor:
    """Return all gradients in one row, and leave none."""
    found = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    model.zero_grad(set_to_none=True)
    return found


SPLITS = ({"micro_batch_size": 1}, {"micro_batch_size": 5, "pack": False}, {"micro_batch_size": 1, "pack": False})


def check_splits(step: Callable[..., tuple[dict[str, float], Tensor]], *, rel: float = 1e-5) -> dict[str, float]:
    """Metrics and gradients of `step(**data)` on twelve rows do not depend on micro-batches and packing."""
    metrics, gradients = step(micro_batch_size=12)
    assert gradients.norm() > 1e-3
    for split in SPLITS:
        other_metrics, other = step(**split)
        assert other_metrics == pytest.approx(metrics, rel=rel, abs=rel / 10), split
        torch.testing.assert_close(other, gradients, rtol=1e-4, atol=rel / 10)
    return metrics
