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

import msgspec
import xxhash

from holdfast.orchestrator.endpoints.chat import ChatClient, ChatRefused, NoChatCompletion
from holdfast.orchestrator.endpoints.reply_log import ReplyLog
from holdfast.orchestrator.engines.http import Unavailable
from holdfast.orchestrator.engines.retry import RetryPolicy
from holdfast.orchestrator.engines.routing import Affinity
from holdfast.orchestrator.rollouts.transcript import ids_of_answer, messages_of, tools_of
from holdfast.orchestrator.task_group import FirstFailure
from holdfast.shared.config.evaluation import EndpointConfig
from holdfast.shared.errors import InferenceError, RunDirError
from holdfast.shared.wire.arrays import Logprobs, TokenIds
from holdfast.shared.wire.chat_reply import ChatReply
from holdfast.shared.wire.inference_api import Completion
from holdfast.shared.wire.keys import read_key
from holdfast.shared.wire.sampling import Sampling

_log = logging.getLogger("orchestrator")

LOG_NAME = "answers.log"
_T = TypeVar("_T")


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
        self._key = read_key(config.api_key_env)
        self._client = ChatClient()
        self._failure = FirstFailure()
        self._log = ReplyLog(directory / LOG_NAME, begins=True)

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
        await self._client.close()
        self._log.close(wait=True)

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
        reply = self._log.find(key)
        if reply is None:
            reply = await self._ask(body)
            if "tools" not in request:  # nobody answers a call then
                reply = msgspec.structs.replace(reply, calls=())
            self._log.append(key, reply)
        ids = ids_of_answer(reply.text, reply.calls)
        return Completion(TokenIds(ids), Logprobs([0.0] * len(ids)), reply.finish_reason, [])

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

    async def _ask(self, body: bytes) -> ChatReply:
        """Return what the server says, asked again while it is busy, fails or cannot be reached.

        Raises:
            InferenceError: it does so for too long, refuses, or its answer is no chat completion.
        """
        attempts = RetryPolicy(self._config.retry_for_s, key="endpoint.retry_for_s")
        while True:
            try:
                return await self._client.ask(self._url, body, key=self._key, timeout_s=self._config.timeout_s)
            except Unavailable as failure:
                _log.warning("%s", failure)
                attempts.count(failure, url=self._url)
                await attempts.pause(failure)
            except ChatRefused as refusal:
                hint = f". Set {self._config.api_key_env} to its key." if refusal.status in (401, 403) else ""
                raise InferenceError(f"{refusal}{hint}") from None
            except NoChatCompletion as error:
                raise InferenceError(
                    f"{error}. Does --url end with what comes before /chat/completions, such as /v1?"
                ) from None
