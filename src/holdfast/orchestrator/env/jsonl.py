"""Environment `jsonl`: prompts and right answers from a JSON-lines file, with a choice of scorers (reward 0 to 1)."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from holdfast.chat.messages import as_dict
from holdfast.chat.template import ChatMessage
from holdfast.config.environments import JudgeConfig
from holdfast.errors import ConfigError, DataError, nearest, shown
from holdfast.orchestrator.env.guard import result_of
from holdfast.orchestrator.env.interface import Environment, Message, Score, Session, Task, TaskSeed, as_messages
from holdfast.orchestrator.env.judge import Judge
from holdfast.orchestrator.env.math_answers import MathAnswers
from holdfast.process.imports import load_function

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?|[-+]?\.\d+")

Scorer = Callable[[str, str], float]


def lcs_length(first: str, second: str) -> int:
    """Return the length of the longest common subsequence.

    Bit-parallel, one row of the dynamic program per big-integer operation (Hyyrö 2004, "Bit-parallel LCS-length
    computation revisited", eq. 4): bit i of `row` is 0 if position i of `first` adds one to the length.
    """
    if not first or not second:
        return 0
    positions: dict[str, int] = {}
    for index, character in enumerate(first):
        positions[character] = positions.get(character, 0) | 1 << index
    full = (1 << len(first)) - 1
    row = full
    for character in second:
        matches = row & positions.get(character, 0)
        row = ((row + matches) | (row - matches)) & full
    return len(first) - row.bit_count()


def lcs(completion: str, answer: str) -> float:
    """Return the longest common subsequence as a share of the longer text; 1 for equal texts."""
    longer = max(len(completion), len(answer))
    return lcs_length(completion, answer) / longer if longer else 1.0


def exact(completion: str, answer: str) -> float:
    """Return whether both are equal up to surrounding white space."""
    return float(completion.strip() == answer.strip())


def contains(completion: str, answer: str) -> float:
    """Return whether the answer occurs in the completion."""
    return float(answer.strip() in completion)


def number(completion: str, answer: str) -> float:
    """Return whether the last number in the completion equals the last in the answer."""
    given, right = _last_number(completion), _last_number(answer)
    return float(given is not None and given == right)


def _last_number(text: str) -> float | Decimal | None:
    """Return the last number, an integer exactly: as floats, integers above 2**53 would equal their neighbours."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    digits = found[-1].replace(",", "")
    whole, _, fraction = digits.lstrip("+-").partition(".")
    return Decimal(digits) if whole.isdecimal() and not fraction.strip("0") else float(digits)


def regex_scorer(pattern: str) -> Scorer:
    """Return a scorer that compares the last match of `pattern` (its first group, if any) with the answer."""
    compiled = re.compile(pattern, re.DOTALL)

    def score(completion: str, answer: str) -> float:
        matches = list(compiled.finditer(completion))
        if not matches:
            return 0.0
        found = matches[-1][1] if compiled.groups else matches[-1][0]
        return exact(found or "", answer)

    return score


SCORERS: dict[str, Scorer] = {"exact": exact, "contains": contains, "lcs": lcs, "number": number}


@dataclass(frozen=True)
class Question(Task):
    """A row of the file, with the fields that a judge sees, by their names in its prompt."""

    fields: Mapping[str, str] = field(default_factory=dict)


class Jsonl(Environment):
    """Single-turn questions; every row is used once per epoch, in a new order each time."""

    def __init__(
        self,
        path: Path,
        prompt: str = "prompt",
        answer: str = "answer",
        scorer: str = "exact",
        pattern: str | None = None,
        shuffle: bool = True,
        judge: JudgeConfig | None = None,
    ) -> None:
        """Read the whole file.

        Args:
            path: the file, one JSON object per line.
            prompt: column of the question: text, or a list of {role, content}.
            answer: column of the right answer, text or a number; not needed for a judge whose prompt does not name it.
            scorer: `exact`, `contains`, `lcs`, `number`, `regex`, `math_verify`, `judge`, or `module:function` for one
                of your own, from completion and right answer to a number.
            pattern: with `regex`: what to find; the last match (its first group) is compared.
            shuffle: a new order every epoch, from the run's seed; off: file order.
            judge: with `judge`: whom to ask. Its prompt may name `{completion}`, `{prompt}`, `{answer}` and columns.
        """
        if (judge is not None) != (scorer == "judge"):
            given = "a judge" if judge is not None else "no judge"
            raise ConfigError(f"jsonl: `judge` belongs to scorer 'judge'; got scorer '{scorer}' and {given}")
        self._judge = Judge(judge) if judge is not None else None
        if self._judge is not None and "completion" not in self._judge.fields:
            raise ConfigError("jsonl: judge.prompt has no {completion}: the judge would not see what it is to score")
        self._score = _find_scorer(scorer, pattern)
        self._scorer_name = scorer.partition(":")[2] or scorer
        self._tasks = _read_tasks(path, prompt, answer, self._judge.fields if self._judge is not None else None)
        self.num_tasks = len(self._tasks)
        self._shuffle = shuffle

    def make_task(self, seed: TaskSeed) -> Task:
        """Return row `index` of the endless sequence of epochs."""
        num_tasks = len(self._tasks)
        return self._tasks[seed.row(num_tasks) if self._shuffle else seed.index % num_tasks]

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        """Score each completion for itself."""
        if self._judge is not None:
            assert isinstance(task, Question)
            return await self._judged(self._judge, task, sessions)
        assert self._score is not None
        rewards = [await result_of(self._score(session.completion, task.answer)) for session in sessions]
        return [Score(reward, {self._scorer_name: reward}) for reward in rewards]

    async def _judged(self, judge: Judge, task: Question, sessions: Sequence[Session]) -> list[Score]:
        rows = [{**task.fields, "completion": session.completion} for session in sessions]
        return [
            Score(one.score, {"judge": one.score, "judge_unreadable": float(not one.is_readable)})
            for one in await judge.ask_all(rows)
        ]


def _find_scorer(name: str, pattern: str | None) -> Callable[[str, str], Any] | None:
    """Return a function of completion and right answer; None for a judge."""
    allowed = [*SCORERS, "regex", "math_verify", "judge"]
    if name not in allowed and ":" not in name:
        raise ConfigError(
            f"jsonl: there is no scorer '{name}'.{nearest(name, allowed)} Allowed: {', '.join(allowed)}, "
            "or 'module:function' for one of your own."
        )
    if (pattern is not None) != (name == "regex"):
        raise ConfigError(f"jsonl: `pattern` belongs to scorer 'regex'; got scorer '{name}' and pattern {pattern!r}")
    if name == "judge":
        return None
    if name == "math_verify":
        return MathAnswers()
    if ":" in name:
        return _users_scorer(name)
    if pattern is None:
        return SCORERS[name]
    try:
        return regex_scorer(pattern)
    except re.error as error:
        raise ConfigError(f"jsonl: pattern {pattern!r} is not a regular expression: {error}") from None


def _users_scorer(name: str) -> Callable[[str, str], Any]:
    scorer = load_function(name, key="jsonl: scorer")
    try:
        inspect.signature(scorer).bind("completion", "answer")
    except TypeError as error:
        raise ConfigError(
            f"jsonl: scorer '{name}' cannot be called with a completion and the right answer: {error}"
        ) from None
    return scorer


def _read_tasks(path: Path, prompt: str, answer: str, fields: Sequence[str] | None) -> list[Task]:
    """Return the tasks of a file with the columns `prompt` and `answer`; `fields` are the fields of a judge's
    prompt."""
    try:
        if not path.is_dir() and path.exists() and not path.is_file():  # it may have no end, or no writer
            raise DataError(f"jsonl: {path.absolute()} is not a regular file, but a pipe or a device")
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"jsonl: {path.absolute()} is not UTF-8: {error}") from None
    except OSError as error:
        there = sorted(entry.name for entry in path.parent.glob("*.jsonl")) if path.parent.is_dir() else []
        beside = f" {path.parent} has: {', '.join(there)}." if there else ""
        raise DataError(
            f"jsonl: {path.absolute()} cannot be read ({error.strerror}).{nearest(path.name, there)}{beside}"
        ) from None
    tasks = [
        _read_task(line, prompt, answer, fields, where=f"{path}:{number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not tasks:
        raise DataError(f"jsonl: {path} has no rows")
    return tasks


def _read_task(line: str, prompt: str, answer: str, fields: Sequence[str] | None, *, where: str) -> Task:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where} is not JSON: {error.msg} at character {error.pos + 1}. Each line must be one whole object: mend "
            "the line, or write the file again."
        ) from None
    if not isinstance(row, dict):
        raise DataError(f"{where} is {type(row).__name__}, expected an object with '{prompt}' and '{answer}'")
    needed = {prompt: "the argument `prompt`"}
    if fields is None or "answer" in fields:
        needed[answer] = "the argument `answer`"
    of_judge = [name for name in fields or () if name not in ("completion", "prompt", "answer")]
    needed |= {name: f"`judge.prompt`, which has {{{name}}}" for name in of_judge}
    for column, named_by in needed.items():
        if column not in row:
            raise DataError(
                f"{where} has no column '{column}'.{nearest(column, row)} Columns there: {', '.join(row) or 'none'}. "
                f"Name the right one with {named_by}."
            )
    for column in ("tools", "documents", "chat_template_kwargs"):
        if row.get(column) and column not in needed:
            raise DataError(
                f"{where} has `{column}`, which prompts of rl do not take, so they would not be those of sft. Write "
                "what the policy must see into the messages, and remove the column."
            )
    right = _plain(row[answer], f"{where}: '{answer}'") if answer in needed else ""
    messages = _messages(row[prompt], f"{where}: '{prompt}'")
    if fields is None:
        return Task(prompt=messages, answer=right)
    judged = {name: _plain(row[name], f"{where}: '{name}'") for name in of_judge}
    if "prompt" in fields:
        judged["prompt"] = _as_text(row[prompt], messages)
    if "answer" in fields:
        judged["answer"] = right
    return Question(prompt=messages, answer=right, fields=judged)


def _plain(value: Any, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"{where} is {shown(value)}, expected text or a number")
    return str(value)


def _as_text(value: Any, messages: Sequence[Message | ChatMessage]) -> str:
    if isinstance(value, str):
        return value
    chat = [as_dict(message) if isinstance(message, Message) else message for message in messages]
    return "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in chat)


def _messages(value: Any, where: str) -> Sequence[Message | ChatMessage]:
    if isinstance(value, str):
        return (Message("user", value),)
    try:
        messages = tuple(as_messages(value))
    except (TypeError, ValueError) as error:
        raise DataError(f"{where} is {shown(value)}, expected text or a list of {{role, content}} ({error})") from None
    if not messages:
        raise DataError(f"{where} is an empty list of messages")
    return messages
