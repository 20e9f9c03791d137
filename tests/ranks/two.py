"""Ranks for tests, mostly two: forked processes in one gloo group, in a program of their own (`python -m tests.…`)."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from holdfast.config.training import ParallelConfig
from holdfast.trainer.mesh import Mesh, join_mesh

_DEADLINE_S = 280.0


def run_on_two_ranks(work: Callable[[Mesh], None], directory: Path) -> NoReturn:
    """See `run_on_ranks`."""
    run_on_ranks(2, work, directory)


def run_on_ranks(number: int, work: Callable[[Mesh], None], directory: Path) -> NoReturn:
    """Call `work` on all ranks and end this process: with 0 when all came through, else with 1.

    Args:
        work: gets its place among the ranks.
        directory: where the ranks find one another.
    """
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(rank, number, work, directory)) for rank in range(number)]
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


def _rank(rank: int, number: int, work: Callable[[Mesh], None], directory: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "store"), number)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=number)
    work(join_mesh(ParallelConfig(num_ranks=number), rank=rank, world_size=number, device=torch.device("cpu")))
    dist.destroy_process_group()
