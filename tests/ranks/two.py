"""Two ranks for tests: forked processes in one gloo group, in a program of their own (`python -m tests.…`)."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from holdfast.trainer.mesh import Mesh

_DEADLINE_S = 280.0


def run_on_two_ranks(work: Callable[[Mesh], None], directory: Path) -> NoReturn:
    """Call `work` on both ranks and end this process: with 0 when both came through, else with 1.

    Args:
        work: gets its place among the ranks.
        directory: where the ranks find one another.
    """
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(rank, work, directory)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(_DEADLINE_S)
        if process.exitcode != 0:
            for other in ranks:
                other.kill()
            os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def _rank(rank: int, work: Callable[[Mesh], None], directory: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    work(Mesh(rank=rank, world_size=2, device=torch.device("cpu"), device_mesh=device_mesh))
    dist.destroy_process_group()
