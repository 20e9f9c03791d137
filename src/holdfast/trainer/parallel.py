"""Ranks, device and process groups of the trainer: one object owns all of it."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from holdfast.shared.config.trainer import ParallelConfig
from holdfast.shared.errors import ConfigError
from holdfast.shared.process.child import available_cores

T = TypeVar("T")


@dataclass(frozen=True)
class Parallel:
    """This process's place in the run.

    Attributes:
        rank, world_size: global rank and number of ranks.
        device: where this rank's shard lives.
        mesh: one-dimensional mesh `fsdp`; parameters are sharded over all ranks.
    """

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def is_main(self) -> bool:
        """Whether this rank writes logs, metrics, weights and manifests."""
        return self.rank == 0

    def sum(self, values: dict[str, float]) -> dict[str, float]:
        """Return the sum over all ranks of each value, in one float64 collective."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: dict[str, float]) -> dict[str, float]:
        """Return the maximum over all ranks of each value, in one float64 collective."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: dict[str, float], operation: dist.ReduceOp.RedOpType) -> dict[str, float]:
        if self.world_size == 1:
            return values
        tensor = torch.tensor(list(values.values()), dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=operation)
        return dict(zip(values, tensor.tolist(), strict=True))

    def sum_tensor(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks of a CPU tensor of the same shape on each, in one collective."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def concatenate(self, vector: Tensor) -> Tensor:
        """Return the CPU vectors of all ranks, of whatever lengths, one after the other in the order of ranks."""
        if self.world_size == 1:
            return vector
        size = torch.tensor([len(vector)])
        sizes = [torch.zeros_like(size) for _ in range(self.world_size)]
        dist.all_gather(sizes, size)
        longest = max(int(size) for size in sizes)
        padded = torch.cat([vector, vector.new_zeros(longest - len(vector))])
        parts = [torch.zeros_like(padded) for _ in range(self.world_size)]
        dist.all_gather(parts, padded)
        return torch.cat([part[: int(size)] for part, size in zip(parts, sizes, strict=True)])

    def gather(self, value: T) -> list[T]:
        """Return what each rank gave, in the order of ranks, as copies in the memory of the host. Collective."""
        values: list[T | None] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]  # all are filled in

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()


def start(config: ParallelConfig) -> Parallel:
    """Join the process group that torchrun describes in the environment."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("parallel.device = cuda, but torch finds no GPU here. Use `auto` or `cpu`.")
    use_cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = datetime.timedelta(seconds=config.collective_timeout_s)
    if use_cuda:  # untested: needs a GPU
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        # CPU tensors (metrics of the host, checkpoint planning) go over gloo.
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(config.threads or max(1, available_cores() // world_size))
        dist.init_process_group("gloo", timeout=timeout)
    mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("fsdp",))
    return Parallel(rank=rank, world_size=world_size, device=device, mesh=mesh)


def stop() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()
