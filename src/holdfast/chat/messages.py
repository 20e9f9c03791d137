"""Messages: what one may hold, and the form in which a chat template reads it.

A message is a plain dict (`role`, `content`, `tool_calls`, `name`, ...), as transformers has it, or a `Message`.
A key whose value is null counts as absent, except for `content`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.errors import DataError

if TYPE_CHECKING:
    from holdfast.chat.template import ChatMessage, ChatTemplate

# Keys under which datasets keep the assistant's thoughts before it spoke.
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
# Keys of a message of an environment beside `role` and `content`.
MORE_KEYS = ("tool_calls", "tool_call_id", "name", *THOUGHTS)
_WORD = "holdfastprobe"


class Message(msgspec.Struct, frozen=True):
    """One message of a chat. A dict works as well, and may have more keys (`tool_calls`, `name`, ...)."""

    role: str
    content: str


def as_dict(message: Message | ChatMessage) -> dict[str, Any]:
    """Return `message` as a template reads it."""
    if isinstance(message, Message):
        return {"role": message.role, "content": message.content}
    return dict(message)


def check_messages(messages: Sequence[object]) -> list[dict[str, Any]]:
    """Return the messages of a chat, without keys that are null. Raise DataError with the number of the first bad
    message, counted from one."""
    return [_checked(message, number) for number, message in enumerate(messages, start=1)]


def _checked(value: object, number: int) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise DataError(f"message {number}: a message needs `role` and `content`, got {_shown(value)}")
    message = {key: entry for key, entry in value.items() if entry is not None or key == "content"}
    content = message.get("content")
    speaks = message["role"] == "assistant" and any(message.get(key) for key in ("tool_calls", *THOUGHTS))
    if content is None and not speaks:
        raise DataError(
            f"message {number}: a message needs `role` and `content` (null only beside tool_calls), got {_shown(value)}"
        )
    if isinstance(content, list):
        for part in content:
            if not (isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)):
                raise DataError(f"message {number}: only text can be trained, got the part {_shown(part)}")
        message["content"] = [{"type": "text", "text": part["text"]} for part in content]
    elif content is not None and not isinstance(content, str):
        raise DataError(f"message {number}: `content` must be text or a list of text parts, got {_shown(content)}")
    if "tool_calls" in message:
        message["tool_calls"] = _checked_calls(message["tool_calls"], number)
    return message


def _checked_calls(value: object, number: int) -> list[Any]:
    calls = parse_json(value, f"message {number}: `tool_calls`") if isinstance(value, str) else value
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise DataError(f"message {number}: `tool_calls` must be a list, got {_shown(value)}")
    calls = [parse_json(call, f"message {number}: a tool call") if isinstance(call, str) else call for call in calls]
    for call in calls:
        if not isinstance(call, Mapping) or not isinstance(function_of(call).get("name"), str):
            raise DataError(f"message {number}: a tool call needs a function with a `name`, got {_shown(call)}")
    return [{key: entry for key, entry in call.items() if entry is not None} for call in calls]


def check_tools(value: object) -> list[Any] | None:
    """Return the tools of a row: a list of JSON objects, each or all of which may be JSON text; None where unset. Raise
    DataError if they are something else."""
    tools = parse_json(value, "`tools`") if isinstance(value, str) and value.strip() else value or None
    if tools is None:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise DataError(f"`tools` must be a list of JSON objects, got {_shown(value)}")
    tools = [parse_json(tool, "`tools`") if isinstance(tool, str) else tool for tool in tools]
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(f"`tools` must be a list of JSON objects, got {_shown(value)}")
    return tools or None


def parse_json(text: str, where: str) -> Any:
    """Return what JSON `text` says. Raise DataError if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{where} is not JSON ({error}): {text[:80]!r}") from None


def function_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the function of a tool or of a tool call, which some write without the `function` around it."""
    function = call.get("function", call)
    return function if isinstance(function, Mapping) else {}


def texts_of(message: ChatMessage) -> list[str]:
    """Return the texts that a message says: its content, or each part of it."""
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content or []]


def thoughts_of(message: ChatMessage) -> list[str]:
    """Return what the assistant thought, where a message keeps that apart."""
    return [value for key in THOUGHTS if isinstance(value := message.get(key), str)]


@dataclass(frozen=True)
class Forms:
    """Which forms of a message a template reads.

    Attributes:
        parts: a content of text parts; else only text.
        objects, texts: arguments of tool calls as JSON objects, as JSON text.
    """

    parts: bool
    objects: bool
    texts: bool

    def adapt(self, messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages in a form that the template reads. Raise DataError if the arguments of a tool call are
        not JSON."""
        return [self._adapted(message) for message in messages]

    def _adapted(self, message: dict[str, Any]) -> dict[str, Any]:
        if isinstance(message.get("content"), list) and not self.parts:
            message = {**message, "content": "".join(texts_of(message))}
        if self.objects != self.texts and "tool_calls" in message:
            message = {**message, "tool_calls": [self._adapted_call(call) for call in message["tool_calls"]]}
        return message

    def _adapted_call(self, call: dict[str, Any]) -> dict[str, Any]:
        arguments = function_of(call).get("arguments")
        if isinstance(arguments, str) and self.objects:
            arguments = parse_json(arguments, "the arguments of a tool call") if arguments.strip() else {}
        elif isinstance(arguments, Mapping) and self.texts:
            arguments = json.dumps(arguments, ensure_ascii=False)
        else:
            return call
        if "function" in call:
            return {**call, "function": {**call["function"], "arguments": arguments}}
        return {**call, "arguments": arguments}


def forms_of(template: ChatTemplate) -> Forms:
    """Find out which forms `template` reads, by rendering probes."""

    def rendered(last: dict[str, Any]) -> str:
        try:
            return template.render([{"role": "user", "content": "."}, last])
        except DataError:
            return ""

    def call(arguments: object) -> str:
        function = {"name": "probe", "arguments": arguments}
        calls = [{"id": "holdfast0", "type": "function", "function": function}]
        return rendered({"role": "assistant", "content": "", "tool_calls": calls})

    parts = rendered({"role": "assistant", "content": [{"type": "text", "text": _WORD}]})
    objects, texts = call({_WORD: "x"}), call(json.dumps({_WORD: "x"}))
    return Forms(
        parts=_WORD in parts and "'text'" not in parts and '"text"' not in parts,
        objects=_WORD in objects and f"{{'{_WORD}'" not in objects,
        texts=f'{{"{_WORD}": "x"}}' in texts,
    )


def common_length(left: str, right: str) -> int:
    """Return how many characters two texts begin with alike."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[low:middle] == right[low:middle] else (low, middle - 1)
    return low


def find_unread(messages: Iterable[ChatMessage], is_read: Callable[[str], bool]) -> list[str]:
    """Return the keys of messages that are set and of which `is_read` says no."""
    keys = {key for message in messages for key, value in message.items() if value not in (None, "", [], {})}
    return sorted(key for key in keys - {"role", "content"} if not is_read(key))


def squeezed(text: str) -> str:
    """Return `text` without white space."""
    return "".join(text.split())


def holds(text: str, parts: Sequence[str]) -> bool:
    """Whether all parts are in a text without white space, as they are or as JSON writes them."""
    return all(squeezed(part) in text or squeezed(json.dumps(part, ensure_ascii=False)[1:-1]) in text for part in parts)


def roles_left_out(messages: Iterable[ChatMessage], text: str) -> list[str]:
    """Return the roles, without the assistant's, of messages that `text` does not hold whole."""
    text = squeezed(text)
    return sorted(
        {
            message["role"]
            for message in messages
            if message["role"] != "assistant" and not holds(text, texts_of(message))
        }
    )


def check_calls_written(messages: Iterable[ChatMessage], text: str, *, name: str) -> None:
    """Check that the tool calls of all messages are in the text that the template of tokenizer `name` made of them.
    Raise DataError if one does not."""
    for number, message in enumerate(messages, start=1):
        for call in message.get("tool_calls") or []:
            if function_of(call).get("name", "") not in text:
                raise DataError(
                    f"message {number} has `tool_calls`, which the chat template of '{name}' does not write. Use a "
                    "template with tools."
                )


def _shown(value: object) -> str:
    return f"{value!r:.120}"
