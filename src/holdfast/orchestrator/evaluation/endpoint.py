"""Samples turns from a server that speaks OpenAI's chat protocol, and keeps what it said.

`POST <url>/chat/completions` with `model`, `messages`, `max_tokens`, `temperature`, `top_p`, `seed`, and `top_k` and
`min_p` (which vLLM, SGLang and llama.cpp know and OpenAI does not) where they are set. For environments with tools
`tools` are sent, the server reads the calls (`tool_calls`), and their answers follow as messages of the role `tool`.
A seed makes no server deterministic, and nothing pins what an endpoint serves: what it said is kept in a log at once,
so that an evaluation that was killed never asks the same twice.
"""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import xxhash

from holdfast.orchestrator.engines.http import Unavailable, retry_after_s
from holdfast.orchestrator.engines.retry import RetryPolicy
from holdfast.orchestrator.engines.routing import Affinity
from holdfast.orchestrator.rollouts.transcript import EndpointCall, ids_of_answer, messages_of, tools_of
from holdfast.orchestrator.task_group import FirstFailure
from holdfast.shared.config.evaluation import EndpointConfig
from holdfast.shared.errors import InferenceError, RunDirError
from holdfast.shared.files.record_log import RecordLog, read_records
from holdfast.shared.printable import printable
from holdfast.shared.wire.arrays import Logprobs, TokenIds
from holdfast.shared.wire.inference_api import Completion
from holdfast.shared.wire.keys import read_key
from holdfast.shared.wire.sampling import Sampling

_log = logging.getLogger("orchestrator")

LOG_NAME = "answers.log"
_T = TypeVar("_T")


class _Answer(msgspec.Struct):
    """One record of the log: what was said to which request."""

    request: str
    text: str
    finish_reason: str
    calls: list[EndpointCall] = []


class _Function(msgspec.Struct):
    name: str
    arguments: str = "{}"


class _Call(msgspec.Struct):
    function: _Function


class _Message(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _ChatCompletion(msgspec.Struct):
    choices: list[_Choice]


class EndpointSampler:
    """Samples the turns of sessions whose ids are those of a `Transcript`.

    Args:
        url: base URL of the server.
        model: what it calls the model.
        directory: of the log.

    Raises:
        RunDirError: the log cannot be read or written.
    """

    def __init__(self, config: EndpointConfig, *, url: str, model: str, directory: Path) -> None:
        self._config = config
        self._url = f"{url}/chat/completions"
        self._model = model
        key = read_key(config.api_key_env)
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=config.timeout_s,
            limits=httpx.Limits(max_connections=None),
        )
        self._failure = FirstFailure()
        path = directory / LOG_NAME
        self._answers: dict[str, _Answer] = {}
        try:
            payloads, damages = read_records(path) if path.exists() else ([], [])
            for damage in damages:
                _log.warning("%s: %s; what it held is asked again", path, damage)
            for payload in payloads:
                answer = msgspec.msgpack.decode(payload, type=_Answer)
                self._answers[answer.request] = answer
            is_torn = bool(damages) and damages[-1].is_tail
            self._records = RecordLog(
                path, valid_bytes=damages[-1].start if is_torn else path.stat().st_size if path.exists() else 0
            )
        except OSError as error:
            raise RunDirError(f"{path} cannot be used: {error.strerror or error}") from error

    def check(self) -> None:
        """Raise what asking has failed with, if it has."""
        self._failure.check()

    async def guard(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Return the result of `work`, which samples here; cancelled as soon as the server has failed.

        Raises:
            InferenceError, RunDirError: what asking failed with; or whatever `work` raises.
        """
        return await self._failure.guard(work)

    async def close(self) -> None:
        """Close connections and log."""
        await self._client.aclose()
        self._records.close(wait=True)

    async def sample(
        self, token_ids: list[int], *, sampling: Sampling, max_tokens: int, seed: int, affinity: Affinity
    ) -> Completion:
        """Return what the policy says to the chat in `token_ids`.

        Raises:
            InferenceError: the server refuses, or fails for longer than `retry_for_s`.
            RunDirError: what it said cannot be kept.
        """
        try:
            return await self._sample(self._request(token_ids, sampling, max_tokens=max_tokens, seed=seed))
        except (InferenceError, RunDirError) as error:
            # Whatever an environment makes of it: the evaluation ends.
            self._failure.set(error)
            raise

    async def _sample(self, request: dict[str, Any]) -> Completion:
        body = msgspec.json.encode(request)
        key = xxhash.xxh3_128_hexdigest(body)
        answer = self._answers.get(key)
        if answer is None:
            choice = await self._ask(body)
            said = choice.message
            # Where there are no tools, nobody answers a call.
            found = [call.function for call in said.tool_calls or ()] if "tools" in request else []
            calls = [EndpointCall(function.name, function.arguments) for function in found]
            answer = _Answer(key, said.content or "", choice.finish_reason or "stop", calls)
            try:
                self._records.append(msgspec.msgpack.encode(answer))
            except OSError as error:
                raise RunDirError(f"{self._records.path} cannot be written: {error.strerror or error}") from error
            self._answers[key] = answer
        ids = ids_of_answer(answer.text, answer.calls)
        return Completion(TokenIds(ids), Logprobs([0.0] * len(ids)), answer.finish_reason, [])

    def _request(self, token_ids: list[int], sampling: Sampling, *, max_tokens: int, seed: int) -> dict[str, Any]:
        more: dict[str, Any] = {name: value for name in ("top_k", "min_p") if (value := getattr(sampling, name))}
        if tools := tools_of(token_ids):
            more["tools"] = tools
        return {
            "model": self._model,
            "messages": messages_of(token_ids),
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": seed,
            **more,
        }

    async def _ask(self, body: bytes) -> _Choice:
        attempts = RetryPolicy(self._config.retry_for_s, key="endpoint.retry_for_s")
        while True:
            try:
                return await self._ask_once(body)
            except Unavailable as failure:
                _log.warning("%s", failure)
                attempts.count(failure, url=self._url)
                await attempts.pause(failure)

    async def _ask_once(self, body: bytes) -> _Choice:
        """Return the one choice of an answer.

        Raises:
            Unavailable: the server is busy, fails or cannot be reached.
            InferenceError: it refuses, or its answer is no chat completion.
        """
        try:
            answer = await self._client.post(self._url, content=body, headers={"Content-Type": "application/json"})
        except httpx.TransportError as error:
            raise Unavailable(f"POST {self._url}: {type(error).__name__} {error}".rstrip()) from None
        except httpx.RequestError as error:  # it was reached, and what it sent cannot be read
            raise InferenceError(f"POST {self._url}: {type(error).__name__} {error}".rstrip()) from None
        said = printable(answer.text)[:500]
        if answer.status_code == 429 or answer.status_code >= 500:
            raise Unavailable(
                f"POST {self._url} was answered {answer.status_code}: {said}",
                retry_after_s=retry_after_s(answer.headers.get("retry-after", "")),
            )
        if not answer.is_success:
            hint = f" Set {self._config.api_key_env} to its key." if answer.status_code in (401, 403) else ""
            raise InferenceError(f"POST {self._url} was answered {answer.status_code}: {said}.{hint}")
        try:
            found = msgspec.json.decode(answer.content, type=_ChatCompletion)
        except (ValueError, RecursionError) as error:
            raise InferenceError(
                f"{self._url} gave an answer that is no chat completion: {error}. Does --url end with what comes "
                "before /chat/completions, such as /v1?"
            ) from None
        if len(found.choices) != 1:
            raise InferenceError(f"{self._url} gave {len(found.choices)} choices, asked for was one")
        return found.choices[0]
