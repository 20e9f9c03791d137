"""One chat completion of a server of others: what is an answer, what is worth another try, and what is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
from fastapi import Response
from fastapi.responses import JSONResponse

from holdfast.orchestrator.client.http import Unavailable
from holdfast.orchestrator.judge_client import ChatClient, ChatRefused, NoChatCompletion
from holdfast.protocol.inference import ChatCall, ChatReply
from tests.servers.judge import Body, FakeJudge, completion, judge_serving

KEY = "sk-of-the-test"


@pytest.fixture(scope="module")
def server() -> Iterator[FakeJudge]:
    with judge_serving(FakeJudge()) as server:
        yield server


def ask(server: FakeJudge, answer: Response, *, timeout_s: float = 60.0) -> ChatReply:
    async def respond(_: Body) -> Response:
        return answer

    async def once() -> ChatReply:
        client = ChatClient()
        try:
            body = json.dumps({"messages": []}).encode()
            return await client.ask(f"{server.url}/chat/completions", body, key=KEY, timeout_s=timeout_s)
        finally:
            await client.close()

    server.answer = respond
    return asyncio.run(once())


def test_text_calls_and_ending_of_an_answer_are_taken(server: FakeJudge) -> None:
    assert ask(server, completion("yes", "length")) == ChatReply("yes", "length")
    calls = [{"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
    choice = {"message": {"content": None, "tool_calls": calls}}
    assert ask(server, JSONResponse({"choices": [choice]})) == ChatReply("", "stop", (ChatCall("add", '{"a": 1}'),))
    assert server.headers[-1]["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        (JSONResponse({"error": f"wait, {KEY}"}, 429, {"Retry-After": "7"}), Unavailable, "429: .*wait, \\.\\.\\."),
        (Response("down", 503), Unavailable, "answered 503: down"),
        (Response("late", 408), Unavailable, "answered 408"),
        (JSONResponse({"error": f"no {KEY}"}, 401), ChatRefused, "answered 401: .*no \\.\\.\\."),
        (Response(status_code=302, headers={"location": "http://x"}), ChatRefused, "answered 302"),
        (Response("x" * 9999, 400), ChatRefused, "answered 400: x{500}$"),
        (Response("hello"), NoChatCompletion, "what is no chat completion"),
        (Response("[" * 100_000), NoChatCompletion, "what is no chat completion"),
        (JSONResponse({"choices": []}), NoChatCompletion, "with 0 choices, asked for was one"),
        (Response(b"x" * (17 << 20)), NoChatCompletion, "more than 16777216 bytes; the rest is not read"),
        (Response(b"no gzip", headers={"content-encoding": "gzip"}), NoChatCompletion, "DecodingError"),
    ],
)  # fmt: skip
def test_what_is_no_answer_is_told_and_never_the_key(
    server: FakeJudge, answer: Response, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said) as caught:
        ask(server, answer)
    assert KEY not in str(caught.value)
    if isinstance(caught.value, Unavailable):
        assert caught.value.retry_after_s == (7.0 if answer.status_code == 429 else 0.0)


def test_an_answer_that_does_not_come_in_time_may_come_the_next_time(server: FakeJudge) -> None:
    class Never(Response):
        async def __call__(self, scope: object, receive: object, send: object) -> None:
            await asyncio.Event().wait()

    with pytest.raises(Unavailable, match="had no answer within 0.2 s"):
        ask(server, Never(), timeout_s=0.2)
    server.url, url = "http://127.0.0.1:9/v1", server.url
    with pytest.raises(Unavailable, match="ConnectError"):
        ask(server, completion("nobody hears it"))
    server.url = url
