"""`rollouts.jsonl`: every rollout of an evaluation, one JSON object a line, appended a task at a time.

A task's lines are written in one piece and synced before the task counts as done. What a killed process has left of
the last piece is cut off at the next start; whole tasks are never played again. `evaluation.json` beside it says what
was evaluated: rollouts of another policy, or of other tasks, never get into the same file.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from holdfast.errors import ConfigError, DataError, RunDirError
from holdfast.run import atomic

ROLLOUTS_NAME = "rollouts.jsonl"
IDENTITY_NAME = "evaluation.json"
FORMAT = 1


class Turn(msgspec.Struct, frozen=True):
    """A stretch of a session.

    Attributes:
        sampled: the policy said it.
        text: with special tokens.
    """

    sampled: bool
    text: str


class EvaluatedRollout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line.

    Attributes:
        environment: its name.
        task: index of the task among the held-out ones.
        sample: of the task, from 0.
        prompt: xxh3-128 of the prompt's token ids, in hexadecimal: two evaluations asked the same if it is
            equal.
        reward: of the whole.
        solved: whether the environment says so; None where it says nothing about that.
        truncated: a token limit ended it.
        sampled_tokens: how many.
        metrics: further numbers of the environment.
        turns: the session.
        dropped: why the task has no rollouts; then this line is the only one of its task.
        detail: what the environment said then.
    """

    environment: str
    task: int
    sample: int = 0
    prompt: str = ""
    reward: float = 0.0
    solved: bool | None = None
    truncated: bool = False
    sampled_tokens: int = 0
    metrics: dict[str, float] = {}
    turns: list[Turn] = []
    dropped: str = ""
    detail: str = ""


_decode = msgspec.json.Decoder(EvaluatedRollout).decode


class ResultsFile:
    """The rollouts of one evaluation, on disk and in memory.

    Attributes:
        tasks: what is done, by environment and index.

    Args:
        directory: of the evaluation.
        identity: of policy and tasks.
        samples_per_task: lines of a whole task.

    Raises:
        ConfigError: the directory holds another evaluation.
        DataError: a line is damaged.
        RunDirError: it cannot be written.
    """

    def __init__(self, directory: Path, identity: dict[str, object], *, samples_per_task: int) -> None:
        self.path = directory / ROLLOUTS_NAME
        self.tasks: dict[tuple[str, int], list[EvaluatedRollout]] = {}
        self._samples_per_task = samples_per_task
        claim_directory(directory, identity)
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            self._end = self._load()
            os.ftruncate(self._descriptor, self._end)
            atomic.fsync_directory(directory)
        except OSError as error:
            raise self._unwritable(error) from error

    async def append(self, rollouts: Sequence[EvaluatedRollout]) -> None:
        """Keep all lines of one task, durably.

        Raises:
            RunDirError: they cannot be written; then nothing of them is in the file.
        """
        data = b"".join(msgspec.json.encode(rollout) + b"\n" for rollout in rollouts)
        try:
            self._write(data)
            await asyncio.to_thread(os.fdatasync, self._descriptor)
        except OSError as error:
            raise self._unwritable(error) from error
        self.tasks[rollouts[0].environment, rollouts[0].task] = list(rollouts)

    def _write(self, data: bytes) -> None:
        """Append in one piece, without an await in which others could."""
        try:
            atomic.write_all(self._descriptor, data)
        except OSError:
            # Of a full disk: another task may be just behind, for whose fewer bytes there is room.
            os.ftruncate(self._descriptor, self._end)
            raise
        self._end += len(data)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _load(self) -> int:
        """Index the whole tasks of the file; return where they end."""
        tasks, end = read_tasks(self.path, samples_per_task=self._samples_per_task)
        self.tasks |= tasks
        return end

    def _unwritable(self, error: OSError) -> RunDirError:
        return RunDirError(
            f"{self.path} cannot be written: {error.strerror or error}. Mend that and give the same command again: it "
            "goes on behind the tasks that are done."
        )


def claim_directory(directory: Path, identity: dict[str, object]) -> None:
    """Say in `directory` what is evaluated there.

    Raises:
        ConfigError: it holds another evaluation; says in what that differs.
    """
    path = directory / IDENTITY_NAME
    wanted = msgspec.json.decode(msgspec.json.encode({"format": FORMAT, **identity}))
    if not path.exists():
        atomic.write_file(path, msgspec.json.format(msgspec.json.encode(wanted), indent=1))
        return
    found = read_identity(directory)
    if found != wanted:
        differing = "; ".join(
            f"{key}: {found.get(key)} there, {wanted.get(key)} here" for key in _differing(found, wanted)
        )
        raise ConfigError(
            f"{directory} holds another evaluation ({differing:.600}). Choose another directory with --output-dir, or "
            "remove what is there with --clean."
        )


def read_identity(directory: Path) -> dict[str, Any]:
    """Return what is evaluated in `directory`.

    Raises:
        DataError: it holds no evaluation, or one that cannot be read.
    """
    path = directory / IDENTITY_NAME
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict)
    except FileNotFoundError:
        raise DataError(f"{directory} holds no evaluation: it has no {IDENTITY_NAME}. `evaluate` makes one.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is damaged: {error}") from None
    if found.get("format") != FORMAT:
        raise DataError(f"{path} has format {found.get('format')}; this version reads format {FORMAT}")
    return found


def _differing(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    return [key for key in {**found, **wanted} if found.get(key) != wanted.get(key)]


def read_tasks(path: Path, *, samples_per_task: int) -> tuple[dict[tuple[str, int], list[EvaluatedRollout]], int]:
    """Return the whole tasks of a file, and how many bytes they are: what follows is a task that was cut off.

    Raises:
        DataError: naming the line that is none of ours, or is of a task that is there twice.
    """
    tasks: dict[tuple[str, int], list[EvaluatedRollout]] = {}
    group: list[EvaluatedRollout] = []
    position = end = 0
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            break
        position += len(line)
        try:
            rollout = _decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DataError(
                f"{path}, line {number}, is damaged: {error}. Restore it, or begin anew with --clean."
            ) from None
        key = (rollout.environment, rollout.task)
        if key in tasks or rollout.sample != len(group) or (group and key != (group[0].environment, group[0].task)):
            raise DataError(
                f"{path}, line {number}: sample {rollout.sample} of task {rollout.task} of '{rollout.environment}' is "
                "not what follows there. Restore the file, or begin anew with --clean."
            )
        group.append(rollout)
        if rollout.dropped or len(group) == samples_per_task:
            tasks[key], group, end = group, [], position
    return tasks, end
