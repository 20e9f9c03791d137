"""Tools of MCP servers, through the official library: listed at the start, called by rollouts.

Every rollout has its own session with each server that it calls: a process, or a session of a server at a URL. No
rollout sees the changes of another rollout. A rollout that is played again finds the same state as the first time.
"""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from holdfast.config.environments import McpServerConfig
from holdfast.errors import MOST_KILLED, ConfigError, ProcessKilled, nearest, printable
from holdfast.orchestrator.env.interface import Session
from holdfast.orchestrator.env.tools import ToolFailed
from holdfast.process.imports import import_extra
from holdfast.process.noted_end import Ending
from holdfast.protocol.inference import read_key

_CLOSED = -32000
"""Code of the library for a connection that is gone (`mcp_types.CONNECTION_CLOSED`)."""


class McpServer:
    """One server of the settings, and its connections by session.

    Raises ConfigError if the library, the command or a key is missing, or the server did not list its tools."""

    def __init__(self, name: str, config: McpServerConfig) -> None:
        import_extra("mcp", extra="mcp", needed_by=f"mcp_servers.{name}")
        self._what = f"mcp_servers.{name}"
        self._config = config
        self._connections: WeakKeyDictionary[Session, _Connection] = WeakKeyDictionary()
        if config.command is not None and shutil.which(config.command) is None:
            raise ConfigError(f"{self._what}: there is no program '{config.command}' on the PATH that could be started")
        wanted = [*config.env, *([config.api_key_env] if config.api_key_env else [])]
        if missing := [variable for variable in wanted if not os.environ.get(variable)]:
            raise ConfigError(f"{self._what}: the environment variable {missing[0]} is not set")
        if config.api_key_env is not None:
            read_key(config.api_key_env)
        self.tools = [McpTool(self, tool) for tool in self._chosen(self._ask_for_tools())]

    async def connect(self, session: Session) -> None:
        """Begin a connection of `session`, unless there is one.

        Raises ToolFailed if it does not answer (the next call tries again), ProcessKilled."""
        if session not in self._connections:
            connection = self._connections[session] = _Connection(self._config)
            session.at_end(connection.close)
        try:
            await self._connections[session].client()
        except ProcessKilled:
            raise self._killed() from None
        except ToolFailed as error:
            self._leave(session)
            raise ToolFailed("server", f"{self._what} could not be reached: {error}") from None

    async def call(self, name: str, arguments: dict[str, Any], session: Session) -> str:
        """Return a tool's answer, as text; `session` is connected.

        Raises ToolFailed if the answer is an error or not text, or the server has ended by itself (the next call starts
        another one); ProcessKilled if the server was killed from outside."""
        from mcp import MCPError

        connection = self._connections[session]
        client = await connection.client()
        try:
            return _text_of(await client.call_tool(name, arguments))
        except MCPError as error:
            if error.code != _CLOSED and not connection.is_forgotten:
                raise ToolFailed("raised", printable(error.message)) from None
        if connection.ending is not None and connection.ending.is_from_outside():
            raise self._killed()
        self._leave(session)
        raise ToolFailed("server", f"{self._what} has died; the next call starts another")

    def require_running(self, session: Session) -> None:
        """Raise ProcessKilled if a signal has stopped the process of `session`."""
        ending = self._connections[session].ending
        if ending is not None and ending.is_stopped():
            raise self._killed("stopped")

    def _killed(self, how: str = "killed") -> ProcessKilled:
        return ProcessKilled(f"{self._what}: its process was {how} from outside")

    def _leave(self, session: Session) -> None:
        self._connections.pop(session).close()

    def _ask_for_tools(self) -> list[Any]:
        """Ask in a thread, since an event loop may run in this one."""
        with ThreadPoolExecutor(1) as thread:
            for _ in range(MOST_KILLED):
                with ending_of(self._config) as ending:
                    try:
                        return thread.submit(asyncio.run, self._list_tools(ending)).result()
                    except ProcessKilled:
                        continue
        raise ConfigError(f"{self._what}: its process was killed from outside, {MOST_KILLED} times in a row")

    async def _list_tools(self, ending: Ending | None) -> list[Any]:
        tools: list[Any] = []
        try:
            async with _starting(self._config, ending), _connect(self._config, ending) as client:
                page = await client.list_tools()
                tools += page.tools
                while page.next_cursor:
                    page = await client.list_tools(cursor=page.next_cursor)
                    tools += page.tools
        except TimeoutError:
            raise ConfigError(
                f"{self._what}: it did not list its tools within {self._config.start_timeout_s:g} s (start_timeout_s)"
            ) from None
        except Exception as error:  # noqa: BLE001 - of whichever class the library, its transport or the server has
            if _was_killed(error, ending):
                raise self._killed() from None
            raise ConfigError(f"{self._what}: it could not be asked for its tools: {_told(error)}") from None
        if not tools:
            raise ConfigError(f"{self._what}: it has no tools")
        return tools

    def _chosen(self, tools: list[Any]) -> list[Any]:
        there = {tool.name: tool for tool in tools}
        for name in self._config.tools or ():
            if name not in there:
                raise ConfigError(
                    f"{self._what}.tools: it has no tool '{name}'.{nearest(name, there)} "
                    f"Tools there: {', '.join(there)}."
                )
        return [there[name] for name in self._config.tools] if self._config.tools is not None else list(there.values())


class McpTool:
    """One tool of a server, in the form of `Tool`."""

    def __init__(self, server: McpServer, tool: Any) -> None:
        self.server = server
        self.name: str = tool.name
        parameters = {"type": "object", "properties": {}, **tool.input_schema}
        parameters.pop("$schema", None)
        function = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
        self.schema: dict[str, Any] = {"type": "function", "function": function}

    def call(self, arguments: Any, session: Session) -> Any:
        """Return the server's answer as an awaitable; `session` is connected, and the server checks the arguments."""
        if not isinstance(arguments, dict):
            raise ToolFailed("arguments", f"{self.name}: the arguments must be a JSON object")
        return self.server.call(self.name, arguments, session)


class _Connection:
    """One session with a server, entered and left in one task, as the library requires.

    Attributes:
        is_forgotten: a server at a URL has lost the session, as after its restart.
        ending: of the program that runs; None for a server at a URL.
    """

    def __init__(self, config: McpServerConfig) -> None:
        self._config = config
        self.is_forgotten = False
        self._is_over = asyncio.Event()
        self.ending: Ending | None = None
        self._client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._client.add_done_callback(lambda client: client.cancelled() or client.exception())
        self._task = asyncio.create_task(self._live())
        _LIVING.add(self._task)
        self._task.add_done_callback(_LIVING.discard)

    async def client(self) -> Any:
        """Return the client, when the server answers. Raises ToolFailed or ProcessKilled."""
        return await asyncio.shield(self._client)

    def close(self) -> None:
        """Leave the server, and end its process."""
        self._is_over.set()
        if not self._client.done():
            self._task.cancel()

    async def _see(self, response: Any) -> None:
        # As the protocol defines it; the library only has a message of the server's.
        asked = response.request
        if response.status_code == 404 and asked.method == "POST" and "mcp-session-id" in asked.headers:
            self.is_forgotten = True

    async def _live(self) -> None:
        with ending_of(self._config) as ending:
            self.ending = ending
            try:
                connecting = _connect(self._config, ending, see=self._see)
                async with _starting(self._config, ending) as bound, connecting as client:
                    bound.reschedule(None)
                    self._client.set_result(client)
                    await self._is_over.wait()
            except Exception as error:  # noqa: BLE001 - of whichever class the library, its transport or the server has
                if not self._client.done():
                    is_killed = _was_killed(error, ending)
                    told = _told(error)
                    self._client.set_exception(ProcessKilled(told) if is_killed else ToolFailed("server", told))
            finally:
                self._client.cancel()
                self.ending = None


_LIVING: set[asyncio.Task[None]] = set()
"""Connections, since an event loop holds its tasks weakly."""


@asynccontextmanager
async def _starting(config: McpServerConfig, ending: Ending | None) -> AsyncIterator[asyncio.Timeout]:
    """Bound the start of a server. Raises TimeoutError, or ProcessKilled if a signal has stopped its program."""
    is_stopped = False

    def look() -> None:
        nonlocal is_stopped
        # Not at every server that has started: it takes milliseconds of the event loop.
        is_stopped = bound.when() is not None and ending is not None and ending.is_stopped()

    # Just before the timeout, after which the library ends the program.
    looking = asyncio.get_running_loop().call_later(config.start_timeout_s, look)
    bound = asyncio.timeout(config.start_timeout_s)
    try:
        async with bound:
            yield bound
    except TimeoutError:
        if is_stopped:
            raise ProcessKilled("its program was stopped") from None
        raise
    finally:
        looking.cancel()


@asynccontextmanager
async def _connect(
    config: McpServerConfig, ending: Ending | None, *, see: Callable[[Any], Awaitable[None]] | None = None
) -> AsyncIterator[Any]:
    """Give a client of the server; `ending` watches a program, `see` gets every response of a server at a URL."""
    from mcp import Client, StdioServerParameters, stdio_client

    if config.command is not None:
        # The kernel kills it with this process: it is not in our process group.
        assert ending is not None
        command = ending.command(config.command, *config.args)
        names = ["PYTHONPATH", *config.env]
        environment = {name: os.environ[name] for name in names if name in os.environ}
        parameters = StdioServerParameters(command=command[0], args=command[1:], env=environment)
        async with Client(stdio_client(parameters, errlog=sys.__stderr__ or sys.stderr)) as client:
            yield client
        return
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    assert config.url is not None
    headers = {"Authorization": f"Bearer {os.environ[config.api_key_env]}"} if config.api_key_env else {}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=None, event_hooks={"response": [see] if see else []}) as http,
        Client(streamable_http_client(config.url, http_client=http)) as client,
    ):
        yield client


def _text_of(result: Any) -> str:
    """Return the text of a result. Raises ToolFailed."""
    others = sorted({block.type for block in result.content if block.type != "text"})
    if others:
        raise ToolFailed("raised", f"it returned what is not text: {', '.join(others)}")
    text = "\n".join(block.text for block in result.content)
    if not text and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    if result.is_error:
        raise ToolFailed("raised", text or "it failed and did not say why")
    return text


@contextmanager
def ending_of(config: McpServerConfig) -> Iterator[Ending | None]:
    """Give the `Ending` of the program of a server; None for a server at a URL."""
    ending = Ending() if config.command is not None else None
    try:
        yield ending
    finally:
        if ending is not None:
            ending.close()


def _was_killed(error: BaseException, ending: Ending | None) -> bool:
    from mcp import MCPError

    error = _innermost(error)
    is_gone = isinstance(error, MCPError) and error.code == _CLOSED
    return isinstance(error, ProcessKilled) or (ending is not None and is_gone and ending.is_from_outside())


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _told(error: BaseException) -> str:
    error = _innermost(error)
    return f"{type(error).__name__}: {printable(error)}"
