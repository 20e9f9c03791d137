"""The orchestrator's program: `python -m holdfast.orchestrator.main <resolved.toml>`.

It reads published weights, samples from inference servers, and writes one journaled batch per train step. It starts
after the last batch in the journal, or after the newest checkpoint.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from holdfast.chat.tokenizer import Tokenizer, load_tokenizer
from holdfast.config.load import read_toml
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.errors import CheckpointError, ConfigError, EnvironmentFailure
from holdfast.orchestrator.batch_maker import BatchMaker
from holdfast.orchestrator.client.client import InferenceClient
from holdfast.orchestrator.client.http import load_vocab_size
from holdfast.orchestrator.curriculum import adopt_curricula, adopt_mix
from holdfast.orchestrator.env.guard import beating, place_of, watching_calls
from holdfast.orchestrator.env.interface import Environment
from holdfast.orchestrator.env.registry import load_levels
from holdfast.orchestrator.env.tool_loop import tool_use_of
from holdfast.orchestrator.evaluation.online import load_evaluation
from holdfast.orchestrator.judge_client import judging
from holdfast.orchestrator.pipeline import BatchPipeline, BatchPublisher, StrictSchedule
from holdfast.orchestrator.state import OrchestratorState, read_state
from holdfast.orchestrator.tasks import FreezeTolerantLoop, phase, run_until_stopped
from holdfast.orchestrator.teacher import Teacher, connect_teacher
from holdfast.orchestrator.weight_sync import DirectoryTransport, WeightPusher
from holdfast.orchestrator.workers import starting_workers
from holdfast.process import events
from holdfast.process.child import allow_connections, die_with_launcher, keep_date, run_reporting_errors, set_up_logging
from holdfast.process.heartbeat import start_heartbeat
from holdfast.run import journal
from holdfast.run.inputs import ask_hub
from holdfast.run.manifest import verify
from holdfast.run.run_dir import RunDir
from holdfast.run.timeline import start_timeline


@dataclass(frozen=True)
class RunStart:
    """Where a run begins.

    Attributes:
        trainer_step: the step that the trainer begins after: that of the checkpoint, or 0.
        state: the orchestrator's state after the last batch that exists.
    """

    trainer_step: int
    state: OrchestratorState


def find_start(run_dir: RunDir, resume_step: int | None) -> RunStart:
    """Return where to begin: after the journal's batches if some follow the checkpoint, else after the checkpoint.

    The trainer trains on the batches that are there, so they are never made again. An orchestrator that
    is started again in the middle of a run goes by the newest checkpoint, which may be later than
    `resume_step`: batches before it may be gone.

    Raises:
        CheckpointError: the state is missing or damaged.
    """
    while True:
        # The trainer may save and prune meanwhile. In this order what follows the newest checkpoint is seen whole.
        published = set(run_dir.published_batches())
        trainer_step = max([resume_step or 0, *run_dir.committed_steps()])
        try:
            return _start_after(run_dir, trainer_step, published)
        except (CheckpointError, FileNotFoundError):
            # A newer checkpoint means that the trainer pruned while we looked: look again.
            if max(run_dir.committed_steps(), default=0) <= trainer_step:
                raise


def _start_after(run_dir: RunDir, trainer_step: int, published: set[int]) -> RunStart:
    last = trainer_step
    # Only without a gap: state N belongs to all batches before it.
    while last + 1 in published:
        last += 1
    if last > trainer_step:
        verify(run_dir.batch(last))
        state = read_state(run_dir.batch(last) / journal.STATE_NAME, step=last)
    elif trainer_step > 0:
        path = run_dir.checkpoint(trainer_step) / "orchestrator" / journal.STATE_NAME
        state = read_state(path, step=trainer_step)
    else:
        state = OrchestratorState()
    return RunStart(trainer_step=trainer_step, state=state)


# Of the garbage collector: after so many more objects, after so many times that, and that again; Python's are 700, 10
# and 10.
_COLLECTOR_THRESHOLDS = (10_000, 10, 10)


async def orchestrate(config: OrchestratorConfig) -> None:
    """Make every batch that is missing, from the resumed step to `max_steps`.

    Raises:
        HoldfastError: whatever ended the run before its time.
    """
    _allow_connections(config)
    key = "model.tokenizer" if config.model.tokenizer else "model.name"
    ask_hub(config.model.tokenizer_name, key=key, file="tokenizer.json")
    events.report("loading the tokenizer and the environments")
    run_dir = RunDir(config.output_dir)
    keep_date(run_dir.created_unix_s())
    tokenizer = load_tokenizer(config.model.tokenizer_name)
    environments = _load_environments(config, tokenizer)
    start = find_start(run_dir, _resume_step(config))
    first = start.state.step + 1
    adopt_mix(start.state, config)
    adopt_curricula(start.state, config)
    start_timeline(run_dir.newest_logs(), "orchestrator", step=start.state.step)
    if start.trainer_step or first > 1:
        events.report("resumed", step=start.trainer_step, first_batch=first)
    if first > config.max_steps:
        await _release_engines(config)
        events.report("finished", step=start.state.step)
        return

    async with (
        beating(bound_s=config.hang_timeout_s),
        judging(run_dir.judgements),
        starting_workers(config) as workers,
        connect_teacher(config, digest=start.state.teacher_digest) as teacher,
        _connect_policy(config, teacher) as client,
        load_evaluation(config, client, run_dir=run_dir, tokenizer=tokenizer) as evaluation,
        BatchPublisher(run_dir) as publisher,
    ):
        if teacher is not None:
            start.state.teacher_digest = teacher.digest
        transport = DirectoryTransport(run_dir, timeout_s=config.weights_timeout_s)
        schedule = StrictSchedule(transport, async_level=config.async_level, trainer_step=start.trainer_step)
        pusher = WeightPusher(client, transport, seq_len=config.seq_len)
        maker = BatchMaker(
            config,
            client,
            run_dir=run_dir,
            tokenizer=tokenizer,
            environments=environments,
            state=start.state,
            teacher=teacher,
            workers=workers,
        )
        pipeline = BatchPipeline(
            config, client=client, publisher=publisher, pusher=pusher, maker=maker, evaluation=evaluation
        )
        with watching_calls():
            for step in range(first, config.max_steps + 1):
                version = schedule.version_for(step)
                if step == first:
                    await pipeline.begin(step, version=version)
                await pipeline.produce(step, version=version)
            # Before the engines are given back: a batch that does not land must be made again.
            await publisher.settle()
        await client.lease.release()
    events.report("finished", step=config.max_steps)


def _load_environments(config: OrchestratorConfig, tokenizer: Tokenizer) -> dict[str, list[Environment]]:
    """Return those that are played in this process, by name, each at every level of its curriculum."""
    environments: dict[str, list[Environment]] = {}
    for position, section in enumerate(config.environments):
        if not section.workers:
            environments[section.label] = load_levels(section, key=f"environments[{position}]")
            for environment in environments[section.label]:
                tool_use_of(environment, section, tokenizer)  # what cannot be, is told before anything is sampled
    return environments


def _allow_connections(config: OrchestratorConfig) -> None:
    """See that all sessions can have a connection at once: whole groups, as many as may be in flight.

    Raises:
        ConfigError: this process may not have as many.
    """
    size = config.largest_group
    most = max(config.client.max_concurrency * len(config.client.urls), size)
    number = most if config.eval is not None else min(most, config.max_problems_per_step * size)
    if config.teacher is not None:
        number += min(config.teacher.max_concurrency * len(config.teacher.urls), number)
    allow_connections(number, key="client.max_concurrency")


@asynccontextmanager
async def _connect_policy(config: OrchestratorConfig, teacher: Teacher | None) -> AsyncIterator[InferenceClient]:
    """Give the client of the servers that sample: those of the policy when they are ready, or the teacher's."""
    if teacher is not None and config.is_sampled_by_teacher:
        yield teacher.client
        return
    vocab_size = load_vocab_size(config.model.name)
    async with InferenceClient(config.client, run_dir=RunDir(config.output_dir), vocab_size=vocab_size) as client:
        events.report("waiting for inference", urls=",".join(config.client.urls))
        with phase("waiting for inference"):
            await client.wait_until_ready(model=config.model.name, seq_len=config.seq_len)
        yield client


async def _release_engines(config: OrchestratorConfig) -> None:
    """Give the servers back that an attempt claimed which died between its last batch and its end."""
    if not config.is_sampled_by_teacher:
        async with InferenceClient(config.client, run_dir=RunDir(config.output_dir)) as client:
            await client.lease.release()


def _resume_step(config: OrchestratorConfig) -> int | None:
    step = config.ckpt.resume_step if config.ckpt else None
    if step is not None and (isinstance(step, str) or step < 0):
        raise ConfigError(f"ckpt.resume_step = {step}: the orchestrator needs the number that the launcher resolved")
    return step


def main(argv: Sequence[str] | None = None) -> None:
    """Run the orchestrator with the resolved configuration that `argv` names; never returns."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    die_with_launcher()
    set_up_logging("orchestrator")
    start_heartbeat()
    run_reporting_errors(lambda: run(_read_config(arguments)))


def run(config: OrchestratorConfig) -> None:
    """Run `orchestrate` in this process, which is for nothing else, until it ends or a signal stops it.

    Raises:
        HoldfastError: whatever ended the run before its time.
    """
    # What is imported stays; and thousands of sessions make so many objects that live on that the collector, at its
    # usual pace, would take a third of a core to walk over them.
    gc.freeze()
    gc.set_threshold(*_COLLECTOR_THRESHOLDS)
    try:
        with asyncio.Runner(loop_factory=FreezeTolerantLoop) as runner:
            runner.run(run_until_stopped(orchestrate(config)))
    except (SystemExit, KeyboardInterrupt) as error:
        # What is raised in a call of an environment is caught there. Its own tasks and callbacks end the event loop.
        raise EnvironmentFailure(
            f"an environment raised {type(error).__name__}({error}) in a task or callback of its own "
            f"({place_of(error)}), which would end the orchestrator"
        ) from error


def _read_config(arguments: Sequence[str]) -> OrchestratorConfig:
    if len(arguments) != 1:
        raise ConfigError("usage: python -m holdfast.orchestrator.main <resolved.toml>")
    return read_toml(OrchestratorConfig, arguments[0])


if __name__ == "__main__":
    main()
