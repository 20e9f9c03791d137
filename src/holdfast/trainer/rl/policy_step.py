"""Forward and backward of one update of the policy.

Shape legend: N predicted tokens of one forward pass.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from holdfast.trainer.data.packing import build_micro_batch, to_device
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.models.logprobs import Reading
from holdfast.trainer.models.policy import Policy, predict
from holdfast.trainer.rl.batches.distributions import reading_of
from holdfast.trainer.rl.batches.minibatches import Minibatch
from holdfast.trainer.rl.batches.per_token import (
    ADVANTAGE,
    AGE,
    OLD_LOGPROB,
    REFERENCE_LOGPROB,
    SAMPLER_LOGPROB,
)
from holdfast.trainer.rl.losses.base import PolicyLoss, PolicyLossInput
from holdfast.trainer.rl.monitoring.metrics import PolicyStatistics
from holdfast.trainer.sums import Sums


def policy_step(
    policy: Policy,
    minibatch: Minibatch,
    loss_function: PolicyLoss,
    mesh: Mesh,
    statistics: PolicyStatistics,
    *,
    reading: Reading,
    teacher: Policy | None = None,
) -> float:
    """Accumulate the gradients of one update; return its loss, of all ranks. Collective.

    Args:
        teacher: what `PolicyLossInput.teacher_kl_N` measures the divergence from; its parameters stay whole.

    Where samples have no log-probabilities from before the step, the weights have not changed since:
    the update is the only one of its step. Under `torch.no_grad` the forward passes are made alone, for `statistics`.
    """
    reading = replace(reading, entropy=True)
    samples = minibatch.samples
    num_targets = minibatch.num_targets
    # At least 1: a sequence whose mask is empty has no token that bears its weight.
    weights = [1 / (len(samples) * max(1, sample.num_targets)) for sample in samples]
    weights_S = to_device(torch.tensor(weights, dtype=torch.float32), mesh.device)
    losses = Sums("loss")
    for indices in minibatch.micro_batches:
        micro = build_micro_batch(samples, indices, pack=policy.layout.packs, device=mesh.device)
        predicted = predict(policy, micro, reading_of(micro, reading), teacher=teacher)
        logprobs_N, entropy_N = predicted.logprobs_N, predicted.entropy_N
        assert entropy_N is not None  # the reading asks for it
        data = PolicyLossInput(
            logprobs_N=logprobs_N,
            # Not measured before the step: this is its only update, and the weights have not changed since.
            old_logprobs_N=micro.per_token.get(OLD_LOGPROB, logprobs_N.detach()),
            sampler_logprobs_N=micro.per_token[SAMPLER_LOGPROB],
            reference_logprobs_N=micro.per_token.get(REFERENCE_LOGPROB),
            advantages_N=micro.per_token[ADVANTAGE],
            entropy_N=entropy_N,
            teacher_kl_N=predicted.teacher_kl_N,
            weights_N=weights_S[micro.sample_index_N],
            correction_N=torch.ones_like(logprobs_N),
            sequence_N=micro.sample_index_N,
            sequence_lengths=micro.targets_per_sample,
            step_sequences=len(samples),
            step_tokens=num_targets,
        )
        loss, counts = loss_function(data)
        if torch.is_grad_enabled():
            # FSDP averages gradients over ranks; the weights sum to one over all of them.
            (loss * mesh.world_size).backward()
        losses.add({"loss": loss})
        statistics.add(data, counts, entropy_N.detach(), micro.per_token[AGE])
    own = losses.read()
    statistics.add_update(own["loss"])
    return mesh.sum(own)["loss"]
