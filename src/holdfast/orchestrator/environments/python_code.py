"""Write a Python function; it is run on inputs that the policy does not see, in a sandbox."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from holdfast.orchestrator.environments.interface import Environment, Message, Score, Session, Task, TaskSeed
from holdfast.orchestrator.environments.prompts import filled, require_placeholders
from holdfast.orchestrator.environments.sandbox import Limits, require_sandbox, run_python
from holdfast.shared.errors import ConfigError
from holdfast.shared.process.child import available_cores

_STEPS: dict[str, tuple[str, Callable[[list[int]], list[int]]]] = {
    "doubles every number": ("[2 * x for x in n]", lambda n: [2 * x for x in n]),
    "squares every number": ("[x * x for x in n]", lambda n: [x * x for x in n]),
    "adds 3 to every number": ("[x + 3 for x in n]", lambda n: [x + 3 for x in n]),
    "changes the sign of every number": ("[-x for x in n]", lambda n: [-x for x in n]),
    "keeps the even numbers": ("[x for x in n if x % 2 == 0]", lambda n: [x for x in n if x % 2 == 0]),
    "keeps the odd numbers": ("[x for x in n if x % 2 == 1]", lambda n: [x for x in n if x % 2 == 1]),
    "keeps the numbers above zero": ("[x for x in n if x > 0]", lambda n: [x for x in n if x > 0]),
    "sorts the numbers": ("sorted(n)", sorted),
    "reverses the order": ("n[::-1]", lambda n: n[::-1]),
    "leaves out the first number": ("n[1:]", lambda n: n[1:]),
    "leaves out numbers that were there before": ("list(dict.fromkeys(n))", lambda n: list(dict.fromkeys(n))),
    "keeps every second number, from the first on": ("n[::2]", lambda n: n[::2]),
}
"""What a function may do with a list: in words, and how Python says it."""

_MOST_NUMBERS = 8
_FENCE = re.compile(r"```[^\n]*\n(.*?)```", re.DOTALL)
_HARNESS = """
import json, os
out = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
os.dup2(1, 2)
code, name, inputs = json.loads({job!r})
answer = {{"__name__": "answer"}}
exec(compile(code, "answer.py", "exec"), answer)
for numbers in inputs:
    try:
        line = json.dumps(answer[name](numbers))
    except Exception:
        line = "null"
    os.write(out, line.encode() + b"\\n")
"""
"""Prints a line for each input. What is right is not inside, so there is nothing to find or to forge."""


@dataclass(frozen=True)
class Program(Task):
    """A task with inputs and what the function must return for each."""

    inputs: tuple[tuple[int, ...], ...] = ()
    outputs: tuple[tuple[int, ...], ...] = ()


class PythonCode(Environment):
    """Reward: the share of inputs for which the function of the answer returns the right list."""

    def __init__(
        self,
        min_steps: int = 1,
        max_steps: int = 3,
        num_inputs: int = 8,
        cpu_s: int = 5,
        memory_mb: int = 512,
        prompt: str = "Write a Python function solve(numbers) that takes a list of whole numbers, {steps}, and returns "
        "the list. Answer with the code alone.",
    ) -> None:
        """Check the arguments, and that the sandbox works here.

        Args:
            min_steps: fewest things that the function must do, one after the other.
            max_steps: most of them.
            num_inputs: how many lists it is run on.
            cpu_s: seconds that it may compute, for all of them; four times as many may pass.
            memory_mb: MiB of address space.
            prompt: the user's message, with {steps} in it.

        Raises:
            ConfigError: they do not fit together, or there is no sandbox on this machine.
        """
        if not 1 <= min_steps <= max_steps:
            raise ConfigError(
                f"python_code: min_steps = {min_steps}, max_steps = {max_steps}; allowed is 1 <= min_steps <= max_steps"
            )
        for name, value, least in (("num_inputs", num_inputs, 1), ("cpu_s", cpu_s, 1), ("memory_mb", memory_mb, 64)):
            if value < least:
                raise ConfigError(f"python_code: {name} = {value}; allowed are whole numbers from {least} on")
        require_placeholders(prompt, ("steps",), environment="python_code")
        require_sandbox()
        self._min_steps = min_steps
        self._max_steps = max_steps
        self._num_inputs = num_inputs
        self._limits = Limits(cpu_s=cpu_s, memory_bytes=memory_mb * 2**20)
        self._prompt = prompt
        self._cores = asyncio.Semaphore(available_cores())

    def make_task(self, seed: TaskSeed) -> Program:
        """Return steps in words, with inputs, their outputs, and a function that is right as the answer."""
        random = seed.random()
        steps = [random.choice(list(_STEPS)) for _ in range(random.randint(self._min_steps, self._max_steps))]
        lines = "".join(f"    n = {_STEPS[step][0]}\n" for step in steps)
        # An empty list among them, which is where programs err.
        inputs = [[], *(_numbers(random) for _ in range(self._num_inputs - 1))]
        return Program(
            prompt=[Message("user", filled(self._prompt, steps=", then ".join(steps)))],
            answer=f"def solve(n):\n{lines}    return n\n",
            inputs=tuple(map(tuple, inputs)),
            outputs=tuple(tuple(_apply(steps, numbers)) for numbers in inputs),
        )

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        """Run each answer in a sandbox of its own, as many at a time as there are cores."""
        assert isinstance(task, Program)
        return await asyncio.gather(*(self._score(session.completion, task) for session in sessions))

    async def _score(self, completion: str, task: Program) -> Score:
        job = json.dumps([code_of(completion), "solve", task.inputs])
        async with self._cores:
            outcome = await run_python(_HARNESS.format(job=job), self._limits)
        lines = outcome.output.decode(errors="replace").split("\n")
        right = [json.dumps(output) for output in task.outputs]
        share = sum(given == wanted for given, wanted in zip(lines, right, strict=False)) / len(right)
        return Score(share, {"exact": float(share == 1.0), "killed": float(outcome.ending != "ended")})


def code_of(completion: str) -> str:
    """Return the last fenced block of an answer, or all of it where there is none."""
    blocks = _FENCE.findall(completion)
    return blocks[-1] if blocks else completion


def _numbers(random: Random) -> list[int]:
    return [random.randint(-20, 20) for _ in range(random.randint(1, _MOST_NUMBERS))]


def _apply(steps: Sequence[str], numbers: list[int]) -> list[int]:
    for step in steps:
        numbers = list(_STEPS[step][1](numbers))
    return numbers
