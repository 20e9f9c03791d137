"""Training on preference pairs: the loop of `dpo` and `reward-model`, and the mean of their losses over pairs.

One optimizer step trains `data.batch_size` pairs, taken in an order that is a pure function of seed
and position. Pairs are packed into micro-batches that are dealt to the ranks; both sides of a pair
are always in the same one. The loss is the mean over the pairs of the whole step.

Shape legend: P pairs of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from holdfast.config.preference import DpoConfig, PreferenceDataConfig, RewardTrainingConfig
from holdfast.config.training import learning_rate
from holdfast.process.events import Counted, report
from holdfast.trainer.checkpoint.commit import Attachment
from holdfast.trainer.data.samples import SampleOrder
from holdfast.trainer.mesh import Mesh, Sums
from holdfast.trainer.model.decoder import reshard
from holdfast.trainer.model.packing_check import Layout
from holdfast.trainer.model.policy import Policy
from holdfast.trainer.model.value_model import ScalarModel
from holdfast.trainer.optimizer import check_finite, clip_gradients, update_parameters
from holdfast.trainer.preference.pairs import P, Preference, plan_preferences
from holdfast.trainer.session import Stopwatch, TrainSession, step_metrics

M = TypeVar("M", Policy, ScalarModel)
M_contra = TypeVar("M_contra", Policy, ScalarModel, contravariant=True)
P_contra = TypeVar("P_contra", bound=Preference, contravariant=True)


class Objective(Protocol[M_contra, P_contra]):
    """A loss of preferences, and what is measured beside it."""

    def accumulate_gradients(self, model: M_contra, batch: Sequence[P_contra]) -> dict[str, float]:
        """Add the gradients of one optimizer step; return its metrics, over all of the batch. Collective."""
        ...

    def measure(self, model: M_contra, preferences: Sequence[P_contra]) -> dict[str, float]:
        """Return the metrics without dropout. Collective."""
        ...


def train_on_preferences(
    config: DpoConfig | RewardTrainingConfig,
    session: TrainSession[M],
    objective: Objective[M, P],
    training: list[P],
    held_out: list[P],
    *,
    attachments: Mapping[str, Attachment] | None = None,
) -> None:
    """Train until `max_steps`.

    Args:
        training: pairs, or labelled answers.
        held_out: those to validate on.
        attachments: what makes further files of every checkpoint, by path in it.
    """
    model, progress, saver = session.policy, session.progress, session.saver
    order = SampleOrder(len(training), seed=config.seed, shuffle=config.data.shuffle)
    report("training", step=progress.step, max_steps=config.max_steps)
    stopwatch = Stopwatch(session.profiler)
    metrics: dict[str, float] = {}

    while progress.step < config.max_steps:
        step = progress.step + 1
        stopwatch.begin_step(step)
        with stopwatch.phase("data"):
            batch = [training[i] for i in order.batch(progress.samples, config.data.batch_size)]
        if saver.is_asked_to_stop():
            saver.stop(progress.step, metrics, attachments)
        with stopwatch.phase("forward_backward"):
            metrics = objective.accumulate_gradients(model, batch)
        with stopwatch.phase("optimizer"):
            lr = learning_rate(step, config.optim, config.max_steps)
            grad_norm = clip_gradients(model, config.optim.max_grad_norm)
            check_finite(step, loss=metrics["loss"], grad_norm=grad_norm)
            update_parameters(session.optimizer, lr=lr)
        num_tokens = sum(pair.num_tokens for pair in batch)
        progress.advance(samples=len(batch), tokens=num_tokens)

        metrics |= {"grad_norm": grad_norm, "lr": lr, "epoch": progress.samples / len(training)}
        is_last = step == config.max_steps
        if held_out and (is_last or (config.val_interval and step % config.val_interval == 0)):
            with stopwatch.phase("validation"):
                validated = objective.measure(model, held_out)
                metrics |= {f"val/{name}": value for name, value in validated.items()}
        metrics |= step_metrics(session, stopwatch, num_tokens=num_tokens)
        session.log(step, metrics)
        with stopwatch.phase("checkpoint"):
            saver.after_step(step, metrics, attachments)
    stopwatch.end()


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
        for indices in self._my_micro_batches(model, batch):
            columns = self.forward(model, batch, indices)
            # FSDP averages gradients over ranks; the losses of all ranks together are divided by the step's pairs.
            (columns["loss"].sum() / len(batch) * self.mesh.world_size).backward()
            totals.add({name: column.double().sum() for name, column in columns.items()})
        return self._means(totals, len(batch))

    @torch.no_grad()
    def measure(self, model: M, preferences: Sequence[P]) -> dict[str, float]:
        """Return the metrics of `pairs` without dropout. Collective."""
        model.eval()
        totals = Sums()
        plan = self._my_micro_batches(model, preferences)
        counted = Counted(self.measuring, len(plan), unit="micro-batches", is_told=self.mesh.is_main)
        for indices in plan:
            columns = self.forward(model, preferences, indices)
            totals.add({name: column.double().sum() for name, column in columns.items()})
            counted.add()
        reshard(model)
        model.train()
        return self._means(totals, len(preferences))

    def _my_micro_batches(self, model: M, pairs: Sequence[P]) -> list[list[int]]:
        return self.plan(pairs, model.layout, self.config, self.mesh.data_size)[self.mesh.data_rank]

    def _means(self, totals: Sums, num_pairs: int) -> dict[str, float]:
        means = {name: total / num_pairs for name, total in self.mesh.sum(totals.read()).items()}
        return self.summarize(means)
