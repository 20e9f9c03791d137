"""Four real ranks, divided in several ways: `python -m tests.ranks.parallelism MODEL DIRECTORY`.

Each rank writes what it computed into `DIRECTORY/rank_R.pt`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.shared.config.trainer import OptimConfig, ParallelConfig, SftDataConfig, TrainedModelConfig
from holdfast.trainer.mesh import Mesh, join_mesh
from holdfast.trainer.models.lora import whole_tensors
from holdfast.trainer.models.policy import build_policy
from holdfast.trainer.optim.optimizers import build_optimizer, clip_gradients, update_parameters
from holdfast.trainer.supervised.step import supervised_step
from tests.models.families import random_samples
from tests.ranks.two import run_on_ranks

RANKS = 4
LENGTHS = (23, 5, 31, 2, 14, 9, 30)
STEPS = 2
LORA = {"lora": {"rank": 2, "target_modules": ["q_proj", "down_proj"]}}
# How the ranks are divided; what is trained, and by which optimizer.
DIVISIONS: dict[str, dict[str, Any]] = {"copies": {"replicas": 4}, "copies_of_shards": {"replicas": 2}}
RUNS: dict[str, tuple[dict[str, Any], OptimConfig]] = {
    "adamw": ({}, OptimConfig(lr=1e-2, max_grad_norm=float("inf"))),
    "muon": ({}, OptimConfig(type="muon", lr=1e-2, max_grad_norm=0.5)),
    "lora": (LORA, OptimConfig(lr=1e-2, max_grad_norm=0.5)),
}


def train(model_dir: Path, mesh: Mesh, run: str) -> dict[str, Tensor]:
    """Return losses and norms of a few supervised steps, and the weights after them. Collective."""
    model, optim = RUNS[run]
    config = TrainedModelConfig.model_validate({"name": str(model_dir), "logits_chunk_tokens": 8} | model)
    policy = build_policy(config, mesh, seed=0)
    optimizer = build_optimizer(policy.hf_model, optim)
    data, samples = SftDataConfig(name="", seq_len=32, micro_batch_size=1), random_samples(LENGTHS, seed=1)
    losses, norms = list[float](), list[float]()
    for _ in range(STEPS):
        losses.append(supervised_step(policy, samples, data, mesh))
        norms.append(clip_gradients(policy, optim.max_grad_norm))
        update_parameters(optimizer, lr=optim.lr)
    found = {"losses": torch.tensor(losses, dtype=torch.float64), "norms": torch.tensor(norms, dtype=torch.float64)}
    return found | {name: tensor.clone() for name, tensor in whole_tensors(policy.hf_model, keep=True)}


def main() -> None:
    """Write what each rank saw as `rank_R.pt`."""
    model_dir, directory = (Path(argument) for argument in sys.argv[1:])

    def work(given: Mesh) -> None:
        found = {}
        for division, settings in DIVISIONS.items():
            config = ParallelConfig(num_ranks=RANKS, **settings)
            mesh = join_mesh(config, rank=given.rank, world_size=RANKS, device=given.device)
            found |= {(division, run): train(model_dir, mesh, run) for run in RUNS}
        torch.save(found, directory / f"rank_{given.rank}.pt")

    run_on_ranks(RANKS, work, directory)


if __name__ == "__main__":
    main()
