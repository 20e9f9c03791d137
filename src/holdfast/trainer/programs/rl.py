"""The trainer of an RL run: `uv run rl @ configs/reverse_text/rl.toml`.

Step N waits for batch N in the journal, trains on it, publishes the weights of version N and saves
when it is due. At the start it publishes the version that it starts from, 0 or the resumed step, so
the orchestrator has one way to begin.
"""

from collections.abc import Callable
from contextlib import nullcontext

import torch

from holdfast.config import TrainerConfig
from holdfast.config.rl_trainer import CollectiveWeights, JournalConfig
from holdfast.errors import WaitedInVain
from holdfast.process.events import report
from holdfast.process.heartbeat import does
from holdfast.run.journal import note_trained, read_batch, wait_for
from holdfast.run.metrics import read_metrics
from holdfast.run.run_dir import RunDir, older_versions
from holdfast.trainer.data.samples import check_same_tokens
from holdfast.trainer.model.build import trained_tensors
from holdfast.trainer.model.policy import Policy, build_policy
from holdfast.trainer.model.weight_offers import WeightOffers
from holdfast.trainer.rl.accounting import Ledger, check_provenance
from holdfast.trainer.rl.auxiliary_models import Ema
from holdfast.trainer.rl.components import RlComponents
from holdfast.trainer.rl.metrics import Alerts
from holdfast.trainer.rl.mismatch import measure_parity_prompt
from holdfast.trainer.rl.train_step import Learner, PretrainingMix
from holdfast.trainer.session import Stopwatch, TrainSession, start_program, start_session, step_metrics
from holdfast.trainer.step_end import StepEnd
from holdfast.trainer.stop import STOP_REQUEST


def run(config: TrainerConfig) -> None:
    """Train until `max_steps`."""
    with start_program(config) as (mesh, tokenizer):
        check_same_tokens(tokenizer, config.model.tokenizer_name)
        pretraining = None
        if config.pretraining is not None:
            pretraining = PretrainingMix(config.pretraining, tokenizer, mesh, seed=config.seed)
        components = RlComponents(config, mesh)
        with start_session(
            config,
            mesh,
            tokenizer,
            build_policy,
            pack=True,
            share=config.share_prompts,
            components=components.begin,
            data_fingerprint=pretraining.fingerprint if pretraining else "",
            older_weights=config.async_level,
        ) as session:
            components.check_models()
            learner = Learner(config, session, components, pretraining)  # before anything is published: it may refuse
            last_probed = _last_probed(session, config)
            session.run_dir.offer.unlink(missing_ok=True)  # of an attempt that was killed
            weights = config.weights if mesh.is_main and isinstance(config.weights, CollectiveWeights) else None
            with WeightOffers(session.run_dir, weights, mesh.device) if weights else nullcontext() as offers:

                def publish(version: int) -> None:
                    goes_on = version < config.max_steps
                    is_probed = goes_on and version <= last_probed
                    parity = (
                        measure_parity_prompt(session.policy, tokenizer, mesh, config=config) if is_probed else None
                    )
                    # Only the directory has a parity prompt.
                    offered_by = offers if goes_on and not is_probed else None
                    session.publisher.publish(version, parity_prompt=parity, for_engines=goes_on, offers=offered_by)

                publish(session.progress.step)
                _train(config, session, learner, publish)
            if components.ema is not None:
                _publish_average(session, components.ema)


def _train(
    config: TrainerConfig, session: TrainSession[Policy], learner: Learner, publish: Callable[[int], None]
) -> None:
    mesh, progress, saver, run_dir = session.mesh, session.progress, session.saver, session.run_dir
    ledger = Ledger(run_dir, progress)
    report("waiting for batches", step=progress.step, max_steps=config.max_steps)
    kept = run_dir.committed_steps()  # read again only after a commit: listing them costs a read each
    alerts = Alerts(config.alerts, history=read_metrics(run_dir.metrics) if mesh.is_main else ())
    stopwatch = Stopwatch(session.profiler)
    metrics: dict[str, float] = {}
    first = progress.step + 1
    end = StepEnd(config, session, stopwatch, ledger.attachments)

    while progress.step < config.max_steps and not end.is_over:
        step = progress.step + 1
        stopwatch.begin_step(step)
        does(f"its wait for batch {step}")
        with stopwatch.phase("wait_for_batch"):
            _wait_for_batch(run_dir, step, config)
        if saver.is_asked_to_stop():
            saver.stop(progress.step, metrics, ledger.attachments())
        is_first = step == first
        does(f"step {step}", bound_s=max(config.hang_timeout_s, config.startup_timeout_s * is_first))
        batch = read_batch(run_dir, step)
        ledger.accept(batch)
        # Only rank 0 looks: other ranks might find the weights pruned meanwhile, and then take another way.
        is_foreign = mesh.max({"is_foreign": float(mesh.is_main and not check_provenance(run_dir, batch))})
        learned = learner.learn(batch, stopwatch, is_foreign=bool(is_foreign["is_foreign"]))
        num_tokens = sum(len(rollout.token_ids) for rollout in batch.rollouts)
        progress.advance(samples=len(batch.rollouts), tokens=num_tokens)

        does(f"publishing and saving step {step}", bound_s=config.save_timeout_s)
        with stopwatch.phase("publish_weights"):
            publish(step)
        if mesh.is_main:
            note_trained(run_dir, step, learner.trained)
        metrics = batch.metrics | learned | step_metrics(session, stopwatch, num_tokens=num_tokens)
        for alert in alerts.check(metrics) if mesh.is_main else ():
            report(f"ALERT: {alert}", step=step)
        committed = end.finish(step, metrics)
        kept = _prune_batches(session, config.journal) if committed else kept
        session.publisher.prune(_needed_weights([*kept, *saver.in_flight(), step], config.async_level))

    stopwatch.end()
    does("finishing", bound_s=config.save_timeout_s)
    saver.settle()
    kept = _prune_batches(session, config.journal)
    session.publisher.prune(_needed_weights([*kept, progress.step], config.async_level))


def _last_probed(session: TrainSession[Policy], config: TrainerConfig) -> int:
    """Return the last version by which the orchestrator of this attempt, which continues after the journal, may begin.

    Up to there versions carry a parity prompt, which costs a pass over the whole model. Collective."""
    # In rounds with the weights before the last; with more `async_level` the strict schedule begins with older ones.
    begins_with = max(session.run_dir.published_batches(), default=0) - min(1, config.async_level)
    version = max(session.progress.step, begins_with)
    return int(session.mesh.max({"version": float(version)})["version"])


def _publish_average(session: TrainSession[Policy], ema: Ema) -> None:
    """Publish the average of the weights, in the place of the weights: nothing trains or saves them any more."""
    step = session.progress.step
    averages = ema.tensors()
    with torch.no_grad():
        for name, tensor in trained_tensors(session.policy.hf_model).items():
            tensor.copy_(averages[name])
    session.publisher.publish(step, path=session.run_dir.weights / f"ema_step_{step}")


def _prune_batches(session: TrainSession[Policy], journal: JournalConfig) -> list[int]:
    """Remove the batches that no checkpoint needs any more, except batches to keep; return the steps with a checkpoint.

    Batches up to the step of a checkpoint are never trained again: a resume begins after it."""
    steps = session.run_dir.committed_steps()
    if session.mesh.is_main and steps and journal.keep != "all":
        session.run_dir.prune_batches(min(steps[0], session.progress.step - journal.keep))
    return steps


def _wait_for_batch(run_dir: RunDir, step: int, config: TrainerConfig) -> None:
    """Wait for the batch of `step`, or for a signal. Every rank waits for itself: no collective can time out."""
    came = wait_for(run_dir.batch(step), timeout_s=config.batch_timeout_s, unless=STOP_REQUEST.signal_number)
    if not came and not STOP_REQUEST.signal_number():
        raise WaitedInVain(
            f"waiting for batches, policy version {step - 1}: the orchestrator published no batch {step} within "
            f"{config.batch_timeout_s:g} s. "
            "See the orchestrator's log, or raise trainer.batch_timeout_s."
        )


def _needed_weights(steps: list[int], async_level: int) -> set[int]:
    """Return the versions that an engine may be asked for by a trainer that is at, or resumes from, one of `steps`."""
    return {version for step in steps for version in (*older_versions(step, async_level), step)}
