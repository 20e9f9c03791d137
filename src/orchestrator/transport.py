"""HTTP to the inference servers: connections, deadlines, and what an error answer means."""

from __future__ import annotations

import asyncio
import itertools
import os
import ssl
from typing import TypeVar

import httpx
import msgspec

from orchestrator.protocol import OTHER_WEIGHTS, Refusal
from triad.arrays import decode_packed
from triad.config.orchestrator import ClientConfig, ServersConfig
from triad.errors import ConfigError, InferenceError
from triad.owner import OWNER_HEADER

# A probe of a busy engine may take long; vLLM's own deadline for one is 20 s.
PROBE_TIMEOUT_S = 30.0
_CONNECT_TIMEOUT_S = 5.0
# uvicorn drops connections after 5 s of silence; leaving first avoids writing into a closed one.
_KEEPALIVE_S = 4.0
# httpx polls every connection of a pool at every request, so many small pools cost less than one large.
_POOL_CONNECTIONS = 16
_UNAVAILABLE = (502, 503, 504)

_T = TypeVar("_T")


class Unavailable(Exception):
    """The server is not there, or not ready, or serves other weights; asking again may help."""


class Transport:
    """Sends requests to all servers of one section of the configuration.

    Attributes:
        run_id: of the run that owns the servers, told with every request; None: none does.

    Args:
        config: where the servers are.
        key: of `config` in the orchestrator's configuration, for errors.
    """

    def __init__(self, config: ServersConfig, *, key: str) -> None:
        self.run_id: str | None = None
        self._config = config
        self._key = key
        token = os.environ.get(config.admin_token_env) if isinstance(config, ClientConfig) else None
        self._admin = {"Authorization": f"Bearer {token}"} if token else {}
        # Making a TLS context reads every root certificate: tens of milliseconds, for nothing on plain http.
        verify = httpx.create_ssl_context() if any(url.startswith("https:") for url in config.urls) else False
        self._pools = [_new_pool(verify) for _ in range(max(1, config.max_concurrency // _POOL_CONNECTIONS))]
        self._next_pool = itertools.cycle(self._pools)

    async def close(self) -> None:
        """Close all connections."""
        for pool in self._pools:
            await pool.aclose()

    async def get(self, url: str, route: str) -> bytes:
        """Return the body of a good answer to a GET; see `_request`."""
        return await self._request("GET", url, route)

    async def post(self, url: str, route: str, body: bytes) -> bytes:
        """Return the body of a good answer to a POST, within `timeout_s` of the configuration; see `_request`."""
        return await self._request("POST", url, route, body=body, timeout_s=self._config.timeout_s)

    async def post_as_admin(self, url: str, route: str, body: bytes, *, is_probe: bool = False) -> bytes:
        """Return the body of a good answer to a POST with the admin token, as fast as a probe or as `post`."""
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
    ) -> bytes:
        """Return the body of a good answer.

        Args:
            timeout_s: None: that of a probe, which may be asked again.

        Raises:
            Unavailable: there was no connection, it broke, or the server says that it is not ready, or that it
                serves other weights; or it left a probe without an answer.
            InferenceError: the server refused, failed, or took longer than `timeout_s`.
        """
        if self.run_id is not None:
            headers = {OWNER_HEADER: self.run_id, **(headers or {})}
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S if timeout_s is None else timeout_s):
                answer = await next(self._next_pool).request(method, url + route, content=body, headers=headers)
        except TimeoutError:
            reason = f"the inference server gave no answer to {method} {url}{route} within"
            if timeout_s is None:
                raise Unavailable(f"{reason} {PROBE_TIMEOUT_S:g} s") from None
            raise InferenceError(f"{reason} {timeout_s:g} s ({self._key}.timeout_s)") from None
        except httpx.InvalidURL as error:
            raise ConfigError(f"{self._key}.urls: '{url}' is not a URL: {error}") from None
        except httpx.UnsupportedProtocol:
            raise ConfigError(f"{self._key}.urls: '{url}' must begin with http:// or https://") from None
        except httpx.TransportError as error:
            raise Unavailable(f"{method} {route}: {type(error).__name__} {error}".rstrip()) from None
        if answer.is_success:
            return answer.content
        reason = f"{method} {url}{route} was answered {answer.status_code}: {_reason(answer)}"
        if answer.status_code in _UNAVAILABLE or _code(answer) == OTHER_WEIGHTS:
            raise Unavailable(reason)
        if answer.status_code in (401, 403) and isinstance(self._config, ClientConfig):
            reason += f". Set {self._config.admin_token_env} to the server's admin token."
        raise InferenceError(reason)


def decode(data: bytes, kind: type[_T], *, url: str) -> _T:
    """Return the answer of the server at `url` as a `kind`.

    Raises:
        InferenceError: it is none.
    """
    try:
        return msgspec.json.decode(data, type=kind, dec_hook=decode_packed)
    except msgspec.DecodeError as error:
        raise InferenceError(
            f"{url} gave an answer that is no {kind.__name__}: {error}. Is it triad's inference server?"
        ) from None


def _new_pool(verify: ssl.SSLContext | bool) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
        limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEEPALIVE_S),
        headers={"Content-Type": "application/json"},
        verify=verify,
        # Proxies of the environment are for the internet, not for the engines of a run.
        trust_env=False,
    )


def _reason(answer: httpx.Response) -> str:
    """The reason in an error answer, whichever of the usual fields holds it."""
    try:
        body = msgspec.json.decode(answer.content)
    except msgspec.DecodeError:
        return answer.text[:500] or "no reason given"
    if isinstance(body, dict):
        return str(body.get("error") or body.get("detail") or body)
    return str(body)


def _code(answer: httpx.Response) -> str:
    """The code of an error answer of ours, else nothing."""
    try:
        return msgspec.json.decode(answer.content, type=Refusal).code
    except msgspec.DecodeError:
        return ""
