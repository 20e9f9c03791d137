"""KTO: its loss, and its estimate of the KL divergence; `holdfast.trainer.preference.pairs` has its data.

KTO compares the log-ratio of each answer with the policy's divergence from the reference. Every step begins with a pass
without gradients that estimates this divergence, on prompts with answers to other prompts. The estimate is the mean
log-ratio of the whole step, over all ranks and micro-batches. It is a function of weights and batch, so checkpoints
keep only the log-probabilities of the reference. Only the data decides which answer goes with which other prompt, so
the reference's log-probabilities of both are computed once.

Shape legend: A answers of a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from holdfast.config import DpoConfig
from holdfast.config.preference import KtoLoss
from holdfast.trainer.data.packing import to_device
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.policy import Policy
from holdfast.trainer.preference.losses import kto_loss
from holdfast.trainer.preference.objective import PairObjective
from holdfast.trainer.preference.pairs import LabelledAnswer, plan_preferences
from holdfast.trainer.preference.reference import Reference, read_sides

_ANSWER, _MISMATCHED = 0, 1


@dataclass(frozen=True)
class KtoObjective:
    """The mean loss of labelled answers, and what is measured beside it."""

    config: DpoConfig
    reference: Reference
    mesh: Mesh

    def accumulate_gradients(self, model: Policy, batch: Sequence[LabelledAnswer]) -> dict[str, float]:
        """Add the gradients of one optimizer step; return its metrics, over all its answers. Collective."""
        return self._compared_with(self.divergence(model, batch)).accumulate_gradients(model, batch)

    def measure(self, model: Policy, rows: Sequence[LabelledAnswer]) -> dict[str, float]:
        """Return the metrics of answers without dropout. Collective."""
        return self._compared_with(self.divergence(model, rows)).measure(model, rows)

    def divergence(self, model: Policy, batch: Sequence[LabelledAnswer]) -> float:
        """Return z of KTO: the mean of l_pi - l_ref over the mismatched answers in nats, not below 0. Collective.

        It is measured without gradients and without dropout."""

        def forward(model: Policy, batch: Sequence[LabelledAnswer], indices: list[int]) -> dict[str, Tensor]:
            return {"kl": self._ratios(model, batch, indices, _MISMATCHED)[0]}

        plan = partial(plan_preferences, side=_MISMATCHED)
        measuring = PairObjective(
            forward, self.config.data, self.mesh, plan=plan, measuring="estimating the divergence"
        )
        return max(0.0, measuring.measure(model, batch)["kl"])

    def _ratios(
        self, model: Policy, batch: Sequence[LabelledAnswer], indices: list[int], side: int
    ) -> tuple[Tensor, Tensor]:
        """Return l_pi - l_ref (A,) and l_pi (A,) of one side of `batch[indices]`."""
        device = self.mesh.device
        sides = [answer.sides[side] for answer in batch]
        logprobs_A = read_sides(model, sides, indices, pack=self.config.data.pack, device=device).logprobs_N
        reference_A = self.reference.of([batch[index] for index in indices], device)[:, side]
        return logprobs_A - reference_A, logprobs_A

    def _compared_with(self, kl: float) -> PairObjective[Policy, LabelledAnswer]:
        config = self.config.loss
        assert isinstance(config, KtoLoss)

        def forward(model: Policy, batch: Sequence[LabelledAnswer], indices: list[int]) -> dict[str, Tensor]:
            ratios_A, logprobs_A = self._ratios(model, batch, indices, _ANSWER)
            labels = [batch[index].is_desirable for index in indices]
            is_desirable_A = to_device(torch.tensor(labels, dtype=torch.bool), self.mesh.device)
            losses_A, rewards_A = kto_loss(ratios_A, is_desirable_A, kl, config)
            good_A, bad_A = is_desirable_A.double(), (~is_desirable_A).double()
            return {
                "loss": losses_A,
                "rewards/chosen": rewards_A * good_A,
                "rewards/rejected": rewards_A * bad_A,
                "logps/chosen": logprobs_A * good_A,
                "logps/rejected": logprobs_A * bad_A,
                "desirable": good_A,
            }

        def summarize(means: dict[str, float]) -> dict[str, float]:
            shares = {"chosen": means["desirable"], "rejected": 1 - means["desirable"]}
            metrics = {name: means[name] for name in ("loss", "desirable")} | {"kl": kl}
            for side, share in shares.items():
                names = (f"rewards/{side}", f"logps/{side}")
                metrics |= {name: means[name] / share for name in names} if share else {}
            if all(shares.values()):
                metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
            return metrics

        plan = partial(plan_preferences, side=_ANSWER)
        return PairObjective(forward, self.config.data, self.mesh, summarize, plan)
