"""Forward and backward of one RL optimizer step, and the statistics that it yields.

Shape legend: N predicted tokens of one forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.loss import k3
from trainer.losses import PolicyLoss, PolicyLossInput
from trainer.model import Policy
from trainer.packing import Sample, build_micro_batch, plan_rows
from trainer.parallel import Parallel
from trainer.rollouts import ADVANTAGE, AGE, SAMPLER_LOGPROB
from trainer.step import predict


@dataclass
class _Sums:
    """Sums over the predicted tokens of this rank; reduced once a step."""

    added: dict[str, float] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, value: Tensor) -> None:
        self.added[name] = self.added.get(name, 0.0) + float(value)

    def keep_largest(self, name: str, value: Tensor) -> None:
        self.largest[name] = max(self.largest.get(name, 0.0), float(value))


def policy_step(
    policy: Policy,
    samples: list[Sample],
    loss_function: PolicyLoss,
    parallel: Parallel,
    *,
    temperature: float,
    row_tokens: int,
) -> dict[str, float]:
    """Accumulate the gradients of one optimizer step; return its metrics, reduced over ranks.

    Metrics: `loss`; `entropy` (nats, mean over tokens); `mismatch_kl` (k3 of trainer against sampler,
    mean over tokens) and `mismatch_kl/age_<a>` by how many versions old the sampler was;
    `mismatch/max_log_ratio`; the loss's own counts as shares of all tokens.
    """
    plan = plan_rows(
        [len(sample.token_ids) for sample in samples],
        pack=True,
        budget=row_tokens,
        rows_per_micro_batch=1,
        world_size=parallel.world_size,
    )
    num_targets = [sample.num_targets for sample in samples]
    total_targets = sum(num_targets)
    weights = torch.tensor([1 / (len(samples) * max(1, count)) for count in num_targets], dtype=torch.float32)
    # Every rank sees all samples, so all agree on the names before the reduction.
    ages = sorted({int(age) for sample in samples for age in set(sample.per_token[AGE][sample.loss_mask].tolist())})
    sums = _Sums(
        added={"loss": 0.0, "entropy": 0.0, "mismatch_kl": 0.0, "clip_fraction/low": 0.0, "clip_fraction/high": 0.0},
        largest={"mismatch/max_log_ratio": 0.0},
    )
    for age in ages:
        sums.added |= {f"mismatch_kl/age_{age}": 0.0, f"tokens/age_{age}": 0.0}
    for indices in plan[parallel.rank]:
        micro = build_micro_batch(samples, indices, pack=True, device=parallel.device)
        logprobs_N, entropy_N = predict(policy, micro, temperature=temperature)
        data = PolicyLossInput(
            logprobs_N=logprobs_N,
            # One optimizer step per batch: these are the weights at the start of the step.
            old_logprobs_N=logprobs_N.detach(),
            sampler_logprobs_N=micro.per_token[SAMPLER_LOGPROB],
            advantages_N=micro.per_token[ADVANTAGE],
            weights_N=weights.to(parallel.device)[micro.sample_index_N],
            sequence_N=micro.sample_index_N,
            step_sequences=len(samples),
            step_tokens=total_targets,
        )
        loss, counts = loss_function(data)
        # FSDP averages gradients over ranks; the weights sum to one over all of them.
        (loss * parallel.world_size).backward()
        sums.add("loss", loss.detach())
        for name, count in counts.items():
            sums.add(name, count)
        _add_mismatch(sums, data, entropy_N, micro.per_token[AGE], ages)
    return _means(parallel.sum(sums.added), total_targets) | parallel.max(sums.largest)


def _add_mismatch(sums: _Sums, data: PolicyLossInput, entropy_N: Tensor, age_N: Tensor, ages: list[int]) -> None:
    if entropy_N.numel() == 0:
        return
    log_ratio_N = (data.logprobs_N.detach() - data.sampler_logprobs_N).double()
    mismatch_N = k3(log_ratio_N)
    sums.add("entropy", entropy_N.double().sum())
    sums.add("mismatch_kl", mismatch_N.sum())
    sums.keep_largest("mismatch/max_log_ratio", log_ratio_N.abs().max())
    for age in ages:
        chosen_N = age_N == age
        sums.add(f"mismatch_kl/age_{age}", mismatch_N[chosen_N].sum())
        sums.add(f"tokens/age_{age}", chosen_N.sum())


def _means(sums: dict[str, float], total_targets: int) -> dict[str, float]:
    """Divide sums over tokens by their counts; the loss is a weighted mean already."""
    means = {}
    for name, value in sums.items():
        if name == "loss":
            means[name] = value
        elif name.startswith("mismatch_kl/age_"):
            means[name] = value / max(1.0, sums[name.replace("mismatch_kl", "tokens")])
        elif not name.startswith("tokens/"):
            means[name] = value / max(1, total_targets)
    means["clip_fraction"] = means["clip_fraction/low"] + means["clip_fraction/high"]
    return means
