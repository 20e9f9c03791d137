"""Every optimizer of the packages that people use: it goes on bit for bit, or is refused at the save."""

import importlib
import inspect
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.errors import CheckpointError
from holdfast.trainer.checkpoint.checkpointer import load_state_with_optimizer, save_state

PACKAGES = {"torch.optim": (12, 0), "pytorch_optimizer": (90, 8), "torchao.optim": (3, 0),
            "bitsandbytes.optim": (4, 0), "schedulefree": (3, 0)}  # fmt: skip
"""How many optimizers must have been compared at least, and how many may be refused at most."""


def start(make: Callable[..., Optimizer], seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 72), nn.Tanh(), nn.Linear(72, 64))
    optimizer = make(model.parameters(), lr=1e-3)
    getattr(optimizer, "train", lambda: None)()
    return {"model": model, "optimizer": optimizer}


def losses(state: dict[str, Any], steps: range) -> list[bytes]:
    """Take the steps; return the bits of each loss and, last, of the parameters."""
    model, optimizer = state["model"], state["optimizer"]
    found: list[Tensor] = []
    for number in steps:
        batch = torch.randn(16, 64, generator=torch.Generator().manual_seed(number))

        def closure(batch: Tensor = batch) -> Tensor:
            optimizer.zero_grad()
            loss = (model(batch) - batch.roll(1, 1)).square().mean()
            loss.backward(create_graph=False)
            return loss

        found.append(closure().detach())
        optimizer.step(closure)
    return [one.detach().numpy().tobytes() for one in (*found, *model.parameters())]


@pytest.mark.trl
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("package", PACKAGES)
@torch.compiler.set_stance("force_eager")  # torchao compiles its steps, for minutes
def test_every_optimizer_of_a_package_goes_on_or_is_refused(package: str, tmp_path: Path) -> None:
    pytest.importorskip(package.partition(".")[0], reason="`.ci/nightly` runs it with the package")
    ends: Counter[str] = Counter()
    different = []
    for name, kind in inspect.getmembers(importlib.import_module(package), inspect.isclass):
        if not issubclass(kind, Optimizer) or kind is Optimizer:
            continue
        try:
            expected = losses(start(kind, 0), range(6))[3:]
        except Exception:  # noqa: BLE001 - whatever keeps it from running here: a GPU, more arguments, a wrapped one
            ends["does not run here"] += 1
            continue
        state = start(kind, 0)
        losses(state, range(3))
        try:
            save_state(tmp_path / name, state)
        except CheckpointError:
            ends["refused"] += 1
            continue
        fresh = start(kind, 1)
        load_state_with_optimizer(tmp_path / name, fresh)
        ends["equal"] += 1
        if losses(fresh, range(3, 6)) != expected:
            different.append(name)
    print(f"{package}: {dict(ends)}")
    least, most_refused = PACKAGES[package]
    assert not different
    assert ends["equal"] >= least and ends["refused"] <= most_refused, ends
