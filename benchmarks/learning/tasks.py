"""The tasks, and demonstrations of them, made from the environments' own tasks.

Demonstrations have a seed that no run has. They show what is asked for; how few of them are seen, and what they leave
out (in `guess_number` how to guess well), is what reinforcement learning has to make good.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from benchmarks.learning.commands import environment_of
from examples.environments.guess_number import Secret
from examples.environments.ledger import Books
from examples.environments.python_code import Program
from holdfast import Message, Task, TaskSeed
from holdfast.config.environments import EnvironmentConfig
from holdfast.orchestrator.env.registry import load_environment

Row = dict[str, Any]
_LOOK_UP_SCHEMA = {"type": "function", "function": {"name": "look_up"}}
_CALL = ('<tool_call>{"name": "look_up", "arguments": {"account": "', '"}}</tool_call>')
# So many tasks name every account, and every step of a program.
_MANY = 500


@dataclass(frozen=True)
class LearningTask:
    """How runs of a task begin.

    Attributes:
        show: makes a demonstration of a task, the index-th: a row of `sft`.
        sft_steps: steps of `sft`, of 64 demonstrations each, before reinforcement learning begins.
        phrases_of: what of a task is one token each.
        shown_by: the task whose demonstrations it is begun with; empty: its own.
        is_pretrained: it begins with the model of examples/smollm2 as it is, and has no `sft` before.
    """

    show: Callable[[Task, int], Row]
    sft_steps: int
    phrases_of: Callable[[Task], Iterator[str]] = lambda _: iter(())
    shown_by: str = ""
    is_pretrained: bool = False

    @property
    def has_answers(self) -> bool:
        """A rollout is one prompt and one answer, without a harness between."""
        return self.show is _answered and not self.shown_by


def demonstrations(name: str, num: int) -> list[Row]:
    """Return `num` rows of `sft` for the task of this name."""
    tasks = _tasks(TASKS[name].shown_by or name)
    return [TASKS[name].show(task, index) for index, task in enumerate(itertools.islice(tasks, num))]


def phrases(name: str) -> list[str]:
    """Return what is one token each in the task of this name, in alphabetical order."""
    tasks = itertools.islice(_tasks(TASKS[name].shown_by or name), _MANY)
    return sorted({phrase for task in tasks for phrase in TASKS[name].phrases_of(task)})


def _tasks(name: str) -> Iterator[Task]:
    """Return tasks that no run draws: their environment has a name that none of a run has."""
    environment = load_environment(EnvironmentConfig(**environment_of(name)), key="environment")
    for index in itertools.count():
        yield environment.make_task(TaskSeed(run_seed=0, environment=f"{name}/demonstrations", index=index))


def _answered(task: Task, _: int) -> Row:
    """Return the task with its right answer."""
    return {
        "prompt": msgspec.to_builtins(task.prompt),
        "completion": [msgspec.to_builtins(Message("assistant", task.answer))],
    }


def _guessed(task: Task, index: int) -> Row:
    """Return a game of random guesses among those that the hints leave: nothing is bisected."""
    assert isinstance(task, Secret)
    args = environment_of("guess_number")["args"]
    draw = random.Random(index)
    messages = msgspec.to_builtins(task.prompt)
    low, high = args["low"], args["high"]
    for turn in range(args["turns"]):
        guess = draw.randint(low, high)
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == task.number or turn == args["turns"] - 1:
            break
        if guess < task.number:
            low = guess + 1
        else:
            high = guess - 1
        messages.append({"role": "user", "content": "higher" if guess < task.number else "lower"})
    return {"messages": messages}


def _looked_up(task: Task, _: int) -> Row:
    """Return a chat in which each account is looked up, and the sum is answered."""
    assert isinstance(task, Books)
    messages = msgspec.to_builtins(task.prompt)
    for number, account in enumerate(task.asked):
        call = {"id": f"call{number:05d}", "type": "function",
                "function": {"name": "look_up", "arguments": {"account": account}}}  # fmt: skip
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": str(task.ledger[account])},
        ]
    return {"messages": [*messages, {"role": "assistant", "content": task.answer}], "tools": [_LOOK_UP_SCHEMA]}


def _accounts(task: Task) -> Iterator[str]:
    assert isinstance(task, Books)
    return iter((*task.ledger, *_CALL))


def _lines_of_code(task: Task) -> Iterator[str]:
    """Return the steps in words, and the lines of the program."""
    assert isinstance(task, Program) and isinstance(task.prompt[0], Message)
    yield from task.prompt[0].content.split(", then ")
    yield ", then "
    yield from task.answer.splitlines(keepends=True)


TASKS = {
    "sort_letters": LearningTask(_answered, sft_steps=22),
    "reverse_text": LearningTask(_answered, sft_steps=36),
    "next_letters": LearningTask(_answered, sft_steps=36),
    "addition": LearningTask(_answered, sft_steps=100),
    "guess_number": LearningTask(_guessed, sft_steps=25),
    "ledger": LearningTask(_looked_up, sft_steps=40, phrases_of=_accounts),
    "python_code": LearningTask(_answered, sft_steps=14, phrases_of=_lines_of_code),
    "spell_backward": LearningTask(_answered, sft_steps=100),
    "verifiers_sort": LearningTask(_answered, sft_steps=22, shown_by="sort_letters"),
    "sums": LearningTask(_answered, sft_steps=0, is_pretrained=True),
    "to_json": LearningTask(_answered, sft_steps=0, is_pretrained=True),
}
