"""An environment in which every kind of process plays or scores, and a judge, which is a process of nobody's."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from examples.environments.python_code import require_sandbox, run_python
from holdfast import ConfigError, Environment, Judge, JudgeConfig, Message, Score, Session, Task, TaskSeed
from holdfast.config.environments import McpServerConfig
from holdfast.orchestrator.env.math_answers import MathAnswers
from holdfast.orchestrator.env.mcp import McpServer
from tests.conftest import ROOT
from tests.faults.blows import PLAYERS
from tests.runs.ports import free_port
from tests.runs.processes import HANG_S

AT_ONCE = 4
"""Questions that a judge is asked at once."""
TURNS = 2


class Everything(Environment):
    """Two turns with the answer of an MCP server between them; a judge, a program and mathematics give the score.
    The policy of these tests knows nothing but small letters, so the server is asked by this class and not by calls of
    the policy.
    """

    def __init__(self, judge: JudgeConfig) -> None:
        self._judge = Judge(judge, fields=["first", "last"])
        self._mathematics = MathAnswers()
        server = McpServerConfig(command=sys.executable, args=["-S", "-E", PLAYERS["mcp_server"]])
        self._notes = McpServer("notes", server)
        self._has_sandbox = has_sandbox()

    def make_task(self, seed: TaskSeed) -> Task:
        return Task(prompt=[Message("user", f"{seed.index % 2}")], answer=str(seed.index))

    async def run(self, session: Session, task: Task) -> None:
        for _ in range(TURNS - 1):
            letters = [letter for letter in await session.sample() if letter.isalpha()]
            most_frequent = max(sorted(letters), key=letters.count, default="none")
            await self._notes.connect(session)
            noted = await self._notes.call("note", {"text": most_frequent}, session)
            session.append_messages([Message("user", noted)])
        await session.sample()

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        judged = await self._judge.ask_all(
            [{"first": session.texts[0], "last": session.texts[-1]} for session in sessions]
        )
        return [Score(one.score + await self._computed(session)) for one, session in zip(judged, sessions, strict=True)]

    async def _computed(self, session: Session) -> float:
        length = len(session.texts[-1])
        right = await self._mathematics(f"$\\frac{{{2 * length}}}{{2}}$", str(length))
        if not self._has_sandbox:
            return right
        # It takes a moment in which it can be hit.
        outcome = await run_python(f"import time\ntime.sleep(0.02)\nprint(len({session.texts[-1]!r}))")
        return right + (outcome.output == f"{length}\n".encode())


def has_sandbox() -> bool:
    """Whether the kernel of this machine builds sandboxes."""
    try:
        require_sandbox()
    except ConfigError:
        return False
    return True


class JudgeProcess:
    """A judge in a process of its own, at a port of its own. Use as a context manager: then it answers."""

    def __init__(self, asked: Path, *, port: int | None = None) -> None:
        self.port = port or free_port()  # where it listens, also when it has been started again
        self._asked = asked
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def start(self) -> None:
        """Start it, again where it has died; return when it answers."""
        if self._process is not None:
            self._process.wait()
        words = [sys.executable, "-m", "tests.servers.judge", str(self.port), str(self._asked)]
        self._process = subprocess.Popen(words, cwd=ROOT)
        # Connecting is tried again after 0.5 s, then after twice as long each time.
        with httpx.Client(transport=httpx.HTTPTransport(retries=20), timeout=HANG_S) as client:
            client.get(f"http://127.0.0.1:{self.port}/")

    def process(self) -> psutil.Process:
        assert self._process is not None
        return psutil.Process(self._process.pid)

    def questions(self, what: str) -> Counter[str]:
        """Count each question that was `asked`, or `answered`; a line that was cut when the judge died was not."""
        lines: list[Any] = [line for line in self._asked.read_text().split("\n")[:-1] if line.endswith("]")]
        return Counter(question for kind, question in map(json.loads, lines) if kind == what)
