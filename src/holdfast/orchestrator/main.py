"""The orchestrator's program: `python -m holdfast.orchestrator.main <resolved.toml>`.

It reads published weights, samples from inference servers, and writes one journaled batch per train step. It starts
after the last batch in the journal, or after the newest checkpoint.
"""

import asyncio
import gc
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from holdfast.chat.tokenizer import Tokenizer, load_tokenizer
from holdfast.config.load import read_toml
from holdfast.config.orchestrator import OrchestratorConfig, check_rounds
from holdfast.errors import CheckpointError, ConfigError, EnvironmentFailure
from holdfast.orchestrator.batch_maker import BatchMaker, adopt_curricula, adopt_mix
from holdfast.orchestrator.batch_pipeline import BatchPipeline, BatchPublisher, version_for
from holdfast.orchestrator.client.client import InferenceClient
from holdfast.orchestrator.client.http import load_vocab_size
from holdfast.orchestrator.env.guard import beating, place_of, watching_calls
from holdfast.orchestrator.env.interface import Environment
from holdfast.orchestrator.env.registry import load_levels
from holdfast.orchestrator.env.tool_loop import tool_use_of
from holdfast.orchestrator.evaluation.evaluator import load_evaluation
from holdfast.orchestrator.group_players import starting_workers
from holdfast.orchestrator.judge_client import judging
from holdfast.orchestrator.rounds import RoundsMaker
from holdfast.orchestrator.state import OrchestratorState, read_state, refuse_open_groups
from holdfast.orchestrator.tasks import FreezeTolerantLoop, phase, run_unless, run_until_stopped
from holdfast.orchestrator.teacher import Teacher, connect_teacher
from holdfast.orchestrator.weight_sync import WeightPusher
from holdfast.process import events
from holdfast.process.child import allow_connections, die_with_launcher, keep_date, run_reporting_errors, set_up_logging
from holdfast.process.heartbeat import start_heartbeat
from holdfast.run import journal
from holdfast.run.inputs import ask_hub
from holdfast.run.manifest import verify
from holdfast.run.run_dir import RunDir
from holdfast.run.timeline import start_timeline


def find_start(run_dir: RunDir, resume_step: int | None) -> tuple[int, OrchestratorState]:
    """Return the trainer's step (0 without a checkpoint), and the state after the last batch that exists.

    Batches after the checkpoint are never made again. An orchestrator that is restarted in the middle of a run uses the
    newest checkpoint, which may be later than `resume_step`. Raises CheckpointError if the state is missing or damaged.
    """
    while True:
        # In this order: the trainer may save and prune meanwhile.
        published = set(run_dir.published_batches())
        trainer_step = max([resume_step or 0, *run_dir.committed_steps()])
        try:
            return trainer_step, _state_after(run_dir, trainer_step, published)
        except (CheckpointError, FileNotFoundError):
            # With a newer checkpoint the trainer has pruned meanwhile: look again.
            if max(run_dir.committed_steps(), default=0) <= trainer_step:
                raise


def _state_after(run_dir: RunDir, trainer_step: int, published: set[int]) -> OrchestratorState:
    last = trainer_step
    # Only without a gap: state N belongs to all batches before it.
    while last + 1 in published:
        last += 1
    if last > trainer_step:
        verify(run_dir.batch(last))
        return read_state(run_dir.batch(last) / journal.STATE_NAME, step=last)
    if trainer_step > 0:
        return read_state(run_dir.checkpoint(trainer_step) / "orchestrator" / journal.STATE_NAME, step=trainer_step)
    return OrchestratorState()


_LOOK_S = 0.5
# The garbage collector's; Python's are 700, 10 and 10.
_COLLECTOR_THRESHOLDS = (10_000, 10, 10)


async def orchestrate(config: OrchestratorConfig) -> None:
    """Make every batch from the end of the journal to `max_steps`."""
    check_rounds(config)
    _allow_connections(config)
    key = "model.tokenizer" if config.model.tokenizer else "model.name"
    ask_hub(config.model.tokenizer_name, key=key, file="tokenizer.json")
    events.report("loading the tokenizer and the environments")
    run_dir = RunDir(config.output_dir)
    keep_date(run_dir.created_unix_s())
    tokenizer = load_tokenizer(config.model.tokenizer_name)
    environments = _load_environments(config, tokenizer)
    trainer_step, state = find_start(run_dir, _resume_step(config))
    first = state.step + 1
    refuse_open_groups(state, config)
    adopt_mix(state, config)
    adopt_curricula(state, config)
    start_timeline(run_dir.newest_logs(), "orchestrator", step=state.step)
    if trainer_step or first > 1:
        events.report("resumed", step=trainer_step, first_batch=first)
    if first > config.max_steps or run_dir.has_ended_early(saves=config.ckpt is not None):
        # An attempt that died after its last batch may still own the engines.
        if not config.is_sampled_by_teacher:
            async with InferenceClient(config.client, run_dir=run_dir) as client:
                await client.lease.release()
        events.report("finished", step=state.step)
        return

    async with (
        beating(bound_s=config.hang_timeout_s),
        judging(run_dir.judgements),
        starting_workers(config) as workers,
        connect_teacher(config, digest=state.teacher_digest) as teacher,
        _connect_policy(config, teacher) as client,
        load_evaluation(config, client, run_dir=run_dir, tokenizer=tokenizer) as evaluation,
        BatchPublisher(run_dir) as publisher,
    ):
        if teacher is not None:
            state.teacher_digest = teacher.digest
        pusher = WeightPusher(client, run_dir, timeout_s=config.weights_timeout_s, seq_len=config.seq_len)
        maker = (RoundsMaker if config.schedule == "rounds" else BatchMaker)(
            config,
            client,
            run_dir=run_dir,
            tokenizer=tokenizer,
            environments=environments,
            state=state,
            teacher=teacher,
            workers=workers,
        )
        pipeline = BatchPipeline(
            config, client=client, publisher=publisher, pusher=pusher, maker=maker, evaluation=evaluation
        )

        async def produce_all() -> None:
            for step in range(first, config.max_steps + 1):
                version = version_for(step, run_dir, async_level=config.versions_behind, trainer_step=trainer_step)
                if step == first:
                    await pipeline.begin(step, version=version)
                await pipeline.produce(step, version=version)

        with watching_calls():
            try:
                await run_unless(produce_all(), _early_end(run_dir, saves=config.ckpt is not None))
            finally:
                await maker.close()
            await publisher.settle()  # a batch that cannot be written must be made again, by these engines
        await client.lease.release()
    events.report("finished", step=run_dir.early_end() or config.max_steps)


async def _early_end(run_dir: RunDir, *, saves: bool) -> None:
    """Return when the trainer has ended the run before its last step: it trains no further batch."""
    while not run_dir.has_ended_early(saves=saves):
        await asyncio.sleep(_LOOK_S)
    events.report("the trainer has ended the run early", step=run_dir.early_end())


def _load_environments(config: OrchestratorConfig, tokenizer: Tokenizer) -> dict[str, list[Environment]]:
    """Return the environments that are played in this process, by name, each with all its levels."""
    environments: dict[str, list[Environment]] = {}
    for position, section in enumerate(config.environments):
        if not section.workers:
            environments[section.label] = load_levels(section, key=f"environments[{position}]")
            for environment in environments[section.label]:
                tool_use_of(environment, section, tokenizer)  # to raise errors early
    return environments


def _allow_connections(config: OrchestratorConfig) -> None:
    """Allow a connection for each session in flight. Raises ConfigError if the system forbids it."""
    size = config.largest_group
    most = max(config.client.max_concurrency * len(config.client.urls), size)
    groups = config.problems_per_step * (1 + config.async_level)
    if config.schedule == "strict":
        groups = config.max_problems_per_step
    number = most if config.eval is not None else min(most, groups * size)
    if config.teacher is not None:
        number += min(config.teacher.max_concurrency * len(config.teacher.urls), number)
    allow_connections(number, key="client.max_concurrency")


@asynccontextmanager
async def _connect_policy(config: OrchestratorConfig, teacher: Teacher | None) -> AsyncIterator[InferenceClient]:
    """Give the client of the servers that sample, when they are ready: the policy's or the teacher's."""
    if teacher is not None and config.is_sampled_by_teacher:
        yield teacher.client
        return
    vocab_size = load_vocab_size(config.model.name)
    async with InferenceClient(config.client, run_dir=RunDir(config.output_dir), vocab_size=vocab_size) as client:
        events.report("waiting for inference", urls=",".join(config.client.urls))
        with phase("waiting for inference"):
            await client.wait_until_ready(model=config.model.name, seq_len=config.seq_len)
        yield client


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
    run_reporting_errors(lambda: run(read_toml(OrchestratorConfig, arguments[0])))


def run(config: OrchestratorConfig) -> None:
    """Run `orchestrate` in a process of its own, until it ends or a signal stops it."""
    # With thousands of sessions the garbage collector, at its usual pace, takes a third of a core.
    gc.freeze()
    gc.set_threshold(*_COLLECTOR_THRESHOLDS)
    try:
        with asyncio.Runner(loop_factory=FreezeTolerantLoop) as runner:
            runner.run(run_until_stopped(orchestrate(config)))
    except (SystemExit, KeyboardInterrupt) as error:
        # Not from a call, whose errors `guard` catches.
        raise EnvironmentFailure(
            f"an environment raised {type(error).__name__}({error}) in a task or callback of its own "
            f"({place_of(error)}), which would end the orchestrator"
        ) from error


if __name__ == "__main__":
    main()
