"""Runs the tools that a turn calls, and tells the policy what they answer or what went wrong.

A failure of a tool is a message to the policy, and counted; it never ends the run.
"""

import asyncio
import inspect
import json
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.chat.template import ChatMessage
from holdfast.chat.tokenizer import Tokenizer, load_tokenizer
from holdfast.config.environments import EnvironmentConfig
from holdfast.errors import ConfigError, DataError, HoldfastError, nearest, shown, text_of
from holdfast.orchestrator.env.interface import Environment, Session, SessionFull
from holdfast.orchestrator.env.mcp import McpServer, McpTool
from holdfast.orchestrator.env.tools import (
    FAILURE_REASONS,
    FailureReason,
    Parser,
    Tool,
    ToolCall,
    ToolFailed,
    arguments_of,
    call_id,
    find_parser,
    tools_of,
)
from holdfast.process.heartbeat import awake_s

_MOST_CHARACTERS = 500
_PROBE = "holdfastprobe"


class _TimeUp(BaseException):
    """Ends a running tool; not an Exception, which the tool might catch."""


@dataclass(frozen=True)
class ToolUse:
    """The tools of one environment, and how its sessions use them.

    Attributes:
        max_turns: most turns of one session; the calls of the last one are not answered.
        timeout_s: most seconds of one call.
    """

    tools: dict[str, Tool | McpTool]
    parse: Parser
    max_turns: int
    timeout_s: float

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self.tools.values()]

    def message(self, text: str, call: ToolCall, *, turn: int, number: int) -> ChatMessage:
        """Return the message that answers a call; `turn` and `number` count from 1."""
        return tool_message(text, name=call.name if call.name in self.tools else "", turn=turn, number=number)

    async def answer(self, call: ToolCall, session: Session) -> tuple[str, FailureReason | None]:
        """Return the answer to a call, and why it failed, if it did."""
        try:
            return await self._result(call, session), None
        except ToolFailed as failure:
            return f"error: {failure}", failure.reason

    async def _result(self, call: ToolCall, session: Session) -> str:
        if call.error:
            raise ToolFailed("unreadable", call.error)
        tool = self.tools.get(call.name)
        if tool is None:
            allowed = ", ".join(self.tools)
            raise ToolFailed(
                "unknown", f"there is no tool '{call.name:.80}'.{nearest(call.name, self.tools)} Tools: {allowed}."
            )
        arguments = arguments_of(call, tool.schema["function"]["parameters"])
        try:
            if isinstance(tool, McpTool):
                await tool.server.connect(session)  # the start of a server does not count
            with _interrupting(self.timeout_s):
                value = tool.call(arguments, session)
            if inspect.isawaitable(value):
                async with asyncio.timeout(self.timeout_s):
                    value = await value
            return _text_of_result(value)
        except (ToolFailed, SessionFull, HoldfastError, MemoryError):
            raise
        except (_TimeUp, TimeoutError):
            if isinstance(tool, McpTool):
                tool.server.require_running(session)  # the policy must not notice a signal from outside
            raise ToolFailed("timeout", f"{call.name} took longer than {self.timeout_s:g} s") from None
        except (Exception, SystemExit) as error:  # argparse raises SystemExit
            raise ToolFailed("raised", f"{type(error).__name__}: {text_of(error):.{_MOST_CHARACTERS}}") from error


def tool_use_of(environment: Environment, settings: EnvironmentConfig, tokenizer: Tokenizer) -> ToolUse | None:
    """Return how sessions of `environment` use its tools; None without tools. Cached in the object.

    Raises ConfigError if one is not a tool, or the chat template does not write tools or their results."""
    kept = environment.__dict__.get("_tool_use")
    if kept is not None and kept[0] is tokenizer and kept[1] is settings:
        return kept[2]
    use = _make(environment, settings, tokenizer)
    # Works for frozen dataclasses, too.
    object.__setattr__(environment, "_tool_use", (tokenizer, settings, use))
    return use


def check_tools(
    environments: Mapping[str, Environment], sections: Iterable[EnvironmentConfig], *, tokenizer_name: str
) -> None:
    """Refuse, before anything is started, tools that a model in a local directory cannot call.

    `environments` are the environments of `sections` that can be made here, by label."""
    with_tools = [
        one for one in sections if one.label in environments and (environments[one.label].tools or one.mcp_servers)
    ]
    if with_tools and Path(tokenizer_name).is_dir():
        tokenizer = load_tokenizer(tokenizer_name)
        for section in with_tools:
            tool_use_of(environments[section.label], section, tokenizer)


def _make(environment: Environment, settings: EnvironmentConfig, tokenizer: Tokenizer) -> ToolUse | None:
    what = f"environment '{settings.label}'"
    try:
        tools: dict[str, Tool | McpTool] = {}
        tools |= tools_of(environment.tools, owner=environment, session_class=Session)
        for name, server in settings.mcp_servers.items():
            for tool in McpServer(name, server).tools:
                if tool.name in tools:
                    raise ConfigError(
                        f"mcp_servers.{name}: there is another tool '{tool.name}': leave one of them out with "
                        f"mcp_servers.{name}.tools"
                    )
                tools[tool.name] = tool
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from None
    if not tools:
        return None
    schemas = [tool.schema for tool in tools.values()]
    template = tokenizer.template(schemas)
    parse = find_parser(settings.tool_parser, template=template.source, model=tokenizer.name)
    _check_template(tokenizer, schemas, what=what)
    return ToolUse(tools, parse, settings.max_turns, settings.tool_timeout_s)


def _check_template(tokenizer: Tokenizer, schemas: list[Any], *, what: str) -> None:
    """Refuse a chat template that hides tools, or their answers, from the policy."""
    question: list[ChatMessage] = [{"role": "user", "content": _PROBE}]
    answer: list[ChatMessage] = [tool_message(_PROBE, name=schemas[0]["function"]["name"], turn=1, number=1)]
    try:
        text = tokenizer.render(question, open_turn=True, tools=schemas)
        missing = [name for schema in schemas if (name := schema["function"]["name"]) not in text]
        if missing:
            raise DataError(
                f"the chat template of '{tokenizer.name}' does not write tools: the policy would not see `{missing[0]}`"
            )
        tokenizer.continuation(answer, last_token_id=-1, tools=schemas)
    except DataError as error:
        raise ConfigError(f"{what} has tools: {error}. Take a model whose template has tools.") from None


def tool_message(content: str, *, name: str, turn: int, number: int) -> dict[str, str]:
    """Return the message with which a tool answers call `number` of turn `turn`, both from 1."""
    content = content.encode("utf-8", "backslashreplace").decode()  # a policy writes halves of surrogate pairs, too
    message = {"role": "tool", "content": content, "tool_call_id": call_id(turn, number)}
    return message | ({"name": name} if name else {})


def tool_metrics(session: Session) -> dict[str, float]:
    """Return the counts of tool calls of a session; empty without tools."""
    if not session.has_tools:
        return {}
    names = ["calls", "unanswered", *(f"failed/{reason}" for reason in FAILURE_REASONS)]
    return {f"tools/{name}": float(session.tool_counts[name]) for name in names}


def _text_of_result(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"it returned {shown(value)}, which is not JSON ({error})") from None


@contextmanager
def _interrupting(seconds: float) -> Iterator[None]:
    """Raise _TimeUp in blocking code when its time is up, except in other threads and calls in C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    began = awake_s()

    def ring(*_: object) -> None:
        if (left := seconds - (awake_s() - began)) > 0.01:  # the process was frozen, which does not count
            signal.setitimer(signal.ITIMER_REAL, left)
        else:
            raise _TimeUp

    previous: Callable[..., Any] | int | None = signal.signal(signal.SIGALRM, ring)
    alarm_s, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            signal.signal(signal.SIGALRM, previous)
            if alarm_s:  # restore somebody else's alarm
                signal.setitimer(signal.ITIMER_REAL, max(1e-3, alarm_s - (awake_s() - began)))
