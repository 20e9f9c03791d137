"""Messages: what one may hold, and the form in which a chat template reads it.

A message is a plain dict (`role`, `content`, `tool_calls`, `name`, ...), as transformers has it, or a `Message`.
A key whose value is null counts as absent, except for `content`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.config.files import object_of
from holdfast.errors import DataError

if TYPE_CHECKING:
    from holdfast.chat.template import ChatMessage

# Keys under which datasets keep the assistant's thoughts before it spoke.
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
# Keys of a message of an environment beside `role` and `content`.
MORE_KEYS = ("tool_calls", "tool_call_id", "name", *THOUGHTS)


# Keys by which datasets say whether a message is trained: OpenAI's, axolotl's, ms-swift's.
WEIGHTS = ("weight", "loss_weight", "train", "trainable", "training", "loss")
_DETAILS = ("train_detail", "training_detail")


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
    if "function_call" in message or message["role"] == "function_call":
        message = _without_legacy_call(message, number)
    content = message.setdefault("content", None)
    speaks = message["role"] == "assistant" and any(message.get(key) for key in ("tool_calls", *THOUGHTS))
    if content is None and not speaks:
        raise DataError(
            f"message {number}: a message needs `role` and `content` (null only beside tool_calls), got {_shown(value)}"
        )
    if isinstance(content, list):
        check_parts(content, f"message {number}")
        message["content"] = [{"type": "text", "text": part[text_keys(part)[1]]} for part in content]
    elif content is not None and not isinstance(content, str):
        raise DataError(f"message {number}: `content` must be text or a list of text parts, got {_shown(content)}")
    if "tool_calls" in message:
        message["tool_calls"] = _checked_calls(message["tool_calls"], number)
    return message


def check_parts(content: Sequence[object], where: str) -> None:
    """Refuse a content with a part that is not text, such as an image. Raise DataError, which begins with `where`."""
    for part in content:
        texts = (
            [part[key] for key in text_keys(part)[1:]]
            if isinstance(part, Mapping) and part.get("type") == "text"
            else []
        )
        if not texts or not isinstance(texts[0], str):
            raise DataError(
                f"{where}: only text can be trained, got the part {_shown(part)}. A part is "
                '{"type": "text", "text": "..."}.'
            )


def _checked_calls(value: object, number: int) -> list[Any]:
    calls = parse_json(value, f"message {number}: `tool_calls`") if isinstance(value, str) else value
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise DataError(f"message {number}: `tool_calls` must be a list, got {_shown(value)}")
    calls = [parse_json(call, f"message {number}: a tool call") if isinstance(call, str) else call for call in calls]
    for call in calls:
        if not isinstance(call, Mapping) or not isinstance(function_of(call).get("name"), str):
            raise DataError(f"message {number}: a tool call needs a function with a `name`, got {_shown(call)}")
    return [_checked_call(call, number) for call in calls]


def _checked_call(call: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a tool call as `{"type": "function", "function": {"name": ..., "arguments": ...}}`, with its other keys.
    Absent, null and blank arguments become `{}`."""
    function = {key: entry for key, entry in function_of(call).items() if entry is not None}
    outer = {key: entry for key, entry in call.items() if entry is not None} if "function" in call else {}
    if not outer:
        outer = {"type": "function", **{key: function.pop(key) for key in ("id", "type", "index") if key in function}}
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        function["arguments"] = {}
    elif isinstance(arguments, str):
        arguments = parse_object(arguments, f"message {number}: the arguments of a tool call")
    elif not isinstance(arguments, Mapping):
        raise DataError(
            f"message {number}: the arguments of a tool call must be a JSON object, got {_shown(arguments)}"
        )
    _refuse_infinite(arguments, f"message {number}: the arguments of a tool call")
    return {**outer, "function": function}


def _without_legacy_call(message: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a message with OpenAI's older `function_call`, or of that role, as a message with `tool_calls`."""
    if message["role"] == "function_call":
        calls, rest = called(message.get("content"), number), {"content": None}
    else:
        call = message["function_call"]
        calls = [parse_json(call, f"message {number}: `function_call`") if isinstance(call, str) else call]
        rest = {key: entry for key, entry in message.items() if key != "function_call"}
    if message.get("tool_calls") or message["role"] not in ("assistant", "function_call"):
        raise DataError(
            f"message {number}: `function_call` belongs to a message of the role `assistant` without `tool_calls`"
        )
    calls = [call if isinstance(call, Mapping) and "function" in call else {"function": call} for call in calls]
    return {**rest, "role": "assistant", "tool_calls": [{"type": "function", **call} for call in calls]}


def called(value: object, number: int) -> list[Any]:
    """Return the calls of a message whose content is a call, or a list of calls. Raise DataError if it is not JSON."""
    calls = parse_json(value, f"message {number}: the value of a function_call") if isinstance(value, str) else value
    return calls if isinstance(calls, list) else [calls]


def is_trained(message: ChatMessage, number: int) -> bool | None:
    """Return what message `number` itself says of its training; None if it says nothing. Raise DataError if it asks for
    something else than yes or no."""
    said = {key: message[key] for key in WEIGHTS if message.get(key) is not None}
    for key in _DETAILS:
        if message.get(key):
            raise DataError(f"message {number}: `{key}` trains parts of a message, which is not supported. Remove it.")
    for key, value in said.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise DataError(
                f"message {number}: `{key}` must be 0 or 1, false or true, got {_shown(value)}. Other weights of the "
                "loss are not supported."
            )
    if len({bool(value) for value in said.values()}) > 1:
        raise DataError(f"message {number}: {' and '.join(f'`{key}`' for key in said)} contradict each other")
    return next((bool(value) for value in said.values()), None)


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
    _refuse_infinite(tools, "`tools`")
    return tools or None


def with_system(system: object, messages: Any) -> Any:
    """Return the messages with the text of a column `system` before them, unless they begin with it. Raise DataError if
    they begin with another system message."""
    if system in (None, "") or not isinstance(messages, list):
        return messages
    first = messages[0] if messages else None
    if not isinstance(first, Mapping) or first.get("role") not in ("system", "developer"):
        return [{"role": "system", "content": system}, *messages]
    if first.get("content") != system:
        raise DataError("the column `system` and the system message say different things. Remove one of them.")
    return messages


def parse_json(text: str, where: str) -> Any:
    """Return what JSON `text` says. Raise DataError if it is not JSON, or has a key twice in one object."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(text, object_pairs_hook=object_of, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: this is not JSON ({error}): {text[:80]!r}") from None


def _refuse_infinite(value: object, where: str) -> None:
    try:
        json.dumps(value, allow_nan=False, default=str)
    except (TypeError, ValueError, RecursionError):
        raise DataError(
            f"{where}: NaN, Infinity and what is nested very deeply are not JSON, got {_shown(value)}"
        ) from None


def parse_object(text: str, where: str) -> dict[str, Any]:
    """Return the JSON object that `text` says. Raise DataError as `parse_json`, and if it is something else."""
    value = parse_json(text, where)
    if not isinstance(value, dict):
        raise DataError(f"{where} must be a JSON object, got {_shown(text)}")
    return value


def function_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the function of a tool or of a tool call, which some write without the `function` around it."""
    function = call.get("function", call)
    return function if isinstance(function, Mapping) else {}


def text_keys(part: Mapping[str, Any]) -> list[str]:
    """Return the keys of a part of a content that are read: `type`, and `text` or what LLaVA writes for it."""
    return ["type", *[key for key in ("text", "value") if part.get(key) is not None][:1]]


def bare(value: Any) -> Any:
    """Return a value of a row without keys that are null, which count as absent, except in arguments of calls."""
    if isinstance(value, Mapping):
        return {key: one if key == "arguments" else bare(one) for key, one in value.items() if one is not None}
    return [bare(one) for one in value] if isinstance(value, list) else value


def texts_of(message: ChatMessage) -> list[str]:
    """Return the texts that a message says: its content, or each part of it."""
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content or []]


def thoughts_of(message: ChatMessage) -> list[str]:
    """Return what the assistant thought, where a message keeps that apart."""
    return [value for key in THOUGHTS if isinstance(value := message.get(key), str)]


def common_length(left: str, right: str) -> int:
    """Return how many characters two texts begin with alike."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[low:middle] == right[low:middle] else (low, middle - 1)
    return low


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


def _shown(value: object) -> str:
    return f"{value!r:.120}"
