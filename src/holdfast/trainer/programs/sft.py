"""Supervised fine-tuning: `uv run sft @ configs/reverse_text/sft.toml`.

One optimizer step trains `data.batch_size` samples, taken in an order that is a pure function of
seed and position, packed into micro-batches that are dealt to the ranks. The loss is the mean
negative log-likelihood of the completion tokens of the whole step.
"""

from __future__ import annotations

import logging

import torch

from holdfast.shared.config import SftConfig
from holdfast.shared.config.schedule import learning_rate
from holdfast.shared.process.events import report
from holdfast.trainer import parallel as parallel_module
from holdfast.trainer.data.packing import Sample, build_micro_batch
from holdfast.trainer.data.samples import SampleOrder, fingerprint_samples, load_samples, load_tokenizer
from holdfast.trainer.models.policy import Policy, build_policy, reshard
from holdfast.trainer.optim.optimizers import clip_gradients, update_parameters
from holdfast.trainer.parallel import Parallel
from holdfast.trainer.session import Session, start_session
from holdfast.trainer.step import Stopwatch, check_finite, predict, step_metrics
from holdfast.trainer.supervised.step import plan_samples, supervised_step
from holdfast.trainer.train_state import seed_everything

_log = logging.getLogger("trainer")


def run(config: SftConfig) -> None:
    """Train until `max_steps`, then publish the weights."""
    parallel = parallel_module.start(config.parallel)
    seed_everything(config.seed, step=0, rank=parallel.rank)
    report("reading data")
    tokenizer = load_tokenizer(config.model.tokenizer_name)
    samples, held_out = load_samples(config.data, tokenizer, seed=config.seed, parallel=parallel)
    order = SampleOrder(len(samples), seed=config.seed, shuffle=config.data.shuffle)
    _log.info("%d samples to train on, %d held out", len(samples), len(held_out))
    with start_session(
        config,
        parallel,
        tokenizer,
        build_policy,
        pack=config.data.pack,
        data_fingerprint=fingerprint_samples(samples),
    ) as session:
        _train(config, session, samples, held_out, order)
        report("publishing weights", step=session.progress.step)
        session.publisher.publish(session.progress.step)
        session.publisher.prune({session.progress.step})
    report("finished", step=session.progress.step)


def _train(
    config: SftConfig, session: Session[Policy], samples: list[Sample], held_out: list[Sample], order: SampleOrder
) -> None:
    parallel = session.parallel
    policy, progress, saver = session.policy, session.progress, session.saver
    report("training", step=progress.step, max_steps=config.max_steps)
    stopwatch = Stopwatch()
    metrics: dict[str, float] = {}

    while progress.step < config.max_steps:
        step = progress.step + 1
        with stopwatch.phase("data"):
            batch = [samples[i] for i in order.batch(progress.samples, config.data.batch_size)]
        if saver.is_asked_to_stop():
            saver.stop(progress.step, metrics)
        with stopwatch.phase("forward_backward"):
            loss = supervised_step(policy, batch, config.data, parallel)
        with stopwatch.phase("optimizer"):
            lr = learning_rate(step, config.optim, config.max_steps)
            grad_norm = clip_gradients(policy, config.optim.max_grad_norm)
            check_finite(step, loss=loss, grad_norm=grad_norm)
            update_parameters(session.optimizer, lr=lr)
        num_tokens = sum(len(sample.token_ids) for sample in batch)
        progress.advance(samples=len(batch), tokens=num_tokens)

        metrics = {"loss": loss, "grad_norm": grad_norm, "lr": lr, "epoch": progress.samples / len(samples)}
        is_last = step == config.max_steps
        if held_out and (is_last or (config.val_interval and step % config.val_interval == 0)):
            with stopwatch.phase("validation"):
                metrics["val/loss"] = _validate(policy, held_out, config, parallel)
        metrics |= step_metrics(session, stopwatch, num_tokens=num_tokens)
        session.log(step, metrics)
        with stopwatch.phase("checkpoint"):
            saver.after_step(step, metrics)


@torch.no_grad()
def _validate(policy: Policy, held_out: list[Sample], config: SftConfig, parallel: Parallel) -> float:
    """Return the mean negative log-likelihood of the held-out targets."""
    policy.eval()
    total_targets = sum(sample.num_targets for sample in held_out)
    loss_sum = 0.0
    arrangement = policy.layout.arrangement(pack=config.data.pack)
    for indices in plan_samples(held_out, arrangement, config.data, parallel):
        micro = build_micro_batch(held_out, indices, pack=arrangement == "packed", device=parallel.device)
        logprobs_N = predict(policy, micro).logprobs_N
        loss_sum -= float(logprobs_N.double().sum())
    reshard(policy)
    policy.train()
    return parallel.sum({"loss": loss_sum})["loss"] / total_targets
