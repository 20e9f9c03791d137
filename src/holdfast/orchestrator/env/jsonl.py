"""Environment `jsonl`: prompts and right answers from files of rows, with a choice of scorers (reward 0 to 1)."""

import glob
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.chat.messages import as_dict, with_system
from holdfast.chat.template import ChatMessage
from holdfast.config.environments import JudgeConfig
from holdfast.errors import ConfigError, DataError, nearest, shown
from holdfast.orchestrator.env.guard import result_of
from holdfast.orchestrator.env.interface import Environment, Message, Score, Session, Task, TaskSeed, as_messages
from holdfast.orchestrator.env.judge import Judge
from holdfast.orchestrator.env.math_answers import MathAnswers
from holdfast.orchestrator.env.numbers import ends_with, fold, number, numbers_alone, read_numbers, same
from holdfast.process.imports import load_function
from holdfast.run.rows import Row, read_rows

_CODE = re.compile(r"0\d")
"""A text of digits that is not a number, such as 007."""

Scorer = Callable[[str, str], float]


def lcs_length(first: str, second: str) -> int:
    """Return the length of the longest common subsequence.

    Bit-parallel, one row of the dynamic program per big-integer operation (Hyyrö 2004, "Bit-parallel LCS-length
    computation revisited", eq. 4): bit i of `row` is 0 if position i of `first` adds one to the length."""
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
    """Return whether both are equal up to white space around them, and the form of spaces and minus signs."""
    return float(fold(completion).strip() == fold(answer).strip())


def exact_number(completion: str, answer: str) -> float:
    """Return whether the completion is the number `answer` and nothing else: `exact` for numbers of JSON."""
    given, right = numbers_alone(completion), numbers_alone(answer)
    return float(len(given) == 1 and ends_with(given, right))


def contains(completion: str, answer: str) -> float:
    """Return whether the answer occurs in the completion, but not as a part of a longer number.

    A number in the completion may have another form than the answer: 1,000 for 1000."""
    right, text = fold(answer).strip(), fold(completion)
    if not right:
        return 0.0
    numbers, given = [] if _CODE.match(right) else numbers_alone(right), read_numbers(text)
    if len(numbers) == 1:
        return float(any(same(one, numbers[0]) for one in given))
    begins, ends = right.removeprefix(".")[:1].isdigit(), right[-1].isdigit()
    before, after = r"(?<!\d)(?<!\d\.)" if begins else "", r"(?!\d|[.,]\d)" if ends else ""
    # A currency or plus sign before the digits leaves the number as it is. "scored 3,5 apples" has no "5 apples".
    insides = [range(one.end - len(text[one.start : one.end].lstrip("+\\$€£¥₹")) + 1, one.end) for one in given]
    inside = {place for one in insides for place in one}
    found = re.finditer(f"{before}{re.escape(right)}{after}", text)
    return float(not all((begins and one.start() in inside) or (ends and one.end() in inside) for one in found))


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
    """A row of the file.

    Attributes:
        fields: what a judge sees, by the names in its prompt.
        answers: all right answers, if there are several.
        has_numbers: the right answers are numbers of JSON.
    """

    fields: Mapping[str, str] = field(default_factory=dict)
    answers: tuple[str, ...] = ()
    has_numbers: bool = False


def answers_of(task: Task) -> tuple[str, ...]:
    """Return all right answers."""
    return (isinstance(task, Question) and task.answers) or (task.answer,)


class Jsonl(Environment):
    """Single-turn questions; every row is used once per epoch, in a new order each time.

    Attributes:
        places, tasks: of each row, in the order of the file.
        full_reward: of a right answer; None if it is not known, as with a scorer of the user's.
    """

    def __init__(
        self,
        path: Path,
        prompt: str = "prompt",
        answer: str = "answer",
        scorer: str = "exact",
        pattern: str | None = None,
        shuffle: bool = True,
        judge: JudgeConfig | None = None,
        split: str = "train",
    ) -> None:
        """Read all rows.

        Args:
            path: a file, directory or glob, as `data.name` of `sft` takes it.
            prompt: column of the question: text, or a list of {role, content}.
            answer: column of the right answer, text or a number, or a list of several right answers, of which the best
                match counts; not needed for a judge whose prompt does not name it. `reward_model.ground_truth` is a key
                inside a column.
            scorer: `exact`, `contains`, `lcs`, `number`, `regex`, `math_verify`, `judge`, or `module:function` for one
                of your own, from completion and right answer to a number.
            pattern: with `regex`: what to find; the last match (its first group) is compared.
            shuffle: a new order every epoch, from the run's seed; off: file order.
            judge: with `judge`: whom to ask. Its prompt may name `{completion}`, `{prompt}`, `{answer}` and columns.
            split: which files of a directory, if the names of all tell a split.
        """
        if (judge is not None) != (scorer == "judge"):
            given = "a judge" if judge is not None else "no judge"
            raise ConfigError(f"jsonl: `judge` belongs to scorer 'judge'; got scorer '{scorer}' and {given}")
        self._judge = Judge(judge) if judge is not None else None
        if self._judge is not None and "completion" not in self._judge.fields:
            raise ConfigError("jsonl: judge.prompt has no {completion}: the judge would not see what it is to score")
        self._score = _find_scorer(scorer, pattern)
        self.scorer_name = scorer.partition(":")[2] or scorer
        self.places, self.tasks = _read_tasks(path, split, prompt, answer, self._judge.fields if self._judge else None)
        self.num_tasks = len(self.tasks)
        self.full_reward = 1.0 if scorer in (*SCORERS, "math_verify") else None
        if scorer == "contains":
            self._refuse_empty_answers(answer)
        self._shuffle = shuffle

    def make_task(self, seed: TaskSeed) -> Task:
        """Return row `index` of the endless sequence of epochs."""
        num_tasks = len(self.tasks)
        return self.tasks[seed.row(num_tasks) if self._shuffle else seed.index % num_tasks]

    def _refuse_empty_answers(self, answer: str) -> None:
        for place, task in zip(self.places, self.tasks, strict=True):
            if not all(one.strip() for one in answers_of(task)):
                raise DataError(
                    f"{place}: '{answer}' is empty, and scorer 'contains' finds an empty answer in every completion. "
                    "Give the row an answer, or remove the row."
                )

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        """Score each completion for itself."""
        if self._judge is not None:
            assert isinstance(task, Question)
            return await self._judged(self._judge, task, sessions)
        assert self._score is not None
        has_numbers = isinstance(task, Question) and task.has_numbers
        score = exact_number if has_numbers and self._score is exact else self._score
        scores = [[await result_of(score(one.completion, answer)) for answer in answers_of(task)] for one in sessions]
        rewards = [max(found) for found in scores]
        return [Score(reward, {self.scorer_name: reward}) for reward in rewards]

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


def _read_tasks(
    path: Path, split: str, prompt: str, answer: str, fields: Sequence[str] | None
) -> tuple[list[str], list[Task]]:
    """Return the places and the tasks of rows with the columns `prompt` and `answer`, and the columns `fields` that a
    judge's prompt names."""
    name = str(path) if path.exists() or glob.has_magic(str(path)) else str(path.absolute())  # not a name of a hub
    rows = read_rows(name, split=split, key="jsonl: path", prefix=lambda file, _: f"{file.path}:")
    places, tasks = list[str](), list[Task]()
    for where, row in rows.take(0, len(rows)):
        if isinstance(row, DataError):
            raise row
        places.append(where)
        tasks.append(_read_task(row, prompt, answer, fields, where=where))
    return places, tasks


def _read_task(row: Row, prompt: str, answer: str, fields: Sequence[str] | None, *, where: str) -> Task:
    needed = {prompt: "the argument `prompt`"}
    if fields is None or "answer" in fields:
        needed[answer] = "the argument `answer`"
    of_judge = [name for name in fields or () if name not in ("completion", "prompt", "answer")]
    needed |= {name: f"`judge.prompt`, which has {{{name}}}" for name in of_judge}
    values = {column: _value(row, column, named_by, where) for column, named_by in needed.items()}
    for column in ("tools", "functions", "documents", "chat_template_kwargs"):
        if row.get(column) and column not in needed:
            raise DataError(
                f"{where} has `{column}`, which prompts of rl do not take, so they would not be those of sft. Write "
                "what the policy must see into the messages, and remove the column."
            )
    right = _answers(values[answer], answer, where) if answer in needed else ("",)
    asked = values[prompt]
    if (system := row.get("system")) and asked and "system" not in needed:
        if not isinstance(system, str):
            raise DataError(f"{where}: the column `system` must be text, got {shown(system)}")
        try:
            asked = with_system(system, [{"role": "user", "content": asked}] if isinstance(asked, str) else asked)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
    messages = _messages(asked, f"{where}: '{prompt}'")
    value = values.get(answer)
    has_numbers = all(not isinstance(one, str) for one in (value if isinstance(value, list) else [value]))
    if fields is None and len(right) == 1 and not has_numbers:
        return Task(prompt=messages, answer=right[0])
    judged = {name: _plain(values[name], f"{where}: '{name}'") for name in of_judge}
    if "prompt" in (fields or ()):
        judged["prompt"] = _as_text(values[prompt], messages)
    if "answer" in (fields or ()):
        judged["answer"] = "\n".join(right)
    return Question(prompt=messages, answer=right[0], fields=judged, answers=right, has_numbers=has_numbers)


def _value(row: Row, column: str, named_by: str, where: str) -> Any:
    """Return a column, or, if no column has that name, what the path `column` leads to, such as `a.b`."""
    value: Any = row
    for part in [column] if column in row else column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            there = value if isinstance(value, Mapping) else {}
            raise DataError(
                f"{where} has no column '{column}'.{nearest(part, there)} Columns there: {', '.join(there) or 'none'}. "
                f"Name the right one with {named_by}."
            )
        value = value[part]
    return value


def _answers(value: Any, answer: str, where: str) -> tuple[str, ...]:
    if isinstance(value, list) and value:
        return tuple(_plain(one, f"{where}: an answer in '{answer}'") for one in value)
    if isinstance(value, Mapping) and value:
        raise DataError(
            f"{where}: '{answer}' is an object, expected text, a number or a list of them. Name a key of it with the "
            f"argument `answer`, such as {', '.join(repr(f'{answer}.{key}') for key in value)}."
        )
    return (_plain(value, f"{where}: '{answer}'"),)


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
