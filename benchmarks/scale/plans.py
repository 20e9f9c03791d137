"""The plans of all ranks of a sharded save, made in one process.

Rank 0's plan is made by torch from DTensors of a fake process group. The plan of another rank has the
same items with the offsets and sizes of that rank's shards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,
    compute_local_shape_and_global_offset,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

State = dict[str, Tensor]


@contextmanager
def fake_mesh(num_ranks: int, *, rank: int = 0) -> Iterator[DeviceMesh]:
    """Be one of `num_ranks` ranks; nothing is sent."""
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("fsdp",))
    finally:
        dist.destroy_process_group()


def sharded_state(parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], mesh: DeviceMesh) -> State:
    """Return this rank's part of the state that the trainer saves: FSDP2 shards the first dimension.

    `model.NAME` and Adam's `optim.NAME.{exp_avg,exp_avg_sq,step}`; buffers and steps are on every rank.
    """
    state: State = {}
    for name, tensor in parameters.items():
        state[f"model.{name}"] = _shard(tensor, mesh)
    for name, tensor in buffers.items():
        state[f"model.{name}"] = tensor
    for name, tensor in parameters.items():
        state[f"optim.{name}.exp_avg"] = _shard(tensor, mesh)
        state[f"optim.{name}.exp_avg_sq"] = _shard(tensor, mesh)
        state[f"optim.{name}.step"] = torch.empty((), device="meta")
    return state


def _shard(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    shape, _ = compute_local_shape_and_global_offset(tensor.shape, mesh, [Shard(0)])
    local = torch.empty(shape, dtype=tensor.dtype, device="meta")
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride())


def local_plan(state: State, *, rank: int) -> SavePlan:
    """Return the plan that torch makes of this rank's part."""
    return create_default_local_save_plan(state, rank == 0)


def plan_of_rank(first: SavePlan, rank: int, num_ranks: int) -> SavePlan:
    """Return the plan of any rank, from that of rank 0."""
    return dataclasses.replace(first, items=[_item_of_rank(item, rank, num_ranks) for item in first.items])


def _item_of_rank(item: WriteItem, rank: int, num_ranks: int) -> WriteItem:
    if item.type != WriteItemType.SHARD or item.tensor_data is None:
        return item
    sizes, offsets = _part(tuple(item.tensor_data.size), rank, num_ranks)
    return dataclasses.replace(
        item,
        index=MetadataIndex(item.index.fqn, offsets),
        tensor_data=dataclasses.replace(item.tensor_data, chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes)),
    )


@cache
def _part(shape: tuple[int, ...], rank: int, num_ranks: int) -> tuple[torch.Size, torch.Size]:
    sizes, offsets = _compute_local_shape_and_global_offset(shape, (num_ranks,), [rank], [Shard(0)])
    return torch.Size(sizes), torch.Size(offsets)


def write_results(plan: SavePlan, rank: int) -> list[WriteResult]:
    """Return what a rank reports after it wrote its plan into one file."""
    results, offset = [], 0
    for item in plan.items:
        assert item.tensor_data is not None
        size = item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
        results.append(WriteResult(item.index, size, _StorageInfo(f"__{rank}_0.distcp", offset, size)))
        offset += size
    return results
