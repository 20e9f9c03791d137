"""Tools of real MCP servers: what the policy sees of them, one session for each rollout, and servers that fail."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import psutil
import pytest

from holdfast.config.environments import EnvironmentConfig, McpServerConfig
from holdfast.errors import ConfigError, EnvironmentFailure, ProcessKilled
from holdfast.orchestrator.env import mcp
from holdfast.orchestrator.env.guard import prompt_ids_of
from holdfast.orchestrator.env.harness import HarnessEnvironment
from holdfast.orchestrator.env.interface import Environment, Message, Session, Task, TaskSeed
from holdfast.orchestrator.env.registry import find_environment
from holdfast.orchestrator.env.tool_loop import check_tools, tool_use_of
from holdfast.orchestrator.env.tools import ToolCall, arguments_of
from holdfast.orchestrator.episodes import Problem, play_session
from tests.builders.scripted_sessions import scripted_session
from tests.conftest import ROOT
from tests.runs.ports import free_port
from tests.runs.processes import HANG_S, command_line
from tests.unit.orchestrator.env.test_environment_tools import answers, called, tokenizer_of

NO_TOOLS = "from mcp.server.mcpserver import MCPServer\nMCPServer('empty').run('stdio')\n"
STDIO = {"command": sys.executable, "args": [str(ROOT / "tests" / "servers" / "mcp_server.py")]}


class Asks(Environment):
    def make_task(self, seed: TaskSeed) -> Task:
        return Task(prompt=[Message("user", "go")])


def settings_of(*servers: dict[str, Any], **more: Any) -> EnvironmentConfig:
    named = {f"s{number}": server for number, server in enumerate(servers)}
    return EnvironmentConfig.model_validate({"id": "asks", "mcp_servers": named, "max_turns": 20, **more})


def call(name: str, **arguments: Any) -> str:
    return called("hermes", name, arguments)


async def play(
    settings: EnvironmentConfig, *rollouts: Sequence[str], before: Callable[[], object] = lambda: None,
    before_turn: Mapping[int, Callable[[], object]] | None = None,
) -> list[Session]:  # fmt: skip
    """Play sessions at the same time, in which the policy says what is given. `before` is called ahead of them, and one
    of `before_turn` ahead of the turn of that number, from 0."""
    tokenizer = tokenizer_of("hermes")
    environment = Asks()
    problem = Problem(environment, settings, TaskSeed(0, "asks", 0))
    task = environment.make_task(problem.seed)
    tool_use = tool_use_of(environment, settings, tokenizer)
    assert tool_use is not None
    prompt = prompt_ids_of(task, tokenizer, what="asks", seq_len=10_000, tools=tool_use.schemas)

    async def call_before(turn: int) -> None:
        if before_turn and turn in before_turn:
            before_turn[turn]()

    def session_saying(texts: Sequence[str]) -> Session:
        turns = [[*tokenizer.encode(text), tokenizer.stop_token_ids[0]] for text in texts]
        return scripted_session(
            tokenizer, prompt, turns, before=call_before, seq_len=10_000, max_tokens=1000, task=task, tool_use=tool_use
        )

    sessions = [session_saying(texts) for texts in rollouts]
    before()
    try:
        await asyncio.gather(*(play_session(session, task, problem) for session in sessions))
    finally:
        # Without their loop, processes that are about to end would be said to be left, in whichever test comes next.
        await asyncio.gather(*mcp._LIVING, return_exceptions=True)
    return sessions


@pytest.mark.launch
def test_every_rollout_sees_a_server_of_its_own(ends: Callable[..., bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCP_SECRET", "s3cret")
    settings = settings_of({**STDIO, "env": ["MCP_SECRET"]})
    first = [call("add", a=2, b=3), call("note", text="a"), call("note", text="b"), call("process"), "done"]
    second = [call("note", text="c"), call("process"), call("add", a=1), "done"]
    one, other = asyncio.run(play(settings, first, second))
    assert "Note a text, and tell all that were noted." in tokenizer_of("hermes").decode(one.token_ids)
    told = answers(one), answers(other)
    assert told[0][:3] == ["5", "a", "a b"] and told[1][0] == "c" and told[1][2] == "2"
    processes = [told[0][3], told[1][1]]
    assert len(set(processes)) == 2 and all(text.endswith(" s3cret") for text in processes)
    assert one.tool_counts["calls"] == 4 and sum(one.tool_counts.values()) == 4
    assert all(ends(int(text.split()[0])) for text in processes), "they end with their rollout"


@pytest.mark.launch
def test_failures_go_to_the_policy_and_a_server_that_died_is_started_again() -> None:
    said = [
        call("note", text="a"), call("fail", why="so"), call("add", a="x"), call("draw"), call("wait"), call("die"),
        call("note", text="b"), called("hermes", "add", [1]), call("none"), "done",
    ]  # fmt: skip
    [session] = asyncio.run(play(settings_of(STDIO, tool_timeout_s=2.0), said))
    told = answers(session)
    assert told[0] == "a" and "so" in told[1] and told[1].startswith("error: ")
    assert told[2].startswith("error: ") and "a" in told[2]
    assert told[3] == "error: it returned what is not text: image" and told[4] == "error: wait took longer than 2 s"
    assert told[5] == "error: mcp_servers.s0 has died; the next call starts another"
    assert told[6] == "b", "of the new one"
    failed = {name.removeprefix("failed/"): n for name, n in session.tool_counts.items() if name.startswith("failed/")}
    assert failed == {"raised": 3, "timeout": 1, "server": 1, "arguments": 1, "unknown": 1}


@pytest.mark.launch
def test_a_server_that_a_signal_stops_is_no_timeout_to_the_policy() -> None:
    def stop() -> None:
        children = psutil.Process().children(recursive=True)
        (server,) = [one for one in children if STDIO["args"][0] in command_line(one)][1:]
        server.suspend()

    settings = settings_of(STDIO, tool_timeout_s=1.0)
    with pytest.raises(ProcessKilled, match=r"mcp_servers.s0: its process was stopped from outside"):
        asyncio.run(play(settings, [call("note", text="a"), call("note", text="b"), "done"], before_turn={1: stop}))


def test_a_server_that_has_started_is_not_looked_at() -> None:
    ending = Mock()

    async def start() -> None:
        async with mcp._starting(McpServerConfig(command="sh", start_timeout_s=0.01), ending) as bound:
            bound.reschedule(None)
            await asyncio.sleep(0.02)

    asyncio.run(start())
    ending.is_stopped.assert_not_called()


@pytest.mark.launch
def test_a_server_that_a_signal_stops_at_its_start_is_no_failure() -> None:
    server = mcp.McpServer("s0", McpServerConfig.model_validate(STDIO))
    stops = McpServerConfig(command="sh", args=["-c", "kill -STOP $$"], start_timeout_s=5.0)
    server._config = stops
    with mcp.ending_of(stops) as ending, pytest.raises(ProcessKilled):
        asyncio.run(server._list_tools(ending))
    with pytest.raises(ProcessKilled):
        asyncio.run(server.connect(Mock()))


@pytest.mark.launch
def test_all_pages_of_tools_are_seen_and_every_kind_of_answer_becomes_text() -> None:
    paged = {"command": sys.executable, "args": [str(ROOT / "tests" / "servers" / "paged_mcp_server.py")]}
    said = [call("structured"), call("silent"), call("refused"), call("echo", text="3", number=3), "done"]
    [session] = asyncio.run(play(settings_of(paged), said))
    assert answers(session) == [
        '{"sum": 3}', "error: it failed and did not say why", "error: not these arguments",
        "{'text': '3', 'number': 3}",
    ]  # fmt: skip
    tokenizer = tokenizer_of("hermes")
    tool_use = tool_use_of(Asks(), settings_of(paged), tokenizer)
    assert tool_use is not None
    texts = {"text": "3", "number": "3", "other": "x"}
    parameters = tool_use.tools["echo"].schema["function"]["parameters"]
    found = arguments_of(ToolCall("echo", texts, has_texts=True), parameters)
    assert found == {"text": "3", "number": 3, "other": "x"}


@pytest.fixture
def server(tmp_path: Path) -> tuple[dict[str, Any], Path]:
    """Return the settings of a server, and its script."""
    script = tmp_path / "server.py"
    script.write_text(Path(STDIO["args"][0]).read_text())
    return {"command": sys.executable, "args": [str(script)]}, script


def test_a_server_that_cannot_be_started_again_is_told_to_the_policy(server: tuple[dict[str, Any], Path]) -> None:
    said = [call("add", a=1), call("add", a=2), "done"]
    [session] = asyncio.run(play(settings_of(server[0]), said, before=server[1].unlink))
    assert all(text.startswith("error: mcp_servers.s0 could not be reached: ") for text in answers(session))
    assert session.tool_counts["failed/server"] == 2


@pytest.mark.launch
def test_a_rollout_that_ends_while_its_server_starts_leaves_none(server: tuple[dict[str, Any], Path]) -> None:
    settings, script = settings_of(server[0], timeout_s=1.0), server[1]
    hang = lambda: script.write_text("import time\ntime.sleep(100000)\n")  # noqa: E731
    with pytest.raises(EnvironmentFailure, match=r"run\(\) took longer than 1 s"):
        asyncio.run(play(settings, [call("add", a=1)], before=hang))
    assert not [one for one in psutil.Process().children(recursive=True) if str(script) in command_line(one)]


@contextmanager
def serving_at(port: int, *more: str) -> Iterator[str]:
    """Start a server at a port, and give its URL once it answers."""
    server = subprocess.Popen([sys.executable, *STDIO["args"], str(port), *more], stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}/mcp"
    try:
        with httpx.Client(transport=httpx.HTTPTransport(retries=20), timeout=HANG_S) as client:
            client.get(url)
        yield url
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def at_a_port() -> Iterator[str]:
    with serving_at(free_port()) as url:
        yield url


@pytest.mark.launch
def test_a_session_that_a_server_at_a_url_has_forgotten_is_begun_anew() -> None:
    port = free_port()
    said = [call("note", text="a"), call("fail", why="so"), call("note", text="b"), call("note", text="c"), "done"]
    with ExitStack() as servers:
        servers.enter_context(serving_at(port, "sessions"))

        def restart() -> None:
            servers.close()
            servers.enter_context(serving_at(port, "sessions"))

        settings = settings_of({"url": f"http://127.0.0.1:{port}/mcp"})
        [session] = asyncio.run(play(settings, said, before_turn={2: restart}))
    told = answers(session)
    assert told[0] == "a" and told[1].startswith("error: ") and "so" in told[1]
    assert told[2] == "error: mcp_servers.s0 has died; the next call starts another"
    assert told[3] == "c"
    assert session.tool_counts["failed/server"] == 1 and session.tool_counts["failed/raised"] == 1


def test_a_server_at_a_url_is_asked_with_its_key(at_a_port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCP_KEY", "k")
    server = {"url": at_a_port, "api_key_env": "MCP_KEY", "tools": ["add", "die", "note"]}
    said = [call("add", a=4), call("die"), call("add", a=1), "done"]
    [session] = asyncio.run(play(settings_of(server), said))
    told = answers(session)
    assert told[0] == "5" and all(text.startswith("error: ") for text in told[1:])
    assert session.tool_counts["failed/server"] + session.tool_counts["failed/raised"] == 2


@pytest.mark.launch
@pytest.mark.parametrize(("servers", "said"), [
    ([{"command": "no_such_program_anywhere"}], "s0: there is no program 'no_such_program_anywhere' on the PATH"),
    ([{**STDIO, "env": ["MCP_NOT_SET"]}], "s0: the environment variable MCP_NOT_SET is not set"),
    ([{**STDIO, "tools": ["ad"]}], r"s0.tools: it has no tool 'ad'. Did you mean 'add'\? Tools there: add, note"),
    ([{"command": sys.executable, "args": ["-c", NO_TOOLS]}], "s0: it has no tools"),
    ([{"command": sys.executable, "args": ["-c", "pass"]}], "s0: it could not be asked for its tools: "),
    ([{"command": "sleep", "args": ["1000"], "start_timeout_s": 0.5}], r"did not list its tools within 0.5 s"),
    ([{"url": "http://127.0.0.1:9/mcp"}], "s0: it could not be asked for its tools: "),
    ([STDIO, {**STDIO, "tools": ["note"]}], r"s1: there is another tool 'note': .* mcp_servers.s1.tools"),
])  # fmt: skip
def test_a_server_that_cannot_be_used_is_told_before_sampling(servers: list[dict[str, Any]], said: str) -> None:
    tokenizer = tokenizer_of("hermes")
    with pytest.raises(ConfigError, match=said):
        tool_use_of(Asks(), settings_of(*servers), tokenizer)


@pytest.mark.parametrize(("server", "said"), [
    ({}, "set `command`, or `url`"),
    ({"command": "x", "url": "http://x"}, "set `command`, or `url`"),
    ({"url": "http://me:secret@x"}, "must not hold a user name"),
    ({"url": "http://x", "args": ["y"]}, "args and env belong to a `command`"),
    ({"command": "x", "api_key_env": "Y"}, "api_key_env belongs to a `url`"),
])  # fmt: skip
def test_settings_of_servers_that_cannot_be_are_refused(server: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        settings_of(server)


class Harnessed(HarnessEnvironment):
    """Brings its own tools."""


def test_a_harness_with_servers_and_a_template_without_tools_are_refused() -> None:
    section = settings_of(STDIO, id=f"{__name__}:Harnessed")
    with pytest.raises(ConfigError, match=r"environments\[0\].mcp_servers: '.*:Harnessed' is played by a harness"):
        find_environment(section, key="environments[0]")
    model = str(ROOT / "examples" / "reverse_text" / "model")
    with pytest.raises(ConfigError, match="the chat template of .* writes calls of tools in no form"):
        check_tools({"asks": Asks()}, [settings_of(STDIO)], tokenizer_name=model)


@pytest.mark.launch
def test_a_server_ends_with_a_process_that_is_killed(tmp_path: Path, ends: Callable[..., bool]) -> None:
    started = tmp_path / "started"
    script = (
        "import asyncio, os, signal, sys\n"
        "from holdfast.orchestrator.env.mcp import _connect, ending_of\n"
        "from holdfast.config.environments import McpServerConfig\n"
        f"config = McpServerConfig(command=sys.executable, args={STDIO['args']!r}, env=['MCP_STARTED'])\n"
        "async def main():\n    with ending_of(config) as ending:\n"
        "      async with _connect(config, ending) as client:\n"
        "        await client.list_tools()\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "MCP_STARTED": str(started)}
    killed = subprocess.run([sys.executable, "-c", script], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL and ends(int(started.read_text()))
