"""Environments of the package verifiers: `id = "verifiers:ID"`, with its settings as `args`.

A process of its own (`verifiers_player.py`) plays them, in an interpreter that has verifiers: its hundred dependencies
take seconds to import, and conflict with the inference server's. A rollout is an episode of verifiers, whose harness
asks our endpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.errors import MOST_KILLED, ConfigError, EnvironmentFailure, printable
from holdfast.orchestrator.env.harness import Endpoint, HarnessEnvironment
from holdfast.orchestrator.env.interface import Score, Task, TaskSeed
from holdfast.process.child import is_stopped, was_killed

VERIFIERS = "verifiers:"
_HINT = (
    "Set args.python to an interpreter that has verifiers, such as verifiers-env/bin/python after "
    "`uv venv verifiers-env && uv pip install -p verifiers-env 'verifiers==0.4.*'`"
)
_PLAYER = Path(__file__).with_name("verifiers_player.py")
_MOST_DEATHS = 3
_MOST_LINE = 1 << 30
_LOOK_S = 30.0


@dataclass(frozen=True)
class Row(Task):
    row: int = 0


class PlayerDied(Exception):
    """The process that played has ended; `is_killed`: by a signal from outside."""

    def __init__(self, *, is_killed: bool) -> None:
        super().__init__("it was killed from outside" if is_killed else "it has ended")
        self.is_killed = is_killed


class Verifiers(HarnessEnvironment):
    """Reward: the reward of the policy's agent, with its parts as metrics."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        """Start the process that plays, and load the tasks there.

        Args:
            name: the id of the taskset, as verifiers has it.
            settings: of verifiers' environment (`taskset`, `agent`, `timeout`, ...); `select`, as verifiers selects
                tasks; and `python`, the interpreter that has verifiers (unset: this one).

        Raises ConfigError if the interpreter does not exist, or verifiers refuses name or settings.
        """
        own = {key: settings[key] for key in ("python", "select") if key in settings}
        env = {key: value for key, value in settings.items() if key not in own}
        taskset = env.get("taskset", {})
        if not isinstance(taskset, dict) or not isinstance(own.get("select", {}), dict):
            raise ConfigError(f"{VERIFIERS}{name}: args.taskset and args.select must be tables")
        env["taskset"] = {**taskset, "id": name}
        start = {"env": env, "select": own.get("select", {})}
        self._player = _Player(str(own.get("python", sys.executable)), start, name=f"{VERIFIERS}{name}")
        self.num_tasks = self._player.num_tasks

    def make_task(self, seed: TaskSeed) -> Row:
        """Return task `index` of an endless sequence of epochs, each in an order of its own."""
        assert self.num_tasks is not None
        return Row(prompt="", row=seed.row(self.num_tasks))

    async def play(self, endpoint: Endpoint, task: Task) -> Score:
        """Play one episode. Raises RuntimeError if it failed, or its process ends again and again."""
        assert isinstance(task, Row)
        num_deaths = num_killed = 0
        while num_deaths < _MOST_DEATHS and num_killed <= MOST_KILLED:
            try:
                found = await self._player.play(task.row, endpoint, is_alone=num_deaths > 0)
            except PlayerDied as death:
                num_deaths += not death.is_killed
                num_killed += death.is_killed
                endpoint.restart()
                continue
            if "failed" not in found:
                return Score(found["reward"], found["metrics"])
            raise RuntimeError(printable(found["failed"]))
        if num_killed > MOST_KILLED:
            raise RuntimeError(f"the process that played it was killed from outside {num_killed} times in a row")
        raise RuntimeError(f"the process that played it has ended {num_deaths} times")


class _Player:
    """The process that plays, started again after its death."""

    def __init__(self, python: str, start: dict[str, Any], *, name: str) -> None:
        self._python = python
        self._start = json.dumps(start).encode() + b"\n"
        self._name = name
        self._process: subprocess.Popen[bytes] | None = None
        self._link: _Link | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting: asyncio.Task[_Link] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._alone = asyncio.Lock()
        self.num_tasks = self._load_first()

    def _load_first(self) -> int:
        for _ in range(MOST_KILLED):
            self._spawn()
            try:
                return self._load(self._socket)
            except PlayerDied:
                self.close()
            except BaseException:
                self.close()
                raise
        raise ConfigError(f"{self._name}: the process that was to play it was killed {MOST_KILLED} times in a row")

    async def play(self, row: int, endpoint: Endpoint, *, is_alone: bool) -> dict[str, Any]:
        """Return the result of one episode; episodes with `is_alone` are played one at a time.

        Raises PlayerDied if the process has ended; ConfigError or EnvironmentFailure if it could not be started again.
        """
        await self._linked()
        async with self._alone if is_alone else contextlib.nullcontext():
            return await (await self._linked()).play(row, endpoint)

    async def _linked(self) -> _Link:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._link, self._starting = loop, None, None
            self._alone = asyncio.Lock()
        if self._starting is None or self._starting.done():
            # In a context of its own, and not cancelled with one rollout: it serves all.
            self._starting = contextvars.Context().run(asyncio.create_task, self._start_again())
        return await asyncio.shield(self._starting)

    async def _start_again(self) -> _Link:
        """Return the link to the process, which is started again if it is gone."""
        process = self._process  # None: it could not be started again the last time
        if process is None or process.poll() is not None or (self._link is not None and self._link.is_over):
            self.close()
            # From the thread of the event loop: the kernel kills the process when that thread ends.
            self._spawn()
            self._watch()
            try:
                if await asyncio.to_thread(self._load, self._socket) != self.num_tasks:
                    raise EnvironmentFailure(f"{self._name} has other tasks after its process was started again")
            except BaseException:
                self.close()
                raise
        elif self._link is None:  # loaded before this event loop began
            self._watch()
        if self._link is None:
            assert self._process is not None
            self._link = await _Link.open(self._socket, self._process)
        return self._link

    def _watch(self) -> None:
        """Kill the process once a signal has stopped it, as nobody else would end the wait for it."""
        process = self._process
        assert process is not None

        async def watch() -> None:
            while process.poll() is None:
                await asyncio.sleep(_LOOK_S)
                if is_stopped(process.pid):
                    process.kill()

        self._watching = asyncio.create_task(watch())

    def _spawn(self) -> None:
        self._socket, theirs = socket.socketpair()
        try:
            # -P: modules beside the script would hide others of the same name.
            command = [self._python, "-P", str(_PLAYER), str(os.getpid()), str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=sys.__stderr__, pass_fds=[theirs.fileno()]
            )
        except OSError as error:
            self._socket.close()
            raise ConfigError(
                f"{self._name}: args.python = '{self._python}' cannot be run ({error.strerror}). {_HINT}"
            ) from None
        finally:
            theirs.close()

    def _load(self, connection: socket.socket) -> int:
        """Load the environment; return its number of tasks. Raises ConfigError, or PlayerDied if it was killed."""
        process = self._process
        with contextlib.suppress(ConnectionError), connection.makefile("rb") as answers:
            connection.sendall(self._start)
            line = answers.readline()
            if line:
                found = json.loads(line)
                if "failed" not in found:
                    return found["num_tasks"]
                hint = _HINT if found.get("is_missing") else f"It ran in {self._python}"
                raise ConfigError(f"{self._name}: {printable(found['failed'])}. {hint}")
        if process is not None and was_killed(process):
            raise PlayerDied(is_killed=True)
        code = "" if process is None else f" with exit code {process.returncode}"
        raise ConfigError(
            f"{self._name}: the process of '{self._python}' that was to play it ended{code}; see its output"
        )

    def close(self) -> None:
        process, self._process, self._link = self._process, None, None
        if process is not None:
            process.kill()
            process.wait()
            self._socket.close()

    def __del__(self) -> None:
        if getattr(self, "_process", None) is not None:
            self.close()


class _Link:
    """The connection of one event loop to the process."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, process: subprocess.Popen[bytes]
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._process = process
        self._is_killed = False
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.is_over = False
        # In a context of its own: it serves all rollouts.
        self._reading = contextvars.Context().run(asyncio.create_task, self._read())

    @classmethod
    async def open(cls, connection: socket.socket, process: subprocess.Popen[bytes]) -> _Link:
        return cls(*await asyncio.open_unix_connection(sock=connection.dup(), limit=_MOST_LINE), process)

    async def play(self, row: int, endpoint: Endpoint) -> dict[str, Any]:
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        asked = {"base_url": endpoint.base_url, "api_key": endpoint.api_key, "model": endpoint.model}
        try:
            self._say({"play": number, "task": row, **asked})
            return await waiting
        finally:
            del self._waiting[number]
            if not waiting.done() or waiting.cancelled():
                with contextlib.suppress(PlayerDied):
                    self._say({"cancel": number})

    def _say(self, message: dict[str, Any]) -> None:
        if self.is_over:
            raise PlayerDied(is_killed=self._is_killed)
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def _read(self) -> None:
        try:
            with contextlib.suppress(ConnectionError):
                # If the process was killed meanwhile, its last line is cut off.
                while (line := await self._reader.readline()).endswith(b"\n"):
                    found = json.loads(line)
                    waiting = self._waiting.get(found.pop("play"))
                    if waiting is not None and not waiting.done():
                        waiting.set_result(found)
            self._is_killed = await asyncio.to_thread(was_killed, self._process)
        finally:
            self.is_over = True
            self._writer.close()
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(PlayerDied(is_killed=self._is_killed))
