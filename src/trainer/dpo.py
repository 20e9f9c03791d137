"""Preference optimisation: `uv run dpo @ configs/reverse_text/dpo.toml`.

One optimizer step trains `data.batch_size` pairs, taken in an order that is a pure function of seed
and position. Pairs are packed into micro-batches that are dealt to the ranks; both sides of a pair
are always in the same one. The loss is the mean over the pairs of the whole step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer import parallel as parallel_module
from trainer.data import SampleOrder, load_tokenizer
from trainer.model import Policy, build_policy, reshard
from trainer.optim import clip_gradients, update_parameters
from trainer.parallel import Parallel
from trainer.preference_loss import PairLogprobs, PreferenceLoss, preference_loss
from trainer.preferences import Pair, fingerprint_pairs, load_pairs, plan_pairs, split_pairs
from trainer.reference import Reference, predict_pairs, start_reference
from trainer.session import Session, start_session
from trainer.state import seed_everything
from trainer.step import Stopwatch, check_finite, step_metrics
from triad.config import DpoConfig
from triad.config.schedule import learning_rate
from triad.events import report

_log = logging.getLogger("trainer")
_METRICS = (
    "loss",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)


def run(config: DpoConfig) -> None:
    """Train until `max_steps`, then publish the weights."""
    parallel = parallel_module.start(config.parallel)
    seed_everything(config.seed, step=0, rank=parallel.rank)
    report("reading data")
    tokenizer = load_tokenizer(config.model.tokenizer_name)
    pairs = load_pairs(config.data, tokenizer)
    training, held_out = split_pairs(pairs, config.data.validation_fraction, seed=config.seed)
    _log.info("%d pairs to train on, %d held out", len(training), len(held_out))
    with start_session(
        config, parallel, tokenizer, build_policy, data_fingerprint=fingerprint_pairs(training)
    ) as session:
        reference = start_reference(config, session, pairs)
        objective = Objective(preference_loss(config.loss), reference, config, parallel)
        _train(config, session, objective, training, held_out)
        report("publishing weights", step=session.progress.step)
        session.publisher.publish(session.progress.step)
        session.publisher.prune({session.progress.step})
    report("finished", step=session.progress.step)


def _train(
    config: DpoConfig, session: Session[Policy], objective: Objective, training: list[Pair], held_out: list[Pair]
) -> None:
    parallel = session.parallel
    policy, progress, saver = session.policy, session.progress, session.saver
    attachments = objective.reference.attachments
    order = SampleOrder(len(training), seed=config.seed, shuffle=config.data.shuffle)
    report("training", step=progress.step, max_steps=config.max_steps)
    stopwatch = Stopwatch()
    metrics: dict[str, float] = {}

    while progress.step < config.max_steps:
        step = progress.step + 1
        with stopwatch.phase("data"):
            batch = [training[i] for i in order.batch(progress.samples, config.data.batch_size)]
        if saver.is_asked_to_stop():
            saver.stop(progress.step, metrics, attachments)
        with stopwatch.phase("forward_backward"):
            metrics = objective.accumulate_gradients(policy, batch)
        with stopwatch.phase("optimizer"):
            lr = learning_rate(step, config.optim, config.max_steps)
            grad_norm = clip_gradients(policy, config.optim.max_grad_norm)
            check_finite(step, loss=metrics["loss"], grad_norm=grad_norm)
            update_parameters(session.optimizer, lr=lr)
        num_tokens = sum(pair.num_tokens for pair in batch)
        progress.advance(samples=len(batch), tokens=num_tokens)

        metrics |= {"grad_norm": grad_norm, "lr": lr, "epoch": progress.samples / len(training)}
        is_last = step == config.max_steps
        if held_out and (is_last or (config.val_interval and step % config.val_interval == 0)):
            with stopwatch.phase("validation"):
                validated = objective.measure(policy, held_out)
                metrics |= {f"val/{name}": value for name, value in validated.items()}
        metrics |= step_metrics(parallel, stopwatch, progress, num_tokens=num_tokens)
        session.log(step, metrics)
        with stopwatch.phase("checkpoint"):
            saver.after_step(step, metrics, attachments)


@dataclass(frozen=True)
class Objective:
    """The mean loss over pairs, as sums over micro-batches and ranks.

    Attributes:
        loss: gives losses and rewards of pairs.
        reference: what `loss` compares the policy with.
    """

    loss: PreferenceLoss
    reference: Reference
    config: DpoConfig
    parallel: Parallel

    def accumulate_gradients(self, policy: Policy, batch: Sequence[Pair]) -> dict[str, float]:
        """Add the gradients of one optimizer step; return its metrics, the means over all its pairs. Collective."""
        totals = torch.zeros(len(_METRICS), dtype=torch.float64)
        for indices in self._my_micro_batches(batch):
            loss, sums = self._forward(policy, batch, indices)
            # FSDP averages gradients over ranks; the losses of all ranks together are divided by the step's pairs.
            (loss / len(batch) * self.parallel.world_size).backward()
            totals += sums
        return self._means(totals, len(batch))

    @torch.no_grad()
    def measure(self, policy: Policy, pairs: Sequence[Pair]) -> dict[str, float]:
        """Return the metrics of `pairs` without dropout. Collective."""
        policy.eval()
        totals = torch.zeros(len(_METRICS), dtype=torch.float64)
        for indices in self._my_micro_batches(pairs):
            totals += self._forward(policy, pairs, indices)[1]
        reshard(policy)
        policy.train()
        return self._means(totals, len(pairs))

    def _my_micro_batches(self, pairs: Sequence[Pair]) -> list[list[int]]:
        return plan_pairs(pairs, self.config.data, rank=self.parallel.rank, world_size=self.parallel.world_size)

    def _forward(self, policy: Policy, pairs: Sequence[Pair], indices: list[int]) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of `pairs[indices]`, and the sums of `_METRICS` on the CPU."""
        device, chosen = self.parallel.device, [pairs[index] for index in indices]
        logprobs_P2 = predict_pairs(policy, pairs, indices, pack=self.config.data.pack, device=device)
        reference_P2 = self.reference.of(chosen, device)
        lengths = [[side.num_targets for side in pair.sides] for pair in chosen]
        tokens_P2 = torch.tensor(lengths, dtype=torch.float64, device=device).reshape(-1, 2)
        losses_P, chosen_rewards_P, rejected_rewards_P = self.loss(
            PairLogprobs(*logprobs_P2.unbind(1), *reference_P2.unbind(1), *tokens_P2.unbind(1))
        )
        columns = (
            losses_P.detach(),
            chosen_rewards_P,
            rejected_rewards_P,
            chosen_rewards_P - rejected_rewards_P,
            (chosen_rewards_P > rejected_rewards_P).double(),
            *logprobs_P2.detach().unbind(1),
        )
        return losses_P.sum(), torch.stack([column.sum() for column in columns]).cpu()

    def _means(self, totals: Tensor, num_pairs: int) -> dict[str, float]:
        summed = self.parallel.sum(dict(zip(_METRICS, totals.tolist(), strict=True)))
        return {name: value / num_pairs for name, value in summed.items()}
