"""Two real ranks that share a scalar model: `python -m tests.scalar_ranks MODEL REWARD_MODEL DIRECTORY`.

Each rank writes what it computed into `DIRECTORY/rank_R.pt`.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from trainer.model import trained_tensors
from trainer.packing import Sample, build_micro_batch, plan_rows
from trainer.parallel import Parallel
from trainer.reward_model import RewardModel
from trainer.scalar_model import build_scalar_model, predict_values, score_samples
from triad.config.trainer import TrainedModelConfig

DEADLINE_S = 120


def ragged_samples() -> list[Sample]:
    """Five samples of several lengths."""
    generator = np.random.default_rng(3)
    return [
        Sample(generator.integers(5, 100, length).astype(np.int32), np.arange(length) >= 1)
        for length in (9, 4, 12, 6, 3)
    ]


def compute(model_dir: Path, reward_model: Path, parallel: Parallel) -> dict[str, object]:
    """Return this rank's scores by sample, values of two samples, the gradients of both, and rewards. Collective."""
    samples = ragged_samples()
    config = TrainedModelConfig(name=str(model_dir))
    model = build_scalar_model(config, parallel, seed=0)
    plan = plan_rows(
        [len(sample.token_ids) for sample in samples],
        pack=True, budget=13, rows_per_micro_batch=1, world_size=parallel.world_size,
    )[parallel.rank]  # fmt: skip
    scores: dict[int, float] = {}
    for indices in plan:
        scores_S = score_samples(model, samples, indices, pack=True, device=parallel.device)
        scores |= dict(zip(indices, scores_S.tolist(), strict=True))
        (scores_S.square().sum() * parallel.world_size).backward()
    values_N = predict_values(model, build_micro_batch(samples, [1, 2], pack=True, device=parallel.device))
    (values_N.square().sum()).backward()  # the same on every rank, so its mean over ranks is itself
    gradients = {}
    for name, parameter in model.hf_model.named_parameters():
        assert parameter.grad is not None
        gradient = parameter.grad
        gradients[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    tensors = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in trained_tensors(model.hf_model).items()
    }
    rewards = RewardModel(str(reward_model), config, parallel).score(samples[:3], row_tokens=100)  # one row: one rank's
    seen = {"scores": scores, "values": values_N.detach(), "gradients": gradients, "tensors": tensors}
    return seen | {"rewards": rewards}


def _rank(rank: int, model_dir: Path, reward_model: Path, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(directory / "store"), 2), rank=rank, world_size=2)
    torch.manual_seed(rank)  # what is built must not depend on it
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    seen = compute(model_dir, reward_model, Parallel(rank=rank, world_size=2, device=torch.device("cpu"), mesh=mesh))
    torch.save(seen, directory / f"rank_{rank}.pt")
    dist.destroy_process_group()


def main() -> int:
    """Start both ranks; return 0 when both came through."""
    model_dir, reward_model, directory = (Path(argument) for argument in sys.argv[1:])
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(rank, model_dir, reward_model, directory)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(DEADLINE_S)
        if process.exitcode != 0:
            for other in ranks:
                other.kill()
            return 1
    return 0


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main())
