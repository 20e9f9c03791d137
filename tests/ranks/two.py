"""Ranks for tests, mostly two: forked processes in one gloo group, in a program of their own (`python -m tests.…`)."""

import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from holdfast.config.training import ParallelConfig
from holdfast.trainer.mesh import join_mesh

_DEADLINE_S = 280.0


def run_on_ranks(work: Callable[..., object], *, number: int = 2) -> NoReturn:
    """Be `python -m tests.ranks.… PATHS DIRECTORY`: `rank_R.pt` gets what `work(mesh, *PATHS)` returns on a rank."""
    paths = [Path(word) for word in sys.argv[1:]]
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(rank, number, work, paths)) for rank in range(number)]
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


def _rank(rank: int, number: int, work: Callable[..., object], paths: list[Path]) -> None:
    directory = paths[-1]
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "store"), number)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=number)
    mesh = join_mesh(ParallelConfig(num_ranks=number), rank=rank, world_size=number, device=torch.device("cpu"))
    torch.save(work(mesh, *paths), directory / f"rank_{rank}.pt")
    dist.destroy_process_group()
