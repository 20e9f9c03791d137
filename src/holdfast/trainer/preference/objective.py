"""The mean of a loss over pairs, for `dpo` and `reward-model`; `holdfast.trainer.programs.sft` has the loop.

Pairs are packed into micro-batches that are dealt to the ranks; both sides of a pair are always in the same one. The
loss is the mean over the pairs of the whole step.

Shape legend: P pairs of a micro-batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from holdfast.config.preference import PreferenceDataConfig
from holdfast.process.events import Counted
from holdfast.trainer.mesh import Mesh, Sums
from holdfast.trainer.model.decoder import reshard, rows_of_update
from holdfast.trainer.model.packing_check import Layout
from holdfast.trainer.model.policy import Policy
from holdfast.trainer.model.value_model import ScalarModel
from holdfast.trainer.preference.pairs import P, Preference, plan_preferences

M = TypeVar("M", Policy, ScalarModel)


@dataclass(frozen=True)
class PairObjective(Generic[M, P]):
    """A loss of pairs, and what is measured beside it.

    Attributes:
        forward: gives values of `pairs[indices]` by name, each (P,): `loss`, with its gradient, and
            metrics. Collective, also without indices. The pairs may be other preferences, too.
        config: how pairs become micro-batches.
        summarize: makes the metrics to report from the means over the pairs.
        plan: which pairs go through the model together.
        measuring: what `measure` is for, in words.
    """

    forward: Callable[[M, Sequence[P], list[int]], dict[str, Tensor]]
    config: PreferenceDataConfig
    mesh: Mesh
    summarize: Callable[[dict[str, float]], dict[str, float]] = dict
    plan: Callable[[Sequence[Preference], Layout, PreferenceDataConfig, int], list[list[list[int]]]] = plan_preferences
    measuring: str = "validating"

    def accumulate_gradients(self, model: M, batch: Sequence[P]) -> dict[str, float]:
        """Add the gradients of one optimizer step; return its metrics, over all its pairs. Collective."""
        totals = Sums()
        for indices in rows_of_update(model, self._my_micro_batches(model, batch)):
            columns = self.forward(model, batch, indices)
            # FSDP averages gradients over ranks; the losses of all ranks together are divided by the step's pairs.
            (columns["loss"].sum() / len(batch) * self.mesh.world_size).backward()
            totals.add({name: column.double().sum() for name, column in columns.items()})
        return self._means(totals, len(batch))

    @torch.no_grad()
    def measure(self, model: M, rows: Sequence[P]) -> dict[str, float]:
        """Return the metrics of `pairs` without dropout. Collective."""
        model.eval()
        totals = Sums()
        plan = self._my_micro_batches(model, rows)
        counted = Counted(self.measuring, len(plan), unit="micro-batches", is_told=self.mesh.is_main)
        for indices in plan:
            columns = self.forward(model, rows, indices)
            totals.add({name: column.double().sum() for name, column in columns.items()})
            counted.add()
        reshard(model)
        model.train()
        return self._means(totals, len(rows))

    def _my_micro_batches(self, model: M, pairs: Sequence[P]) -> list[list[int]]:
        return self.plan(pairs, model.layout, self.config, self.mesh.data_size)[self.mesh.data_rank]

    def _means(self, totals: Sums, num_pairs: int) -> dict[str, float]:
        means = {name: total / num_pairs for name, total in self.mesh.sum(totals.read()).items()}
        return self.summarize(means)
