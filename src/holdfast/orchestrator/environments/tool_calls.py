"""Calls of tools in what the policy sampled, in the form that each family of models writes them in.

    hermes        <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>     (Hermes, Qwen 2.5, Qwen 3)
    qwen3_coder   <tool_call><function=add><parameter=a>1</parameter></function></tool_call>     (Qwen 3 Coder, 3.5)
    llama3_json   {"name": "add", "parameters": {"a": 1}}; ...     (Llama 3.1 and later)
    mistral       [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}], or [TOOL_CALLS]add{"a": 1}     (Mistral)

The names are those of vLLM's parsers, which need torch and vLLM, and whose word for a call that cannot be read is that
there is none. Here what cannot be read is a call with an `error`, so that the policy is told.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from holdfast.shared.errors import ConfigError

_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool, as the policy wrote it.

    Attributes:
        name: of the tool; empty where it cannot be read.
        arguments: by name.
        error: why the call cannot be read; empty where it can.
        has_texts: the format has no types: all arguments are text.
    """

    name: str
    arguments: Any = field(default_factory=dict)
    error: str = ""
    has_texts: bool = False


Parser = Callable[[str], list[ToolCall]]


@runtime_checkable
class ReadsCalls(Protocol):
    """A tokenizer that tells calls of tools from text by itself, whatever a template writes."""

    def calls_in(self, text: str) -> list[ToolCall]:
        """Return the calls in the text of a turn, with its special tokens."""
        ...


_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def parse_hermes(text: str) -> list[ToolCall]:
    """Return the calls between `<tool_call>` and `</tool_call>`, or the end, outside of thoughts."""
    return [_of_text(found.strip()) for found in _HERMES.findall(_without_thoughts(text))]


_FUNCTION = re.compile(r"<function=([^>\n]*)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER_END = "</parameter>"
_PARAMETER = re.compile(r"<parameter=([^>\n]*)>(.*?)</parameter>", re.DOTALL)


def parse_qwen3_coder(text: str) -> list[ToolCall]:
    """Return the calls between `<tool_call>` and `</tool_call>` that are written as tags."""
    calls = []
    for part in _HERMES.findall(_without_thoughts(text)):
        found = _FUNCTION.search(part)
        if found is None:
            calls.append(ToolCall("", error="there is no <function=name> in the call"))
            continue
        body = found[2]
        # Behind the last end there is none to look for, once for each beginning there.
        last = body.rfind(_PARAMETER_END) + len(_PARAMETER_END) if _PARAMETER_END in body else 0
        arguments = {name: _without_line_breaks(value) for name, value in _PARAMETER.findall(body[:last])}
        rest = (_PARAMETER.sub("", body[:last]) + body[last:]).strip()
        error = f"this is no <parameter=name>value</parameter>: {rest[:80]}" if rest else ""
        calls.append(ToolCall(found[1].strip(), arguments, error, has_texts=True))
    return calls


def parse_llama3_json(text: str) -> list[ToolCall]:
    """Return the calls of a turn that is nothing but JSON objects with a `;` or white space between them."""
    text = text.strip().removeprefix("<|python_tag|>").strip()
    if not text.startswith("{"):
        return []
    calls: list[ToolCall] = []
    while text:
        try:
            value, end = _DECODER.raw_decode(text)
        except (ValueError, RecursionError) as error:
            return [*calls, ToolCall("", error=f"the call is not JSON ({error})")]
        calls.append(_of_value(value))
        text = text[end:].lstrip("; \n\r\t")
    # An answer that happens to be JSON calls nothing.
    return calls if any(call.name for call in calls) else []


_MISTRAL = "[TOOL_CALLS]"
# Possessive: white space without an end is divided among the parts in one way, not in all.
_MISTRAL_NAMED = re.compile(r"\s*+([\w.-]++)\s*+(?:\[CALL_ID\]\w*+)?\s*+(?:\[ARGS\])?\s*+(?=\{)")


def parse_mistral(text: str) -> list[ToolCall]:
    """Return the calls behind `[TOOL_CALLS]`: a list of them, or in newer models a name with its arguments, each."""
    parts = _without_thoughts(text).split(_MISTRAL)[1:]
    return [call for part in parts for call in _mistral_calls(part.strip())]


def _mistral_calls(text: str) -> list[ToolCall]:
    if named := _MISTRAL_NAMED.match(text):
        try:
            return [ToolCall(named[1], _DECODER.raw_decode(text[named.end() :])[0])]
        except (ValueError, RecursionError) as error:
            return [ToolCall(named[1], error=f"the arguments are not JSON ({error})")]
    try:
        values, _ = _DECODER.raw_decode(text)
    except (ValueError, RecursionError) as error:
        return [ToolCall("", error=f"the calls are not JSON ({error})")]
    return [_of_value(value) for value in (values if isinstance(values, list) else [values])]


PARSERS: dict[str, Parser] = {
    "hermes": parse_hermes,
    "qwen3_coder": parse_qwen3_coder,
    "llama3_json": parse_llama3_json,
    "mistral": parse_mistral,
}


def find_parser(name: str, *, template: str, model: str) -> Parser:
    """Return the parser of that name; for `auto` that of the format which a chat template shows.

    Args:
        template: source of the chat template of tokenizer `model`.

    Raises:
        ConfigError: `auto` finds none.
    """
    if name != "auto":
        return PARSERS[name]
    signs = {
        "<function=": "qwen3_coder",
        "<tool_call>": "hermes",
        _MISTRAL: "mistral",
        "<|python_tag|>": "llama3_json",
        '"parameters": ': "llama3_json",
    }
    for sign, parser in signs.items():
        if sign in template:
            return PARSERS[parser]
    raise ConfigError(
        f"tool_parser = auto: the chat template of '{model}' writes calls of tools in no form that is known. Name "
        f"the one that the model writes: {', '.join(PARSERS)}; or take a model that calls tools."
    )


def text_before_calls(text: str, parse: Parser) -> str:
    """Return what a turn in which `parse` has found calls says before the first of them."""
    start = max(0, text.rfind("</think>"))
    beginnings: dict[Parser, str] = {
        parse_hermes: "<tool_call>",
        parse_qwen3_coder: "<tool_call>",
        parse_mistral: _MISTRAL,
    }
    beginning = beginnings.get(parse)
    return text[: text.find(beginning, start)].strip() if beginning else ""


def _of_text(text: str) -> ToolCall:
    try:
        return _of_value(json.loads(text))
    except (ValueError, RecursionError) as error:
        return ToolCall("", error=f"the call is not JSON ({error})")


def _of_value(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall("", error='a call must be {"name": ..., "arguments": {...}}')
    return ToolCall(value["name"], value.get("arguments", value.get("parameters", {})))


def _without_thoughts(text: str) -> str:
    """Return what comes behind the thoughts, in which a call may be pondered."""
    return text.rpartition("</think>")[2]


def _without_line_breaks(text: str) -> str:
    """Return a value without the line break that the format writes before and behind it."""
    return text.removeprefix("\n").removesuffix("\n")
