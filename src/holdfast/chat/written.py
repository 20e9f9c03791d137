"""Finds the values of messages that a chat template writes, by rendering the messages with values changed.

A value is written if its change changes the text. A search for the letters of the value would also find the same
letters of other values.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from holdfast.chat.messages import function_of, parse_object
from holdfast.errors import DataError, printable

Render = Callable[[Sequence[Mapping[str, Any]]], str]
_MOST_SHOWN = 60


class _Marks:
    """Puts a mark in the place of each value that it meets, or of a single value. `met`: the values in order: the
    number of the message, and the value in words."""

    def __init__(self, only: int | None = None) -> None:
        self._only = only
        self.met: list[tuple[int, str]] = []

    @staticmethod
    def mark(place: int) -> str:
        """Return the mark of the value at a place of `met`: letters that no format escapes."""
        return f"holdfast{place}mark"

    def put(self, value: Any, what: str, number: int) -> Any:
        place = len(self.met)
        self.met.append((number, what))
        return self.mark(place) if self._only in (None, place) else value

    def put_into(self, value: Any, what: str, number: int) -> Any:
        """Mark all keys and values within `value`."""
        if isinstance(value, Mapping) and value:
            return {
                self.put(key, f"the key {key!r} in {what}", number): self.put_into(one, f"{key!r} in {what}", number)
                for key, one in value.items()
            }
        if isinstance(value, list) and value:
            return [self.put_into(one, what, number) for one in value]
        return self.put(value, what, number)

    def calls(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Mark the name and the arguments of all tool calls."""
        return [
            {**message, "tool_calls": [self._call(call, number) for call in message["tool_calls"]]}
            if message.get("tool_calls")
            else dict(message)
            for number, message in enumerate(messages, start=1)
        ]

    def _call(self, call: Mapping[str, Any], number: int) -> dict[str, Any]:
        function = dict(function_of(call))
        name, arguments = function.get("name"), function.get("arguments")
        function["name"] = self.put(name, "the name", number)
        if isinstance(arguments, str) and arguments.strip():
            arguments = parse_object(arguments, f"message {number}: the arguments of a tool call")
        if arguments and isinstance(arguments, Mapping):
            function["arguments"] = self.put_into(arguments, "the arguments", number)
        return {**call, "function": function} if "function" in call else {**call, **function}

    def tools(self, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Mark the names of all tools."""
        marked = []
        for number, tool in enumerate(tools, start=1):
            function = dict(function_of(tool))
            function["name"] = self.put(function.get("name"), "the name", number)
            marked.append({**tool, "function": function} if "function" in tool else {**tool, **function})
        return marked


def _unwritten(change: Callable[[_Marks], Any], render: Callable[[Any], str], text: str) -> tuple[int, str] | None:
    """Return the first value whose change does not change `text`; None if there is none.

    Args:
        change: puts marks.
        render: makes a text of the messages or tools that `change` returns.
    """
    marks = _Marks()
    try:
        changed = render(change(marks))
    except DataError:
        changed = ""
    for place, met in enumerate(marks.met):
        if marks.mark(place) in changed:
            continue
        try:
            if render(change(_Marks(place))) == text:
                return met
        except DataError:
            continue  # the template reads it, or it would not refuse the change
    return None


def check_calls_written(messages: Sequence[Mapping[str, Any]], render: Render, text: str, *, name: str) -> None:
    """Check that the names and all arguments of the tool calls are in a text.

    Args:
        render: makes the text of messages.
        text: of these messages.
        name: of the tokenizer, for messages.

    Raise DataError if a value of a call can change and the text does not.
    """
    if not any(message.get("tool_calls") for message in messages):
        return
    if (found := _unwritten(lambda marks: marks.calls(messages), render, text)) is not None:
        number, what = found
        raise DataError(
            f"message {number} has `tool_calls`, which the chat template of '{name}' does not write whole: it leaves "
            f"out {printable(what, most=_MOST_SHOWN)} of a call. {USE_TOOLS}"
        )


def is_value_written(value: Any, put: Callable[[Any], Any], render: Callable[[Any], str], text: str) -> bool:
    """Whether another value in the place of `value` changes the `text`. `put`: returns what `render` takes, with a
    value in that place."""
    other: Any
    if isinstance(value, bool):
        other = not value
    elif isinstance(value, int | float):
        other = value + 1
    elif isinstance(value, str):
        other = value + _Marks.mark(0)
    else:
        other = _Marks().put_into(value, "", 0)
    try:
        return render(put(other)) != text
    except DataError:
        return True  # the template reads it, or it would not refuse the change


ValueOfTool = tuple[tuple[Hashable, ...], str, Any, Callable[[Any], Any]]
_SCHEMAS = ("function", "parameters", "items", "additionalProperties", "not", "return", "response")
_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "anyOf", "oneOf", "allOf")
"""Keys of a schema, and keys of named or listed schemas."""


def values_of_tool(tool: Mapping[str, Any], kind: tuple[Hashable, ...] = ()) -> Iterator[ValueOfTool]:
    """Yield all values of a tool, or of a schema in it, except empty values and the type of a thing that has no other.

    Args:
        kind: of the schema.

    Yields:
        For each value: its kind, its key, the value, and a function that returns the tool with another value there. A
        template is expected to treat values of one kind alike. The kind has the keywords and types of the schemas
        around the value, and not the names of properties.
    """
    kind = (*kind, frozenset(key for key, value in tool.items() if value), str(tool.get("type")))
    is_typed = "properties" in tool or "properties" not in kind
    for key, value in tool.items():
        is_implied = key == "type" and (value == "function" or (value == "object" and is_typed))
        if value is not None and value not in ("", [], {}) and not is_implied:
            yield from _values_at(value, key, (*kind, key), partial(_with, tool, key), is_schema=key in _SCHEMAS)


def _values_at(
    value: Any, key: str, kind: tuple[Hashable, ...], put: Callable[[Any], Any], *, is_schema: bool
) -> Iterator[ValueOfTool]:
    if is_schema and isinstance(value, Mapping):
        for inner_kind, inner_key, inner, inner_put in values_of_tool(value, kind):
            yield inner_kind, inner_key, inner, partial(_put_into, put, inner_put)
    elif key in _OF_SCHEMAS and isinstance(value, Mapping | list):
        places = value if isinstance(value, Mapping) else range(len(value))
        for place in places:
            inner_put = partial(_put_into, put, partial(_with, value, place))
            yield from _values_at(value[place], key, kind, inner_put, is_schema=True)
    else:
        parts = frozenset(map(type, value)) if isinstance(value, list) else ()
        yield (*kind, type(value), value if isinstance(value, bool) else parts), key, value, put


def _with(whole: Any, place: Any, value: Any) -> Any:
    if isinstance(whole, Mapping):
        return {**whole, place: value}
    return [*whole[:place], value, *whole[place + 1 :]]


def _put_into(put: Callable[[Any], Any], inner_put: Callable[[Any], Any], value: Any) -> Any:
    return put(inner_put(value))


def is_tools_written(tools: Sequence[Any], render: Callable[[Any], str], text: str) -> bool:
    """Whether the names of all tools are in the `text` that `render` makes of `tools`."""
    return _unwritten(lambda marks: marks.tools(tools), render, text) is None


ANOTHER_TEMPLATE = "name the file of another chat template as model.chat_template."
USE_TOOLS = f"Use a template with tools: {ANOTHER_TEMPLATE}"
