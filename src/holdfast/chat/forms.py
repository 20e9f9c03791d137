"""The forms of messages that a chat template reads, found by rendering probes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.chat.messages import check_parts, function_of, parse_object, texts_of
from holdfast.errors import DataError

if TYPE_CHECKING:
    from holdfast.chat.template import ChatTemplate

_WORD = "holdfastprobe"
_NO_ROLE = "holdfastrole"
_USER = {"role": "user", "content": "."}
_SAME_ROLES = {"developer": "system", "function": "tool", "observation": "tool"}
"""Roles of some data, with the role that most templates know instead."""


@dataclass(frozen=True)
class Forms:
    """Which forms of a message a template reads.

    Attributes:
        parts: a content of text parts; else only text.
        text: a content of text; else only text parts, as some templates of models that also see images.
        objects, texts: arguments of tool calls as JSON objects, as JSON text.
        roles: roles that the template does not know, with the role to give it instead.
        contents: for messages with tool calls and for messages with thoughts: what to write for a null content, and for
            an empty content.
    """

    parts: bool
    text: bool
    objects: bool
    texts: bool
    roles: Mapping[str, str]
    contents: Mapping[bool, Mapping[str | None, str | None]]

    def adapt(self, messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages in a form that the template reads. Raise DataError if the arguments of a tool call are
        not a JSON object."""
        return [self._adapted(message) for message in messages]

    def _adapted(self, message: dict[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if message["role"] in self.roles:
            message = {**message, "role": self.roles[message["role"]]}
        if isinstance(content, list):
            check_parts(content, f"a message of the role `{message['role']}`")
            if not self.parts:
                message = {**message, "content": "".join(texts_of(message))}
        elif not content and message["role"] == "assistant":
            calls = message.get("tool_calls")
            if calls or content is None:
                message = {**message, "content": self.contents[bool(calls)][content]}
        if isinstance(message.get("content"), str) and not self.text:
            message = {**message, "content": [{"type": "text", "text": message["content"]}]}
        if message.get("tool_calls") and (self.objects or self.texts):
            message = {**message, "tool_calls": [self._adapted_call(call) for call in message["tool_calls"]]}
        return message

    def _adapted_call(self, call: dict[str, Any]) -> dict[str, Any]:
        arguments = function_of(call).get("arguments")
        if isinstance(arguments, str) and self.objects:
            arguments = parse_object(arguments, "the arguments of a tool call") if arguments.strip() else {}
        elif isinstance(arguments, Mapping) and not self.objects:
            arguments = json.dumps(arguments, ensure_ascii=False)
        else:
            return call
        if "function" in call:
            return {**call, "function": {**call["function"], "arguments": arguments}}
        return {**call, "arguments": arguments}


def forms_of(template: ChatTemplate) -> Forms:
    """Find out which forms `template` reads, by rendering probes."""

    def rendered(*messages: dict[str, Any]) -> str:
        try:
            return template.render(messages)
        except DataError:
            return ""

    def call(arguments: object, content: str | None = "") -> str:
        function = {"name": "probe", "arguments": arguments}
        calls = [{"id": "holdfast0", "type": "function", "function": function}]
        return rendered(_USER, {"role": "assistant", "content": content, "tool_calls": calls})

    def first_written(*forms: tuple[object, str]) -> str:
        """Return the first rendering that has the call, with empty or with null content."""
        texts = (call(arguments, content) for arguments, _ in forms for content in ("", None))
        return next((text for text in texts if _WORD in text), "")

    part = [{"type": "text", "text": _WORD}]
    user, answer = ({"role": role, "content": part} for role in ("user", "assistant"))
    parts = rendered(_USER, answer) or rendered(user, answer)
    reads_parts = _WORD in parts and "'text'" not in parts and '"text"' not in parts
    plain = rendered({**user, "content": _WORD}, {**answer, "content": _WORD})
    as_object, as_text = {_WORD: "x"}, json.dumps({_WORD: "x"})
    objects, texts = first_written((as_object, "")), first_written((as_text, ""))
    reads_objects = _WORD in objects and f"{{'{_WORD}'" not in objects
    reads_texts = as_text in texts
    arguments = as_object if reads_objects or not reads_texts else as_text

    def thought(content: str | None) -> str:
        return rendered(_USER, {"role": "assistant", "content": content, "reasoning_content": _WORD})

    return Forms(
        parts=reads_parts,
        text=not reads_parts or _WORD in plain,
        objects=reads_objects,
        texts=reads_texts,
        roles={role: same for role, same in _SAME_ROLES.items() if _is_unknown(role, same, rendered)},
        contents={
            True: _contents(lambda content: call(arguments, content), has_calls=True),
            False: _contents(thought, has_calls=False),
        },
    )


def _contents(render: Any, *, has_calls: bool) -> dict[str | None, str | None]:
    """Return what to write for a null content, and for an empty content."""
    words = [len(re.findall(r"None|null", render(content))) for content in (None, _WORD)]
    null, empty = render(None), render("")
    is_null_read = bool(null) and words[0] <= words[1] and (_WORD in null or not has_calls)
    if is_null_read:
        return {None: None, "": None if has_calls and _WORD not in empty else ""}
    return {None: "" if empty else None, "": ""}


def _is_unknown(role: str, same: str, rendered: Any) -> bool:
    """Whether a template treats `role` as it treats any word, and writes messages of the role `same`."""

    def told(name: str) -> str:
        message = {"role": name, "content": _WORD, "name": "probe", "tool_call_id": "holdfast0"}
        if same == "system":
            return rendered(message, _USER).replace(name, "")
        function = {"name": "probe", "arguments": {}}
        calls = [{"id": "holdfast0", "type": "function", "function": function}]
        asked = {"role": "assistant", "content": "", "tool_calls": calls}
        return (rendered(_USER, asked, message) or rendered(_USER, message)).replace(name, "")

    is_known = _WORD in told(role) and told(role) != told(_NO_ROLE)
    return not is_known and _WORD in told(same)
