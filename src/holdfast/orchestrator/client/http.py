"""HTTP to the inference servers: connections, deadlines, the meaning of error answers, and checks of good answers."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
import time
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
import msgspec

from holdfast.config.orchestrator import ClientConfig, ServersConfig
from holdfast.errors import STORAGE_FAILED, ConfigError, InferenceError, printable
from holdfast.process.heartbeat import moved
from holdfast.protocol import inference
from holdfast.protocol.rollouts import decode_packed, fault_of_ids, fault_of_logprobs, vocab_size_in

if TYPE_CHECKING:
    from aiohttp.client_proto import ResponseHandler
    from aiohttp.client_reqrep import ClientRequest
    from aiohttp.tracing import Trace

_log = logging.getLogger("orchestrator")

# A probe of a busy engine may take long; vLLM's own deadline for one is 20 s.
PROBE_TIMEOUT_S = 30.0
# For TCP and TLS. The kernel gives up earlier, see `_OPTIONS`: a busy event loop may miss shorter deadlines.
_CONNECT_TIMEOUT_S = 60.0
# Thousands of sessions may ask at once, and the accept queue of a slow server is short (2048 for ours).
_OPENED_AT_ONCE = 64
# Below what servers allow (ours 120 s, uvicorn by default 5 s): the client must close first.
_KEEPALIVE_S = 4.0
# A machine that is cut off does not close its connections. The kernel probes it after 30 s of silence and gives up
# after 60 more, also if unacknowledged data is waiting. A connection is tried three times, within 7 s.
_OPTIONS = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 90_000),
    (socket.IPPROTO_TCP, socket.TCP_SYNCNT, 2),
]
_BUSY = (429, 502, 503, 504)
# A failing server (500) is asked again for a shorter time than a busy one.
_RETRY_FAILING_S = 120.0
# Size of an answer that is not a generation.
_MOST_BYTES = 1 << 20

_T = TypeVar("_T")


class Unavailable(Exception):
    """The server is not there, or not ready, or serves other weights; asking again may help.

    Args:
        retry_after_s: how long to wait before the next request, as the server asks.
        retry_for_s: for how long it makes sense to ask again.
    """

    def __init__(self, reason: str, *, retry_after_s: float = 0.0, retry_for_s: float = math.inf) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s
        self.retry_for_s = retry_for_s


class HttpTransport:
    """Sends requests to all servers of the section `key`, with the `run_id` of the run that owns the servers."""

    def __init__(self, config: ServersConfig, *, key: str) -> None:
        self.run_id: str | None = None
        self._config = config
        self._key = key
        token = inference.read_admin_token(config.admin_token_env) if isinstance(config, ClientConfig) else None
        self._admin = {"Authorization": f"Bearer {token}"} if token else {}
        self._opened: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()

    @property
    def _session(self) -> aiohttp.ClientSession:
        # Not in the constructor: a session belongs to the running event loop.
        if self._opened is None:
            self._opened = _new_session(self._config.urls)
        return self._opened

    async def get(self, url: str, route: str) -> bytes:
        """Return the body of a good answer to a GET; see `_request`."""
        return await self._request("GET", url, route)

    async def post(self, url: str, route: str, body: bytes, *, most_bytes: int = _MOST_BYTES) -> bytes:
        """Return the body of a good answer to a POST; see `_request`."""
        timeout_s = self._config.timeout_s
        return await self._request("POST", url, route, body=body, timeout_s=timeout_s, most_bytes=most_bytes)

    async def post_as_admin(self, url: str, route: str, body: bytes, *, is_probe: bool = False) -> bytes:
        """Return the body of a good answer to a POST with the admin token; `is_probe`: with the deadline of a probe."""
        timeout_s = None if is_probe else self._config.timeout_s
        return await self._request("POST", url, route, body=body, timeout_s=timeout_s, headers=self._admin)

    async def _request(
        self,
        method: str,
        url: str,
        route: str,
        *,
        timeout_s: float | None = None,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        most_bytes: int = _MOST_BYTES,
    ) -> bytes:
        """Return the body of a good answer of at most `most_bytes`; `timeout_s` None: the deadline of a probe. Raise
        Unavailable if there was no connection, or it broke; if the server failed, is not ready, is busy, serves other
        weights, did not answer a probe in time, or is not well after `timeout_s`. Raise InferenceError if the server
        refused, or its answer is too long; with the exit code of a failed storage if the server could not read the
        weights."""
        if self.run_id is not None:
            headers = {inference.OWNER_HEADER: self.run_id, **(headers or {})}
        try:
            asking = self._ask(method, url + route, most_bytes, data=body, headers=headers)
            if timeout_s is None:
                answer, content = await asyncio.wait_for(asking, PROBE_TIMEOUT_S)
            else:
                answer, content = await self._await_while_healthy(asking, f"{method} {url}{route}", url, timeout_s)
        except aiohttp.ClientError as error:
            raise Unavailable(f"{method} {route}: {type(error).__name__} {error}".rstrip()) from None
        except TimeoutError:
            raise Unavailable(
                f"the inference server gave no answer to {method} {url}{route} within {PROBE_TIMEOUT_S:g} s"
            ) from None
        if 200 <= answer.status < 300:
            return content
        reason = f"{method} {url}{route} was answered {answer.status}: {printable(_reason(content))}"
        pause_s = retry_after_s(answer.headers.get("retry-after", ""))
        if answer.status in _BUSY:
            raise Unavailable(reason, retry_after_s=pause_s)
        if answer.status == 500:
            raise Unavailable(reason, retry_after_s=pause_s, retry_for_s=_RETRY_FAILING_S)
        if _code(content) == inference.OTHER_WEIGHTS:
            raise Unavailable(reason, retry_for_s=0.0)
        if answer.status in (401, 403) and isinstance(self._config, ClientConfig):
            reason += f". Set {self._config.admin_token_env} to the server's admin token."
        is_unreadable = _code(content) == inference.UNREADABLE
        raise InferenceError(reason, exit_code=STORAGE_FAILED if is_unreadable else None)  # a run waits for its storage

    async def _ask(
        self, method: str, url: str, most_bytes: int, **options: Any
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        async with self._session.request(method, url, allow_redirects=False, **options) as answer:
            return answer, await _read(answer, most_bytes, what=f"{method} {url}")

    async def _await_while_healthy(
        self, asking: Coroutine[None, None, tuple[aiohttp.ClientResponse, bytes]], what: str, url: str, timeout_s: float
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """Return the answer, however long it takes, as long as the server is healthy at each check (`timeout_s`)."""
        task = asyncio.ensure_future(asking)
        waited_s = 0.0
        try:
            # asyncio.wait, not wait_for: that would cancel the request at each look.
            while not (await asyncio.wait({task}, timeout=timeout_s))[0]:
                waited_s += timeout_s
                try:
                    await self.get(url, inference.HEALTH_ROUTE)
                except (Unavailable, InferenceError) as error:
                    raise Unavailable(
                        f"the inference server gave no answer to {what} within {waited_s:g} s ({self._key}.timeout_s), "
                        f"and is not well: {error}"
                    ) from None
                _log.warning("%s takes longer than %g s; the server is well: waiting on", what, waited_s)
                moved()  # progress for processes that wait for this process
            return task.result()
        finally:
            task.cancel()  # asyncio.wait leaves its tasks running


def decode(data: bytes, kind: type[_T], *, url: str) -> _T:
    """Return the answer of the server at `url` as a `kind`. Raises InferenceError if it is not one."""
    try:
        return msgspec.json.decode(data, type=kind, dec_hook=decode_packed)
    except (ValueError, RecursionError) as error:  # msgspec and broken text raise ValueErrors
        raise InferenceError(
            f"{url} gave an answer that is not a {kind.__name__}: {error}. Is it holdfast's inference server?"
        ) from None


class _Connector(aiohttp.TCPConnector):
    """Opens at most `_OPENED_AT_ONCE` connections to one server at once."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # One per server: a server that accepts no connections must not delay others.
        self._openings: defaultdict[object, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(_OPENED_AT_ONCE))

    async def _create_connection(
        self, req: ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        async with self._openings[req.connection_key]:
            return await super()._create_connection(req, traces, timeout)


def _new_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    created = socket.socket(family, kind, protocol)
    for option in _OPTIONS:
        created.setsockopt(*option)
    return created


def _new_session(urls: Sequence[str]) -> aiohttp.ClientSession:
    # Only for https: a TLS context reads every root certificate, which takes tens of milliseconds.
    verify = ssl.create_default_context() if any(url.startswith("https:") for url in urls) else False
    return aiohttp.ClientSession(
        connector=_Connector(ssl=verify, limit=0, keepalive_timeout=_KEEPALIVE_S, socket_factory=_new_socket),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
        # No compression: `most_bytes` must bound the memory.
        headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,  # no proxies
    )


async def _read(answer: aiohttp.ClientResponse, most_bytes: int, *, what: str) -> bytes:
    if (encoding := answer.headers.get("content-encoding", "identity")) != "identity":
        raise InferenceError(f"{what} was answered with the content encoding {encoding!r:.40}, which was not asked for")
    content = bytearray()
    async for piece in answer.content.iter_any():
        content += piece
        if len(content) > most_bytes:
            raise InferenceError(
                f"{what} was answered with more than {most_bytes} bytes, the most that a right answer can have; the "
                "rest is not read. Is it holdfast's inference server?"
            )
    return bytes(content)


def _reason(content: bytes) -> str:
    try:
        body = msgspec.json.decode(content)
    except (ValueError, RecursionError):
        return content.decode(errors="backslashreplace") or "no reason given"
    if isinstance(body, dict):
        return str(body.get("error") or body.get("detail") or body)
    return str(body)


def _code(content: bytes) -> str:
    try:
        return msgspec.json.decode(content, type=inference.ErrorBody).code
    except (ValueError, RecursionError):
        return ""


def retry_after_s(value: str) -> float:
    """Return the seconds of a `Retry-After` header (seconds or a date); 0 if empty."""
    if value.isascii() and value.isdecimal():
        return float(value[:9])  # at most 30 years
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return 0.0


# No token this unlikely is ever sampled: the smallest positive float32 is exp(-103.3).
_LOWEST_SAMPLED_LOGPROB = -1000.0
_FINISH_REASONS = ("stop", "length")


def load_vocab_size(name: str) -> int:
    """Return the vocabulary size of a model in a local directory or on the hub.

    Raises ConfigError if the model does not exist, DataError if its config.json has no size."""
    path = Path(name) / "config.json"
    if not Path(name).is_dir():
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HFValidationError

        try:
            path = Path(hf_hub_download(name, "config.json"))
        except (HFValidationError, OSError) as error:
            raise ConfigError(f"model.name: '{name}' is neither a directory nor a model on the hub: {error}") from None
    return vocab_size_in(path)


def check_choices(
    response: inference.GenerateResponse, request: inference.GenerateRequest, *, url: str, vocab_size: int | None
) -> list[inference.Choice]:
    """Return the choices of an answer in the order of the seeds, after checks that a policy can have sampled them.

    Raises InferenceError with field, value and what is allowed; Unavailable if the server aborted the request."""
    choices = sorted(response.choices, key=lambda choice: choice.index)
    if [choice.index for choice in choices] != list(range(len(request.seeds))):
        found = str([choice.index for choice in choices])
        raise InferenceError(f"{url} answered {len(request.seeds)} seeds with the choices {found:.200}")
    for choice in choices:
        if choice.finish_reason == "abort":
            raise Unavailable("the server aborted a generation request")
        problem = problem_of(
            choice,
            max_tokens=request.max_tokens,
            stop_token_ids=request.stop_token_ids,
            has_stop_texts=bool(request.stop),
            vocab_size=vocab_size,
        ) or fault_of_logprobs("prompt_logprobs", choice.prompt_logprobs or [])
        if problem is not None:
            raise InferenceError(
                f"{url} gave an answer that no engine can have sampled: {problem}. Nothing of it is kept. Is this the "
                "inference server of this version of holdfast, and do its model and memory hold?"
            )
    newest = {span.version for choice in choices for span in choice.versions}
    if newest and response.version != max(newest):
        raise InferenceError(
            f"{url} says that version {response.version} answered, and its choices are of version {max(newest)}"
        )
    return choices


def problem_of(
    completion: inference.Completion,
    *,
    max_tokens: int,
    stop_token_ids: Sequence[int],
    has_stop_texts: bool = False,
    vocab_size: int | None,
) -> str | None:
    """Return why no engine can have sampled `completion`, or None."""
    count, reason = len(completion.token_ids), completion.finish_reason
    if not (1 <= count <= max_tokens and len(completion.logprobs) == count):
        return (
            f"it has {count} token ids with {len(completion.logprobs)} logprobs; expected equally many, from 1 to "
            f"max_tokens = {max_tokens}"
        )
    if problem := fault_of_ids(completion.token_ids, vocab_size) or fault_of_logprobs(
        "logprobs", completion.logprobs, least=_LOWEST_SAMPLED_LOGPROB
    ):
        return problem
    covered = 0
    for span in completion.versions:
        if not covered <= span.start < span.end <= count or span.version < 0:
            return (
                f"versions holds {{version: {span.version}, start: {span.start}, end: {span.end}}} for {count} tokens; "
                "allowed are versions from 0, and spans inside and in order"
            )
        covered = span.end
    if sum(span.end - span.start for span in completion.versions) != count:
        return f"versions does not name the policy version of each of the {count} sampled tokens"
    if reason not in _FINISH_REASONS:
        return f"finish_reason is {reason!r:.80}, allowed are {' and '.join(_FINISH_REASONS)}"
    stops = [place for place, token_id in enumerate(completion.token_ids) if token_id in stop_token_ids]
    if reason == "stop" and stops != [count - 1] and (stops or not has_stop_texts):
        return f"finish_reason is 'stop' and its stop tokens are at {stops}, allowed is {count - 1} alone, the last"
    if reason == "length" and (stops or count != max_tokens):
        return f"finish_reason is 'length' after {count} tokens of at most {max_tokens}, with stop tokens at {stops}"
    return None
