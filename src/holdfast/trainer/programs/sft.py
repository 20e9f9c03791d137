"""Supervised fine-tuning: `uv run sft @ configs/reverse_text/sft.toml`; and the loop of all programs on rows of data.

One optimizer step trains `data.batch_size` samples, in an order that is a pure function of seed and position. Samples
are packed into micro-batches, and the ranks share the micro-batches. The loss is the mean negative log-likelihood of
the completion tokens of the whole step, over all ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from holdfast.config import SftConfig
from holdfast.config.data import SftDataConfig
from holdfast.config.training import SupervisedCommand, learning_rate
from holdfast.process.events import Counted, report
from holdfast.trainer.checkpoint.commit import Attachment
from holdfast.trainer.data.packing import Sample, build_micro_batch
from holdfast.trainer.data.samples import fingerprint_samples, load_samples, order_of
from holdfast.trainer.mesh import Mesh, Sums
from holdfast.trainer.model.decoder import reshard
from holdfast.trainer.model.policy import WATCHED, Policy, build_policy, plan_samples, predict, supervised_step, watched
from holdfast.trainer.model.value_model import ScalarModel
from holdfast.trainer.optimizer import check_finite, clip_gradients, update_parameters
from holdfast.trainer.positions import check_lengths
from holdfast.trainer.session import Stopwatch, TrainSession, start_program, start_session, step_metrics
from holdfast.trainer.step_end import StepEnd
from holdfast.trainer.survey import survey_of, tell_data


class _Row(Protocol):
    @property
    def num_tokens(self) -> int: ...


M = TypeVar("M", Policy, ScalarModel)
M_contra = TypeVar("M_contra", Policy, ScalarModel, contravariant=True)
R = TypeVar("R", bound=_Row)
R_contra = TypeVar("R_contra", bound=_Row, contravariant=True)


class Objective(Protocol[M_contra, R_contra]):
    """A loss of samples, pairs or labelled answers, and what is measured beside it."""

    def accumulate_gradients(self, model: M_contra, batch: Sequence[R_contra]) -> dict[str, float]:
        """Add the gradients of one optimizer step; return its metrics, over all of the batch. Collective."""
        ...

    def measure(self, model: M_contra, rows: Sequence[R_contra]) -> dict[str, float]:
        """Return the metrics without dropout. Collective."""
        ...


def run(config: SftConfig) -> None:
    """Train until `max_steps`, then publish the weights."""
    with start_program(config) as (mesh, tokenizer):
        report("reading data")
        samples, held_out = load_samples(config.data, tokenizer, seed=config.seed, mesh=mesh)
        check_lengths(config, samples, held_out, is_told=mesh.is_main)
        tell_data(config, survey_of(samples, len(held_out), tokenizer), is_main=mesh.is_main)
        with start_session(
            config, mesh, tokenizer, build_policy, pack=config.data.pack, data_fingerprint=fingerprint_samples(samples)
        ) as session:
            train_on_rows(config, session, SftObjective(config.data, mesh), samples, held_out)
            session.publish_last()


def train_on_rows(
    config: SupervisedCommand,
    session: TrainSession[M],
    objective: Objective[M, R],
    training: Sequence[R],
    held_out: Sequence[R],
    *,
    attachments: Mapping[str, Attachment] | None = None,
) -> None:
    """Train until `max_steps`.

    Args:
        training, held_out: samples, pairs or labelled answers; the second to validate on.
        attachments: what makes further files of every checkpoint, by path in it.
    """
    model, progress, saver = session.policy, session.progress, session.saver
    order = order_of(training, config.data, seed=config.seed)
    report("training", step=progress.step, max_steps=config.max_steps)
    stopwatch = Stopwatch(session.profiler)
    metrics: dict[str, float] = {}
    end = StepEnd(config, session, stopwatch, lambda: attachments)

    while progress.step < config.max_steps and not end.is_over:
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
        num_tokens = sum(row.num_tokens for row in batch)
        progress.advance(samples=len(batch), tokens=num_tokens)

        metrics |= {"grad_norm": grad_norm, "lr": lr, "epoch": progress.samples / len(training)}
        is_last = step == config.max_steps
        if held_out and (is_last or (config.val_interval and step % config.val_interval == 0)):
            with stopwatch.phase("validation"):
                validated = objective.measure(model, held_out)
                metrics |= {f"val/{name}": value for name, value in validated.items()}
        metrics |= step_metrics(session, stopwatch, num_tokens=num_tokens)
        end.finish(step, metrics)
    stopwatch.end()


@dataclass(frozen=True)
class SftObjective:
    """The mean negative log-likelihood of the targets."""

    config: SftDataConfig
    mesh: Mesh

    def accumulate_gradients(self, model: Policy, batch: Sequence[Sample]) -> dict[str, float]:
        """Add the gradients of one optimizer step; return its loss, entropy and accuracy. Collective."""
        return supervised_step(model, batch, self.config, self.mesh)

    @torch.no_grad()
    def measure(self, model: Policy, rows: Sequence[Sample]) -> dict[str, float]:
        """Return loss, entropy and accuracy without dropout. Collective."""
        model.eval()
        totals, num_targets = Sums("loss", "entropy", "token_accuracy"), sum(sample.num_targets for sample in rows)
        pack = model.layout.arrangement(pack=self.config.pack) == "packed"
        plan = plan_samples(rows, model.layout, self.config, self.mesh)
        counted = Counted("validating", len(plan), unit="micro-batches", is_told=self.mesh.is_main)
        for indices in plan:
            micro = build_micro_batch(rows, indices, pack=pack, device=self.mesh.device)
            predicted = predict(model, micro, WATCHED)
            totals.add({"loss": -predicted.logprobs_N.double().sum(), **watched(predicted, num_targets)})
            counted.add()
        reshard(model)
        model.train()
        found = self.mesh.sum(totals.read())
        return found | {"loss": found["loss"] / num_targets}
