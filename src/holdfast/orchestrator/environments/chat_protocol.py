"""OpenAI's chat protocol as harnesses speak it to the policy: what a request may ask for, and what answers it.

A request is one turn of a rollout. What would sample it from another distribution than the run's is refused by name:
tokens that the trainer reads otherwise than they were sampled are worse than a harness that has to leave out a setting.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from holdfast.orchestrator.environments.session import Session
from holdfast.orchestrator.environments.tool_calls import Parser, ReadsCalls, ToolCall, text_before_calls
from holdfast.shared.chat.messages import MORE_KEYS, check_tools, function_of, texts_of
from holdfast.shared.errors import DataError, nearest
from holdfast.shared.printable import shown

RefusalReason = Literal["malformed", "parameter", "history", "parallel", "full"]
"""Why a request is refused: it cannot be read; it asks for what a rollout does not have; it does not go on where the
last one ended; another one of the rollout is being answered; there is no room left within `seq_len`."""
REFUSALS: tuple[RefusalReason, ...] = get_args(RefusalReason)

_ALLOWED: dict[str, Any] = {
    "n": 1,
    "stream": False,
    "logprobs": False,
    "stop": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
}
"""The one value of what may only be left out otherwise."""
_OF_THE_RUN = ("temperature", "top_p", "top_k", "min_p", "seed")
_LIMITS = ("max_tokens", "max_completion_tokens")
_WITHOUT_EFFECT = ("user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier")
_KNOWN = ("model", "messages", "tools", *_LIMITS, *_ALLOWED, *_WITHOUT_EFFECT)
_MESSAGE_KEYS = ("role", "content", *MORE_KEYS)


class Refused(Exception):
    """A request that gets an error for an answer; the message is for the harness.

    Attributes:
        reason: by which it is counted.
        code: of OpenAI's, where it has one.
    """

    def __init__(self, reason: RefusalReason, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.reason: RefusalReason = reason
        self.code = code


@dataclass(frozen=True)
class ChatRequest:
    """One request.

    Attributes:
        messages: the chat so far, contents as text.
        tools: their JSON schemas; None: none.
        max_tokens: most tokens of the turn; None: as many as the run allows.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    max_tokens: int | None


def read_request(body: bytes, *, model: str) -> ChatRequest:
    """Return what a request asks for; keys that are null count as absent.

    Raises:
        Refused: it is no request, or asks for what a rollout does not have.
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused("malformed", f"the request is not JSON: {error}") from None
    if not isinstance(asked, dict):
        raise Refused("malformed", f"the request must be a JSON object, got {shown(asked)}")
    asked = {name: value for name, value in asked.items() if value is not None}
    for name, value in asked.items():
        _check_parameter(name, value)
    if asked.get("model") != model:
        raise Refused(
            "parameter",
            f"model = {shown(asked.get('model'))}: this endpoint has '{model}' alone",
            code="model_not_found",
        )
    limits = [asked[name] for name in _LIMITS if name in asked]
    if any(type(limit) is not int or limit < 1 for limit in limits):
        raise Refused("parameter", f"max_tokens must be a number from 1 on, got {shown(limits[0])}")
    try:
        tools = check_tools(asked.get("tools"))
    except DataError as error:
        raise Refused("malformed", str(error)) from None
    return ChatRequest(_messages(asked.get("messages")), tools, min(limits, default=None))


def _check_parameter(name: str, value: Any) -> None:
    if name in _OF_THE_RUN:
        raise Refused(
            "parameter", f"{name} is the run's, for all rollouts alike (its `sampling` and `seed`): leave it out"
        )
    if name in _ALLOWED and value != _ALLOWED[name]:
        allowed = json.dumps(_ALLOWED[name])
        raise Refused("parameter", f"{name} = {shown(value)} is not supported: leave it out, or {allowed}")
    if name not in _KNOWN:
        known = ", ".join(_KNOWN)
        raise Refused("parameter", f"there is no parameter `{name:.80}`.{nearest(name, _KNOWN)} Known: {known}")


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise Refused("malformed", f"messages must be a list of messages, got {shown(messages)}")
    return [_message(message, number) for number, message in enumerate(messages)]


def _message(message: Any, number: int) -> dict[str, Any]:
    """Return a message with its content as text, without what says nothing."""
    what = f"messages[{number}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise Refused("malformed", f"{what} must be an object with a role, got {shown(message)}")
    said = {name: value for name, value in message.items() if value is not None and value != []}
    if unknown := [name for name in said if name not in _MESSAGE_KEYS]:
        raise Refused("malformed", f"{what}.{unknown[0]:.80} is not supported. Known: {', '.join(_MESSAGE_KEYS)}")
    content = said.get("content", "")
    if isinstance(content, list):
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
            raise Refused("malformed", f"{what}.content has parts that are no text, got {shown(content)}")
        content = "".join(texts_of({"content": content}))
    if not isinstance(content, str):
        raise Refused("malformed", f"{what}.content must be text or a list of text parts, got {shown(content)}")
    return said | {"content": content}


def is_same(message: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two messages say the same: white space around the assistant's does not count, nor how JSON is written."""
    return _comparable(message) == _comparable(other)


def _comparable(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] != "assistant":
        return dict(message)
    calls = [
        (call.get("id"), function_of(call)) for call in message.get("tool_calls") or [] if isinstance(call, Mapping)
    ]
    told = [(ident, function.get("name"), _value_of(function.get("arguments"))) for ident, function in calls]
    return {**message, "content": message["content"].strip(), "tool_calls": told}


def _value_of(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


def reply_of(session: Session, *, tools: Sequence[Any] | None, parse: Parser | None) -> dict[str, Any]:
    """Return the last turn of `session` as the assistant's message, with the calls that `parse` finds in it.

    A call that cannot be read leaves the whole turn text, as OpenAI's protocol has no words for one.
    """
    calls = parse(session.raw_completion) if parse else []
    if parse is None or not calls or any(call.error for call in calls):
        return {"role": "assistant", "content": session.completion}
    turn = len(session.texts)
    written = [
        {
            "id": f"t{turn:04d}{number:04d}",  # nine letters and digits: Mistral's templates take no other
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(_arguments(call, tools or ()), ensure_ascii=False)},
        }
        for number, call in enumerate(calls, start=1)
    ]
    has_read = isinstance(session.tokenizer, ReadsCalls)  # and left its calls out of the text
    content = session.completion if has_read else text_before_calls(session.raw_completion, parse)
    return {"role": "assistant", "content": content or None, "tool_calls": written}


def _arguments(call: ToolCall, tools: Sequence[Any]) -> Any:
    """Return the arguments of a call; where the format has no types, those of the tool's schema."""
    if not call.has_texts:
        return call.arguments
    functions = {function_of(tool).get("name"): function_of(tool) for tool in tools}
    parameters = functions.get(call.name, {}).get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    schemas = properties if isinstance(properties, Mapping) else {}
    texts = {name for name, schema in schemas.items() if isinstance(schema, Mapping) and schema.get("type") == "string"}
    return {name: text if name in texts else _value_of(text) for name, text in call.arguments.items()}


def completion_of(reply: Mapping[str, Any], session: Session, *, model: str) -> dict[str, Any]:
    """Return the body of an answer."""
    ends = (0, *session.turn_ends)
    sampled = session.loss_mask.tobytes()[ends[-2] : ends[-1]].count(1)
    total = len(session.token_ids) - session.branch_starts[-1]  # what the policy saw
    is_cut = session.token_ids[-1] not in session.tokenizer.stop_token_ids
    return {
        "id": f"chatcmpl-{len(session.texts)}",
        "object": "chat.completion",
        "created": 0,  # no harness shall go otherwise at another hour
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": dict(reply),
                "finish_reason": "length" if is_cut else "tool_calls" if reply.get("tool_calls") else "stop",
                "logprobs": None,
            }
        ],
        "usage": {"prompt_tokens": total - sampled, "completion_tokens": sampled, "total_tokens": total},
    }
