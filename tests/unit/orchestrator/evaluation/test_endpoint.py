"""Endpoints that speak OpenAI's protocol: what they are asked, how they fail, and that nothing is asked twice."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from holdfast import Environment, HarnessEnvironment, Message, Score, Session, Task, TaskSeed
from holdfast.orchestrator.environments import harness
from holdfast.orchestrator.environments.tool_calls import ToolCall
from holdfast.orchestrator.evaluation import main
from holdfast.orchestrator.evaluation.endpoint import LOG_NAME
from holdfast.orchestrator.evaluation.summary import Summary, summary_in
from holdfast.orchestrator.rollouts.transcript import Transcript, ids_of_answer, messages_of, tools_of
from holdfast.shared.config.evaluation import EvaluateConfig
from holdfast.shared.errors import DataError, EnvironmentFailure, InferenceError, RunDirError
from holdfast.shared.wire.chat_reply import ChatCall
from tests.runs.harness_environments import ask
from tests.servers.quick_server import QuickServer


class Echo(Environment):
    """Two turns: the word, then the word again with an umlaut; solved by who says it back both times."""

    as_text = False

    def make_task(self, seed: TaskSeed) -> Task:
        word = "".join(seed.random().choices("abc", k=3))
        return Task(prompt=word if Echo.as_text else [Message("user", word)], answer=word)

    async def run(self, session: Session, task: Task) -> None:
        await session.sample()
        session.append_messages([Message("user", f"{task.answer}ü")])
        await session.sample()

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        right = [task.answer, f"{task.answer}ü"]
        return [Score(float(session.texts == right), {"exact": float(session.texts == right)}) for session in sessions]


@dataclass
class Endpoint:
    """Says back what the user said last. `intercept` may answer in its place, by the number of the request."""

    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    intercept: Callable[[int], Response | None] = lambda number: None

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/v1/chat/completions")
        async def complete(request: Request) -> Response:
            self.keys.append(request.headers.get("authorization"))
            if (answer := self.intercept(len(self.keys))) is not None:
                return answer
            body = await request.json()
            self.requests.append(body)
            said = {"role": "assistant", "content": body["messages"][-1]["content"]}
            return JSONResponse({"choices": [{"index": 0, "message": said, "finish_reason": "stop"}]})

        return app


@contextmanager
def answering(endpoint: Endpoint) -> Iterator[None]:
    listener = socket.create_server(("127.0.0.1", 0))
    endpoint.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    server = QuickServer(endpoint.app(), listener)
    try:
        yield
    finally:
        server.end()


def evaluated(directory: Path, endpoint: Endpoint, **changes: Any) -> Summary:
    values: dict[str, Any] = {
        "output_dir": directory,
        "model": {"name": "echo"},
        "url": endpoint.url,
        "environments": [{"id": f"{__name__}:Echo", "name": "echo"}],
        "num_tasks": 3,
        "samples_per_task": 2,
        "endpoint": {"retry_for_s": 0.2, "api_key_env": "KEY_OF_THE_TEST"},
    }
    asyncio.run(main.run(EvaluateConfig.model_validate(values | changes)))
    return summary_in(directory)


def test_an_answer_that_cannot_be_unpacked_is_the_servers_fault(tmp_path: Path) -> None:
    endpoint = Endpoint()
    endpoint.intercept = lambda number: Response(b"no gzip", headers={"content-encoding": "gzip"})
    with answering(endpoint), pytest.raises(InferenceError, match=r"chat/completions: DecodingError"):
        evaluated(tmp_path, endpoint)


def test_an_endpoint_is_asked_for_every_turn_with_the_chat_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_OF_THE_TEST", "secret")
    endpoint = Endpoint()
    with answering(endpoint):
        summary = evaluated(tmp_path, endpoint, sampling={"temperature": 0.5, "top_k": 7, "max_tokens": 9})
    found = summary.environments["echo"]
    assert {name: one.value for name, one in found.estimates.items()} == {"avg@2": 1, "pass@1": 1, "pass@2": 1}
    assert found.sampled_tokens is None
    assert summary.policy == {"kind": "endpoint", "url": endpoint.url, "model": "echo"}
    assert set(endpoint.keys) == {"Bearer secret"} and len(endpoint.requests) == 3 * 2 * 2
    asked = [
        {key: value for key, value in body.items() if key not in ("messages", "seed")} for body in endpoint.requests
    ]
    assert all(
        body == {"model": "echo", "max_tokens": 9, "temperature": 0.5, "top_p": 1.0, "top_k": 7} for body in asked
    )
    assert len({body["seed"] for body in endpoint.requests}) == 12
    second = next(body["messages"] for body in endpoint.requests if len(body["messages"]) == 3)
    word = second[0]["content"]
    assert second == [
        {"role": "user", "content": word},
        {"role": "assistant", "content": word},
        {"role": "user", "content": f"{word}ü"},
    ]
    line = json.loads((tmp_path / "rollouts.jsonl").read_bytes().splitlines()[0])
    assert [turn["sampled"] for turn in line["turns"]] == [False, True, False, True]
    assert line["turns"][3]["text"].endswith("ü") and "sampled_tokens" not in line


def test_what_an_endpoint_said_is_not_asked_again(tmp_path: Path) -> None:
    endpoint = Endpoint()
    refusal = JSONResponse({"error": "no such model"}, 404)
    with answering(endpoint):
        endpoint.intercept = lambda number: refusal if number > 7 else None
        with pytest.raises(InferenceError, match="was answered 404: .*no such model"):
            evaluated(tmp_path, endpoint)
        log = tmp_path / "rollouts" / LOG_NAME
        log.write_bytes(log.read_bytes() + b"\xc1REC half a record")
        endpoint.intercept = lambda number: None
        evaluated(tmp_path, endpoint)
    asked = [json.dumps([body["messages"], body["seed"]]) for body in endpoint.requests]
    assert len(asked) == len(set(asked)) == 12


def test_damage_in_the_log_of_answers_is_asked_again(tmp_path: Path) -> None:
    endpoint = Endpoint()
    with answering(endpoint):
        endpoint.intercept = lambda number: JSONResponse({}, 400) if number > 1 else None
        with pytest.raises(InferenceError):
            evaluated(tmp_path, endpoint, num_tasks=1, samples_per_task=1)
        log = tmp_path / "rollouts" / LOG_NAME
        data = bytearray(log.read_bytes())
        data[30] ^= 1
        log.write_bytes(data)
        endpoint.intercept = lambda number: None
        evaluated(tmp_path, endpoint, num_tasks=1, samples_per_task=1)
    assert len(endpoint.requests) == 3, "the first turn, and both"


def test_a_busy_endpoint_is_asked_again_and_one_that_stays_away_ends_the_evaluation(tmp_path: Path) -> None:
    endpoint = Endpoint()
    with answering(endpoint):
        endpoint.intercept = lambda number: Response("busy", 429) if number in (1, 5) else None
        assert evaluated(tmp_path / "busy", endpoint).environments["echo"].estimates["pass@1"].value == 1
        endpoint.intercept = lambda number: Response("broken", 500)
        with pytest.raises(InferenceError, match=r"endpoint.retry_for_s\): POST .* was answered 500: broken"):
            evaluated(tmp_path / "broken", endpoint)
    with pytest.raises(InferenceError, match=r"POST .*: ConnectError"):
        evaluated(tmp_path / "away", endpoint)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Response("no JSON"), "answered with what is no chat completion: .* Does --url end with"),
        (JSONResponse({"choices": []}), "answered with 0 choices, asked for was one"),
        (JSONResponse({"error": "who are you?"}, 401), "401: .*who are you.* Set KEY_OF_THE_TEST to its key"),
    ],
)
def test_answers_that_are_none_are_told(answer: Response, said: str, tmp_path: Path) -> None:
    endpoint = Endpoint(intercept=lambda number: answer)
    with answering(endpoint), pytest.raises(InferenceError, match=said):
        evaluated(tmp_path, endpoint)


def test_answers_without_text_and_cut_ones_are_what_they_are(tmp_path: Path) -> None:
    choice = {"message": {"content": None}, "finish_reason": "length"}
    endpoint = Endpoint(intercept=lambda number: JSONResponse({"choices": [choice]}))
    with answering(endpoint):
        found = evaluated(tmp_path, endpoint).environments["echo"]
    assert found.truncated == 1 and found.estimates["avg@2"].value == 0


def test_an_endpoint_takes_chats_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Echo, "as_text", True)
    endpoint = Endpoint()
    with answering(endpoint), pytest.raises(EnvironmentFailure, match="takes chats, and this prompt is plain text"):
        evaluated(tmp_path, endpoint)
    transcript = Transcript("http://a/v1")
    with pytest.raises(DataError, match="append_text"):
        transcript.encode_after("a")
    with pytest.raises(DataError, match="without options"):
        transcript.prompt([Message("user", "a")], options={"enable_thinking": False})


def caller(request: dict[str, Any]) -> dict[str, Any]:
    """Answer as a model that looks up all accounts at once, one of them twice and badly, and then adds."""
    messages = request["messages"]
    if messages[-1]["role"] != "tool":
        asked = re.findall(r"accounts (.*) hold", messages[0]["content"])[0].replace(" and ", ", ").split(", ")
        calls = [{"name": "look_up", "arguments": json.dumps({"account": name})} for name in asked]
        calls += [{"name": "look_up", "arguments": "{"}, {"name": "nothing", "arguments": ""}]
        made = [{"id": f"call_{number}", "type": "function", "function": one} for number, one in enumerate(calls)]
        return {"message": {"role": "assistant", "content": None, "tool_calls": made}, "finish_reason": "tool_calls"}
    found = [message["content"] for message in messages if message["role"] == "tool"]
    total = sum(int(text) for text in found if text.isdecimal())
    return {"message": {"role": "assistant", "content": f"\x1e{total}"}, "finish_reason": "stop"}


@dataclass
class Calling(Endpoint):
    """Answers as `answer` does."""

    answer: Callable[[dict[str, Any]], dict[str, Any]] = caller

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/v1/chat/completions")
        async def complete(request: Request) -> Response:
            body = await request.json()
            self.requests.append(body)
            return JSONResponse({"choices": [{"index": 0, **self.answer(body)}]})

        return app


def test_an_endpoint_calls_tools(tmp_path: Path) -> None:
    endpoint = Calling()
    ledger = {"id": "ledger", "args": {"call_cost": 0.1}}
    with answering(endpoint):
        summary = evaluated(tmp_path / "here", endpoint, environments=[ledger])
        asked = list(endpoint.requests)
        # Workers have no more of the model than this process.
        there = evaluated(tmp_path / "there", endpoint, environments=[ledger | {"workers": 1}])
    found = summary.environments["ledger"]
    assert found.estimates["avg@2"].value == pytest.approx(0.8), "all of it, less two wrong calls"
    assert found.metrics["tools/calls"] == 4 and found.metrics["tools/failed/unknown"] == 1
    assert found.metrics["tools/failed/unreadable"] == 1
    assert there == summary
    first, second = (next(body for body in asked if len(body["messages"]) == length) for length in (1, 6))
    assert first["tools"] == second["tools"] and first["tools"][0]["function"]["name"] == "look_up"
    said, *answers = second["messages"][1:]
    assert said["role"] == "assistant" and said["content"] is None
    assert [call["id"] for call in said["tool_calls"]] == [message["tool_call_id"] for message in answers]
    assert all(set(message) == {"role", "content", "tool_call_id"} for message in answers)
    assert answers[2]["content"].startswith("error: the arguments are not JSON")
    line = json.loads((tmp_path / "here" / "rollouts.jsonl").read_bytes().splitlines()[0])
    assert '"look_up"' in line["turns"][1]["text"]


class Asking(HarnessEnvironment):
    """A harness with one tool; solved where it gets text and call, and the answer to what the tool returned."""

    def make_task(self, seed: TaskSeed) -> Task:
        return Task(prompt="", answer=str(seed.index))

    async def play(self, endpoint: harness.Endpoint, task: Task) -> float:
        question = {"role": "user", "content": "Look it up."}
        function = {"name": "look_up", "parameters": {"type": "object", "properties": {"key": {"type": "string"}}}}
        tools = [{"type": "function", "function": function}]
        said = await ask(endpoint, question, tools=tools)
        [call] = said["tool_calls"]
        assert said["content"] == "So. {not a call}"
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("look_up", {"key": "a"})
        result = {"role": "tool", "content": task.answer, "tool_call_id": call["id"]}
        last = await ask(endpoint, question, said, result, tools=tools)
        return float(last["content"] == f"{task.answer}!" and "tool_calls" not in last)


def test_a_harness_gets_the_text_and_the_calls_of_an_endpoint(tmp_path: Path) -> None:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        *_, last = body["messages"]
        if last["role"] == "tool":
            return {"message": {"content": f"{last['content']}!"}, "finish_reason": "stop"}
        call = {"id": "c", "type": "function", "function": {"name": "look_up", "arguments": '{"key": "a"}'}}
        return {"message": {"content": "So. {not a call}", "tool_calls": [call]}, "finish_reason": "tool_calls"}

    endpoint = Calling(answer=answer)
    with answering(endpoint):
        summary = evaluated(tmp_path, endpoint, environments=[{"id": f"{__name__}:Asking", "name": "asking"}])
    assert summary.environments["asking"].estimates["avg@2"].value == 1
    second = next(body for body in endpoint.requests if len(body["messages"]) == 3)
    _, said, result = second["messages"]
    assert said["content"] == "So. {not a call}" and [call["id"] for call in said["tool_calls"]] == ["t00010001"]
    assert result["tool_call_id"] == "t00010001" and second["tools"][0]["function"]["name"] == "look_up"


def test_calls_without_tools_are_nobodys(tmp_path: Path) -> None:
    call = {"function": {"name": "a", "arguments": "{}"}}
    choice = {"message": {"content": "yes", "tool_calls": [call]}, "finish_reason": "tool_calls"}
    endpoint = Endpoint(intercept=lambda number: JSONResponse({"choices": [choice]}))
    with answering(endpoint):
        assert evaluated(tmp_path, endpoint).environments["echo"].estimates["avg@2"].value == 0
    assert "tools" not in json.loads((tmp_path / "rollouts.jsonl").read_bytes().splitlines()[0])["turns"][1]["text"]


def test_a_transcript_is_the_chat_again() -> None:
    transcript = Transcript("http://a/v1")
    ids = transcript.prompt([Message("system", "s"), Message("user", "ü")])
    ids += ids_of_answer("{not JSON")
    ids += transcript.continuation([Message("tool", "42")], last_token_id=ids[-1])
    calls = [ChatCall("add", '{"a": 1}'), ChatCall("add", "")]
    turn = ids_of_answer("so\x1e", calls)
    ids += turn
    assert messages_of(ids) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "ü"},
        {"role": "assistant", "content": "{not JSON"},
        {"role": "tool", "content": "42"},
        {
            "role": "assistant",
            "content": "so\x1e",
            "tool_calls": [
                {"id": "t00020001", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
                {"id": "t00020002", "type": "function", "function": {"name": "add", "arguments": ""}},
            ],
        },
    ]
    assert tools_of(ids) == [] and tools_of([]) == []
    assert tools_of(transcript.prompt([Message("user", "a")], tools=[{"type": "function"}])) == [{"type": "function"}]
    assert transcript.decode(turn) == "so\x1e"
    shown = transcript.decode(turn[:-1], skip_special_tokens=False)
    assert transcript.calls_in(shown) == [ToolCall("add", {"a": 1}), ToolCall("add", {})]
    said = transcript.decode(ids_of_answer('\x1e[{"name": "add"}]'), skip_special_tokens=False)
    assert transcript.calls_in(said) == [], "what the policy says is no call"
    assert transcript.decode(ids_of_answer("ä b")) == "ä b"
    assert transcript.is_too_long(11, room=10) and not transcript.is_too_long(10, room=10)


def test_a_log_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("in the way")
    with pytest.raises(RunDirError, match="replies cannot be kept in .*answers.log: File exists"):
        evaluated(tmp_path, Endpoint(url="http://127.0.0.1:9/v1"))
