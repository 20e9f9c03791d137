"""Supervised fine-tuning: `uv run sft @ configs/reverse_text/sft.toml`.

One optimizer step trains `data.batch_size` samples, taken in an order that is a pure function of
seed and position, packed into micro-batches that are dealt to the ranks. The loss is the mean
negative log-likelihood of the completion tokens of the whole step.
"""

from __future__ import annotations

import logging

import torch

from trainer import parallel as parallel_module
from trainer.checkpoint import Checkpointer
from trainer.data import SampleOrder, load_samples, load_tokenizer
from trainer.loss import cross_entropy
from trainer.model import Policy, build_policy, reshard
from trainer.optim import build_optimizer, clip_gradients, update_parameters
from trainer.packing import Sample, build_micro_batch, plan_rows
from trainer.parallel import Parallel
from trainer.state import Progress, TrainState, seed_everything
from trainer.step import Stopwatch, check_finite, memory_gib, predict
from trainer.weights import WeightPublisher
from triad.config import SftConfig
from triad.config.fingerprint import fingerprint
from triad.config.schedule import learning_rate
from triad.events import report
from triad.metrics import MetricsWriter
from triad.run_dir import RunDir

_log = logging.getLogger("trainer")


def run(config: SftConfig) -> None:
    """Train until `max_steps`, then publish the weights."""
    parallel = parallel_module.start(config.parallel)
    run_dir = RunDir(config.output_dir)
    resume_step = config.ckpt.resume_step if config.ckpt else None
    seed_everything(config.seed, step=0, rank=parallel.rank)

    report("reading data")
    tokenizer = load_tokenizer(config.model.tokenizer_name)
    samples, held_out = load_samples(config.data, tokenizer, seed=config.seed)
    order = SampleOrder(len(samples), seed=config.seed, shuffle=config.data.shuffle)
    _log.info("%d samples to train on, %d held out", len(samples), len(held_out))

    report("loading model")
    policy = build_policy(config.model, parallel, seed=config.seed, weights=resume_step is None)
    optimizer = build_optimizer(policy, config.optim)
    state = TrainState(policy, optimizer, Progress())
    checkpointer = Checkpointer(run_dir, config.ckpt, parallel, seed=config.seed, fingerprint=fingerprint(config))
    publisher = WeightPublisher(run_dir, policy, tokenizer, parallel, dtype=config.model.dtype)
    if isinstance(resume_step, int):
        report("loading checkpoint", step=resume_step)
        checkpointer.load(state, resume_step)
        _log.info("resumed from step %d: %d samples trained", resume_step, state.progress.samples)
    writer = MetricsWriter(run_dir.metrics) if parallel.is_main else None
    report("training", step=state.progress.step, max_steps=config.max_steps)
    stopwatch = Stopwatch()

    while state.progress.step < config.max_steps:
        step = state.progress.step + 1
        with stopwatch.phase("data"):
            batch = [samples[i] for i in order.batch(state.progress.samples, config.data.batch_size)]
        with stopwatch.phase("forward_backward"):
            loss = _forward_backward(policy, batch, config, parallel)
        with stopwatch.phase("optimizer"):
            lr = learning_rate(step, config.optim, config.max_steps)
            grad_norm = clip_gradients(policy, config.optim.max_grad_norm)
            check_finite(step, loss=loss, grad_norm=grad_norm)
            update_parameters(optimizer, lr=lr)
        num_tokens = sum(len(sample.token_ids) for sample in batch)
        state.progress.step = step
        state.progress.samples += len(batch)
        state.progress.tokens += num_tokens

        metrics = {"loss": loss, "grad_norm": grad_norm, "lr": lr, "epoch": state.progress.samples / len(samples)}
        is_last = step == config.max_steps
        if held_out and (is_last or (config.val_interval and step % config.val_interval == 0)):
            with stopwatch.phase("validation"):
                metrics["val/loss"] = _validate(policy, held_out, config, parallel)
        metrics["memory_gib"] = memory_gib(parallel)
        metrics |= stopwatch.take()
        metrics["tokens_per_s"] = num_tokens / metrics["time/step"]
        metrics |= {"samples": state.progress.samples, "tokens": state.progress.tokens}
        # Before the checkpoint: a step that exists for resume has its line of metrics.
        if writer is not None:
            writer.write(step, metrics)
        if checkpointer.is_due(step, config.max_steps):
            with stopwatch.phase("checkpoint"):
                checkpointer.save(state)

    report("publishing weights", step=state.progress.step)
    publisher.publish(state.progress.step)
    publisher.prune({state.progress.step})
    if writer is not None:
        writer.close()
    parallel.barrier()
    parallel_module.stop()
    report("finished", step=state.progress.step)


def _forward_backward(policy: Policy, batch: list[Sample], config: SftConfig, parallel: Parallel) -> float:
    """Accumulate the gradients of one optimizer step; return its loss, the mean over all its targets."""
    total_targets = sum(sample.num_targets for sample in batch)
    loss_sum = torch.zeros((), dtype=torch.float64)
    for indices in _my_micro_batches(batch, config, parallel):
        micro = build_micro_batch(batch, indices, pack=config.data.pack, device=parallel.device)
        logprobs_N, _ = predict(policy, micro)
        weights_N = torch.full_like(logprobs_N, 1 / total_targets)
        loss = cross_entropy(logprobs_N, weights_N)
        # FSDP averages gradients over ranks; the weights above sum to one over all of them.
        (loss * parallel.world_size).backward()
        loss_sum += loss.detach().double().cpu()
    return parallel.sum({"loss": float(loss_sum)})["loss"]


@torch.no_grad()
def _validate(policy: Policy, held_out: list[Sample], config: SftConfig, parallel: Parallel) -> float:
    """Return the mean negative log-likelihood of the held-out targets."""
    policy.eval()
    total_targets = sum(sample.num_targets for sample in held_out)
    loss_sum = 0.0
    for indices in _my_micro_batches(held_out, config, parallel):
        micro = build_micro_batch(held_out, indices, pack=config.data.pack, device=parallel.device)
        logprobs_N, _ = predict(policy, micro)
        loss_sum -= float(logprobs_N.double().sum())
    reshard(policy)
    policy.train()
    return parallel.sum({"loss": loss_sum})["loss"] / total_targets


def _my_micro_batches(batch: list[Sample], config: SftConfig, parallel: Parallel) -> list[list[int]]:
    plan = plan_rows(
        [len(sample.token_ids) for sample in batch],
        pack=config.data.pack,
        budget=config.data.seq_len * config.data.micro_batch_size,
        rows_per_micro_batch=config.data.micro_batch_size,
        world_size=parallel.world_size,
    )
    return plan[parallel.rank]
