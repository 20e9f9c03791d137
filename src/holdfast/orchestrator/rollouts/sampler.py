"""Between sessions and engines: gathers equal prompts into one request, and keeps what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from holdfast.orchestrator.engines.client import InferenceClient
from holdfast.orchestrator.engines.routing import Affinity
from holdfast.orchestrator.rollouts.generation_log import GenerationLog
from holdfast.orchestrator.task_group import FirstFailure
from holdfast.shared.process.heartbeat import moved
from holdfast.shared.wire.inference_api import Completion, GenerateRequest
from holdfast.shared.wire.sampling import Sampling

# Whose sessions they are, distribution, most tokens, prompt: those that agree on these can share a request.
_Key = tuple[Affinity, Sampling, int, tuple[int, ...]]

_T = TypeVar("_T")


class Sampler:
    """Samples turns for the sessions of one batch, all by the same weights, those with `weights_digest`.

    Sessions of a group begin with the same prompt. Those that ask in the same turn of the event loop
    become one request with one seed each, which the engine prefills once. Which sessions share a
    request changes nothing in what is sampled, since every sample has its own seed.

    A failure ends the batch, whatever the environment that it was raised in makes of it: see `guard`.
    """

    def __init__(
        self,
        client: InferenceClient,
        log: GenerationLog,
        *,
        weights_digest: str,
        stop_token_ids: list[int],
    ) -> None:
        self._client = client
        self._log = log
        self._weights_digest = weights_digest
        self._stop_token_ids = stop_token_ids
        self._gathering: dict[_Key, dict[int, asyncio.Future[Completion]]] = {}
        self._requests: set[asyncio.Task[None]] = set()
        self._failure = FirstFailure()
        self.num_reused = 0

    def check(self) -> None:
        """Raise what engine or log have failed with, if they have."""
        self._failure.check()

    async def guard(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Return the result of `work`, which samples here; cancelled as soon as engine or log have failed.

        Raises:
            InferenceError, RunDirError: what they failed with; or whatever `work` raises.
        """
        return await self._failure.guard(work)

    async def sample(
        self, token_ids: list[int], *, sampling: Sampling, max_tokens: int, seed: int, affinity: Affinity
    ) -> Completion:
        """Return one continuation of `token_ids`, of at most `max_tokens`, from the distribution `sampling`.

        Raises:
            InferenceError: an engine refused, all failed, or they serve other weights again and again.
            RunDirError: what it sampled cannot be kept.
        """
        if self._failure:
            await asyncio.sleep(0)  # an environment that asks again and again shall block nobody
            self.check()
        found = self._log.find(token_ids, sampling=sampling, max_tokens=max_tokens, seed=seed)
        if found is not None:
            self.num_reused += 1
            return found
        loop = asyncio.get_running_loop()
        key = (affinity, sampling, max_tokens, tuple(token_ids))
        waiting = self._gathering.get(key)
        if waiting is None:
            waiting = self._gathering[key] = {}
            # At the end of this turn of the loop: who asks until then shares the request.
            loop.call_soon(self._send, key)
        waiting[seed] = loop.create_future()
        return await waiting[seed]

    async def close(self) -> None:
        """Cancel what is still in flight, and close the log of generations."""
        for request in self._requests:
            request.cancel()
        # Before the log closes: what is in flight appends to it.
        await asyncio.gather(*self._requests, return_exceptions=True)
        self._log.close()

    def _send(self, key: _Key) -> None:
        waiting = self._gathering.pop(key)
        request = asyncio.create_task(self._request(key, waiting))
        # The loop itself holds tasks weakly.
        self._requests.add(request)
        request.add_done_callback(self._requests.discard)

    async def _request(self, key: _Key, waiting: dict[int, asyncio.Future[Completion]]) -> None:
        affinity, sampling, max_tokens, prompt = key
        token_ids, seeds = list(prompt), list(waiting)
        try:
            request = GenerateRequest(
                token_ids=token_ids,
                seeds=seeds,
                max_tokens=max_tokens,
                stop_token_ids=self._stop_token_ids,
                weights_digest=self._weights_digest,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
            )
            choices = await self._client.generate(request, affinity=affinity)
            moved()
            # Kept before any session sees it: what an environment acted on is found again after a kill.
            self._log.append(token_ids, sampling=sampling, max_tokens=max_tokens, seeds=seeds, completions=choices)
        except BaseException as error:
            if isinstance(error, Exception):
                self._failure.set(error)
            for future in waiting.values():
                if future.done():
                    continue
                if isinstance(error, asyncio.CancelledError):
                    future.cancel()
                else:
                    future.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        for future, choice in zip(waiting.values(), choices, strict=True):
            if not future.done():
                future.set_result(choice)
