"""The stub engine: all sequences are sampled token by token in one step, between two turns of the event loop, so a
pause or a swap of weights never meets it in the middle of a step."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.chat.tokenizer import Tokenizer, load_tokenizer
from holdfast.errors import DataError, ReadError, is_storage_failure
from holdfast.inference.weights import ServerMetrics, read_label
from holdfast.protocol.inference import Choice, GenerateRequest, SampledSpan
from holdfast.protocol.rollouts import Logprobs, TokenIds
from tests.servers.stub_model import Cache, Floats, Model
from tests.servers.stub_weights import Read, Weights

# Sequences whose prompt and completion need as many blocks share a cache.
_LENGTH = 64


class StubDiedError(Exception):
    """The server stops while a request is in flight."""


@dataclass(eq=False)
class _Sequence:
    request: GenerateRequest
    index: int
    draws: Floats  # one number of [0, 1) for each token that may come
    cache: Cache
    slot: int
    done: asyncio.Future[Choice]
    tokens: list[int]
    decode: Callable[..., str]
    num_cached: int = 0  # how many of its tokens have keys and values by the weights that serve
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    spans: list[SampledSpan] = field(default_factory=list)

    @property
    def num_sampled(self) -> int:
        return len(self.tokens) - len(self.request.token_ids)

    def take(self, token: int, logprob: float, label: str) -> None:
        """Note a token that the weights called `label` have sampled; end if it is the last one."""
        start = self.num_sampled
        self.tokens.append(token)
        self.logprobs.append(logprob)
        version, digest = read_label(label)
        last = self.spans.pop() if self.spans and self.spans[-1].digest == digest else None
        if last is not None and last.version != version:
            self.spans.append(last)
            last = None
        self.spans.append(SampledSpan(version, start if last is None else last.start, start + 1, digest=digest))
        stop = self.request.stop
        text = self.decode(self.tokens[len(self.request.token_ids) :], skip_special_tokens=False) if stop else ""
        if token in self.request.stop_token_ids or any(one in text for one in stop):
            self.end("stop")
        elif self.num_sampled == self.request.max_tokens:
            self.end("length")

    def end(self, reason: str) -> None:
        """Answer with what there is."""
        if not self.done.done():
            choice = Choice(
                token_ids=TokenIds(self.tokens[len(self.request.token_ids) :]),
                logprobs=Logprobs(self.logprobs),
                finish_reason=reason,
                versions=self.spans,
                index=self.index,
                prompt_logprobs=self.prompt_logprobs if self.request.prompt_logprobs else None,
            )
            self.done.set_result(choice)


class StubSampler:
    """Samples with the weights that serve. `served`: those at the start, with their digest; None: it waits for the
    first. `most_rows`: sequences that are sampled at once."""

    died: type[Exception] = StubDiedError
    has_died = False

    def __init__(
        self, weights: Weights, served: tuple[dict[str, Floats], str] | None, metrics: ServerMetrics, *, max_len: int,
        most_rows: int,
    ) -> None:  # fmt: skip
        self.max_len = max_len
        self.vocab_size = weights.shape.vocab_size
        self.engine_core = self  # of which the server asks for the scheduler
        self._weights = weights
        self._served = served
        self._staged: Read | Callable[[], Read] | None = None
        self._model = None if served is None else Model(weights.shape, served[0])
        self._metrics = metrics
        self._most_rows = most_rows
        self._label = ""
        self._paused = False
        self._tokenizer: Tokenizer | None = None
        self._caches: dict[int, Cache] = {}
        self._sequences: list[_Sequence] = []
        self._wake = asyncio.Event()

    async def sample(self, request: GenerateRequest, index: int, seed: int) -> Choice:
        """Sample one choice; the numbers drawn for it depend on the seed alone."""
        length = -(-(len(request.token_ids) + request.max_tokens) // _LENGTH) * _LENGTH
        cache = self._caches.setdefault(length, Cache(self._weights.shape, length))
        draws = np.random.Generator(np.random.Philox(seed)).random(request.max_tokens)
        done: asyncio.Future[Choice] = asyncio.get_running_loop().create_future()
        tokens = list(request.token_ids)
        sequence = _Sequence(request, index, draws, cache, cache.take(), done, tokens, self._decode)
        self._sequences.append(sequence)
        self._wake.set()
        try:
            return await done
        finally:
            if sequence in self._sequences:
                self._sequences.remove(sequence)
            cache.give(sequence.slot)

    def _decode(self, token_ids: list[int], **options: bool) -> str:
        self._tokenizer = self._tokenizer or load_tokenizer(str(self._weights.model_dir))
        return self._tokenizer.decode(token_ids, **options)

    async def probe(self, *, generates: bool) -> str | None:
        if generates:
            await self.sample(GenerateRequest(token_ids=[0], seeds=[0], max_tokens=1, temperature=0.0), 0, 0)
        return None

    async def run(self) -> None:
        """Sample one token of every sequence, again and again."""
        while True:
            while self._paused or not self._sequences:
                self._wake.clear()
                await self._wake.wait()
            self._step()
            await asyncio.sleep(0)

    def close(self) -> None:
        for sequence in self._sequences:
            sequence.end("abort")

    # What `EngineWeights` asks of vLLM's client.

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return [await getattr(self, method)(*args)]

    async def loaded_digest(self) -> str | None:
        """Return the digest of the weights that were loaded at the start."""
        return self._served[1] if self._served else None

    async def stage_weights(self, location: str, version: int, transfer: str | None = None) -> dict[str, str | None]:
        """Read and check weights, or join a transfer, while those before serve."""
        self._staged = None
        try:
            if transfer is None:
                self._staged = await asyncio.to_thread(self._weights.read, Path(location), version)
            else:
                self._staged = await asyncio.to_thread(self._weights.join, transfer)
        except (DataError, ReadError, OSError) as error:
            is_unreadable = is_storage_failure(error)
            return {
                "refused": None if is_unreadable else str(error),
                "unreadable": str(error) if is_unreadable else None,
            }
        return {"refused": None, "unreadable": None}

    async def apply_weights(self) -> dict[str, str | None]:
        assert self._staged is not None and self._paused
        staged, self._staged = self._staged, None
        if callable(staged):
            self._model = None  # as half a model: nothing may sample with it
            try:
                staged = await asyncio.to_thread(staged)
            except Exception as error:  # noqa: BLE001 - told
                return {"digest": None, "torn": str(error)}
        self._served = staged
        self._model = Model(self._weights.shape, self._served[0])
        return {"digest": self._served[1], "torn": None}

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        """Sample nothing from here on; what was cached is of the weights that go."""
        assert mode == "keep"
        self._paused = True
        for sequence in self._sequences if clear_cache else ():
            sequence.num_cached = 0

    async def resume_generation(self) -> None:
        self._paused = False
        self._wake.set()

    async def update_weight_version(self, label: str) -> None:
        """Put this on every token from here on."""
        self._label = label

    def _step(self) -> None:
        chosen = [one for one in self._sequences if not one.done.done()][: self._most_rows]
        for cache in self._caches.values():
            if sequences := [one for one in chosen if one.cache is cache]:
                self._sample(cache, sequences)

    def _sample(self, cache: Cache, sequences: list[_Sequence]) -> None:
        """Sample a token of each sequence; what of it is in no cache yet goes there, once for equal prompts."""
        assert self._model is not None
        first: dict[tuple[int, ...], _Sequence] = {}
        for one in sequences:
            if one.num_cached == 0:
                first.setdefault(tuple(one.tokens), one)
        computed = [one for one in sequences if one.num_cached or first[tuple(one.tokens)] is one]
        rows = [(one, place) for one in computed for place in range(one.num_cached, len(one.tokens))]
        tokens, places = [one.tokens[place] for one, place in rows], [place for _, place in rows]
        slots = [one.slot for one, _ in rows]
        logits_RV = self._model.logits(cache, np.array(tokens), np.array(places), np.array(slots))
        ends = dict(zip(computed, np.cumsum([len(one.tokens) - one.num_cached for one in computed]), strict=True))
        behind = []
        for one in sequences:
            source = one if one in ends else first[tuple(one.tokens)]
            if source is not one:
                cache.copy(source.slot, one.slot, len(one.tokens))
            last = ends[source] - 1
            behind.append(last)
            if one.request.prompt_logprobs and not one.prompt_logprobs and one.num_cached == 0:
                num = len(one.request.token_ids)
                begin = last + 1 - len(one.tokens)
                logprobs = log_softmax(logits_RV[begin : begin + num - 1].astype(np.float64))
                one.prompt_logprobs = logprobs[np.arange(num - 1), one.tokens[1:num]].tolist()
        for one in sequences:
            one.num_cached = len(one.tokens)
        draws = np.array([one.draws[one.num_sampled] for one in sequences])
        sampled, logprobs = pick(logits_RV[behind], [one.request for one in sequences], draws)
        self._metrics.sampled(len(sequences))
        for one, token, logprob in zip(sequences, sampled.tolist(), logprobs.tolist(), strict=True):
            one.take(token, logprob, self._label)


def pick(logits_RV: Floats, requests: list[GenerateRequest], draws_R: Any) -> tuple[Any, Any]:
    """Return the token that each number of [0, 1) draws, and its log-probability in what was drawn from."""
    temperature_R1 = np.array([[one.temperature or 1.0] for one in requests], np.float32)
    logits_RV = logits_RV / temperature_R1
    is_greedy_R = np.array([one.temperature == 0 for one in requests])
    for row, one in enumerate(requests):
        if one.temperature and (one.top_p < 1 or one.top_k or one.min_p):
            logits_RV[row] = cut(logits_RV[row], one)
    logprobs_RV = log_softmax(logits_RV.astype(np.float64))
    sums_RV = np.exp(logprobs_RV).cumsum(axis=-1)
    drawn_R = (sums_RV <= draws_R[:, None] * sums_RV[:, -1:]).sum(axis=-1)
    tokens_R = np.where(is_greedy_R, logits_RV.argmax(axis=-1), np.minimum(drawn_R, logits_RV.shape[1] - 1))
    return tokens_R, logprobs_RV[np.arange(len(tokens_R)), tokens_R]


def cut(logits_V: Floats, request: GenerateRequest) -> Floats:
    """Return the logits of the tokens that `min_p`, then `top_k`, then `top_p` leave; the others are minus infinity."""
    gone = np.float32(-np.inf)
    if request.min_p:
        logits_V = np.where(logits_V < logits_V.max() + np.log(np.float32(request.min_p)), gone, logits_V)
    if 0 < request.top_k < len(logits_V):
        logits_V = np.where(logits_V < np.sort(logits_V)[-request.top_k], gone, logits_V)
    if request.top_p < 1:
        order_V = np.argsort(logits_V, kind="stable")
        probabilities_V = np.exp(log_softmax(logits_V[order_V]))
        is_tail_V = probabilities_V.cumsum() <= 1 - np.float32(request.top_p)
        is_tail_V[-1] = False
        logits_V = logits_V.copy()
        logits_V[order_V[is_tail_V]] = gone
    return logits_V


def log_softmax(logits: Any) -> Any:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
