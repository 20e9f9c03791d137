"""Write a Python function, which runs on hidden inputs in a sandbox. Endless; the number of steps says how hard it is.

The sandbox runs programs that nobody has read, so that they can do no harm. A program sees an interpreter with its
standard library, read-only, and 16 MiB of its own files in memory. It has no network, no other processes and no rights.
Time, memory, processes and output are bounded. Its printed output is all that remains. `sandbox_inside.py` says how;
the sandbox needs Linux 5.12 and user namespaces, and no root.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

import psutil

from holdfast import ConfigError, Environment, Message, Score, Session, Task, TaskSeed
from holdfast.errors import EnvironmentFailure, ProcessKilled
from holdfast.process.child import available_cores, killed_by

_INSIDE = Path(__file__).with_name("sandbox_inside.py")
_SETUP_FAILED = 71
_KILLED = 72
"""Its exit codes: it cannot build the sandbox; a process of the sandbox's own was killed."""
_VISIBLE = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/etc/alternatives")
_WALL_PER_CPU = 4
"""Seconds that may pass for every second of computing: a busy machine shall not decide what a program is worth."""


@dataclass(frozen=True)
class Limits:
    """What a program may use.

    Attributes:
        cpu_s: seconds of computing, of each of its processes; four times as many may pass.
        memory_bytes: address space of each of its processes.
        files_bytes: of all files that it writes.
        processes: most processes and threads at a time.
        output_bytes: most that it may print.
    """

    cpu_s: int = 5
    memory_bytes: int = 512 * 2**20
    files_bytes: int = 16 * 2**20
    processes: int = 16
    output_bytes: int = 2**16


@dataclass(frozen=True)
class Outcome:
    """What became of a program.

    Attributes:
        output: what it printed, cut at `output_bytes`.
        ending: `ended` by itself or by a bound of the kernel's, or killed for its time or for its output.
    """

    output: bytes
    ending: Literal["ended", "too long", "too much output"]


def require_sandbox() -> None:
    """Try the sandbox with a program that says a word.

    Raises:
        ConfigError: this machine does not let it be built; says what failed.
    """
    command = _command(Limits(cpu_s=60))

    def tried() -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(command, input=b"print('word')", capture_output=True, env=_ENVIRONMENT, check=False)

    done = tried()
    if done.returncode == _KILLED or killed_by(done.returncode) is not None:
        done = tried()
    if done.returncode or done.stdout != b"word\n":
        reason = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
        raise ConfigError(
            f"the sandbox cannot be built on this machine: {reason}. It needs Linux 5.12 and user namespaces: see "
            "`sysctl user.max_user_namespaces kernel.apparmor_restrict_unprivileged_userns`; in a container, a seccomp "
            "profile that lets `unshare` and `mount` pass. Programs of a policy are not run without it"
        )


async def run_python(source: str, limits: Limits | None = None) -> Outcome:
    """Run a program and return what became of it.

    Raises:
        EnvironmentFailure: the sandbox could not be built.
        ProcessKilled: somebody, or the kernel, killed or stopped the sandbox, which no program inside can.
    """
    limits = limits or Limits()
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *_command(limits), stdin=pipe, stdout=pipe, stderr=pipe, env=_ENVIRONMENT, start_new_session=True
    )
    ending: Literal["ended", "too long", "too much output"] = "too long"
    output, is_stopped = b"", False
    try:
        async with asyncio.timeout(_WALL_PER_CPU * limits.cpu_s):
            output = await _exchange(process, source.encode(errors="replace"), most_bytes=limits.output_bytes)
            if len(output) > limits.output_bytes:
                ending = "too much output"
            else:
                await process.wait()  # it may have closed its output, and go on
                ending = "ended"
    except TimeoutError:
        output = b""  # how far it came is a matter of how busy the machine was
        is_stopped = _is_stopped(process.pid)
    finally:
        is_ours = process.returncode is None and ending != "ended"
        if process.returncode is None:
            process.kill()
        error = await _end(process)
    if process.returncode == _SETUP_FAILED:
        raise EnvironmentFailure(f"the sandbox could not be built: {error.decode(errors='replace')}")
    if process.returncode == _KILLED or (not is_ours and killed_by(process.returncode) is not None):
        raise ProcessKilled("its sandbox was killed from outside")
    if is_stopped:
        raise ProcessKilled("its sandbox was stopped from outside")
    return Outcome(output[: limits.output_bytes], ending)


def _is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the outer process of a sandbox, or the first one inside."""
    with contextlib.suppress(psutil.NoSuchProcess):
        outer = psutil.Process(pid)
        return any(one.status() == psutil.STATUS_STOPPED for one in (outer, *outer.children()))
    return False


async def _exchange(process: asyncio.subprocess.Process, source: bytes, *, most_bytes: int) -> bytes:
    """Write a program, and return what it prints until it says that this was all, or until that is too much."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(source)
    process.stdin.close()
    output = b""
    while len(output) <= most_bytes and (more := await process.stdout.read(2**16)):
        output += more
    return output


async def _end(process: asyncio.subprocess.Process) -> bytes:
    """Wait for the end of a process that has ended or was killed, and return what it had to say."""
    assert process.stdout is not None and process.stderr is not None
    while await process.stdout.read(2**16):
        pass
    error = await process.stderr.read()
    await process.wait()
    return error


_ENVIRONMENT = {"PYTHONHASHSEED": "0"}
"""The order of sets is the same at every run. Nothing else of the environment, its keys and tokens, goes inside."""


def _command(limits: Limits) -> list[str]:
    prefix = os.path.realpath(sys.base_prefix)
    visible = [path for path in _VISIBLE if Path(path).exists()]
    if not any(Path(prefix).is_relative_to(path) for path in visible):
        visible.append(prefix)
    values = {
        "parent": os.getpid(),
        "visible": visible,
        "cpu_s": limits.cpu_s,
        "memory_bytes": limits.memory_bytes,
        "files_bytes": limits.files_bytes,
        "processes": limits.processes,
    }
    # Neither site-packages nor the directory of the script: what the program can import is the standard library.
    interpreter = [os.path.realpath(sys.executable), "-S", "-s", "-P", "-B", "-X", "utf8"]
    return [*interpreter, str(_INSIDE), json.dumps(values)]


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
            prompt=[Message("user", self._prompt.replace("{steps}", ", then ".join(steps)))],
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
