"""Mathematical answers by their value, as math-verify finds it, in a process of its own.

math-verify bounds its work by signal alarms, which raise outside of a main thread, and sympy may still take forever, or
all memory: the kernel ends the process then, and the next answer gets a new one. Time is processor time, so that a busy
machine changes no reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import math
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.errors import EnvironmentFailure, ProcessKilled
from holdfast.orchestrator.env.numbers import Number, digits_of, fold, is_near, number, numbers_alone, plain, same
from holdfast.process.child import die_with_parent, was_killed
from holdfast.process.imports import import_extra

_CPU_S = 30.0
"""For one answer; math-verify gives up by itself after 5 s for each of its steps."""
_WAIT_S = 300.0
"""For a process that does not get so far."""
_MEMORY_BYTES = 4 << 30
"""For one answer, beyond the memory of the process before it."""
_WORD = re.compile(r"[^\W\d_]{2,}")
_FUNCTIONS = frozenset({"sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "sqrt", "pi", "max", "min"})
_TERM = r"(?:[a-zA-Z]\s?=\s?)?[-+]?[\d.\\(](?:[^\s,;*$!?]|,(?=\S))*(?<!\.)"
_OR = r",?\s(?:\\text\s?\{\s?)?(?:or|and)(?:\s?\})?\s"
_LISTED = re.compile(rf"(?<![^\s*]){_TERM}(?:(?:{_OR}|,\s){_TERM})+")
"""Solutions such as `x = 1 or x = 2`, and `1, 2, and 3`, which math-verify reads as a set between dollars only."""
_KEPT_SHARE = 0.25
"""The part that answers may leave in the process, as sympy's caches do, before the next answer gets another process."""


class MathAnswers:
    """A scorer: 1 if an answer has the value of the right one, in LaTeX or plain; one answer after the other.

    An answer may cost `cpu_s`. A process that gives no answer within `wait_s` counts as killed."""

    def __init__(self, *, cpu_s: float = _CPU_S, wait_s: float = _WAIT_S) -> None:
        """Start nothing yet. Raises ConfigError if math-verify is not installed."""
        self._process: subprocess.Popen[bytes] | None = None
        import_extra("math_verify", extra="math-verify", needed_by="scorer 'math_verify'")
        self._cpu_s, self._wait_s = cpu_s, wait_s
        self._turn: asyncio.Lock | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, completion: str, answer: str) -> float:
        """Return 1 for the same value, 0 for another one, or if the comparison takes too long or too much memory.

        Raises EnvironmentFailure if the right answer is not mathematics, ProcessKilled if the process was killed."""
        if self._loop is not asyncio.get_running_loop() or self._turn is None:
            self._loop, self._turn = asyncio.get_running_loop(), asyncio.Lock()
        async with self._turn:
            reply = await self._ask(json.dumps([completion, answer]).encode() + b"\n")
        if reply is None:
            return 0.0
        if "error" in reply:
            raise EnvironmentFailure(f"scorer 'math_verify': {reply['error']}")
        return float(reply["equal"])

    async def _ask(self, line: bytes) -> dict[str, Any] | None:
        """Return the answer of the process; None if it ends by itself. Raises ProcessKilled."""
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            # From the thread of the event loop: the kernel kills the process when that thread ends.
            command = [sys.executable, "-m", "holdfast.orchestrator.env.math_answers", str(self._cpu_s)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        process = self._process
        exchange = asyncio.ensure_future(asyncio.to_thread(_exchange, process, line))
        try:
            reply = await asyncio.wait_for(asyncio.shield(exchange), self._wait_s)
            reason = "was killed from outside" if not reply and await asyncio.to_thread(was_killed, process) else ""
        except TimeoutError:
            reply, reason = b"", f"gave no answer for {self._wait_s:g} s, in which it hardly got to work"
        finally:
            if not exchange.done():
                process.kill()
                await asyncio.wait([exchange])
        if reason:
            self.close()
            raise ProcessKilled(f"the process of scorer 'math_verify' {reason}")
        if not reply:
            self.close()
            return None
        said = json.loads(reply)
        if said.pop("is_full"):
            self.close()
        return said

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # an unsent line
            process.stdin.close()
        process.stdout.close()
        process.wait()

    def __del__(self) -> None:
        self.close()


def _exchange(process: subprocess.Popen[bytes], line: bytes) -> bytes:
    """Write a line and return the answer to it, whole; nothing if the process ends meanwhile."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(line)
        process.stdin.flush()
    except BrokenPipeError:
        return b""
    reply = process.stdout.readline()
    return reply if reply.endswith(b"\n") else b""


def _compare(completion: str, answer: str) -> dict[str, Any]:
    from math_verify import parse, verify

    is_marked = "$" in completion or "\\boxed" in completion
    numbers = numbers_alone(answer)
    bare = answer.strip().strip("$")
    listed = "" if "$" in bare else plain(bare).strip()
    if re.search(_OR, listed) and _LISTED.fullmatch(listed):
        answer = f"${listed}$"
        completion = completion if is_marked else _LISTED.sub(r"$\g<0>$", plain(completion))
    if len(numbers) > 1 or any(isinstance(one.value, tuple) for one in numbers):
        # Plain lists of numbers and times: math-verify reads parts of them.
        if "\\begin" not in completion and number(completion, answer):
            return {"equal": True}
        if any(isinstance(one.value, tuple) for one in numbers):
            return {"equal": False}
        if not is_marked and not set("([") & set(completion + answer) and len(numbers_alone(completion)) > 1:
            completion = f"${completion}$"
    given = list[Any]()
    if len(numbers) == 1:
        said = numbers_alone(completion)
        if len(said) != 1:
            given = parse(plain(completion))
            said = numbers_alone(given[-1]) if given and isinstance(given[-1], str) else []
        if len(said) == 1:
            if same(said[0], numbers[0]) or not is_near(said[0], numbers[0]):
                return {"equal": same(said[0], numbers[0])}
            given = given or parse(digits_of(said[0]))  # math-verify says whether two roundings are equal
    right = _parse_right(answer, numbers)
    if all(isinstance(one, str) for one in right):  # math_verify returns text that it cannot parse as it is
        return {"error": f"the right answer {answer[:80]!r} is not a formula or number"}
    return {"equal": bool(verify(right, given or parse(fold(completion))))}


def _parse_right(answer: str, numbers: Sequence[Number]) -> list[Any]:
    """Return what math-verify finds in a right answer."""
    from math_verify import parse

    answer = fold(answer)
    if len(numbers) == 1:
        return parse(digits_of(numbers[0]) + "%" * numbers[0].is_percent)
    # Without these marks a formula would be read as its last number; with them, words as products of letters.
    is_marked = "$" in answer or "\\boxed" in answer
    words = set(_WORD.findall(answer)) - _FUNCTIONS
    is_formula = not is_marked and (not words or "\\" in answer)
    return parse(f"${answer}$" if is_formula else answer) or parse(answer if is_formula else f"${answer}$")


def _prepare() -> None:
    """Import what takes memory that is not an answer's, and let math-verify's alarms count the processor's time."""
    importlib.import_module("math_verify")
    _limit(resource.RLIMIT_CORE, 0)
    alarm: Any = lambda seconds: signal.setitimer(signal.ITIMER_PROF, seconds)  # noqa: E731
    signal.alarm = alarm
    signal.signal(signal.SIGPROF, _ring)


def _ring(number: int, frame: Any) -> None:
    if callable(handler := signal.getsignal(signal.SIGALRM)):
        handler(number, frame)


def _data_bytes() -> int:
    """Return what the kernel counts for RLIMIT_DATA."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[5]) * resource.getpagesize()


def _limit(kind: int, most: int) -> int:
    """Set a limit, within the hard one; return it."""
    _, hard = resource.getrlimit(kind)
    soft = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (soft, hard))
    return soft


def _main() -> None:
    die_with_parent()
    replies = sys.stdout.buffer
    sys.stdout = sys.stderr
    _prepare()
    begin = _data_bytes()
    most_bytes = begin + _KEPT_SHARE * (_limit(resource.RLIMIT_DATA, begin + _MEMORY_BYTES) - begin)
    for line in sys.stdin.buffer:
        # Limits count from here: earlier answers must not matter.
        _limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + float(sys.argv[-1])))
        _limit(resource.RLIMIT_DATA, _data_bytes() + _MEMORY_BYTES)
        said = _compare(*json.loads(line))
        replies.write(json.dumps(said | {"is_full": _data_bytes() > most_bytes}).encode() + b"\n")
        replies.flush()


if __name__ == "__main__":
    _main()
