"""The moving average of the weights by hand, against a slow loop, over shards and through a checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from holdfast.trainer.mesh import Mesh
from holdfast.trainer.rl.auxiliary_models import Ema


def test_many_updates_equal_the_weighted_sum_over_all_steps() -> None:
    generator = torch.Generator().manual_seed(0)
    steps = [torch.randn(7, generator=generator) for _ in range(40)]
    ema = Ema({"a": steps[0]}, decay=0.9)
    for weights in steps[1:]:
        ema.update({"a": weights})
    last = len(steps) - 1
    expected = 0.9**last * steps[0].double()
    for step in range(1, len(steps)):
        expected += 0.1 * 0.9 ** (last - step) * steps[step].double()
    torch.testing.assert_close(ema.tensors()["a"].double(), expected, atol=1e-6, rtol=1e-5)


def test_bfloat16_weights_are_averaged_in_float32() -> None:
    weights = torch.ones(1, dtype=torch.bfloat16)
    ema = Ema({"a": weights}, decay=0.992)
    nudged = weights * 1.0078125  # the next bfloat16: 0.008 of the way is too little for that type
    for _ in range(3):
        ema.update({"a": nudged})
    (average,) = ema.tensors().values()
    assert average.dtype == torch.float32
    assert average.item() == pytest.approx(1 + 0.0078125 * (1 - 0.992**3), abs=1e-7)


def test_the_average_is_a_copy_that_stays_in_place_so_that_loading_reaches_it() -> None:
    weights = torch.nn.Parameter(torch.ones(3))
    ema = Ema({"a": weights}, decay=0.5)
    held = ema.tensors()["a"]
    with torch.no_grad():
        weights.add_(2.0)
    ema.update({"a": weights})
    assert held.tolist() == [2.0] * 3 and weights.tolist() == [3.0] * 3 and not held.requires_grad
    held.copy_(torch.tensor([4.0, 8.0, 9.0]))
    assert ema.tensors()["a"].tolist() == [4.0, 8.0, 9.0]


def test_shards_stay_sharded_and_average_as_whole_tensors_do(mesh: Mesh) -> None:
    start, after = torch.randn(2, 6, 4)
    ema = Ema({"a": distribute_tensor(start, mesh.device_mesh, [Shard(0)])}, decay=0.992)
    ema.update({"a": distribute_tensor(after, mesh.device_mesh, [Shard(0)])})
    average = ema.tensors()["a"]
    assert isinstance(average, DTensor) and average.placements == (Shard(0),)
    whole = Ema({"a": start}, decay=0.992)
    whole.update({"a": after})
    assert torch.equal(average.to_local(), whole.tensors()["a"])
