"""Plays tasks of one environment of `verifiers`, in whichever interpreter has it. Run by its path, not imported:

    python verifiers_player.py <pid of who starts it> <socket>

It needs nothing but `verifiers`. Messages are JSON, one a line; the first one says which environment:

    {"env": {...}, "select": {...}}
        -> {"num_tasks": 100} or {"failed": "..."}
    {"play": 7, "task": 3, "base_url": ..., "api_key": ..., "model": ...}
        -> {"play": 7, "reward": 1.0, "metrics": {...}} or {"play": 7, "failed": "..."}
    {"cancel": 7}
"""

import asyncio
import ctypes
import importlib.metadata
import json
import os
import signal
import socket
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

VERSION = "0.4"
"""Version of verifiers; its v1 environments keep changing."""
_KEY_ENV = "HOLDFAST_ENDPOINT_KEY"
_MOST_LINE = 1 << 30


class Refusal(Exception):  # untested: needs verifiers
    """Message to the user; `is_missing`: verifiers is not there, or another version."""

    def __init__(self, message: str, *, is_missing: bool = False) -> None:
        super().__init__(message)
        self.is_missing = is_missing


@contextmanager
def _others_code() -> Iterator[None]:  # untested: needs verifiers
    """Turn errors of verifiers and of tasksets into a Refusal that names error and place."""
    try:
        yield
    except (Exception, SystemExit) as error:  # noqa: BLE001 - of others' code
        place, cause = _place_of(error), error.__cause__ or error.__context__
        # verifiers says that a taskset is missing if the taskset's own imports are.
        if cause is not None and not place and (origin := _place_of(cause)):
            place = f", after {_told(cause)}{origin}"
        raise Refusal(f"{_told(error)}{place}") from None


def _told(error: BaseException) -> str:  # untested: needs verifiers
    lines = [line.strip() for line in str(error).splitlines() if "errors.pydantic.dev" not in line]
    return f"{type(error).__name__}: {' '.join(lines).rstrip('.')}"


def _place_of(error: BaseException) -> str:  # untested: needs verifiers
    """Return ` (file:line)` of the taskset's code where an error came from; empty if verifiers refused something."""
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    installed = [place for place in places if "-packages/" in place[0]]
    library = (sysconfig.get_path("stdlib"), __file__, "<")
    own = [place for place in places if place not in installed and not place[0].startswith(library)]
    others = [place for place in installed if not {"verifiers", "pydantic"}.intersection(Path(place[0]).parts)]
    return "".join(f" ({name}:{line})" for name, line in (own or others)[-1:])


class Player:  # untested: needs verifiers
    """One environment, whose rollouts ask the endpoints that come with them."""

    def __init__(self, env: dict[str, Any], select: dict[str, Any]) -> None:
        """Load the environment and its tasks. Raises Refusal if verifiers or the taskset fails, or it has no end."""
        try:
            version = importlib.metadata.version("verifiers")
        except importlib.metadata.PackageNotFoundError:
            raise Refusal(f"verifiers is not installed in {sys.prefix}", is_missing=True) from None
        if not f"{version}.".startswith(f"{VERSION}."):
            told = f"verifiers {version} is installed in {sys.prefix}, and {VERSION}.x is supported"
            raise Refusal(told, is_missing=True)
        import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

        self._vf = vf
        with _others_code():
            self.env = vf.load_environment(vf.resolve_env_config(env))
            tasks = self.env.taskset.select(vf.SelectConfig.model_validate(select))
        if not tasks.bounded:
            raise Refusal("its tasks have no end: bound them with args.select, such as select = { limit = 1000 }")
        with _others_code():  # a generator of tasks runs only now
            self.tasks = list(tasks)
        if not self.tasks:
            raise Refusal("it has no tasks")

    async def play(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the reward of one rollout, or the reason of its failure."""
        vf = self._vf
        os.environ[_KEY_ENV] = asked["api_key"]  # the one key of the process that asks
        client = vf.EvalClientConfig(base_url=asked["base_url"], api_key_var=_KEY_ENV)
        context = vf.ModelContext(model=asked["model"], client=client)
        (slot,) = self.env.slots(self.tasks[asked["task"]])
        episode = await self.env.run_slot(slot, context)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            told = "; ".join(f"{error.type}: {error.message}" for error in errors) or "it says no reason"
            return {"failed": f"the episode failed: {told}"}
        traces = [trace for trace in episode.traces if trace.agent is None or trace.agent.trainable]
        if len(traces) != 1:
            return {"failed": f"{len(traces)} agents were played by the policy, and a rollout is one conversation"}
        rewards = {f"reward/{name}": one.value for name, one in traces[0].rewards.items() if one is not None}
        metrics = {name: value for name, value in traces[0].metrics.items() if value is not None}
        return {"reward": traces[0].reward, "metrics": rewards | metrics}


async def _serve(connection: socket.socket) -> None:  # untested: needs verifiers
    reader, writer = await asyncio.open_unix_connection(sock=connection, limit=_MOST_LINE)
    playing: dict[int, asyncio.Task[None]] = {}

    def say(message: dict[str, Any]) -> None:
        writer.write(json.dumps(message).encode() + b"\n")

    async def play(player: Player, asked: dict[str, Any]) -> None:
        try:
            found = await player.play(asked)
        except Exception as error:  # noqa: BLE001 - of others' code
            found = {"failed": f"{type(error).__name__}: {error}"}
        finally:
            del playing[asked["play"]]
        say({"play": asked["play"], **found})

    start = json.loads(await reader.readline())
    async with AsyncExitStack() as serving:
        try:
            player = Player(**start)
            with _others_code():
                await serving.enter_async_context(player.env.serving())
        except Refusal as refusal:
            say({"failed": str(refusal), "is_missing": refusal.is_missing})
            await writer.drain()
            return
        say({"num_tasks": len(player.tasks)})
        while line := await reader.readline():
            asked = json.loads(line)
            if "play" in asked:
                playing[asked["play"]] = asyncio.create_task(play(player, asked))
            elif asked["cancel"] in playing:
                playing[asked["cancel"]].cancel()
        for task in playing.values():
            task.cancel()
        await asyncio.gather(*playing.values(), return_exceptions=True)


def _main(parent: int, descriptor: int) -> None:  # untested: needs verifiers
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it dies with who has started it
    if os.getppid() != parent:
        return
    sys.path.append(str(Path.cwd()))  # where tasksets of the user's own may be
    with suppress(ConnectionError):
        asyncio.run(_serve(socket.socket(fileno=descriptor)))


if __name__ == "__main__":  # untested: needs verifiers
    _main(int(sys.argv[1]), int(sys.argv[2]))
