"""Training states for tests of checkpoints: a tiny policy with AdamW, trained by random gradients."""

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from holdfast.config.training import AdamWConfig, TrainedModelConfig
from holdfast.run.manifest import FileEntry
from holdfast.trainer.checkpoint.commit import Storage
from holdfast.trainer.checkpoint.dcp import ShardWriter
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.build import trained_tensors
from holdfast.trainer.model.policy import build_policy
from holdfast.trainer.optimizer import build_optimizer, clip_gradients, update_parameters
from holdfast.trainer.state import Progress, TrainState

MakeState = Callable[..., TrainState]


def state_maker(tiny_model: Callable[..., Path], mesh: Mesh) -> MakeState:
    """Return a maker of states: `make(seed=0, steps=0, weights=True, **model)`."""

    def make(*, seed: int = 0, steps: int = 0, weights: bool = True, **model: Any) -> TrainState:
        config = TrainedModelConfig(name=str(tiny_model(**model)), init="random")
        policy = build_policy(config, mesh, seed=seed, weights=weights)
        state = TrainState(policy, build_optimizer(policy, AdamWConfig(lr=0.01)), Progress())
        train(state, steps)
        return state

    return make


def train(state: TrainState, steps: int) -> None:
    """Take steps with random gradients: they use torch's generator, as dropout does."""
    for _ in range(steps):
        for parameter in state.policy.parameters():
            parameter.grad = torch.zeros_like(parameter)
            local_part(parameter.grad).copy_(torch.randn(local_part(parameter).shape))
        clip_gradients(state.policy, 1.0)
        update_parameters(state.optimizer, lr=0.01)
        state.progress.advance(samples=8, tokens=100)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, or the tensor itself where it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def fill(model: PreTrainedModel) -> None:
    """Give what is trained of a model random values, under which adapters matter."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in trained_tensors(model).values():
            local = local_part(tensor)
            local.copy_(torch.randn(local.shape, generator=generator) * 0.2)


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: local_part(tensor).detach().clone() for name, tensor in tensors.items()}


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def draw() -> tuple[float, float, float, float]:
    return random.random(), random.gauss(0, 1), float(np.random.rand()), float(torch.rand(()))


class HeldWrites:
    def __init__(self) -> None:
        self.begun = threading.Event()  # set when a save has come to its writing
        self._released = threading.Event()

    @property
    def is_released(self) -> bool:
        return self._released.is_set()

    def release(self) -> None:
        self._released.set()

    def wait(self) -> None:
        """Called by the writing thread."""
        self.begun.set()
        assert self._released.wait(120), "nobody released the save"


@contextmanager
def held_writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldWrites]:
    """Hold every save back just before it writes its tensors, and release it at the end at the latest."""
    held = HeldWrites()
    write = ShardWriter.write

    def late(writer: ShardWriter, tensors: Mapping[str, Tensor], directory: Path) -> dict[str, FileEntry]:
        held.wait()
        return write(writer, tensors, directory)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "write", late)
        try:
            yield held
        finally:
            held.release()


class NotifyingStorage(Storage):
    """Calls `notify` with the directory of every committed step, from the thread that commits."""

    def __init__(self, notify: Callable[[Path], object]) -> None:
        super().__init__()
        self._notify = notify

    def publish(self, directory: Path) -> None:
        self._notify(directory)
