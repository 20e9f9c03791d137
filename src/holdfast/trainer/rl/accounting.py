"""The ledger of an RL run: every accepted rollout is trained once, pending in the journal, or dropped by name.

The orchestrator's state N (`rollouts/step_N/orchestrator.json`) counts everything up to batch N, and counts dropped
items by reason. The equation

    accepted = trained + pending + dropped

holds under two conditions. Every batch holds, or names as dropped, exactly the items between state N - 1 and state N.
And when the trainer saves step N, it has trained exactly what state N counts, less the dropped items. The pending items
are then the batches after N.

`check_provenance` checks that a batch was sampled by the weights that this trainer published, by digest and not only by
version number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.errors import TrainingError
from holdfast.process.events import report
from holdfast.protocol.rollouts import Batch, Rollout
from holdfast.run.checkpoints import ORCHESTRATOR_DIR
from holdfast.run.journal import STATE_NAME, Accepted, Counts, dropped_by_reason, read_state
from holdfast.run.manifest import is_committed, read_manifest
from holdfast.run.run_dir import RunDir
from holdfast.run.weights import listed_digest

if TYPE_CHECKING:
    from holdfast.trainer.state import Progress


class Ledger:
    """Follows the orchestrator's states from batch to batch. Reads a small file a step; every rank has one. `progress`:
    the trainer's counters, of the step from which it continues."""

    def __init__(self, run_dir: RunDir, progress: Progress) -> None:
        self._run_dir = run_dir
        self._progress = progress
        self._accepted, self._state = Accepted(), b""
        if progress.step > 0:
            path = run_dir.checkpoint(progress.step) / ORCHESTRATOR_DIR / STATE_NAME
            self._accepted, self._state = read_state(path, step=progress.step)

    def accept(self, batch: Batch) -> None:
        """Check that `batch` is what the orchestrator's state says comes next; call it before training. Raise
        TrainingError if tasks are missing, come again, or are out of order; CheckpointError if the state cannot be
        read."""
        accepted, state = read_state(self._run_dir.batch(batch.step) / STATE_NAME, step=batch.step)
        check_tasks(batch, before=self._accepted, after=accepted)
        self._accepted, self._state = accepted, state

    def attachments(self) -> dict[str, bytes]:
        """Return the orchestrator's state to save with the current step. Raise TrainingError if it does not count what
        was trained; nothing may be saved then."""
        check_trained(self._accepted, self._progress)
        return {f"{ORCHESTRATOR_DIR}/{STATE_NAME}": self._state}


def check_trained(accepted: Accepted, progress: Progress) -> None:
    """Check that the orchestrator counts up to a step what the trainer has trained up to it. Raise TrainingError that
    names the step and both numbers."""
    counts = {
        "steps": (accepted.step, progress.step),
        "rollouts": (accepted.batched.rollouts, progress.samples),
        "tokens": (accepted.batched.tokens, progress.tokens),
    }
    for name, (made, trained) in counts.items():
        if made != trained:
            raise TrainingError(
                f"step {progress.step}: the orchestrator made {made} {name} up to this batch, and {trained} were "
                "trained. They must be equal, so this step is not saved. Resume from the last checkpoint, and keep "
                "what lies in rollouts/ and logs/: this is a fault of the program."
            )


def check_tasks(batch: Batch, *, before: Accepted, after: Accepted) -> None:
    """Check that a batch holds or drops exactly the tasks between two states of the orchestrator.

    A task is there once: as a whole group, as large as the state after it says, or as dropped with its reason. Raise
    TrainingError that names step, environment and task."""
    groups: dict[str, dict[int, list[Rollout]]] = {}
    for rollout in batch.rollouts:
        groups.setdefault(rollout.environment, {}).setdefault(rollout.task_id, []).append(rollout)
    left_out: dict[str, list[int]] = {}
    for one in batch.dropped:
        left_out.setdefault(one.environment, []).append(one.task_id)
    for name in sorted(groups.keys() | left_out.keys() | before.environments.keys() | after.environments.keys()):
        drawn = [*before.open(name), *range(before.next_task(name), after.next_task(name))]
        _check_open(batch.step, name, after.open(name), drawn)
        expected = sorted(set(drawn) - set(after.open(name)))
        _check_environment(batch.step, name, list(groups.get(name, {})), left_out.get(name, []), expected)
    for name, tasks in groups.items():
        group_size = after.group_size(name)
        for task, group in tasks.items():
            samples = [rollout.sample_index for rollout in group]
            if samples != list(range(group_size)):
                raise TrainingError(
                    f"batch {batch.step}: task {task} of environment '{name}' has the samples {samples}, expected "
                    f"0 to {group_size - 1} once each. Nothing of this batch is trained."
                )
    num_tokens = sum(len(rollout.token_ids) for rollout in batch.rollouts)
    held = Counts(sum(map(len, groups.values())), len(batch.rollouts), num_tokens)
    _check_counts(batch.step, "holds", held, after.batched - before.batched)
    dropped = dropped_by_reason(batch.dropped)
    for reason in sorted(dropped.keys() | before.dropped.keys() | after.dropped.keys()):
        counted = after.dropped.get(reason, Counts()) - before.dropped.get(reason, Counts())
        _check_counts(batch.step, f"drops ({reason})", dropped.get(reason, Counts()), counted)


def _check_open(step: int, name: str, is_open: Sequence[int], drawn: Sequence[int]) -> None:
    """Check that tasks that stay open were drawn, and are in no earlier batch."""
    if surplus := sorted(set(is_open) - set(drawn)):
        raise TrainingError(
            f"batch {step}: the orchestrator's state says that {_listed(surplus)} of environment '{name}' are open, "
            "which were trained before, or were never drawn. Nothing of this batch is trained."
        )


def _check_environment(step: int, name: str, tasks: list[int], dropped: list[int], expected: list[int]) -> None:
    """Check that `tasks` and `dropped` together are `expected`, both in order and nothing twice."""
    if tasks == sorted(tasks) and dropped == sorted(dropped) and sorted(tasks + dropped) == expected:
        return
    found = Counter(tasks + dropped)
    missing, surplus = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    doubled = sorted(task for task, number in found.items() if number > 1)
    faults = {"missing": missing, "trained before or too early": surplus, "more than once": doubled}
    reasons = [f"{_listed(numbers)} {fault}" for fault, numbers in faults.items() if numbers]
    span = f"tasks {_listed(expected)}" if expected else "no task"
    if expected and expected == list(range(expected[0], expected[-1] + 1)):
        span = f"tasks {expected[0]} to {expected[-1]}"
    drops = f" and drops {_listed(dropped)}" if dropped else ""
    raise TrainingError(
        f"batch {step}: environment '{name}' has {span} in turn by the orchestrator's states, and the batch "
        f"holds {_listed(tasks)}{drops}: {', '.join(reasons) or 'out of order'}. Nothing of this batch is trained."
    )


def _check_counts(step: int, account: str, held: Counts, counted: Counts) -> None:
    for name in held.__struct_fields__:
        if getattr(held, name) != getattr(counted, name):
            raise TrainingError(
                f"batch {step} {account} {getattr(held, name)} {name}, the orchestrator's states count "
                f"{getattr(counted, name)} for it. Nothing of this batch is trained."
            )


def _listed(numbers: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(map(str, numbers[:most]))
    return (f"{shown}, … ({len(numbers)})" if len(numbers) > most else shown) or "none"


def check_provenance(run_dir: RunDir, batch: Batch) -> bool:
    """Return whether `batch` was sampled by the published weights of its versions; print a warning if not.

    A trainer that resumes from a checkpoint makes the versions after it again, and trains on batches that the versions
    before the restart sampled. If a machine repeats its bits, these are the same weights. If not, the batch is as stale
    as the two differ, though their number is the same. Weights that are not published any more are not compared, nor is
    a batch that a teacher sampled. Reads a small file for each version."""
    for version, digest in {**batch.older_digests, batch.policy_version: batch.weights_digest}.items():
        path = run_dir.weights_of(version)
        if not digest or not is_committed(path):
            continue
        published = listed_digest(read_manifest(path), path)
        if published != digest:
            report(
                f"WARNING: batch {batch.step} was sampled by other weights than version {version} has now: digest "
                f"{digest}, published is {published}. This machine did not repeat the bits of the steps that it "
                "trained again; the batch is trained all the same, with the log-probabilities of what sampled it",
                step=batch.step,
            )
            return False
    return True
