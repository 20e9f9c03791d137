"""Batches by the arguments of `rollouts`, and their answers as rows: as text, chosen by an expression, sorted.

`rollouts read`, `rollouts export`, `report` and the trackers show these rows. An expression such as
`reward < 0.2 and truncated` is read by `ast`, and only the parts of Python in `Expression` count.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.errors import CheckpointError, ConfigError, nearest
from holdfast.protocol.rollouts import Batch, Rollout
from holdfast.run.choose_run import command_line, no_run, steps_of
from holdfast.run.journal import TrainedRewards, read_batch_in, read_trained
from holdfast.run.run_dir import RunDir
from holdfast.run.settings import read_settings

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_STEP_NAME = re.compile(r"step_(\d+)(\.\d+)?")


def find_batches(run_dir: RunDir, texts: Sequence[str]) -> list[Path]:
    """Return the directories of the batches that STEP arguments name, each once, in their order. Raise CheckpointError
    if a batch is not there; names the batches that are. Raise ConfigError if the directory holds no run, or an argument
    is not a STEP."""
    if not (run_dir.holds_run() or run_dir.rollouts.is_dir()):
        raise no_run(run_dir.path, "neither run.json nor rollouts")
    return list(dict.fromkeys(directory for text in texts for directory in _batches_of(run_dir, text)))


def find_batch(run_dir: RunDir, command: str, step: str) -> Path:
    """Return the directory of the one batch that STEP names for a subcommand. Raise as `find_batches`."""
    directories = find_batches(run_dir, [step])
    if len(directories) != 1:
        raise ConfigError(
            f"{command} takes one batch, '{step}' means {len(directories)}. "
            f"`{command_line('rollouts stats', run_dir.path, [step])}` shows several."
        )
    return directories[0]


def _batches_of(run_dir: RunDir, text: str) -> Iterator[Path]:
    there = run_dir.published_batches()
    if _STEP_NAME.fullmatch(Path(text).name) and Path(text).is_dir():
        yield Path(text)
        return
    wanted = steps_of(text, there)
    if wanted is None:
        raise ConfigError(
            f"'{text}' is not a STEP: a number, a span such as 3-7, `latest`, `all`, or a batch's directory"
        )
    for step in wanted:
        if step not in there:
            steps = f"it has {', '.join(map(str, there))}" if there else "it has none, only `rl` makes batches"
            raise CheckpointError(f"batch {text} is not in {run_dir.rollouts}: {steps}.")
        yield run_dir.batch(step)


def step_of(directory: Path) -> int:
    """Return the step of a batch by the name of its directory."""
    match = _STEP_NAME.fullmatch(directory.name)
    assert match is not None
    return int(match[1])


def read_batch_at(directory: Path) -> Batch:
    """Return the verified batch in a directory that `find_batches` returned. Raise CheckpointError if it is damaged."""
    try:
        return read_batch_in(directory, step=step_of(directory))
    except FileNotFoundError as error:  # removed while it was read
        raise CheckpointError(f"{error.filename} is missing") from None


def problems_of(batch: Batch) -> list[list[Rollout]]:
    """Return the rollouts of a batch, problem by problem, in their order."""
    grouped = itertools.groupby(batch.rollouts, key=lambda rollout: (rollout.environment, rollout.task_id))
    return [list(group) for _, group in grouped]


@dataclass(frozen=True)
class TextOf:
    """Decodes token ids, or cannot, for a `reason`."""

    tokenizer: Tokenizer | None
    reason: str = ""

    def decode(self, token_ids: Sequence[int]) -> str | None:
        """Return the text of `token_ids` with special tokens; None without a tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.decode(token_ids, skip_special_tokens=False)


def text_of(run_dir: RunDir) -> TextOf:
    """Return the tokenizer of the model in the newest configuration of a run, else of its newest checkpoint."""
    names = [str(path) for path in _directories(run_dir)]
    file = next((path for name in names if (path := Path(name) / "tokenizer.json").is_file()), None)
    if file is None:
        return TextOf(None, f"there is no tokenizer.json in {' or '.join(names) or 'any model of the run'}")
    from tokenizers import Tokenizer

    try:
        return TextOf(Tokenizer.from_file(str(file)))
    except Exception as error:  # noqa: BLE001 - the library raises nothing more specific
        return TextOf(None, f"{file} cannot be read: {error}")


def _directories(run_dir: RunDir) -> list[Path]:
    configs = run_dir.configs(run_dir.next_attempt() - 1)
    found = []
    for path in (configs / "orchestrator.toml", configs / "trainer.toml"):
        with contextlib.suppress(CheckpointError, FileNotFoundError):  # damaged: checkpoints hold the tokenizer, too
            model = read_settings(path).get("model", {})
            found += [Path(model[key]) for key in ("tokenizer", "name") if model.get(key)]
    found += [run_dir.checkpoint(step) / "model" for step in reversed(run_dir.committed_steps())]
    return list(dict.fromkeys(found))


def sampler_of(batch: Batch) -> str:
    """Return who sampled a batch, such as `version 3 with digest 4f5a...`."""
    if not batch.weights_digest:
        return f"the teacher with digest {batch.teacher_digest}"
    digests = {**batch.older_digests, batch.policy_version: batch.weights_digest}
    # In rounds the newest version may have come too late to sample any of it.
    sampled = {span.version for rollout in batch.rollouts for span in rollout.versions} or {batch.policy_version}
    return ", ".join(f"version {version} with digest {digests[version]}" for version in sorted(sampled))


def shown_text(text: str | None, token_ids: Sequence[int]) -> str:
    """Return a text indented for a table, or the tokens if there is no text."""
    return " ".join(map(str, token_ids)) if text is None else text.replace("\n", "\n          | ")


FIELDS = {
    "step": "the batch",
    "policy_version": "the version that the batch is sampled by",
    "environment": "name of the environment",
    "task": "number of the task in its environment",
    "sample": "number of the answer in its group",
    "index": "number of the rollout in its batch",
    "reward": "as the environment gave it, without rewards of turns",
    "trained_reward": "after the reward model and shaping; None before the step is trained",
    "advantage": "mean over the trained tokens; None before the step is trained, and without a trained token",
    "truncated": "whether a token limit ended the answer",
    "ended": "why the answer ended",
    "tokens": "sampled tokens",
    "prompt_tokens": "tokens before the first sampled token",
    "turns": "stretches of sampled tokens",
    "prompt": "text before the first sampled token",
    "answer": "text from there on",
    "right_answer": "of the task; empty if the task has no answer",
    "metrics": 'the parts of the reward by name, such as metrics["exact"]',
}
"""The names in an expression, beside the names of metrics."""


@dataclass(frozen=True)
class Answer:
    """One rollout of a batch; its texts are decoded when they are asked for."""

    step: int
    policy_version: int
    index: int
    rollout: Rollout
    text: TextOf
    trained_reward: float | None
    advantage: float | None

    @property
    def ended(self) -> str:
        """Why the answer ended."""
        return "token limit" if self.rollout.truncated else "finished"

    @cached_property
    def prompt_tokens(self) -> int:
        """How many tokens come before the first sampled token."""
        return (self.rollout.loss_mask.tobytes() + b"\1").index(1)

    @cached_property
    def prompt(self) -> str | None:
        """The text before the first sampled token; None without a tokenizer."""
        return self.text.decode(self.rollout.token_ids[: self.prompt_tokens].tolist())

    @cached_property
    def answer(self) -> str | None:
        """The text from the first sampled token on; None without a tokenizer."""
        return self.text.decode(self.rollout.token_ids[self.prompt_tokens :].tolist())

    def texts(self) -> tuple[str, str]:
        """Return prompt and answer to show: the token ids if there is no tokenizer."""
        begin, ids = self.prompt_tokens, self.rollout.token_ids
        return (
            " ".join(map(str, ids[:begin])) if self.prompt is None else self.prompt,
            " ".join(map(str, ids[begin:])) if self.answer is None else self.answer,
        )

    def value(self, name: str) -> Any:
        """Return a field, or a metric; None if the rollout has no such metric."""
        rollout = self.rollout
        match name:
            case "task":
                return rollout.task_id
            case "sample":
                return rollout.sample_index
            case "tokens":
                return rollout.loss_mask.num_sampled
            case "turns":
                return rollout.loss_mask.num_stretches
            case "environment" | "reward" | "truncated" | "metrics" | "right_answer":
                return getattr(rollout, name)
            case _:
                return getattr(self, name) if name in FIELDS else rollout.metrics.get(name)

    def row(self) -> dict[str, Any]:
        """Return all fields by name, with the rewards of turns."""
        steps = self.rollout.step_rewards
        return {name: self.value(name) for name in FIELDS} | {"step_rewards": steps.rewards.tolist() if steps else None}


def read_answers(directories: Iterable[Path], text: TextOf) -> Iterator[Answer]:
    """Yield the answers of some batches, in their order. Raise CheckpointError if a batch is damaged."""
    for directory in directories:
        yield from answers_of(read_batch_at(directory), read_trained(directory), text)


def answers_of(batch: Batch, trained: TrainedRewards | None, text: TextOf) -> list[Answer]:
    """Return the answers of a batch, in its order; `trained` of another number of rollouts does not count."""
    if trained is None or len(trained.rewards) != len(batch.rollouts):
        rewards = advantages = [None] * len(batch.rollouts)
    else:
        rewards, advantages = trained.rewards, trained.advantages
    numbered = enumerate(zip(batch.rollouts, rewards, advantages, strict=True))
    return [Answer(batch.step, batch.policy_version, n, one, text, *more) for n, (one, *more) in numbered]


@dataclass(frozen=True)
class Choice:
    """Which answers are meant, in which order, and at most how many."""

    where: Expression | None = None
    environment: str | None = None
    sort: Expression | None = None
    limit: int | None = None


def choose(answers: Iterable[Answer], choice: Choice) -> list[Answer]:
    """Return the answers that are meant, the smallest value of `sort` first; None comes last. Raise ConfigError for an
    environment or field that no answer has, and for an expression that cannot be computed."""
    answers, where, sort = list(answers), choice.where, choice.sort
    metrics = {name for answer in answers for name in answer.rollout.metrics}
    for expression in filter(None, (where, sort)):
        expression.check_names([*FIELDS], sorted(metrics))
    environments = {answer.rollout.environment for answer in answers}
    if choice.environment not in (None, *environments):
        told = nearest(choice.environment, environments)
        raise ConfigError(
            f"--environment {choice.environment}: no answer is of it.{told} "
            f"There are: {', '.join(sorted(environments))}."
        )
    wanted = environments if choice.environment is None else {choice.environment}
    found = [answer for answer in answers if answer.rollout.environment in wanted]
    found = [answer for answer in found if where is None or where.of(answer.value)]
    if sort is None:
        return found
    valued = [(sort.of(answer.value), answer) for answer in found]
    try:
        valued.sort(key=lambda one: (one[0] is None, one[0] if one[0] is not None else 0))
    except TypeError as error:
        raise ConfigError(f"{sort.key} '{sort.text}': {error}. Sort by a number or a text.") from None
    return [answer for _, answer in valued]


_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda one, other: one in other, ast.NotIn: lambda one, other: one not in other,
}  # fmt: skip
_WITH_NONE = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot)
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {"len": len, "abs": abs}
_ALLOWED = "names, numbers, texts, and, or, not, comparisons, in, + - * / %, len(x), abs(x), metrics['name']"


class Expression:
    """A part of Python about one answer. A comparison or a sum with None is false or None. Raise ConfigError if the
    text is not Python, or more than the parts that are allowed."""

    def __init__(self, text: str, *, key: str) -> None:
        self.text, self.key = text, key
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise self._refused("it is not an expression of Python") from None
        self._names = {node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name)} - set(_FUNCTIONS)
        subscripts = (node.slice for node in ast.walk(self._tree) if isinstance(node, ast.Subscript))
        self._metrics = {str(node.value) for node in subscripts if isinstance(node, ast.Constant)}
        self.of(lambda _: None)  # refuses what is not allowed, before anything is read

    def _refused(self, reason: str) -> ConfigError:
        return ConfigError(
            f"{self.key} '{self.text}': {reason}. Allowed are {_ALLOWED}; for example reward < 0.2 and truncated."
        )

    def check_names(self, fields: Sequence[str], metrics: Sequence[str]) -> None:
        """Raise ConfigError for a name that is neither a field nor a metric, and for `metrics['name']` without it."""
        for names, known in ((self._names, [*fields, *metrics]), (self._metrics, metrics)):
            for unknown in sorted(names - {*known}):
                told = f"{nearest(unknown, known)} There are: {', '.join(known) or 'none'}."
                raise ConfigError(f"{self.key}: no answer has '{unknown}'.{told}")

    def of(self, value: Callable[[str], Any]) -> Any:
        """Return the value of the expression; `value` returns the value of a name. Raise ConfigError if it has none."""
        try:
            return self._of(self._tree, value)
        except (TypeError, ValueError, ArithmeticError, MemoryError, RecursionError) as error:
            raise self._refused(str(error) or "too large") from None

    def _of(self, node: ast.expr, value: Callable[[str], Any]) -> Any:
        match node:
            case ast.Constant(value=int() | float() | str() | None as constant):
                return constant
            case ast.Name(id=name):
                return value(name)
            case ast.BoolOp(op=op, values=parts):
                found = [self._of(part, value) for part in parts]
                return all(found) if isinstance(op, ast.And) else any(found)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self._of(operand, value)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                number = self._of(operand, value)
                return None if number is None else -number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                sides = self._of(left, value), self._of(right, value)
                return None if None in sides else _ARITHMETIC[type(op)](*sides)
            case ast.Compare(left=left, ops=ops, comparators=others):
                sides = [self._of(side, value) for side in (left, *others)]
                return all(_compared(op, *pair) for op, *pair in zip(ops, sides, sides[1:], strict=False))
            case ast.Subscript(value=ast.Name(id="metrics"), slice=ast.Constant(value=str(name))):
                return (value("metrics") or {}).get(name)
            case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
                found = self._of(argument, value)
                return None if found is None else _FUNCTIONS[name](found)
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                return [self._of(part, value) for part in parts]
            case _:
                raise self._refused(f"'{ast.unparse(node)}' is not allowed")


def _compared(op: ast.cmpop, one: Any, other: Any) -> Any:
    if not isinstance(op, _WITH_NONE) and (one is None or other is None):
        return False
    return _COMPARISONS[type(op)](one, other)


def shown_parts(answer: Answer) -> str:
    """Return the parts of a reward in a line, such as `exact 0, tools/calls 2`."""
    steps = answer.rollout.step_rewards
    parts: Mapping[str, Any] = answer.rollout.metrics
    told = [f"{name} {value:.5g}" for name, value in parts.items()]
    told += [f"rewards of turns {' '.join(f'{one:.5g}' for one in steps.rewards)}"] if steps else []
    return ", ".join(told)


def spread(answers: Sequence[Answer], count: int) -> list[Answer]:
    """Return `count` answers from the worst reward to the best, evenly spread over the order of their rewards."""
    ordered = sorted(answers, key=lambda answer: answer.rollout.reward)
    if len(ordered) <= count:
        return ordered
    return [ordered[round(place * (len(ordered) - 1) / max(1, count - 1))] for place in range(count)]
