"""Two real ranks that share a model of some family: `python -m tests.ranks.families MODEL DIRECTORY`.

Each rank writes what it computed into `DIRECTORY/rank_R.pt`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from holdfast.shared.config.trainer import SftDataConfig, TrainedModelConfig
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.models.policy import build_policy
from holdfast.trainer.supervised.step import supervised_step
from tests.models.families import random_samples
from tests.ranks.two import run_on_two_ranks

LENGTHS = (23, 5, 31, 2, 14)


def compute(model_dir: Path, mesh: Mesh) -> dict[str, Tensor]:
    """Return the loss of a supervised step and its gradients by parameter. Collective."""
    policy = build_policy(TrainedModelConfig(name=str(model_dir), logits_chunk_tokens=8), mesh, seed=0)
    samples = random_samples(LENGTHS, seed=1)
    # Three micro-batches: one of two ranks has an empty one.
    loss = supervised_step(policy, samples, SftDataConfig(name="", seq_len=32, micro_batch_size=1), mesh)
    found = {"loss": torch.tensor(loss)}
    for name, parameter in policy.hf_model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return found


def main() -> None:
    """Write what each rank saw as `rank_R.pt`."""
    model_dir, directory = (Path(argument) for argument in sys.argv[1:])

    def work(mesh: Mesh) -> None:
        torch.save(compute(model_dir, mesh), directory / f"rank_{mesh.rank}.pt")

    run_on_two_ranks(work, directory)


if __name__ == "__main__":
    main()
