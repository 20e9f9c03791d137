"""Chats as token ids, for a policy that takes and gives text alone.

Sessions are sequences of ids that only grow. Where nobody knows the ids of the model, the bytes of the transcript
stand for them:

    tools as JSON, then `TOOLS`                                   once, at the beginning, where there are some
    messages as JSON, then `GIVEN`
    what the policy said as it stands, then `SAID`
    what it said, then `CALLS`, its calls of tools as JSON, then `SAID`
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from holdfast.orchestrator.environments.tool_calls import ToolCall
from holdfast.orchestrator.environments.tool_use import call_id
from holdfast.shared.chat.messages import Message, as_dict
from holdfast.shared.chat.template import ChatMessage
from holdfast.shared.chat.tokenizer import Around, Tokenizer
from holdfast.shared.errors import DataError
from holdfast.shared.wire.chat_reply import ChatCall

GIVEN = 256
SAID = 257
TOOLS = 258
CALLS = 259
_CALLS_TEXT = "\x1e"
"""Stands for `CALLS` in text; where the policy itself says this control character, it becomes `\ufffd` there."""


class Transcript(Tokenizer):
    """A tokenizer of bytes for a server that has one of its own."""

    def __init__(self, name: str) -> None:  # no files behind it: the base has nothing to read
        self.name = name
        self.eos_token_id = SAID

    @property
    def stop_token_ids(self) -> list[int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What ends a turn."""
        return [SAID]

    def is_too_long(self, num_characters: int, *, room: int) -> bool:
        """Whether a text has more than `room` bytes, told by its length."""
        return num_characters > room

    def text_prompt(self, text: str) -> list[int]:
        """Refuse a prompt that is no chat.

        Raises:
            DataError: always.
        """
        raise DataError(f"{self.name} takes chats, and this prompt is plain text: make it a list of messages")

    def prompt(
        self,
        messages: Sequence[Message | ChatMessage],
        *,
        tools: Sequence[Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids of a chat so far, behind those of its tools."""
        if options:
            raise DataError(f"{self.name} is asked without options of a template")
        begun = [*json.dumps(tools, sort_keys=True).encode(), TOOLS] if tools else []
        return begun + self.continuation(messages, last_token_id=SAID)

    def continuation(
        self,
        messages: Sequence[Message | ChatMessage],
        *,
        last_token_id: int,
        tools: Sequence[Any] | None = None,
        around: Around | None = None,
    ) -> list[int]:
        """Return the ids of messages that follow a turn of the policy."""
        return [*json.dumps([as_dict(message) for message in messages], sort_keys=True).encode(), GIVEN]

    def around_assistant(
        self, messages: Sequence[Message | ChatMessage], *, open_turn: bool = True, tools: Sequence[Any] | None = None
    ) -> Around:
        """Return no text: there is no template."""
        return Around("", "")

    def rewrites(
        self,
        chat: Sequence[Message | ChatMessage],
        messages: Sequence[Message | ChatMessage],
        *,
        around: Around,
        tools: Sequence[Any] | None = None,
    ) -> bool:
        """Say that turns stay as they were said: what the server makes of them is its own affair."""
        return False

    def encode_after(self, text: str) -> list[int]:
        """Refuse text that is no message.

        Raises:
            DataError: always.
        """
        raise DataError(f"{self.name} takes chats: append_text() has no place in one, use append_messages()")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids: of a turn what was said, of messages their JSON.

        Args:
            skip_special_tokens: leave out calls of tools, which are no text of the chat.
        """
        text, is_calls = "", False
        for end, part in _parts(token_ids):
            said = part.decode()
            if not is_calls:
                text += said if skip_special_tokens else said.replace(_CALLS_TEXT, "\ufffd")
            elif not skip_special_tokens:
                text += _CALLS_TEXT + said
            is_calls = end == CALLS
        return text

    def calls_in(self, text: str) -> list[ToolCall]:
        """Return the calls in the text of a turn, as `decode` gives it with special tokens."""
        _, sign, calls = text.rpartition(_CALLS_TEXT)
        return [_as_tool_call(call) for call in msgspec.json.decode(calls, type=list[ChatCall])] if sign else []


def _as_tool_call(call: ChatCall) -> ToolCall:
    """Return a call with its arguments read."""
    try:
        return ToolCall(call.name, json.loads(call.arguments) if call.arguments.strip() else {})
    except (ValueError, RecursionError) as error:
        return ToolCall(call.name, error=f"the arguments are not JSON ({error})")


def _parts(token_ids: Sequence[int]) -> Iterator[tuple[int | None, bytes]]:
    """Yield the bytes up to every sign, with that sign; None for bytes behind the last."""
    token_ids = list(token_ids)  # of an array the buffer has other bytes
    start = 0
    for place, one in enumerate(token_ids):
        if one >= GIVEN:
            yield one, bytes(token_ids[start:place])
            start = place + 1
    if start < len(token_ids):
        yield None, bytes(token_ids[start:])


def tools_of(token_ids: Sequence[int]) -> list[Any]:
    """Return the schemas of the tools that the ids of a `Transcript` begin with."""
    for end, part in _parts(token_ids):
        return json.loads(part) if end == TOOLS else []
    return []


def messages_of(token_ids: Sequence[int]) -> list[dict[str, Any]]:
    """Return the chat that the ids of a `Transcript` stand for, as OpenAI's protocol has it.

    Calls have the ids that their answers have: a server remembers none of its own.
    """
    messages: list[dict[str, Any]] = []
    said: str | None = None
    turn = 0
    for end, part in _parts(token_ids):
        text = part.decode()
        if end == GIVEN:
            messages += [_of_protocol(message) for message in json.loads(text)]
        elif end == CALLS:
            said = text
        elif end == SAID:
            turn += 1
            if said is None:
                messages.append({"role": "assistant", "content": text})
            else:
                calls = msgspec.json.decode(text, type=list[ChatCall])
                shown = [_shown_call(call, turn=turn, number=number) for number, call in enumerate(calls, start=1)]
                messages.append({"role": "assistant", "content": said or None, "tool_calls": shown})
                said = None
    return messages


def _of_protocol(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without the name of a tool: the protocol knows whose answer it is by the id of the call."""
    return {key: value for key, value in message.items() if message["role"] != "tool" or key != "name"}


def _shown_call(call: ChatCall, *, turn: int, number: int) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call_id(turn, number), "type": "function", "function": function}


def ids_of_answer(text: str, calls: Sequence[ChatCall] = ()) -> list[int]:
    """Return the ids of what the policy said, and of the tools that it called."""
    return [*text.encode(), *([CALLS, *msgspec.json.encode(list(calls))] if calls else ()), SAID]
