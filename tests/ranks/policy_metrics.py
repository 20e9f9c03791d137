"""Two real ranks that measure and count what one does: `python -m tests.ranks.policy_metrics MODEL DATA DIRECTORY`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from holdfast.config.algorithm import UpdatesConfig
from holdfast.config.policy_losses import PolicyLossConfig
from holdfast.config.training import MuonConfig, TrainedModelConfig
from holdfast.trainer.data.packing import Sample
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.build import trained_tensors
from holdfast.trainer.model.decoder import freeze, reshard
from holdfast.trainer.model.logprobs import PLAIN
from holdfast.trainer.model.packing_check import PACKED
from holdfast.trainer.model.policy import build_policy, predict
from holdfast.trainer.optimizer import _orthogonalized, build_optimizer, update_parameters
from holdfast.trainer.rl.batch import ADVANTAGE, AGE, SAMPLER_LOGPROB, measure_targets, plan_epochs
from holdfast.trainer.rl.losses import PolicyLossInput, build_policy_loss, with_distillation_term
from holdfast.trainer.rl.metrics import PolicyStatistics
from holdfast.trainer.rl.train_step import forward_backward
from tests.builders.policy_inputs import policy_input
from tests.models.families import gradients_of, group_samples, random_samples
from tests.ranks.two import run_on_ranks

AGES = (0, 1, 4)
# Of each token: new, old, sampler and reference log-probability, age. By update, by forward pass.
TOKENS: list[list[list[tuple[float, float, float, float, int]]]] = [
    [
        [(-1.0, -1.2, -1.5, -1.1, 0), (-0.5, -0.5, -0.4, -0.9, 1)],
        [(-2.0, -1.9, -1.9, -2.2, 1), (-0.1, -0.2, -0.7, -0.1, 1), (-3.0, -2.5, -2.0, -2.0, 0)],
    ],
    [[(-0.7, -0.6, -0.1, -0.8, 0)], []],
]
LOSSES = [[0.5, 0.25], [-1.0, 0.0]]


def ragged_samples() -> list[Sample]:
    """Five samples of several lengths, one with nothing to train."""
    generator, lengths = np.random.default_rng(3), (9, 4, 12, 6, 3)
    return [Sample(generator.integers(5, 100, n).astype(np.int32), (np.arange(n) >= 2) & (n != 4)) for n in lengths]


def loss_input(tokens: list[tuple[float, float, float, float, int]]) -> tuple[PolicyLossInput, Tensor]:
    """Return the input of a loss with these tokens, and their ages."""
    columns = torch.tensor(tokens, dtype=torch.float32).reshape(-1, 5).T
    nothing_N = torch.zeros(len(tokens))
    data = policy_input(
        columns[0], old_logprobs_N=columns[1], sampler_logprobs_N=columns[2],
        reference_logprobs_N=columns[3],
        advantages_N=nothing_N, weights_N=nothing_N, sequence_N=nothing_N.long(), step_sequences=6, step_tokens=6,
    )  # fmt: skip
    return data, columns[4]


def statistics_of(mesh: Mesh) -> dict[str, float]:
    """Return the metrics of two updates whose two forward passes are dealt to the ranks. Collective."""
    statistics = PolicyStatistics(AGES, has_reference=True)
    for passes, losses in zip(TOKENS, LOSSES, strict=True):
        own = range(mesh.data_rank, len(passes), mesh.data_size)
        for place in own:
            data, age_N = loss_input(passes[place])
            counts = {"clip_fraction/low": torch.tensor(len(passes[place]) % 2), "mine": torch.tensor(place)}
            statistics.add(data, counts, data.logprobs_N.abs() / 2, age_N)
        statistics.add_update(sum(losses[place] for place in own))
    return statistics.reduce(mesh)


def measured(model_dir: Path, mesh: Mesh, **settings: Any) -> list[np.ndarray]:
    """Return the log-probabilities that `measure_targets` gives every sample. Collective."""
    config = TrainedModelConfig(name=str(model_dir), **settings)
    samples = ragged_samples()
    policy = build_policy(config, mesh, seed=0).eval()
    (minibatches,) = plan_epochs(
        samples, UpdatesConfig(minibatches=2), row_tokens=14, mesh=mesh, seed=0, step=1, layout=PACKED
    )
    measure_targets("logprob", lambda micro: predict(policy, micro).logprobs_N, minibatches, mesh, pack=True)
    reshard(policy)
    return [sample.per_token["logprob"] for sample in samples]


def taught(model_dir: Path, mesh: Mesh, *, shares: bool = False) -> dict[str, Tensor]:
    """Return loss and gradients of a distillation over whole vocabularies. Collective. `shares`: they share prompts."""
    student, other = (
        build_policy(TrainedModelConfig(name=str(model_dir), init=init, logits_chunk_tokens=4), mesh, seed=7)
        for init in ("pretrained", "random")
    )
    freeze(other)
    samples = group_samples(random_samples((9, 5, 7, 3, 6, 4), seed=4)) if shares else ragged_samples()
    for sample in samples:
        for name in (ADVANTAGE, AGE, SAMPLER_LOGPROB):
            sample.per_token[name] = np.zeros(len(sample.token_ids), dtype=np.float32)
    ((minibatch,),) = plan_epochs(
        samples, UpdatesConfig(), row_tokens=30 if shares else 14, mesh=mesh, seed=0, step=1,
        layout=replace(PACKED, shares=shares),
    )  # fmt: skip
    assert minibatch.shares == shares
    config = PolicyLossConfig.of(type="policy_gradient", aggregation="sequence")
    loss = with_distillation_term(build_policy_loss(config), config, 2.0)
    statistics = PolicyStatistics([0], has_reference=False)
    value = forward_backward(student, minibatch, loss, mesh, statistics, reading=PLAIN, teacher=other)
    reshard(other)
    assert all(parameter.grad is not None for parameter in student.parameters())
    return {"loss": torch.tensor(value)} | gradients_of(student.hf_model)


def stepped(model_dir: Path, mesh: Mesh) -> dict[str, Tensor]:
    """Return the weights after two steps of Muon with gradients that are drawn, the same for any ranks. Collective."""
    policy = build_policy(TrainedModelConfig(name=str(model_dir)), mesh, seed=0)
    optimizer = build_optimizer(policy.hf_model, MuonConfig(weight_decay=0.1))
    generator = torch.Generator().manual_seed(0)
    for lr in (0.01, 0.02):
        for parameter in policy.hf_model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            sharded = isinstance(parameter, DTensor)
            parameter.grad = distribute_tensor(drawn, mesh.device_mesh, parameter.placements) if sharded else drawn
        update_parameters(optimizer, lr=lr)
    small = torch.randn(1, 7, generator=generator)  # fewer rows than ranks
    if mesh.world_size > 1:
        small = distribute_tensor(small, mesh.device_mesh, [Shard(0)])
    tensors = {**trained_tensors(policy.hf_model), "small": _orthogonalized(small)}
    return {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in tensors.items()}


def compute(model_dir: Path, mesh: Mesh) -> dict[str, Any]:
    return {
        "statistics": statistics_of(mesh),
        "stepped": stepped(model_dir, mesh),
        "taught": taught(model_dir, mesh),
        "measured": [torch.tensor(one) for one in measured(model_dir, mesh)],
        "with_float32_head": [
            torch.tensor(one) for one in measured(model_dir, mesh, dtype="bfloat16", fp32_lm_head=True)
        ],
    }


if __name__ == "__main__":
    run_on_ranks(lambda mesh, model_dir, _data, _: compute(model_dir, mesh))
