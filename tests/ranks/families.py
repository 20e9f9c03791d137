"""Two real ranks that share a model of some family: `python -m tests.ranks.families MODEL DIRECTORY`."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.config.data import SftDataConfig
from holdfast.config.training import ParallelConfig, TrainedModelConfig
from holdfast.errors import DataError
from holdfast.trainer.mesh import Mesh, join_mesh
from holdfast.trainer.model.policy import build_policy, supervised_step
from tests.models.families import gradients_of, random_samples
from tests.ranks.two import run_on_ranks

LENGTHS = (23, 5, 31, 2, 14)
DIVISIONS: dict[str, dict[str, Any]] = {
    "shards": {}, "offloaded": {"cpu_offload": True}, "copies": {"replicas": 2}, "slices": {"sequence_parallel": 2},
    "experts": {"expert_parallel": 2},
}  # fmt: skip


def compute(model_dir: Path, mesh: Mesh) -> dict[str, Tensor]:
    """Return the loss of a supervised step and its gradients by parameter. Collective."""
    policy = build_policy(TrainedModelConfig(name=str(model_dir), logits_chunk_tokens=8), mesh, seed=0)
    samples = random_samples(LENGTHS, seed=1)
    # Three micro-batches: one of two ranks has an empty one.
    loss = supervised_step(policy, samples, SftDataConfig(name="", seq_len=32, micro_batch_size=1), mesh)["loss"]
    assert all(parameter.grad is not None for parameter in policy.parameters())
    return {"loss": torch.tensor(loss)} | gradients_of(policy.hf_model)


def _work(given: Mesh, model_dir: Path, _: Path) -> dict[str, dict[str, Tensor] | str]:
    found: dict[str, dict[str, Tensor] | str] = {}
    for name, settings in DIVISIONS.items():
        config = ParallelConfig(num_ranks=given.world_size, **settings)
        mesh = join_mesh(config, rank=given.rank, world_size=given.world_size, device=given.device)
        try:
            found[name] = compute(model_dir, mesh)
        except DataError as refusal:
            found[name] = str(refusal)
    return found


if __name__ == "__main__":
    run_on_ranks(_work)
