"""Tools that the policy may call: their schema for the chat template, and parsers and checks of the calls.

    def add(a: int, b: int) -> int:
        '''Add two numbers.

        Args:
            a: the first one.
            b: the second one.
        '''
        return a + b

Name, docstring and annotations become the schema that chat templates take, in the form of OpenAI's functions. A
parameter annotated with `Session` is left out: the tool gets the session that called it. Schema and check come from
pydantic, since `transformers.utils.get_json_schema` imports torch and checks nothing. Forms of calls, by vLLM's names:

    hermes        <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>     (Hermes, Qwen 2.5, Qwen 3)
    qwen3_coder   <tool_call><function=add><parameter=a>1</parameter></function></tool_call>     (Qwen 3 Coder, 3.5)
    llama3_json   {"name": "add", "parameters": {"a": 1}}; ...     (Llama 3.1 and later)
    mistral       [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}], or [TOOL_CALLS]add{"a": 1}     (Mistral)

vLLM's parsers need torch and vLLM, and drop a call that they cannot read. The parsers here return such a call with an
`error`, so that the policy is told.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_type_hints

import pydantic

from holdfast.chat.template import tool_format_of
from holdfast.errors import ConfigError, nearest

_SECTION = re.compile(r"^(Args|Arguments|Returns|Raises|Yields|Examples?|Notes?):\s*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

FailureReason = Literal["unreadable", "unknown", "arguments", "raised", "timeout", "server"]
"""Why a call has no result. The call cannot be read, its tool is unknown, or its arguments do not fit. Or the tool
raised, returned something that is not JSON, or took too long. Or its MCP server died."""
FAILURE_REASONS: tuple[FailureReason, ...] = get_args(FailureReason)


class ToolFailed(Exception):
    """A call of a tool failed; the message is for the policy."""

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(message)
        self.reason: FailureReason = reason


class Tool:
    """One function that the policy may call. `schema`: what the chat template gets: `{"type": "function", "function":
    {name, description, parameters}}`."""

    def __init__(self, function: Callable[..., Any], *, session_class: type) -> None:
        """Read the signature of a function or bound method; a parameter of `session_class` gets the session.

        Raises ConfigError without a docstring, or for a parameter without annotation or of a kind that JSON does not
        have."""
        self.name: str = getattr(function, "__name__", type(function).__name__)
        self._function = function
        doc = inspect.getdoc(function)
        if not doc:
            raise ConfigError(f"tool '{self.name}' has no docstring, which tells the policy what it does: write one")
        description, told = _read_docstring(doc)
        try:
            hints = get_type_hints(function, include_extras=True)
        except Exception as error:  # noqa: BLE001 - whatever an expression of the user's raises
            raise ConfigError(f"tool '{self.name}': its annotations cannot be evaluated: {error}") from None
        self._for_session: list[str] = []
        self._fields: dict[str, str] = {}
        fields: dict[str, Any] = {}
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind not in _BY_NAME:
                raise ConfigError(f"tool '{self.name}': parameter `{parameter}` cannot be given by name; write it out")
            if name not in hints:
                raise ConfigError(f"tool '{self.name}': parameter `{name}` has no annotation, such as `{name}: str`")
            if isinstance(hints[name], type) and issubclass(hints[name], session_class):
                self._for_session.append(name)
                continue
            default = ... if parameter.default is parameter.empty else None
            field = f"field_{len(fields)}"  # not its own name, which may be `json` or `_of`
            fields[field] = (hints[name], pydantic.Field(default, alias=name, description=told.get(name)))
            self._fields[field] = name
        if unknown := sorted(told.keys() - set(self._fields.values())):
            known = ", ".join(self._fields.values()) or "none"
            near = nearest(unknown[0], self._fields.values())
            raise ConfigError(
                f"tool '{self.name}': its docstring describes `{unknown[0]}`.{near} Parameters there: {known}."
            )
        try:
            config = pydantic.ConfigDict(extra="forbid")
            self._arguments = pydantic.create_model(self.name, __config__=config, **fields)
            parameters = _plain(self._arguments.model_json_schema())
        except pydantic.PydanticUserError as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"tool '{self.name}': its annotations are not all of kinds that JSON has: {reason}"
            ) from None
        shown = {"type": "object", "properties": parameters.get("properties", {})}
        shown |= {key: parameters[key] for key in ("required", "$defs") if key in parameters}
        function_schema = {"name": self.name, "description": description, "parameters": shown}
        self.schema: dict[str, Any] = {"type": "function", "function": function_schema}

    def call(self, arguments: Any, session: object) -> Any:
        """Call the function with decoded JSON; return its result, which is awaitable if it is `async`.

        Raises ToolFailed that says which arguments do not fit, and what is allowed."""
        try:
            # As JSON and strict: "3" is not a number, and a tuple may still be written as a list.
            checked = self._arguments.model_validate_json(json.dumps(arguments), strict=True)
        except pydantic.ValidationError as error:
            allowed = ", ".join(self._fields.values()) or "none"
            raise ToolFailed("arguments", f"{self.name}: {_told(error)}. Parameters: {allowed}.") from None
        except RecursionError:
            raise ToolFailed("arguments", f"{self.name}: the arguments are nested too deeply") from None
        given = {
            name: getattr(checked, field) for field, name in self._fields.items() if field in checked.model_fields_set
        }
        return self._function(**given, **dict.fromkeys(self._for_session, session))


def tools_of(functions: Sequence[Callable[..., Any]], *, owner: object, session_class: type) -> dict[str, Tool]:
    """Return the tools of an environment by name. A function with a first parameter `self` becomes a method of `owner`.

    Raises ConfigError if one is not a tool, or two have one name."""
    if isinstance(functions, str | Mapping) or not isinstance(functions, Sequence):
        raise ConfigError(f"`tools` must be a list of functions, got {functions!r:.120}")
    tools: dict[str, Tool] = {}
    for function in functions:
        if not callable(function):
            raise ConfigError(f"`tools` must be a list of functions, got {function!r:.120} in it")
        if inspect.isfunction(function) and next(iter(inspect.signature(function).parameters), "") == "self":
            function = function.__get__(owner)
        tool = Tool(function, session_class=session_class)
        if tool.name in tools:
            raise ConfigError(f"`tools` has two functions with the name '{tool.name}': rename one")
        tools[tool.name] = tool
    return tools


def of_json(text: str) -> Any:
    """Return the value of JSON; other text as it is."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _told(error: pydantic.ValidationError) -> str:
    reasons = []
    for entry in error.errors(include_url=False):
        where = ".".join(map(str, entry["loc"]))
        match entry["type"]:
            case "missing":
                reasons.append(f"`{where}` is missing")
            case "extra_forbidden":
                reasons.append(f"there is no parameter `{where}`")
            case _:
                reasons.append(f"`{where}`: {entry['msg']}" if where else "the arguments must be a JSON object")
    return "; ".join(reasons)


def _plain(schema: Any) -> Any:
    """Return a schema without the titles and defaults that pydantic adds, types first, as models were shown them."""
    if isinstance(schema, list):
        return [_plain(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    first = {"type": schema["type"]} if isinstance(schema.get("type"), str) else {}
    # Under `properties` the keys are names of the user, which may be `title`.
    return first | {
        key: {name: _plain(entry) for name, entry in value.items()} if key in ("properties", "$defs") else _plain(value)
        for key, value in schema.items()
        if key not in ("title", "default")
    }


def _read_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """Return the description in a docstring of Google's style, and the text of every argument."""
    parts = _SECTION.split(doc)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    told: dict[str, str] = {}
    name, indent = "", None
    for line in (sections.get("Args") or sections.get("Arguments") or "").splitlines():
        text = line.strip()
        depth = len(line) - len(line.lstrip())
        indent = depth if indent is None and text else indent
        found = _ARGUMENT.match(text) if depth == indent else None
        if found:
            name = found[1]
            told[name] = found[2]
        elif name and text:
            told[name] = f"{told[name]} {text}".strip()
    return parts[0].strip(), told


_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool, as the policy wrote it.

    Attributes:
        name: of the tool; empty if the call cannot be read.
        error: why the call cannot be read.
        has_texts: the format has no types: all arguments are text.
    """

    name: str
    arguments: Any = field(default_factory=dict)
    error: str = ""
    has_texts: bool = False


def arguments_of(call: ToolCall, parameters: Any) -> Any:
    """Return the arguments of a call; if its format has only text, as the JSON schema `parameters` has their types."""
    if not call.has_texts:
        return call.arguments
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    schemas = properties if isinstance(properties, Mapping) else {}
    texts = {name for name, schema in schemas.items() if isinstance(schema, Mapping) and schema.get("type") == "string"}
    return {name: text if name in texts else of_json(text) for name, text in call.arguments.items()}


Parser = Callable[[str], list[ToolCall]]


def call_id(turn: int, number: int) -> str:
    """Return the id of call `number` of turn `turn`, both from 1."""
    return f"t{turn:04d}{number:04d}"  # nine letters and digits: Mistral's templates take no other id


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
        # Without this, each beginning after the last end would be searched to the end of the text.
        last = body.rfind(_PARAMETER_END) + len(_PARAMETER_END) if _PARAMETER_END in body else 0
        arguments = {
            name: value.removeprefix("\n").removesuffix("\n") for name, value in _PARAMETER.findall(body[:last])
        }
        rest = (_PARAMETER.sub("", body[:last]) + body[last:]).strip()
        error = f"this is not <parameter=name>value</parameter>: {rest[:80]}" if rest else ""
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
# Possessive quantifiers: no backtracking over long white space.
_MISTRAL_NAMED = re.compile(r"\s*+([\w.-]++)\s*+(?:\[CALL_ID\]\w*+)?\s*+(?:\[ARGS\])?\s*+(?=\{)")


def parse_mistral(text: str) -> list[ToolCall]:
    """Return the calls after `[TOOL_CALLS]`: a list of them, or in newer models a name with its arguments, each."""
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
    """Return the parser `name`; `auto`: the parser for the chat template of tokenizer `model`.

    Raises ConfigError if `auto` finds none."""
    if name != "auto":
        return PARSERS[name]
    if (found := tool_format_of(template)) is not None:
        return PARSERS[found]
    raise ConfigError(
        f"tool_parser = auto: the chat template of '{model}' writes calls of tools in no form that is known. Name "
        f"the one that the model writes: {', '.join(PARSERS)}; or take a model that calls tools."
    )


def text_before_calls(text: str, parse: Parser) -> str:
    """Return the text of a turn before its first call."""
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
    return text.rpartition("</think>")[2]
