"""The ledger refuses batches that skip, repeat or cut a task, and saves that do not add up; which batches stay."""

import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from holdfast.config.rl_trainer import JournalConfig
from holdfast.errors import CheckpointError, TrainingError
from holdfast.orchestrator.state import EnvironmentState, OrchestratorState
from holdfast.protocol.rollouts import Batch, Dropped, DropReason, Rollout
from holdfast.run.journal import Accepted, Counts, EnvironmentPosition, publish_batch, read_accepted
from holdfast.run.run_dir import RunDir
from holdfast.trainer.programs.rl import _prune_batches
from holdfast.trainer.rl.accounting import Ledger, check_tasks, check_trained
from holdfast.trainer.state import Progress
from tests.builders.checkpoint_files import commit
from tests.builders.sampled_rollouts import sampled_rollout

GROUP, TOKENS = 2, 5


def group(environment: str, task: int, samples: Sequence[int] = range(GROUP)) -> list[Rollout]:
    own: dict[str, Any] = {"environment": environment, "task_id": task, "sampled": TOKENS - 1}
    return [sampled_rollout(0.0, sample_index=sample, **own) for sample in samples]


def make_batch(step: int, *tasks: tuple[str, int]) -> Batch:
    rollouts = [rollout for environment, task in tasks for rollout in group(environment, task)]
    return Batch(step=step, policy_version=0, weights_digest="d" * 32, rollouts=rollouts)


def accepted(step: int, problems: int, **next_task: int) -> Accepted:
    positions = {name: EnvironmentPosition(number, GROUP) for name, number in next_task.items()}
    return Accepted(step, problems, problems * GROUP, problems * GROUP * TOKENS, positions)


BEFORE, AFTER = accepted(6, 10, a=7, b=3, gone=4), accepted(7, 13, a=9, b=4, gone=4)
GOOD = (("a", 7), ("b", 3), ("a", 8))


def with_open(accepted: Accepted, **open_tasks: tuple[int, ...]) -> Accepted:
    held = accepted.environments.items()
    positions = {name: msgspec.structs.replace(one, open=open_tasks.get(name, ())) for name, one in held}
    return msgspec.structs.replace(accepted, environments=positions)


def test_a_batch_may_leave_tasks_open_and_must_take_each_once() -> None:
    before, after = with_open(BEFORE, a=(5,)), with_open(AFTER, a=(8,))
    check_tasks(make_batch(7, ("a", 5), ("b", 3), ("a", 7)), before=before, after=after)
    with pytest.raises(TrainingError, match="'a' has tasks 5, 7 in turn.*holds 7, 8: 5 missing, 8 trained before"):
        check_tasks(make_batch(7, *GOOD), before=before, after=after)
    for again in (4, 9):  # trained before, and never drawn
        with pytest.raises(TrainingError, match=f"state says that {again} of environment 'a' are open"):
            check_tasks(make_batch(7, *GOOD), before=BEFORE, after=with_open(AFTER, a=(again,)))
    check_tasks(make_batch(7, *GOOD), before=BEFORE, after=AFTER)
    check_tasks(make_batch(1, ("new", 0)), before=Accepted(), after=accepted(1, 1, new=1))


@pytest.mark.parametrize(("tasks", "message"), [
    ((("a", 7), ("b", 3)), "'a' has tasks 7 to 8 in turn.*holds 7: 8 missing"),
    ((*GOOD, ("a", 9)), "holds 7, 8, 9: 9 trained before or too early"),
    ((("a", 6), ("a", 7), ("b", 3)), "holds 6, 7: 8 missing, 6 trained before or too early"),
    ((("a", 8), ("b", 3), ("a", 7)), "holds 8, 7: out of order"),
    ((("a", 7), ("a", 8)), "'b' has tasks 3 to 3 in turn.*holds none: 3 missing"),
    ((*GOOD, ("gone", 4)), "'gone' has no task in turn.*holds 4: 4 trained"),
    ((*GOOD, ("other", 0)), "'other' has no task in turn"),
    ((*GOOD, ("a", 8)), r"task 8 of environment 'a' has the samples \[0, 1, 0, 1\], expected 0 to 1 once each"),
])  # fmt: skip
def test_tasks_skipped_repeated_or_out_of_turn_are_refused(tasks: tuple[tuple[str, int], ...], message: str) -> None:
    with pytest.raises(TrainingError, match=f"batch 7: .*{message}.*Nothing of this batch is trained"):
        check_tasks(make_batch(7, *tasks), before=BEFORE, after=AFTER)


@pytest.mark.parametrize(("name", "held"), [("problems", 3), ("rollouts", 6), ("tokens", 30)])
def test_counts_must_fit_the_states(name: str, held: int) -> None:
    after = msgspec.structs.replace(AFTER, **{name: getattr(AFTER, name) + 1})
    with pytest.raises(TrainingError, match=f"holds {held} {name}, the orchestrator's states count {held + 1}"):
        check_tasks(make_batch(7, *GOOD), before=BEFORE, after=after)


def dropping(*tasks: tuple[str, int], reason: DropReason = "zero_signal") -> list[Dropped]:
    counts = {"rollouts": GROUP, "tokens": GROUP * TOKENS}
    return [Dropped(environment=name, task_id=task, reason=reason, **counts) for name, task in tasks]


def dropped_after(problems: int, dropped: int, **next_task: int) -> Accepted:
    """The state after batch 7, with `dropped` of its problems dropped."""
    counts = {"zero_signal": Counts(dropped, dropped * GROUP, dropped * GROUP * TOKENS)}
    return msgspec.structs.replace(accepted(7, problems, **next_task), dropped=counts)


def test_a_task_is_trained_or_dropped() -> None:
    batch, after = make_batch(7, ("a", 7), ("b", 3)), dropped_after(14, 2, a=9, b=5, gone=4)
    batch.dropped = dropping(("a", 8), ("b", 4))
    check_tasks(batch, before=BEFORE, after=after)
    assert after.batched == Counts(12, 12 * GROUP, 12 * GROUP * TOKENS)


@pytest.mark.parametrize(("dropped", "message"), [
    ((("a", 7), ("a", 8)), "'a' has tasks 7 to 8 in turn.*holds 7, 8 and drops 7, 8: 7, 8 more than once"),
    ((("b", 3),), "holds 3 and drops 3: 3 more than once"),
    ((("a", 9),), "holds 7, 8 and drops 9: 9 trained before or too early"),
    ((("other", 0),), r"'other' has no task.*holds none and drops 0"),
])  # fmt: skip
def test_a_task_that_is_trained_and_dropped_is_refused(dropped: tuple[tuple[str, int], ...], message: str) -> None:
    batch = make_batch(7, *GOOD)
    batch.dropped = dropping(*dropped)
    with pytest.raises(TrainingError, match=message):
        check_tasks(batch, before=BEFORE, after=AFTER)


def test_tasks_are_dropped_in_order_and_counted_by_their_reason() -> None:
    batch, after = make_batch(7, ("b", 3)), dropped_after(13, 2, a=9, b=4, gone=4)
    batch.dropped = dropping(("a", 8), ("a", 7))
    with pytest.raises(TrainingError, match="drops 8, 7: out of order"):
        check_tasks(batch, before=BEFORE, after=after)
    batch.dropped = [*dropping(("a", 7)), *dropping(("a", 8), reason="timeout")]
    with pytest.raises(TrainingError, match=r"drops \(timeout\) 1 problems, the orchestrator's states count 0"):
        check_tasks(batch, before=BEFORE, after=after)
    batch.dropped = dropping(("a", 7), ("a", 8))
    check_tasks(batch, before=BEFORE, after=after)
    with pytest.raises(TrainingError, match="holds 1 problems, the orchestrator's states count 3"):
        check_tasks(batch, before=BEFORE, after=AFTER)


def test_what_was_dropped_was_not_trained() -> None:
    state = dropped_after(13, 2)
    check_trained(state, Progress(7, 22, 110))
    with pytest.raises(TrainingError, match="made 22 rollouts up to this batch, and 26 were trained"):
        check_trained(state, Progress(7, 26, 130))


def test_what_was_trained_must_be_what_was_made() -> None:
    check_trained(accepted(7, 13), Progress(7, 26, 130))
    for progress, message in (
        (Progress(7, 24, 130), "step 7: the orchestrator made 26 rollouts up to this batch, and 24 were trained"),
        (Progress(7, 26, 131), "made 130 tokens up to this batch, and 131"),
        (Progress(8, 26, 130), "step 8: the orchestrator made 7 steps up to this batch, and 8"),
    ):
        with pytest.raises(TrainingError, match=f"{message}.*not saved"):
            check_trained(accepted(7, 13), progress)


def publish(run_dir: RunDir, step: int, *tasks: tuple[str, int], state: OrchestratorState) -> Batch:
    batch = make_batch(step, *tasks)
    state.step, state.problems = step, state.problems + len(tasks)
    state.rollouts += len(batch.rollouts)
    state.tokens += TOKENS * len(batch.rollouts)
    for environment, task in tasks:
        state.environments.setdefault(environment, EnvironmentState(group_size=GROUP)).next_task = task + 1
    publish_batch(run_dir, batch, state.encode())
    return batch


def test_the_ledger_follows_the_journal_from_a_start_and_from_a_checkpoint(tmp_path: Path) -> None:
    run_dir, state, progress = RunDir(tmp_path), OrchestratorState(), Progress()
    ledger = Ledger(run_dir, progress)
    ledger.attachments()  # a stop before the first step
    for step in (1, 2):
        batch = publish(run_dir, step, ("a", step - 1), ("b", step - 1), state=state)
        ledger.accept(batch)
        progress.advance(samples=len(batch.rollouts), tokens=TOKENS * len(batch.rollouts))
        saved = ledger.attachments()
    assert saved == {"orchestrator/orchestrator.json": (run_dir.batch(2) / "orchestrator.json").read_bytes()}
    directory = run_dir.checkpoint(2) / "orchestrator"
    directory.mkdir(parents=True)
    (directory / "orchestrator.json").write_bytes(saved["orchestrator/orchestrator.json"])
    run_dir.prune_batches(2)
    third, resumed = publish(run_dir, 3, ("a", 2), ("b", 2), state=state), Ledger(run_dir, progress)
    with pytest.raises(TrainingError, match=r"batch 3: environment 'a' has no task|batch 3: environment 'a' has tasks"):
        Ledger(run_dir, Progress()).accept(third)
    resumed.accept(third)
    with pytest.raises(TrainingError, match="step 2: the orchestrator made 3 steps"):
        resumed.attachments()  # accepted, not trained yet
    with pytest.raises(TrainingError, match="batch 3"):
        resumed.accept(third)


def test_a_state_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    path = tmp_path / "orchestrator.json"
    with pytest.raises(CheckpointError, match=f"{re.escape(str(path))} cannot be read"):
        read_accepted(path, step=1)
    path.write_bytes(b"{")
    with pytest.raises(CheckpointError, match="is damaged"):
        read_accepted(path, step=1)
    path.write_bytes(OrchestratorState(step=2).encode())
    with pytest.raises(CheckpointError, match="state after step 2, expected step 1"):
        read_accepted(path, step=1)


def test_each_environment_has_groups_of_its_own_size() -> None:
    batch = make_batch(7, ("a", 7), ("a", 8))
    batch.rollouts += group("b", 3, range(3))
    held = len(batch.rollouts)
    positions = {"a": EnvironmentPosition(7, 5), "b": EnvironmentPosition(3, 2)}
    before = msgspec.structs.replace(BEFORE, environments=positions)
    after = msgspec.structs.replace(
        accepted(7, 13), rollouts=20 + held, tokens=(20 + held) * TOKENS,
        environments={"a": EnvironmentPosition(9, GROUP), "b": EnvironmentPosition(4, 3)},
    )  # fmt: skip
    check_tasks(batch, before=before, after=after)
    with pytest.raises(TrainingError, match=r"task 3 of environment 'b' has the samples \[0, 1, 2\], expected 0 to 1"):
        check_tasks(batch, before=before, after=msgspec.structs.replace(
            after, environments=after.environments | {"b": EnvironmentPosition(4, 2)}))  # fmt: skip


@pytest.mark.parametrize(("keep", "checkpoints", "first"), [
    (0, [4, 8], 5), (5, [4, 8], 4), (20, [4, 8], 1), ("all", [8], 1), (0, [8], 9), (2, [8], 7), (0, [], 1),
])  # fmt: skip
def test_batches_stay_for_checkpoints_and_users(tmp_path: Path, keep: Any, checkpoints: list[int], first: int) -> None:
    run_dir = RunDir(tmp_path)
    for step in range(1, 9):
        run_dir.batch(step).mkdir(parents=True)
    for step in checkpoints:
        run_dir.checkpoint(step).mkdir(parents=True)
        commit(run_dir.checkpoint(step), "checkpoint", step)
    progress, main = SimpleNamespace(step=8), SimpleNamespace(is_main=True)
    session: Any = SimpleNamespace(run_dir=run_dir, mesh=main, progress=progress)
    assert _prune_batches(session, JournalConfig(keep=keep)) == checkpoints
    assert run_dir.published_batches() == list(range(first, 9))
