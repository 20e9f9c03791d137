"""Supervised fine-tuning: `uv run sft @ configs/reverse_text/sft.toml`.

One optimizer step trains `data.batch_size` samples, in an order that is a pure function of seed and position. Samples
are packed into micro-batches, and the ranks share the micro-batches. The loss is the mean negative log-likelihood of
the completion tokens of the whole step, over all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.config import SftConfig
from holdfast.config.training import learning_rate
from holdfast.process.events import Counted, report
from holdfast.trainer.data.packing import Sample, build_micro_batch
from holdfast.trainer.data.samples import SampleOrder, fingerprint_samples, load_samples
from holdfast.trainer.mesh import Mesh, Sums
from holdfast.trainer.model.decoder import reshard
from holdfast.trainer.model.policy import Policy, build_policy, plan_samples, predict, supervised_step
from holdfast.trainer.optimizer import check_finite, clip_gradients, update_parameters
from holdfast.trainer.session import Stopwatch, TrainSession, start_program, start_session, step_metrics
from holdfast.trainer.survey import survey_of, tell_data


def run(config: SftConfig) -> None:
    """Train until `max_steps`, then publish the weights."""
    with start_program(config) as (mesh, tokenizer):
        report("reading data")
        samples, held_out = load_samples(config.data, tokenizer, seed=config.seed, mesh=mesh)
        order = SampleOrder(len(samples), seed=config.seed, shuffle=config.data.shuffle)
        tell_data(config, survey_of(samples, len(held_out), tokenizer), is_main=mesh.is_main)
        with start_session(
            config,
            mesh,
            tokenizer,
            build_policy,
            pack=config.data.pack,
            data_fingerprint=fingerprint_samples(samples),
        ) as session:
            _train(config, session, samples, held_out, order)
            session.publish_last()


def _train(
    config: SftConfig,
    session: TrainSession[Policy],
    samples: Sequence[Sample],
    held_out: Sequence[Sample],
    order: SampleOrder,
) -> None:
    mesh = session.mesh
    policy, progress, saver = session.policy, session.progress, session.saver
    report("training", step=progress.step, max_steps=config.max_steps)
    stopwatch = Stopwatch(session.profiler)
    metrics: dict[str, float] = {}

    while progress.step < config.max_steps:
        step = progress.step + 1
        stopwatch.begin_step(step)
        with stopwatch.phase("data"):
            batch = [samples[i] for i in order.batch(progress.samples, config.data.batch_size)]
        if saver.is_asked_to_stop():
            saver.stop(progress.step, metrics)
        with stopwatch.phase("forward_backward"):
            loss = supervised_step(policy, batch, config.data, mesh)
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
                metrics["val/loss"] = _validate(policy, held_out, config, mesh)
        metrics |= step_metrics(session, stopwatch, num_tokens=num_tokens)
        session.log(step, metrics)
        with stopwatch.phase("checkpoint"):
            saver.after_step(step, metrics)
    stopwatch.end()


@torch.no_grad()
def _validate(policy: Policy, held_out: Sequence[Sample], config: SftConfig, mesh: Mesh) -> float:
    """Return the mean negative log-likelihood of the held-out targets."""
    policy.eval()
    total_targets = sum(sample.num_targets for sample in held_out)
    losses = Sums("loss")
    pack = policy.layout.arrangement(pack=config.data.pack) == "packed"
    plan = plan_samples(held_out, policy.layout, config.data, mesh)
    counted = Counted("validating", len(plan), unit="micro-batches", is_told=mesh.is_main)
    for indices in plan:
        micro = build_micro_batch(held_out, indices, pack=pack, device=mesh.device)
        logprobs_N = predict(policy, micro).logprobs_N
        losses.add({"loss": -logprobs_N.double().sum()})
        counted.add()
    reshard(policy)
    policy.train()
    return mesh.sum(losses.read())["loss"] / total_targets
