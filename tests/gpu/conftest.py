"""A GPU, and one rank on it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from holdfast.trainer.mesh import Mesh
from tests.gpu.gpu_place import Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place("cuda", tmp_path, is_toy=False)


@pytest.fixture(scope="session")
def mesh() -> Iterator[Mesh]:
    """Return the ranks of a trainer of one process on the GPU."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    device_mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("fsdp",))
    yield Mesh(rank=0, world_size=1, device=device, device_mesh=device_mesh)
    dist.destroy_process_group()
