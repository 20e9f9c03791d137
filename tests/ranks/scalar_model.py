"""Two real ranks that share a scalar model: `python -m tests.ranks.scalar_model MODEL REWARD_MODEL DIRECTORY`.

Each rank writes what it computed into `DIRECTORY/rank_R.pt`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from holdfast.shared.config.trainer import TrainedModelConfig
from holdfast.trainer.data.packing import Sample, build_micro_batch
from holdfast.trainer.data.row_plan import plan_rows
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.models.pretrained import trained_tensors
from holdfast.trainer.models.scalar_model import build_scalar_model, predict_values, score_samples
from holdfast.trainer.rl.rewards.reward_model import RewardModel
from tests.ranks.two import run_on_two_ranks


def ragged_samples() -> list[Sample]:
    """Five samples of several lengths."""
    generator = np.random.default_rng(3)
    return [
        Sample(generator.integers(5, 100, length).astype(np.int32), np.arange(length) >= 1)
        for length in (9, 4, 12, 6, 3)
    ]


def compute(model_dir: Path, reward_model: Path, mesh: Mesh) -> dict[str, object]:
    """Return this rank's scores by sample, values of two samples, the gradients of both, and rewards. Collective."""
    samples = ragged_samples()
    config = TrainedModelConfig(name=str(model_dir))
    model = build_scalar_model(config, mesh, seed=0)
    plan = plan_rows(
        [len(sample.token_ids) for sample in samples],
        arrangement="packed", budget=13, rows_per_micro_batch=1, world_size=mesh.world_size,
    )[mesh.rank]  # fmt: skip
    scores: dict[int, float] = {}
    for indices in plan:
        scores_S = score_samples(model, samples, indices, pack=True, device=mesh.device)
        scores |= dict(zip(indices, scores_S.tolist(), strict=True))
        (scores_S.square().sum() * mesh.world_size).backward()
    values_N = predict_values(model, build_micro_batch(samples, [1, 2], pack=True, device=mesh.device))
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
    rewards = RewardModel(str(reward_model), config, mesh).score(samples[:3], row_tokens=100)  # one row: one rank's
    seen = {"scores": scores, "values": values_N.detach(), "gradients": gradients, "tensors": tensors}
    return seen | {"rewards": rewards}


def main() -> None:
    """Write what each rank saw as `rank_R.pt`."""
    model_dir, reward_model, directory = (Path(argument) for argument in sys.argv[1:])

    def work(mesh: Mesh) -> None:
        torch.manual_seed(mesh.rank)  # what is built must not depend on it
        torch.save(compute(model_dir, reward_model, mesh), directory / f"rank_{mesh.rank}.pt")

    run_on_two_ranks(work, directory)


if __name__ == "__main__":
    main()
