"""`rollouts.jsonl`: every rollout of an evaluation, one JSON object a line, appended a task at a time.

A task's lines are written in one piece and synced before the task counts as done; the next start cuts off what a killed
process left of a task. Each line begins with a checksum of the rest: only a task with a damaged line is played again.
`evaluation.json` says what was evaluated, so rollouts of other policies or tasks never get into the same file.
"""

import asyncio
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from holdfast.errors import ConfigError, DataError, RunDirError
from holdfast.run import atomic, checked
from holdfast.run.settings import flat_settings, without_secrets

_log = logging.getLogger("evaluation")

ROLLOUTS_NAME = "rollouts.jsonl"
IDENTITY_NAME = "evaluation.json"
FORMAT = 2


class Turn(msgspec.Struct, frozen=True):
    """A stretch of a session: its text with special tokens, and whether the policy sampled it."""

    sampled: bool
    text: str


class EvaluatedRollout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line.

    Attributes:
        task: index of the task among the held-out ones.
        sample: of the task, from 0.
        prompt: xxh3-128 of the prompt's token ids, in hexadecimal.
        solved: None if the environment does not say.
        truncated: a token limit ended it.
        metrics: further numbers of the environment.
        dropped: why the task has no rollouts; then this is the only line of its task.
        detail: the environment's message then.
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
_CHECKED = re.compile(rb'\{"check":"([0-9a-f]{16})",(.*)\}', re.DOTALL)


def line_of(rollout: EvaluatedRollout) -> bytes:
    """Return the line of a rollout: its fields after the xxh3-64 of their JSON."""
    body = msgspec.json.encode(rollout)
    return b'{"check":"%s",%s\n' % (xxhash.xxh3_64_hexdigest(body).encode(), body[1:])


def _rollout_of(line: bytes) -> EvaluatedRollout:
    """Return the rollout of a line. Raises ValueError if it is damaged."""
    match = _CHECKED.fullmatch(line)
    if match is None:
        raise ValueError("it does not begin with its checksum")
    body = b"{" + match[2] + b"}"
    if xxhash.xxh3_64_hexdigest(body).encode() != match[1]:
        raise ValueError("its checksum is another one")
    return _decode(body)


# Rollouts of whole tasks, by environment and index.
Tasks = dict[tuple[str, int], list[EvaluatedRollout]]


class ResultsFile:
    """The rollouts of one evaluation, on disk and in memory (`tasks`).

    Raises ConfigError if the directory holds another evaluation; DataError if a line is of another file; RunDirError if
    it cannot be written."""

    def __init__(self, directory: Path, identity: dict[str, object], *, samples_per_task: int) -> None:
        self.path = directory / ROLLOUTS_NAME
        claim_directory(directory, identity)
        try:
            self.tasks = self._load(samples_per_task)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            self._end = os.fstat(self._descriptor).st_size
            atomic.fsync_directory(directory)
        except OSError as error:
            raise self._unwritable(error) from error

    async def append(self, rollouts: Sequence[EvaluatedRollout]) -> None:
        """Keep all lines of one task, durably. Raises RunDirError; then none of them is in the file."""
        data = b"".join(map(line_of, rollouts))
        try:
            self._write(data)
            await asyncio.to_thread(os.fdatasync, self._descriptor)
        except OSError as error:
            raise self._unwritable(error) from error
        self.tasks[rollouts[0].environment, rollouts[0].task] = list(rollouts)

    def _write(self, data: bytes) -> None:
        try:
            atomic.write_all(self._descriptor, data)
        except OSError:
            # A full disk may have room for the shorter lines of another task.
            os.ftruncate(self._descriptor, self._end)
            raise
        self._end += len(data)

    def close(self) -> None:
        os.close(self._descriptor)

    def _load(self, samples_per_task: int) -> Tasks:
        """Return the whole tasks of the file, and remove everything else."""
        if not self.path.exists():
            return {}
        tasks, damaged = read_tasks(self.path, samples_per_task=samples_per_task)
        for told in damaged:
            _log.warning("%s: its task is played again", told)
        data = b"".join(line_of(rollout) for group in tasks.values() for rollout in group)
        if damaged or len(data) != self.path.stat().st_size:
            atomic.write_file(self.path, data)
        return tasks

    def _unwritable(self, error: OSError) -> RunDirError:
        return RunDirError(
            f"{self.path} cannot be written: {error.strerror or error}. Mend that and give the same command again: it "
            "continues after the finished tasks."
        )


def claim_directory(directory: Path, identity: dict[str, object]) -> None:
    """Note in `directory` what is evaluated there.

    Raises ConfigError that names the differences if it holds another evaluation; DataError if it is not known which."""
    path = directory / IDENTITY_NAME
    wanted = msgspec.json.decode(msgspec.json.encode({"format": FORMAT, **identity}))
    if not path.exists():
        if (directory / ROLLOUTS_NAME).exists():
            raise DataError(
                f"{directory} holds {ROLLOUTS_NAME} of an unknown evaluation: {IDENTITY_NAME} is missing. "
                "Bring it back, choose another directory with --output-dir, or remove what is there with --clean."
            )
        atomic.write_file(path, checked.encode(wanted))
        return
    found = read_identity(directory)
    if found != wanted:
        differing = "; ".join(f"{key}: {there} there, {here} here" for key, there, here in differences(found, wanted))
        raise ConfigError(
            f"{directory} holds another evaluation ({differing:.600}). Choose another directory with --output-dir, or "
            "remove what is there with --clean."
        )


def read_identity(directory: Path) -> dict[str, Any]:
    """Return what is evaluated in `directory`. Raises DataError if there is nothing, or it is damaged."""
    path = directory / IDENTITY_NAME
    try:
        found = checked.decode(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{directory} holds no evaluation: it has no {IDENTITY_NAME}. `evaluate` makes one.") from None
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}") from None
    if found.get("format") != FORMAT:
        raise DataError(f"{path} has format {found.get('format')}; this version reads format {FORMAT}")
    return found


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return what differs between two identities: the dotted key, and both values as text."""
    # Empty tables do not count: their settings are compared one by one.
    old, new = ({key: value for key, value in flat_settings(table).items() if value != {}} for table in (one, other))
    keys = [key for key in old | new if old.get(key) != new.get(key)]
    old, new = without_secrets(old), without_secrets(new)
    return [(key, _shown(old.get(key)), _shown(new.get(key))) for key in keys]


def _shown(value: Any) -> str:
    return "unset" if value is None else json.dumps(value, ensure_ascii=False)


def read_tasks(path: Path, *, samples_per_task: int) -> tuple[Tasks, list[str]]:
    """Return the whole tasks of a file, and a message per damaged line.

    Raises DataError that names a line of another file, or of a repeated task."""
    tasks: Tasks = {}
    damaged: list[str] = []
    group: list[EvaluatedRollout] = []
    is_lost = False  # the first lines of the current task are damaged
    # Not `splitlines`, which takes some damaged bytes for line breaks. The last part has no line break: it was cut off.
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            rollout = _rollout_of(line)
        except ValueError as error:
            damaged.append(f"{path}, line {number}, is damaged: {error}")
            group, is_lost = [], True
            continue
        if is_lost and rollout.sample:
            continue
        is_lost = False
        key = (rollout.environment, rollout.task)
        is_next = rollout.sample == len(group) and (not group or key == (group[0].environment, group[0].task))
        if key in tasks or not is_next:
            raise DataError(
                f"{path}, line {number}: sample {rollout.sample} of task {rollout.task} of '{rollout.environment}' is "
                "not what follows there. Restore the file, or start again with --clean."
            )
        group.append(rollout)
        if rollout.dropped or len(group) == samples_per_task:
            tasks[key], group = group, []
    return tasks, damaged
