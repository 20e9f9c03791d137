"""Statistics of an RL step over the trained tokens of all its updates, micro-batches and ranks.

Shape legend: N predicted tokens of one forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from holdfast.trainer.mesh import Mesh
from holdfast.trainer.rl.losses.base import PolicyLossInput
from holdfast.trainer.rl.regularization.kl import k3
from holdfast.trainer.sums import Sums

_QUANTILES = (0.5, 0.95, 0.99)


_CLIPPED = ("clip_fraction/low", "clip_fraction/high", "clip_fraction/dual")


_OF_TOKENS = ("entropy", "ppo_kl", "mismatch_kl", *_CLIPPED)


class PolicyStatistics:
    """Sums of this rank, reduced once a step.

    Args:
        ages: every version age of the step's tokens, so that all ranks agree on the names.
        has_reference: whether the tokens have log-probabilities under a reference.
    """

    def __init__(self, ages: Sequence[int], *, has_reference: bool) -> None:
        self._ages = ages
        of_ages = [f"{name}/age_{age}" for age in ages for name in ("mismatch_kl", "tokens")]
        self._sums = Sums(*_OF_TOKENS, "loss", "tokens", "updates", *(("ref_kld",) if has_reference else ()), *of_ages)
        self._log_ratios: list[Tensor] = []

    def add_update(self, loss: float) -> None:
        """Count one update; `loss` is this rank's part."""
        self._sums.add({"loss": loss, "updates": 1.0})

    def add(self, data: PolicyLossInput, counts: Mapping[str, Tensor], entropy_N: Tensor, age_N: Tensor) -> None:
        """Add the tokens of one forward pass.

        Args:
            counts: the loss's own counts of tokens.
            entropy_N: in nats.
            age_N: versions by which the sampler was older.
        """
        self._sums.add(counts)
        if entropy_N.numel() == 0:
            return
        new_N, old_N = data.logprobs_N.detach().double(), data.old_logprobs_N.double()
        log_ratio_N = old_N - data.sampler_logprobs_N.double()
        mismatch_N = k3(log_ratio_N)
        terms: dict[str, Tensor | float] = {
            "tokens": float(entropy_N.numel()),
            "entropy": entropy_N.double().sum(),
            "ppo_kl": k3(new_N - old_N).sum(),
            "mismatch_kl": mismatch_N.sum(),
        }
        if data.reference_logprobs_N is not None:
            terms["ref_kld"] = k3(data.reference_logprobs_N.double() - new_N).sum()
        for age in self._ages:
            chosen_N = age_N == age
            # Not the chosen ones alone: how many there are is known to the device only.
            terms[f"mismatch_kl/age_{age}"] = torch.where(chosen_N, mismatch_N, 0.0).sum()
            terms[f"tokens/age_{age}"] = chosen_N.sum()
        self._sums.add(terms)
        self._log_ratios.append(log_ratio_N)

    def fresh_mismatch(self, mesh: Mesh) -> float | None:
        """Return the mean `mismatch_kl` so far of tokens of age 0; None where there are none. Collective."""
        names, own = ("mismatch_kl/age_0", "tokens/age_0"), self._sums.read()
        sums = mesh.sum({name: own.get(name, 0.0) for name in names})
        return sums[names[0]] / sums[names[1]] if sums[names[1]] else None

    def reduce(self, mesh: Mesh) -> dict[str, float]:
        """Return the metrics of the step, the same on every rank. Collective.

        All are means over trained tokens but these: `loss`, the mean of the updates; `mismatch/ratio_*`,
        quantiles and maximum of trainer over sampler; `mismatch/max_log_ratio`, in either direction.
        """
        log_ratios = torch.cat(self._log_ratios).cpu() if self._log_ratios else torch.zeros(0, dtype=torch.float64)
        ratios = mesh.concatenate(log_ratios.exp())
        sums = mesh.sum(self._sums.read())
        num_tokens, num_updates = max(1.0, sums.pop("tokens")), max(1.0, sums.pop("updates") / mesh.data_size)
        metrics = {"loss": sums.pop("loss") / num_updates}
        of_ages = {age: sums.pop(f"tokens/age_{age}") for age in self._ages}
        for name, value in sums.items():
            age = name.removeprefix("mismatch_kl/age_")
            metrics[name] = value / (max(1.0, of_ages[int(age)]) if age != name else num_tokens)
        metrics["clip_fraction"] = sum(metrics[name] for name in _CLIPPED)
        largest = float(log_ratios.abs().max()) if len(log_ratios) else 0.0
        metrics |= mesh.max({"mismatch/max_log_ratio": largest})
        if len(ratios):
            found = torch.sort(ratios).values
            places = {f"p{round(100 * share)}": round(share * (len(found) - 1)) for share in _QUANTILES}
            places["max"] = len(found) - 1
            metrics |= {f"mismatch/ratio_{name}": float(found[place]) for name, place in places.items()}
        return metrics
