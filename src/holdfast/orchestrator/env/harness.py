"""Environments that a harness plays: any program that asks an OpenAI-compatible endpoint for the policy's answers.

    class Ask(HarnessEnvironment):
        def make_task(self, seed: TaskSeed) -> Task:
            return Task(prompt="", answer=seed.random().choice(["yes", "no"]))

        async def play(self, endpoint: Endpoint, task: Task) -> float:
            async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
                chat = [{"role": "user", "content": f"Say {task.answer}"}]
                answer = await client.chat.completions.create(model=endpoint.model, messages=chat)
            return float(answer.choices[0].message.content == task.answer)

The endpoint keeps the exact token ids of every turn. A rollout is one conversation: each request repeats the messages
of the last request and its answer, and adds more. An event loop has one server, and each rollout its own address:

    POST /<rollout>/v1/chat/completions     one turn of the rollout
    GET  /<rollout>/v1/models               the only model

The server refuses by name every parameter that would sample from another distribution than the run's. A request with
`stream` gets the finished answer as a stream of chunks.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import json
import logging
import secrets
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args
from weakref import WeakKeyDictionary

from holdfast.chat.messages import MORE_KEYS, check_tools, function_of, texts_of
from holdfast.errors import ConfigError, DataError, HoldfastError, nearest, shown
from holdfast.orchestrator.env.guard import PromptTooLong
from holdfast.orchestrator.env.interface import Environment, Score, Session, SessionFull, Task
from holdfast.orchestrator.env.tools import Parser, arguments_of, call_id, find_parser, of_json, text_before_calls

if TYPE_CHECKING:
    from aiohttp import web

_log = logging.getLogger("orchestrator")

RefusalReason = Literal["malformed", "parameter", "history", "parallel", "full"]
"""Why a request is refused: it cannot be read; it asks for something that a rollout does not have; it does not continue
the conversation; another request of the rollout is being answered; there is no room left within `seq_len`."""
REFUSALS: tuple[RefusalReason, ...] = get_args(RefusalReason)

_ALLOWED: dict[str, Any] = {
    "n": 1,
    "logprobs": False,
    "stop": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "repetition_penalty": 1,
    "min_tokens": 0,
    "bad_words": [],
    "allowed_token_ids": [],
    "structured_outputs": None,
}
"""The only allowed value of these parameters."""
_INSTEAD = {
    "n": "the run's `group_size` says how many rollouts a task has",
    "logprobs": "the rollout itself keeps them",
    "stop": "texts that end a turn are the run's `sampling.stop`",
    "tool_choice": "the policy chooses",
    "parallel_tool_calls": "the policy chooses",
}
_OF_THE_RUN = ("temperature", "top_p", "top_k", "min_p", "seed")
_LIMITS = ("max_tokens", "max_completion_tokens")
_WITHOUT_EFFECT = ("user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier")
_STREAM_OPTIONS = ("include_usage", "include_obfuscation")  # the second has no effect
_KNOWN = ("model", "messages", "tools", "stream", "stream_options", *_LIMITS, *_ALLOWED, *_WITHOUT_EFFECT)
_MESSAGE_KEYS = ("role", "content", *MORE_KEYS)


class Refused(Exception):
    """A request that is answered with an error; `reason` is for the counts, `code` is OpenAI's, if there is one."""

    def __init__(self, reason: RefusalReason, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.reason: RefusalReason = reason
        self.code = code


@dataclass(frozen=True)
class ChatRequest:
    """One request: contents as text, tools as JSON schemas, most tokens of the turn (None: the run's).

    `stream` and `include_usage` say how the answer is sent. The answer is the same, so they do not make two requests
    differ."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    max_tokens: int | None
    stream: bool = field(default=False, compare=False)
    include_usage: bool = field(default=False, compare=False)


def read_request(body: bytes, *, model: str) -> ChatRequest:
    """Return a request; null counts as absent. Raises Refused for something that a rollout does not have."""
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
            f"model = {shown(asked.get('model'))}: this endpoint has only '{model}'",
            code="model_not_found",
        )
    limits = [asked[name] for name in _LIMITS if name in asked]
    if any(type(limit) is not int or limit < 1 for limit in limits):
        raise Refused("parameter", f"max_tokens must be 1 or more, got {shown(limits[0])}")
    try:
        tools = check_tools(asked.get("tools"))
    except DataError as error:
        raise Refused("malformed", str(error)) from None
    stream, include_usage = _streaming(asked)
    return ChatRequest(_messages(asked.get("messages")), tools, min(limits, default=None), stream, include_usage)


def _streaming(asked: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether the answer is streamed, and whether its usage too."""
    stream, options = asked.get("stream", False), asked.get("stream_options")
    if not isinstance(stream, bool):
        raise Refused("parameter", f"stream must be true or false, got {shown(stream)}")
    if options is None:
        return stream, False
    if not stream:
        raise Refused("parameter", "stream_options needs stream = true: leave it out, or stream")
    if not isinstance(options, Mapping) or any(not isinstance(value, bool | None) for value in options.values()):
        raise Refused("parameter", f"stream_options must be an object of true and false, got {shown(options)}")
    if unknown := [name for name in options if name not in _STREAM_OPTIONS]:
        known = ", ".join(_STREAM_OPTIONS)
        raise Refused("parameter", f"stream_options.{unknown[0]:.80} is not supported. Known: {known}")
    return True, options.get("include_usage") is True


def _check_parameter(name: str, value: Any) -> None:
    if name in _OF_THE_RUN:
        raise Refused(
            "parameter", f"{name} is set by the run for all rollouts (its `sampling` and `seed`): leave it out"
        )
    if name in _ALLOWED and value != _ALLOWED[name]:
        allowed = json.dumps(_ALLOWED[name])
        why = _INSTEAD.get(name, "the trainer computes log-probabilities without it")
        raise Refused("parameter", f"{name} = {shown(value)} is not supported: leave it out, or {allowed}; {why}")
    if name not in _KNOWN:
        known = ", ".join(_KNOWN)
        raise Refused("parameter", f"there is no parameter `{name:.80}`.{nearest(name, _KNOWN)} Known: {known}")


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise Refused("malformed", f"messages must be a list of messages, got {shown(messages)}")
    return [_message(message, number) for number, message in enumerate(messages)]


def _message(message: Any, number: int) -> dict[str, Any]:
    """Return a message with its content as text, without empty keys."""
    what = f"messages[{number}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise Refused("malformed", f"{what} must be an object with a role, got {shown(message)}")
    said = {name: value for name, value in message.items() if value is not None and value != []}
    if unknown := [name for name in said if name not in _MESSAGE_KEYS]:
        raise Refused("malformed", f"{what}.{unknown[0]:.80} is not supported. Known: {', '.join(_MESSAGE_KEYS)}")
    content = said.get("content", "")
    if isinstance(content, list):
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
            raise Refused("malformed", f"{what}.content has parts that are not text, got {shown(content)}")
        content = "".join(texts_of({"content": content}))
    if not isinstance(content, str):
        raise Refused("malformed", f"{what}.content must be text or a list of text parts, got {shown(content)}")
    return said | {"content": content}


def is_same(message: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two messages are equal, except for white space around the assistant's text, and the format of JSON."""
    return _comparable(message) == _comparable(other)


def _comparable(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] != "assistant":
        return dict(message)
    calls = [
        (call.get("id"), function_of(call)) for call in message.get("tool_calls") or [] if isinstance(call, Mapping)
    ]
    told = [(ident, function.get("name"), _parsed(function.get("arguments"))) for ident, function in calls]
    return {**message, "content": message["content"].strip(), "tool_calls": told}


def _parsed(arguments: Any) -> Any:
    return of_json(arguments) if isinstance(arguments, str) else arguments


def reply_of(session: Session, *, tools: Sequence[Any] | None, parse: Parser | None) -> dict[str, Any]:
    """Return the last turn of `session` as the assistant's message, with the calls that `parse` finds in it.

    A call that cannot be read leaves the whole turn text, since OpenAI's protocol cannot express it."""
    calls = parse(session.raw_completion) if parse else []
    if parse is None or not calls or any(call.error for call in calls):
        return {"role": "assistant", "content": session.completion}
    parameters = {function_of(tool).get("name"): function_of(tool).get("parameters") for tool in tools or ()}
    written = []
    for number, call in enumerate(calls, start=1):
        arguments = json.dumps(arguments_of(call, parameters.get(call.name)), ensure_ascii=False)
        function = {"name": call.name, "arguments": arguments}
        written.append({"id": call_id(len(session.texts), number), "type": "function", "function": function})
    content = text_before_calls(session.raw_completion, parse)
    return {"role": "assistant", "content": content or None, "tool_calls": written}


def completion_of(reply: Mapping[str, Any], session: Session, *, model: str) -> dict[str, Any]:
    ends = (0, *session.turn_ends)
    sampled = session.loss_mask.tobytes()[ends[-2] : ends[-1]].count(1)
    total = len(session.token_ids) - session.branch_starts[-1]  # what the policy saw
    reason = session.finish_reason
    return {
        "id": f"chatcmpl-{len(session.texts)}",
        "object": "chat.completion",
        "created": 0,  # the time of day must not change what a harness does
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": dict(reply),
                "finish_reason": "tool_calls" if reason == "stop" and reply.get("tool_calls") else reason,
                "logprobs": None,
            }
        ],
        "usage": {"prompt_tokens": total - sampled, "completion_tokens": sampled, "total_tokens": total},
    }


def chunks_of(completion: Mapping[str, Any], *, include_usage: bool) -> list[dict[str, Any]]:
    """Return a completion as OpenAI streams it: role, text, calls, the reason of the end, and the usage if asked."""
    [choice] = completion["choices"]
    message = choice["message"]
    text = message["content"]
    deltas: list[dict[str, Any]] = [{"role": message["role"], "content": None if text is None else ""}]
    if text:
        deltas.append({"content": text})
    deltas += [{"tool_calls": [{"index": place, **call}]} for place, call in enumerate(message.get("tool_calls", ()))]
    ends = [*(None for _ in deltas), choice["finish_reason"]]
    head = {**completion, "object": "chat.completion.chunk", "usage": None}
    if not include_usage:
        del head["usage"]
    streamed = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": end, "logprobs": None}]}
        for delta, end in zip([*deltas, {}], ends, strict=True)
    ]
    return [*streamed, {**head, "choices": [], "usage": completion["usage"]}] if include_usage else streamed


MODEL = "policy"
_ROUTES = {"chat/completions": "POST", "models": "GET"}


class ChatServer:
    """Routes the requests of harnesses to their rollouts, and checks the `api_key`, until the event loop ends."""

    def __init__(self) -> None:
        self.api_key = secrets.token_urlsafe(24)
        self._numbers = itertools.count(1)
        self._rollouts: dict[str, _Rollout] = {}
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=2048)
        loop = asyncio.get_running_loop()
        self.is_up: asyncio.Future[None] = loop.create_future()
        # In a context of its own: it serves all rollouts, not only the first.
        self._serving = contextvars.Context().run(loop.create_task, self._serve())

    @contextlib.contextmanager
    def serving(self, rollout: _Rollout) -> Iterator[str]:
        """Answer the requests of a rollout meanwhile; gives the base URL."""
        number = str(next(self._numbers))
        self._rollouts[number] = rollout
        try:
            yield f"http://127.0.0.1:{self._socket.getsockname()[1]}/{number}/v1"
        finally:
            del self._rollouts[number]

    async def _serve(self) -> None:
        from aiohttp import web  # most runs have no harness

        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            status, body = await self._answer(request)
            if isinstance(body, list):
                text = "".join(f"data: {event}\n\n" for event in (*map(json.dumps, body), "[DONE]"))
                return web.Response(text=text, content_type="text/event-stream", headers={"Cache-Control": "no-cache"})
            headers = {} if status == 200 else {"x-should-retry": "false"}  # OpenAI's clients heed it
            return web.json_response(body, status=status, headers=headers)

        server = web.Server(answer, keepalive_timeout=120.0, access_log=None)
        runner = web.ServerRunner(server, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.SockSite(runner, self._socket).start()
            self.is_up.set_result(None)
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> tuple[int, dict[str, Any] | list[dict[str, Any]]]:
        """Return status and body; a list is streamed."""
        given = request.headers.get("authorization", "")
        if not secrets.compare_digest(given.encode(errors="replace"), f"Bearer {self.api_key}".encode()):
            return 401, _error("the API key is not that of the endpoint", code="invalid_api_key")
        number, _, route = request.path[1:].partition("/v1/")
        rollout = self._rollouts.get(number)
        if rollout is None or _ROUTES.get(route) != request.method:
            asked = f"{request.method} {request.path[:200]}"
            _log.warning("a harness asks for %s, where no rollout is played", asked)
            ended = "its rollout has ended, or the base URL of the rollout does not stand before /chat/completions"
            told = ended if rollout is None else "this endpoint has only POST /chat/completions and GET /models"
            return 404, _error(f"there is no {asked}: {told}")
        if request.method == "GET":
            return 200, {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "run"}]}
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        try:
            return 200, await rollout.answer(await request.content.read(), is_retry=is_retry)
        except Refused as refusal:
            return 400, _error(str(refusal), code=refusal.code or refusal.reason)
        except HoldfastError as error:
            return 500, _error(f"the policy cannot be sampled: {error}", kind="server_error")


_SERVERS: WeakKeyDictionary[asyncio.AbstractEventLoop, ChatServer] = WeakKeyDictionary()


async def chat_server() -> ChatServer:
    """Return the running server of this event loop."""
    loop = asyncio.get_running_loop()
    if loop not in _SERVERS:
        _SERVERS[loop] = ChatServer()
    await asyncio.shield(_SERVERS[loop].is_up)
    return _SERVERS[loop]


def _error(message: str, *, code: str | None = None, kind: str = "invalid_request_error") -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


RESULT = "result"
"""Key of the result of `play` in `session.state`."""


@dataclass(frozen=True)
class Endpoint:
    """The endpoint of one rollout, for clients of OpenAI.

    Attributes:
        base_url: of this rollout; ends with `/v1`, and answers until `play` returns.
        api_key: for every request.
        model: name of the policy.
    """

    base_url: str
    api_key: str
    rollout: _Rollout = field(repr=False)
    model: str = MODEL

    @property
    def is_full(self) -> bool:
        """Whether a request found no room within `seq_len`."""
        return self.rollout.is_full

    def restart(self) -> None:
        """Let a harness that has died play the rollout again; the same requests get the same answers."""
        self.rollout.restart()


class HarnessEnvironment(Environment):
    """Base of environments whose rollouts are played by a program that asks for chat completions.

    Attributes:
        tool_parser: the setting of that name.
        reward_of_full: reward of a rollout whose `play` raises after a request that found no room within `seq_len`.
    """

    tool_parser: str = "auto"
    reward_of_full: float = 0.0

    async def play(self, endpoint: Endpoint, task: Task) -> float | Score:
        """Play one rollout of `task` with requests to `endpoint`, one after the other; return the reward."""
        raise NotImplementedError(f"{type(self).__name__} needs a method play(endpoint, task)")

    async def run(self, session: Session, task: Task) -> None:
        """Serve the requests of one rollout until `play` returns.

        Raises PromptTooLong if the first request leaves no room for an answer; RuntimeError if no request was answered,
        or one is still being answered."""
        server = await chat_server()
        rollout = _Rollout(session, tool_parser=self.tool_parser)
        try:
            with server.serving(rollout) as base_url:
                result = await self._play(Endpoint(base_url, server.api_key, rollout), task)
            if rollout.too_long is not None and not session.texts:
                raise rollout.too_long
            if rollout.is_answering:
                raise RuntimeError("play() returned while a request of it was being answered: await every one")
            if not session.texts:
                raise RuntimeError(f"play() returned without a request that was answered.{rollout.last_refusal}")
            session.state[RESULT] = result
        finally:
            await rollout.end()

    async def _play(self, endpoint: Endpoint, task: Task) -> float | Score:
        try:
            return await self.play(endpoint, task)
        except Exception:
            if not endpoint.is_full:
                raise
            return self.reward_of_full  # the policy's answers left no room: not a failure of the environment

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        results = [session.state[RESULT] for session in sessions]
        return [result if isinstance(result, Score) else Score(result) for result in results]


class _Rollout:
    """One rollout: requests go in, the session grows."""

    def __init__(self, session: Session, *, tool_parser: str) -> None:
        self._session = session
        self._tool_parser = tool_parser
        # Context of the call that plays it; the clock of that call stands still while the policy is sampled.
        self._context = contextvars.copy_context()
        self._counts = session.request_counts = Counter()
        self._said: list[dict[str, Any]] = []
        self._tools: list[Any] | None = None
        self._parse: Parser | None = None
        self._body = b""
        self._outcomes: list[tuple[ChatRequest, dict[str, Any] | Refused]] = []
        self._num_replayed: int | None = None
        self._turn: asyncio.Task[dict[str, Any]] | None = None
        self.too_long: PromptTooLong | None = None
        self.last_refusal = ""

    @property
    def is_answering(self) -> bool:
        return self._turn is not None and not self._turn.done()

    @property
    def is_full(self) -> bool:
        return self._counts["refused/full"] > 0

    def restart(self) -> None:
        self._num_replayed = 0
        self._body = b""
        for reason in REFUSALS:  # it comes, and counts, again
            self._counts.pop(f"refused/{reason}", None)

    async def end(self) -> None:
        if self._turn is not None:
            self._turn.cancel()
            await asyncio.gather(self._turn, return_exceptions=True)

    async def answer(self, body: bytes, *, is_retry: bool) -> dict[str, Any] | list[dict[str, Any]]:
        """Return the answer to a request, the same one to a retry; as chunks, if the request asks for a stream.

        Raises Refused; HoldfastError if sampling failed."""
        try:
            request = read_request(body, model=MODEL)
            answer = await self._whole_answer(request, body, is_retry=is_retry)
        except Refused as refusal:
            self._counts[f"refused/{refusal.reason}"] += 1
            self.last_refusal = f" The last refusal: {refusal}"
            raise
        return chunks_of(answer, include_usage=request.include_usage) if request.stream else answer

    async def _whole_answer(self, request: ChatRequest, body: bytes, *, is_retry: bool) -> dict[str, Any]:
        if self._turn is not None and is_retry and body == self._body:
            return await asyncio.shield(self._turn)
        if self._turn is not None and self._num_replayed == len(self._outcomes):
            await asyncio.wait([self._turn])  # the last request of the harness that died
        if (known := self._replayed(request)) is not None:
            return known
        if self.is_answering:
            told = "await one after the other, and play several conversations as several rollouts"
            raise Refused("parallel", f"another request of this rollout is being answered: {told}")
        self._body = body
        self._turn = self._context.copy().run(asyncio.create_task, self._answer(request))
        answer = await asyncio.shield(self._turn)
        self._counts["answered"] += 1
        return answer

    async def _answer(self, request: ChatRequest) -> dict[str, Any]:
        try:
            answer = await self._sampled(request)
        except Refused as refusal:
            self._outcomes.append((request, refusal))
            raise
        self._outcomes.append((request, answer))
        return answer

    async def _sampled(self, request: ChatRequest) -> dict[str, Any]:
        session = self._session
        try:
            self._extend(request)
            await session.sample(max_tokens=request.max_tokens)
        except SessionFull as error:
            session.truncated = True
            if not session.token_ids:
                self.too_long = PromptTooLong(f"the prompt of the harness: {error}")
            raise Refused("full", str(error), code="context_length_exceeded") from None
        except (ConfigError, DataError, TypeError) as error:
            raise Refused("malformed", str(error)) from None
        reply = reply_of(session, tools=self._tools, parse=self._parse)
        self._said = [*request.messages, reply | {"content": reply["content"] or ""}]
        return completion_of(reply, session, model=MODEL)

    def _replayed(self, request: ChatRequest) -> dict[str, Any] | None:
        """Give a request of a harness that began again the earlier answer or refusal; None for a new request."""
        place, self._num_replayed = self._num_replayed, None
        if place is None or place >= len(self._outcomes):
            return None
        asked, outcome = self._outcomes[place]
        if asked != request:
            raise Refused("history", f"request {place + 1} differs from that before the harness was started again")
        self._num_replayed = place + 1
        if isinstance(outcome, Refused):
            raise outcome
        return outcome

    def _extend(self, request: ChatRequest) -> None:
        """Append what is new in the request. Raises Refused if it does not continue the conversation."""
        session, said = self._session, self._said
        if not said:
            if request.tools:
                self._parse = self._parser(request.tools)
            session.begin(request.messages, tools=request.tools)
            self._tools = request.tools
            return
        if request.tools != self._tools:
            raise Refused("history", "the tools differ from those of the first request")
        pairs = zip(said, request.messages, strict=False)
        other = next((number for number, pair in enumerate(pairs) if not is_same(*pair)), None)
        if other is not None or len(request.messages) <= len(said):
            place = min(len(said), len(request.messages)) if other is None else other
            told = f"a request must repeat the {len(said)} messages so far, answers included, and add to them"
            raise Refused("history", f"a rollout is one conversation: {told}; from messages[{place}] on it does not")
        session.append_messages(request.messages[len(said) :])

    def _parser(self, tools: list[Any]) -> Parser:
        tokenizer = self._session.tokenizer
        source = tokenizer.template(tools).source
        return find_parser(self._tool_parser, template=source, model=tokenizer.name)


def request_metrics(session: Session) -> dict[str, float]:
    """Return the counts of requests of a session; empty without a harness."""
    if session.request_counts is None:
        return {}
    names = ["answered", *(f"refused/{reason}" for reason in REFUSALS)]
    return {f"requests/{name}": float(session.request_counts[name]) for name in names}
