"""One chat completion of a server that speaks OpenAI's chat protocol: `POST <url>/chat/completions`."""

from __future__ import annotations

import asyncio

import httpx
import msgspec

from holdfast.orchestrator.engines.http import Unavailable, retry_after_s
from holdfast.shared.printable import printable
from holdfast.shared.wire.chat_reply import ChatCall, ChatReply

_MOST_BYTES = 1 << 24
"""Of an answer: what is longer is no chat completion that anybody asked for."""


class ChatRefused(Exception):
    """A server refuses a request; asking again does not help."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason)
        self.status = status


class NoChatCompletion(Exception):
    """A server answered with something else."""


class _Call(msgspec.Struct):
    function: ChatCall


class _Message(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _ChatCompletion(msgspec.Struct):
    choices: list[_Choice]


class ChatClient:
    """Asks any number of servers, without a limit of its own to how many requests at once."""

    def __init__(self) -> None:
        # The time is that of a whole answer, of which httpx bounds each piece only.
        self._client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def ask(self, url: str, body: bytes, *, key: str | None, timeout_s: float) -> ChatReply:
        """Return what the server says to a request.

        Args:
            url: with `/chat/completions` at its end.
            key: sent with it, and not repeated in any message; None: none is.
            timeout_s: within which the whole answer must come.

        Raises:
            Unavailable: the server is busy, fails or cannot be reached: asking again may help.
            ChatRefused: it refuses.
            NoChatCompletion: it was reached, and what it sent cannot be read.
        """
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        what = f"POST {url}"
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._client.stream("POST", url, content=body, headers=headers) as answer,
            ):
                content = await _read(answer, what)
        except TimeoutError:
            raise Unavailable(f"{what} had no answer within {timeout_s:g} s (timeout_s)") from None
        except httpx.TransportError as error:
            raise Unavailable(f"{what}: {type(error).__name__} {error}".rstrip()) from None
        except httpx.RequestError as error:
            raise NoChatCompletion(f"{what}: {type(error).__name__} {error}".rstrip()) from None
        if answer.is_success:
            return _decode(content, what)
        told = content.decode(errors="backslashreplace")
        told = printable(told.replace(key, "...") if key else told)[:500]  # some repeat the key
        reason = f"{what} was answered {answer.status_code}: {told}"
        if answer.status_code in (408, 429) or answer.status_code >= 500:
            raise Unavailable(reason, retry_after_s=retry_after_s(answer.headers.get("retry-after", "")))
        raise ChatRefused(reason, answer.status_code)


async def _read(answer: httpx.Response, what: str) -> bytes:
    content = bytearray()
    async for piece in answer.aiter_bytes():
        content += piece
        if len(content) > _MOST_BYTES:
            raise NoChatCompletion(f"{what} was answered with more than {_MOST_BYTES} bytes; the rest is not read")
    return bytes(content)


def _decode(content: bytes, what: str) -> ChatReply:
    try:
        found = msgspec.json.decode(content, type=_ChatCompletion)
    except (ValueError, RecursionError) as error:
        raise NoChatCompletion(f"{what} was answered with what is no chat completion: {error}") from None
    if len(found.choices) != 1:
        raise NoChatCompletion(f"{what} was answered with {len(found.choices)} choices, asked for was one")
    [choice] = found.choices
    calls = tuple(call.function for call in choice.message.tool_calls or ())
    return ChatReply(choice.message.content or "", choice.finish_reason or "stop", calls)
