"""The trainer of an RL run: `uv run rl @ configs/reverse_text/rl.toml`.

Step N waits for batch N in the journal, trains on it, publishes the weights of version N and saves
when it is due. At the start it publishes the version that it starts from, 0 or the resumed step, so
the orchestrator has one way to begin.
"""

from __future__ import annotations

import logging

from trainer import parallel as parallel_module
from trainer.checkpoint import Checkpointer
from trainer.data import load_tokenizer
from trainer.loss import grpo_loss
from trainer.model import build_policy
from trainer.optim import build_optimizer, clip_gradients, update_parameters
from trainer.policy_step import policy_step
from trainer.rollouts import to_samples
from trainer.state import Progress, TrainState, seed_everything
from trainer.step import Stopwatch, check_finite, memory_gib
from trainer.weights import WeightPublisher
from triad.config import TrainerConfig
from triad.config.fingerprint import fingerprint
from triad.config.schedule import learning_rate
from triad.errors import InferenceError
from triad.events import report
from triad.journal import STATE_NAME, read_batch, wait_for
from triad.messages import Batch
from triad.metrics import MetricsWriter
from triad.run_dir import RunDir

_log = logging.getLogger("trainer")


def run(config: TrainerConfig) -> None:
    """Train until `max_steps`."""
    parallel = parallel_module.start(config.parallel)
    run_dir = RunDir(config.output_dir)
    resume_step = config.ckpt.resume_step if config.ckpt else None
    seed_everything(config.seed, step=0, rank=parallel.rank)

    report("loading model")
    tokenizer = load_tokenizer(config.model.tokenizer_name)
    policy = build_policy(config.model, parallel, seed=config.seed, weights=resume_step is None)
    optimizer = build_optimizer(policy, config.optim)
    loss_function = grpo_loss(config.loss)
    state = TrainState(policy, optimizer, Progress())
    checkpointer = Checkpointer(run_dir, config.ckpt, parallel, seed=config.seed, fingerprint=fingerprint(config))
    publisher = WeightPublisher(run_dir, policy, tokenizer, parallel, dtype=config.model.dtype)
    if isinstance(resume_step, int):
        report("loading checkpoint", step=resume_step)
        checkpointer.load(state, resume_step)
        _log.info("resumed from step %d", resume_step)
    publisher.publish(state.progress.step)
    writer = MetricsWriter(run_dir.metrics) if parallel.is_main else None
    report("waiting for batches", step=state.progress.step, max_steps=config.max_steps)
    checkpoints = run_dir.committed_steps()  # read again only after a save: listing them costs a read each
    stopwatch = Stopwatch()

    while state.progress.step < config.max_steps:
        step = state.progress.step + 1
        with stopwatch.phase("wait_for_batch"):
            batch = _receive(run_dir, step, config)
        with stopwatch.phase("forward_backward"):
            samples = to_samples(batch, trained_version=step - 1)
            metrics = policy_step(
                policy, samples, loss_function, parallel, temperature=batch.temperature, row_tokens=config.row_tokens
            )
        with stopwatch.phase("optimizer"):
            lr = learning_rate(step, config.optim, config.max_steps)
            grad_norm = clip_gradients(policy, config.optim.max_grad_norm)
            check_finite(step, loss=metrics["loss"], grad_norm=grad_norm)
            update_parameters(optimizer, lr=lr)
        num_tokens = sum(len(sample.token_ids) for sample in samples)
        state.progress.step = step
        state.progress.samples += len(samples)
        state.progress.tokens += num_tokens

        with stopwatch.phase("publish_weights"):
            publisher.publish(step)
        metrics |= batch.metrics | {"grad_norm": grad_norm, "lr": lr, "memory_gib": memory_gib(parallel)}
        metrics |= stopwatch.take()
        metrics["tokens_per_s"] = num_tokens / metrics["time/step"]
        metrics |= {"samples": state.progress.samples, "tokens": state.progress.tokens}
        # Before the checkpoint: a step that exists for resume has its line of metrics.
        if writer is not None:
            writer.write(step, metrics)
        if checkpointer.is_due(step, config.max_steps):
            with stopwatch.phase("checkpoint"):
                checkpointer.save(state, orchestrator_state=run_dir.batch(step) / STATE_NAME)
            checkpoints = run_dir.committed_steps()
            if parallel.is_main:
                run_dir.prune_batches(checkpoints[0])
        publisher.prune(_needed_weights([step, *checkpoints], config.async_level))

    if writer is not None:
        writer.close()
    parallel.barrier()
    parallel_module.stop()
    report("finished", step=state.progress.step)


def _receive(run_dir: RunDir, step: int, config: TrainerConfig) -> Batch:
    """Wait for the batch of `step`. Every rank waits and reads for itself: no collective can time out."""
    if not wait_for(run_dir.batch(step), timeout_s=config.batch_timeout_s):
        raise InferenceError(
            f"step {step}: the orchestrator published no batch within {config.batch_timeout_s:g} s. "
            "See the orchestrator's log, or raise trainer.batch_timeout_s."
        )
    return read_batch(run_dir, step)


def _needed_weights(steps: list[int], async_level: int) -> set[int]:
    """Return the versions that an engine may be asked for by a trainer that is at, or resumes from, one of `steps`."""
    return {version for step in steps for version in range(max(0, step - async_level), step + 1)}
