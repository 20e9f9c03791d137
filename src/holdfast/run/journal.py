"""The journal of batches: transport from the orchestrator to the trainer, and write-ahead log.

`rollouts/step_N/` holds `batch.msgpack`, `orchestrator.json` (the orchestrator's state after
producing the batch) and `manifest.json`. It appears by one rename, when everything is durable, so
when the trainer can see batch N the orchestrator's state N exists already. The trainer adds
`trained.json`, which no process depends on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from holdfast.errors import CheckpointError, ReadError
from holdfast.process.heartbeat import Wait
from holdfast.protocol.rollouts import Batch, Dropped, decode_batch, encode_batch
from holdfast.run import atomic, checked
from holdfast.run.manifest import FileEntry, Manifest, describe, verify, write_manifest
from holdfast.run.run_dir import RunDir

BATCH_NAME = "batch.msgpack"
STATE_NAME = "orchestrator.json"
TRAINED_NAME = "trained.json"
POLL_S = 0.005


def publish_batch(run_dir: RunDir, batch: Batch, state: bytes) -> Path:
    """Make `batch` and the orchestrator's `state` after it durable, then visible; return its directory."""
    final = run_dir.batch(batch.step)
    atomic.make_directory(final.parent)
    temporary = atomic.temporary_sibling(final)
    temporary.mkdir()
    files: dict[str, FileEntry] = {}
    for name, data in ((BATCH_NAME, encode_batch(batch)), (STATE_NAME, state)):
        (temporary / name).write_bytes(data)
        files[name] = describe(data)
    listing = Manifest(
        kind="batch",
        step=batch.step,
        policy_version=batch.policy_version,
        weights_digest=batch.weights_digest,
        files=files,
    )
    write_manifest(temporary, listing)
    atomic.publish_directory(temporary, final)
    return final


def read_batch(run_dir: RunDir, step: int) -> Batch:
    """Return the published batch of `step`, verified against its manifest. Raise CheckpointError if it is missing,
    damaged, or not the batch of `step`; ReadError if it cannot be read."""
    return read_batch_in(run_dir.batch(step), step=step)


def read_batch_in(directory: Path, *, step: int) -> Batch:
    """Return the batch of `step` in `directory`, wherever it was put; see `read_batch`."""
    verify(directory)
    try:
        batch = decode_batch((directory / BATCH_NAME).read_bytes())
    except ValueError as error:  # msgspec's errors are ValueErrors too
        raise CheckpointError(f"{directory / BATCH_NAME} cannot be read: {error}") from None
    if batch.step != step:
        raise CheckpointError(f"{directory / BATCH_NAME} is batch {batch.step}, expected batch {step}")
    return batch


class TrainedRewards(msgspec.Struct, frozen=True):
    """The numbers that the trainer computed for a batch, a value per rollout in the order of the batch.

    Attributes:
        rewards: after the reward model and shaping.
        advantages: the mean over the trained tokens; None for a rollout without trained tokens.
    """

    rewards: list[float]
    advantages: list[float | None]


def note_trained(run_dir: RunDir, step: int, trained: TrainedRewards) -> None:
    """Put the numbers of the trainer beside the batch of `step`. A repeated step replaces them by the same numbers."""
    final = run_dir.batch(step) / TRAINED_NAME
    # Beside the batches: the next start clears there what a killed process leaves.
    temporary = atomic.temporary_sibling(final.parent)
    try:
        temporary.write_bytes(checked.encode(msgspec.to_builtins(trained)))
        with suppress(FileNotFoundError):  # the batch was set aside, or a start cleared the temporary file
            atomic.fsync_file(temporary)
            os.rename(temporary, final)
            atomic.fsync_directory(final.parent)
    finally:
        temporary.unlink(missing_ok=True)


def read_trained(directory: Path) -> TrainedRewards | None:
    """Return the numbers of the trainer beside a batch; None if the batch is not trained yet. Raise CheckpointError if
    they are damaged; ReadError if they cannot be read."""
    path = directory / TRAINED_NAME
    try:
        return msgspec.convert(checked.decode(path.read_bytes()), TrainedRewards)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ReadError.of(path, error) from error
    except ValueError as error:  # msgspec's errors are ValueErrors too
        raise CheckpointError(f"{path} is damaged: {error}") from None


class EnvironmentPosition(msgspec.Struct, frozen=True):
    """Position in one environment.

    Attributes:
        next_task: the task that comes next.
        group_size: how many rollouts a problem of the batch had.
        open: earlier tasks that are in no batch yet.
    """

    next_task: int = 0
    group_size: int = 0
    open: tuple[int, ...] = ()


class Counts(msgspec.Struct, frozen=True):
    """How many problems, rollouts of them, and tokens of those, prompts included."""

    problems: int = 0
    rollouts: int = 0
    tokens: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.problems + other.problems, self.rollouts + other.rollouts, self.tokens + other.tokens)

    def __sub__(self, other: Counts) -> Counts:
        return Counts(self.problems - other.problems, self.rollouts - other.rollouts, self.tokens - other.tokens)


def dropped_by_reason(dropped: Iterable[Dropped]) -> dict[str, Counts]:
    """Return the totals of dropped tasks by reason, in the order in which the reasons occur."""
    totals: dict[str, Counts] = {}
    for one in dropped:
        totals[one.reason] = totals.get(one.reason, Counts()) + Counts(1, one.rollouts, one.tokens)
    return totals


class Accepted(msgspec.Struct, frozen=True):
    """The public part of the orchestrator's state after batch `step`: counts since the start of the run.

    Attributes:
        step: the batch that was made last; 0 before the first.
        problems: problems drawn so far, in batches or dropped.
        rollouts: their rollouts.
        tokens: tokens of those, prompts included.
        environments: position in every environment, by name.
        dropped: what of problems, rollouts and tokens is in no batch, by reason.
    """

    step: int = 0
    problems: int = 0
    rollouts: int = 0
    tokens: int = 0
    environments: dict[str, EnvironmentPosition] = {}
    dropped: dict[str, Counts] = {}

    @property
    def drawn(self) -> Counts:
        """All that was drawn."""
        return Counts(self.problems, self.rollouts, self.tokens)

    @property
    def batched(self) -> Counts:
        """Content of the batches: drawn less dropped."""
        return self.drawn - sum(self.dropped.values(), Counts())

    def next_task(self, environment: str) -> int:
        """The task of `environment` that comes next; 0 where none was made."""
        return self.environments.get(environment, EnvironmentPosition()).next_task

    def open(self, environment: str) -> tuple[int, ...]:
        """The tasks of `environment` that are drawn and in no batch yet."""
        return self.environments.get(environment, EnvironmentPosition()).open

    def group_size(self, environment: str) -> int:
        """How many rollouts a problem of `environment` has in the last batch; 0 where none was made."""
        return self.environments.get(environment, EnvironmentPosition()).group_size


def read_accepted(path: Path, *, step: int) -> Accepted:
    """Return the counts in the orchestrator's state at `path`; see `read_state`."""
    return read_state(path, step=step)[0]


def read_state(path: Path, *, step: int) -> tuple[Accepted, bytes]:
    """Return counts and bytes of the orchestrator's state at `path`, which must be the one after batch `step`. Raise
    CheckpointError if it is missing, damaged, or of another step; ReadError if it cannot be read."""
    try:
        data = path.read_bytes()
        accepted = msgspec.json.decode(data, type=Accepted)
    except FileNotFoundError:
        raise CheckpointError(f"{path} cannot be read: it is missing") from None
    except OSError as error:
        raise ReadError.of(path, error) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if accepted.step != step:
        raise CheckpointError(f"{path} is the state after step {accepted.step}, expected step {step}")
    return accepted, data


def wait_for(
    path: Path, *, timeout_s: float, check: Callable[[], None] | None = None, unless: Callable[[], object] | None = None
) -> bool:
    """Wait until `path` exists; return whether it came before nothing else happened for `timeout_s` seconds. `check` is
    called at each round and may raise; the wait ends early when `unless` returns something true."""
    wait = Wait(timeout_s)
    while not atomic.is_visible(path):
        if check is not None:
            check()
        if wait.is_over() or (unless is not None and unless()):
            return False
        time.sleep(POLL_S)  # no notification crosses machines on a shared filesystem
    return True
