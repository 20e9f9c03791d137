"""Supervised training: the cross-entropy of `sft`, and of the pretraining mix of `rl`, forward and backward.

The losses of RL are in `holdfast.trainer.rl.losses`. Shape legend: N predicted tokens of the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.config.training import SftDataConfig
from holdfast.trainer.data.packing import Sample, build_micro_batch, plan_rows
from holdfast.trainer.mesh import Mesh, Sums
from holdfast.trainer.model.packing_check import Layout
from holdfast.trainer.model.policy import Policy, predict


def cross_entropy(logprobs_N: Tensor, weights_N: Tensor) -> Tensor:
    """Return the negative log-likelihood, in nats. Denominator: all trained tokens of the step."""
    return -(weights_N * logprobs_N).sum()


def supervised_step(
    policy: Policy, batch: Sequence[Sample], config: SftDataConfig, mesh: Mesh, *, coef: float = 1.0
) -> float:
    """Accumulate `coef` times the gradients of the mean cross-entropy over all targets; return it. Collective."""
    total_targets = sum(sample.num_targets for sample in batch)
    losses = Sums("loss")
    pack = policy.layout.arrangement(pack=config.pack) == "packed"
    for indices in plan_samples(batch, policy.layout, config, mesh):
        micro = build_micro_batch(batch, indices, pack=pack, device=mesh.device)
        logprobs_N = predict(policy, micro).logprobs_N
        weights_N = torch.full_like(logprobs_N, 1 / total_targets)
        loss = cross_entropy(logprobs_N, weights_N)
        # FSDP averages gradients over ranks; the weights above sum to one over all of them.
        (loss * (coef * mesh.world_size)).backward()
        losses.add({"loss": loss})
    return mesh.sum(losses.read())["loss"]


def plan_samples(batch: Sequence[Sample], layout: Layout, config: SftDataConfig, mesh: Mesh) -> list[list[int]]:
    """Return this rank's micro-batches of supervised samples, as indices into `batch`."""
    lengths = [len(sample.token_ids) for sample in batch]
    plan = plan_rows(
        lengths,
        costs=[layout.cost(length) for length in lengths],
        arrangement=layout.arrangement(pack=config.pack),
        budget=config.seq_len * config.micro_batch_size,
        rows_per_micro_batch=config.micro_batch_size,
        world_size=mesh.data_size,
    )
    return plan[mesh.data_rank]
