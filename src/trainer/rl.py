"""The trainer of an RL run: `uv run rl @ configs/reverse_text/rl.toml`.

Step N waits for batch N in the journal, trains on it, publishes the weights of version N and saves
when it is due. At the start it publishes the version that it starts from, 0 or the resumed step, so
the orchestrator has one way to begin.
"""

from __future__ import annotations

from trainer import parallel as parallel_module
from trainer.advantage import choose_advantage
from trainer.canary import measure_canary
from trainer.data import load_tokenizer
from trainer.ledger import Ledger
from trainer.losses import policy_loss
from trainer.model import Policy, build_policy
from trainer.optim import clip_gradients, update_parameters
from trainer.policy_step import policy_step
from trainer.rollouts import assign_advantages, group_rollouts, to_samples
from trainer.session import Session, start_session
from trainer.state import seed_everything
from trainer.step import Stopwatch, check_finite, step_metrics
from trainer.stop import STOP_REQUEST
from triad.config import TrainerConfig
from triad.config.schedule import learning_rate
from triad.errors import InferenceError
from triad.events import report
from triad.journal import read_batch, wait_for
from triad.run_dir import RunDir


def run(config: TrainerConfig) -> None:
    """Train until `max_steps`."""
    parallel = parallel_module.start(config.parallel)
    seed_everything(config.seed, step=0, rank=parallel.rank)
    tokenizer = load_tokenizer(config.model.tokenizer_name)
    with start_session(config, parallel, tokenizer, build_policy, older_weights=config.async_level) as session:
        session.publisher.publish(
            session.progress.step,
            canary=measure_canary(session.policy, tokenizer, parallel),
            for_engines=session.progress.step < config.max_steps,
        )
        _train(config, session)
    report("finished", step=session.progress.step)


def _train(config: TrainerConfig, session: Session[Policy]) -> None:
    parallel = session.parallel
    policy, progress, saver, run_dir = session.policy, session.progress, session.saver, session.run_dir
    loss_function, advantage = policy_loss(config.loss), choose_advantage(config.advantage)
    ledger = Ledger(run_dir, progress)
    report("waiting for batches", step=progress.step, max_steps=config.max_steps)
    kept = run_dir.committed_steps()  # read again only after a commit: listing them costs a read each
    stopwatch = Stopwatch()
    metrics: dict[str, float] = {}

    while progress.step < config.max_steps:
        step = progress.step + 1
        with stopwatch.phase("wait_for_batch"):
            _wait_for_batch(run_dir, step, config)
        if saver.is_asked_to_stop():
            saver.stop(progress.step, metrics, ledger.attachments())
        batch = read_batch(run_dir, step)
        ledger.accept(batch)
        with stopwatch.phase("forward_backward"):
            samples = to_samples(batch.rollouts, trained_version=step - 1)
            rewards_PG = [[one.reward for one in group] for group in group_rollouts(batch.rollouts)]
            assign_advantages(samples, advantage(rewards_PG))
            metrics = policy_step(
                policy, samples, loss_function, parallel, temperature=batch.temperature, row_tokens=config.row_tokens
            )
        with stopwatch.phase("optimizer"):
            lr = learning_rate(step, config.optim, config.max_steps)
            grad_norm = clip_gradients(policy, config.optim.max_grad_norm)
            check_finite(step, loss=metrics["loss"], grad_norm=grad_norm)
            update_parameters(session.optimizer, lr=lr)
        num_tokens = sum(len(sample.token_ids) for sample in samples)
        progress.advance(samples=len(samples), tokens=num_tokens)

        with stopwatch.phase("publish_weights"):
            session.publisher.publish(step, for_engines=step < config.max_steps)
        metrics |= batch.metrics | {"grad_norm": grad_norm, "lr": lr}
        metrics |= step_metrics(parallel, stopwatch, progress, num_tokens=num_tokens)
        session.log(step, metrics)
        with stopwatch.phase("checkpoint"):
            committed = saver.after_step(step, metrics, ledger.attachments())
        kept = _prune_batches(session) if committed else kept
        session.publisher.prune(_needed_weights([*kept, *saver.unsettled(), step], config.async_level))

    saver.wait()
    kept = _prune_batches(session)
    session.publisher.prune(_needed_weights([*kept, progress.step], config.async_level))


def _prune_batches(session: Session[Policy]) -> list[int]:
    """Remove the batches that no checkpoint needs any more; return the steps with a checkpoint."""
    steps = session.run_dir.committed_steps()
    if session.parallel.is_main and steps:
        session.run_dir.prune_batches(steps[0])
    return steps


def _wait_for_batch(run_dir: RunDir, step: int, config: TrainerConfig) -> None:
    """Wait for the batch of `step`, or for a signal. Every rank waits for itself: no collective can time out."""
    came = wait_for(run_dir.batch(step), timeout_s=config.batch_timeout_s, unless=STOP_REQUEST.signal_number)
    if not came and not STOP_REQUEST.signal_number():
        raise InferenceError(
            f"step {step}: the orchestrator published no batch within {config.batch_timeout_s:g} s. "
            "See the orchestrator's log, or raise trainer.batch_timeout_s."
        )


def _needed_weights(steps: list[int], async_level: int) -> set[int]:
    """Return the versions that an engine may be asked for by a trainer that is at, or resumes from, one of `steps`."""
    return {version for step in steps for version in range(max(0, step - async_level), step + 1)}
