"""Rollouts that a harness plays over HTTP: token for token those of a session, and refusals that say what is wrong."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

import httpx
import openai
import pytest

from holdfast import Endpoint, HarnessEnvironment, Message, Score, Session, Task, TaskSeed
from holdfast.chat.tokenizer import Tokenizer, load_tokenizer
from holdfast.errors import InferenceError
from holdfast.orchestrator.env.guard import PromptTooLong
from holdfast.orchestrator.env.harness import MODEL, chat_server, completion_of, is_same, request_metrics
from holdfast.orchestrator.env.tool_loop import tool_message
from tests.builders.scripted_sessions import scripted_session
from tests.runs.harness_environments import ask
from tests.unit.orchestrator.env.test_environment_tools import WITH_TOOLS, called, tokenizer_of

_Play = Callable[[Endpoint], Awaitable[Any]]
USER = {"role": "user", "content": "ab"}
_PROPERTIES = {"a": {"type": "integer"}, "b": {"type": "string"}}
_PARAMETERS = {"type": "object", "properties": _PROPERTIES, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": _PARAMETERS}}


class Scripted(HarnessEnvironment):
    def __init__(self, script: _Play) -> None:
        self._script = script

    def make_task(self, seed: TaskSeed) -> Task:
        return Task(prompt="")

    async def play(self, endpoint: Endpoint, task: Task) -> Any:
        found = await self._script(endpoint)
        return 1.0 if found is None else found


@cache
def letters() -> Tokenizer:
    return load_tokenizer("examples/reverse_text/base")


def session_of(turns: list[str], *, tokenizer: Tokenizer | None = None, **settings: Any) -> Session:
    """Return a session without a prompt, whose policy says `turns`."""
    known = tokenizer or letters()
    return scripted_session(known, [], [known.encode(turn) for turn in turns], **settings)


class Gate:
    """Holds the sampling of a turn until it is opened."""

    def __init__(self, turn: int = 0) -> None:
        self._turn = turn
        self.reached, self.opened = asyncio.Event(), asyncio.Event()

    async def __call__(self, turn: int) -> None:
        if turn == self._turn:
            self.reached.set()
            await self.opened.wait()


def play(session: Session, script: _Play, *, parser: str = "auto") -> list[Score]:
    environment = Scripted(script)
    environment.tool_parser = parser

    async def run() -> list[Score]:
        await environment.run(session, Task(prompt=""))
        return await environment.score(Task(prompt=""), [session])

    return asyncio.run(run())


def test_a_conversation_is_one_sample_with_one_mask() -> None:
    async def script(endpoint: Endpoint) -> Score:
        first = await ask(endpoint, USER)
        # As clients send it back: parts, nulls, and white space of their own.
        echo = {**first, "content": [{"type": "text", "text": f"{first['content']} "}], "refusal": None}
        second = await ask(endpoint, USER, echo, {"role": "user", "content": "d"}, max_completion_tokens=2, stop=None)
        return Score(0.5, {"length": float(len(second["content"]))})

    session = session_of(["ba<|end|>", "cdef<|end|>"])
    assert play(session, script) == [Score(0.5, {"length": 2.0})]
    tokenizer = letters()
    prompt = tokenizer.prompt([Message("user", "ab")])
    first, more = tokenizer.encode("ba<|end|>"), tokenizer.continuation([Message("user", "d")], last_token_id=3)
    assert session.token_ids.tolist() == [*prompt, *first, *more, *tokenizer.encode("cd")]
    assert session.turn_ends == (len(prompt) + 3, len(session.token_ids)) and session.truncated
    assert request_metrics(session)["requests/answered"] == 2.0


def test_what_a_request_may_not_ask_for_is_refused_by_name_and_counted() -> None:
    refused: dict[str, dict[str, Any]] = {
        "n = 2 is not supported: leave it out, or 1; the run's `group_size` says": {"n": 2},
        "stop = ['a'] is not supported: leave it out, or []; texts that end a turn are the run's `sampling.stop`": {
            "stop": ["a"]
        },
        "repetition_penalty = 1.1 is not supported: leave it out, or 1; the trainer": {"repetition_penalty": 1.1},
        "min_tokens = 3 is not supported: leave it out, or 0; the trainer": {"min_tokens": 3},
        "bad_words = ['a'] is not supported: leave it out, or []; the trainer": {"bad_words": ["a"]},
        "allowed_token_ids = [3] is not supported: leave it out, or []; the trainer": {"allowed_token_ids": [3]},
        "} is not supported: leave it out, or null; the trainer": {"structured_outputs": {"regex": "a"}},
        'is not supported: leave it out, or {"type": "text"}': {"response_format": {"type": "json_object"}},
        "there is no parameter `stop_token_ids`.": {"stop_token_ids": [3]},
        "stream must be true or false, got 1": {"stream": 1},
        "stream_options needs stream = true": {"stream_options": {}},
        "stream_options must be an object of true and false, got 3": {"stream": True, "stream_options": 3},
        "stream_options.usage is not supported. Known: include_usage,": {
            "stream": True,
            "stream_options": {"usage": True},
        },
        "logprobs = True is not supported": {"logprobs": True},
        "there is no parameter `top_logprobs`.": {"top_logprobs": 3},
        "Did you mean 'max_tokens'?": {"max_token": 3},
        "temperature is set by the run": {"temperature": 0.7},
        "seed is set by the run": {"seed": 1},
        "model = 'gpt': this endpoint has only 'policy'": {"model": "gpt"},
        "max_tokens must be 1 or more, got 0": {"max_tokens": 0},
    }
    unreadable: dict[str, dict[str, Any]] = {
        "messages must be a list of messages, got []": {"messages": []},
        "messages[0] must be an object with a role, got 'ab'": {"messages": ["ab"]},
        "messages[0].audio is not supported. Known: role,": {"messages": [{**USER, "audio": "x"}]},
        "messages[0].content has parts that are not text": {"messages": [{"role": "user", "content": [{"type": "i"}]}]},
        "messages[0].content must be text or a list": {"messages": [{"role": "user", "content": 3}]},
        "`tools` must be a list of JSON objects": {"tools": [3]},
        "no form that is known": {"tools": [TOOL]},
    }

    async def script(endpoint: Endpoint) -> None:
        for told, more in {**refused, **unreadable}.items():
            said = await ask(endpoint, USER, **more)
            assert told in said["error"]["message"], said
            code = "model_not_found" if "model" in more else "parameter" if told in refused else "malformed"
            assert (said["error"]["type"], said["error"]["code"]) == ("invalid_request_error", code)
        async with httpx.AsyncClient(base_url=endpoint.base_url) as client:
            key = {"Authorization": f"Bearer {endpoint.api_key}"}
            path = f"{endpoint.base_url}/chat/completions"
            for body in (b"{", b"[]"):
                answer = await client.post(path, content=body, headers=key)
                assert answer.status_code == 400 and answer.headers["x-should-retry"] == "false"
            assert (await client.post(path, json={})).status_code == 401
            assert (await client.get(path, headers=key)).status_code == 404
            answer = await client.post(f"{endpoint.base_url}/responses", headers=key)
            assert answer.status_code == 404 and "this endpoint has only POST" in answer.json()["error"]["message"]
            models = await client.get(f"{endpoint.base_url}/models", headers=key)
            assert [one["id"] for one in models.json()["data"]] == [MODEL]
        await ask(endpoint, USER)

    session = session_of(["ba<|end|>"])
    play(session, script)
    metrics = request_metrics(session)
    assert metrics == {
        "requests/answered": 1.0, "requests/refused/malformed": len(unreadable) + 2.0,
        "requests/refused/parameter": float(len(refused)), "requests/refused/history": 0.0,
        "requests/refused/parallel": 0.0, "requests/refused/full": 0.0,
    }  # fmt: skip


def test_a_rollout_is_one_conversation() -> None:
    async def script(endpoint: Endpoint) -> None:
        first = await ask(endpoint, USER)
        more = {"role": "user", "content": "d"}
        for chat in ([USER], [more, first, more], [USER, {**first, "content": "other"}, more], [USER, first]):
            said = await ask(endpoint, *chat)
            assert said["error"]["code"] == "history" and "is one conversation" in said["error"]["message"], said
        said = await ask(endpoint, USER, first, more, tools=[TOOL])
        assert "the tools differ" in said["error"]["message"]
        await ask(endpoint, USER, first, more)

    session = session_of(["ba<|end|>", "c<|end|>"])
    play(session, script)
    assert session.request_counts == {"answered": 2, "refused/history": 5}


async def streamed(endpoint: Endpoint, messages: list[Any], **more: Any) -> tuple[Any, list[Any]]:
    """Return the completion that OpenAI's client builds from a stream, and the chunks."""
    key, asked = endpoint.api_key, {"model": endpoint.model, "messages": messages, "tools": [TOOL], **more}
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=key, max_retries=0) as client:
        async with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
            chunks = [event.chunk async for event in stream if event.type == "chunk"]
        return await stream.get_final_completion(), chunks


def test_a_stream_is_the_same_answer_in_chunks_and_sampled_once() -> None:
    tokenizer = tokenizer_of("qwen2_5")
    call = called(WITH_TOOLS["qwen2_5"], "add", {"a": 1, "b": "é"})
    turns = [f"So.\n{call}\n{call}<|im_end|>", f"{call}<|im_end|>", "3<|im_end|>"]
    replies, messages = list[Any](), list[Any]([USER])

    async def script(endpoint: Endpoint) -> None:
        for _ in turns:
            completion, chunks = await streamed(endpoint, messages)
            again, _ = await streamed(endpoint, messages, extra_headers={"X-Stainless-Retry-Count": "1"})
            assert again.to_dict() == completion.to_dict(), "a retry gets the same stream"
            assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].object == "chat.completion.chunk"
            ends = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
            assert ends[:-1] == [None] * (len(chunks) - 2) and chunks[-1].usage == completion.usage
            replies.append(completion.choices[0])
            calls = completion.choices[0].message.tool_calls or ()
            results = [{"role": "tool", "content": "3", "tool_call_id": one.id} for one in calls]
            messages.extend([completion.choices[0].message.model_dump(exclude_none=True), *results])
        endpoint.restart()
        first = await ask(endpoint, USER, tools=[TOOL])
        told = [
            one.model_dump(include={"id": True, "type": True, "function": {"name", "arguments"}}) for one in calls_of(0)
        ]
        assert first["content"] == "So." and first["tool_calls"] == told, "as without a stream"
        assert (await streamed(endpoint, messages[:4]))[0].choices[0] == replies[1], "after a restart"

    def calls_of(turn: int) -> list[Any]:
        return replies[turn].message.tool_calls

    session = session_of(turns, tokenizer=tokenizer)
    play(session, script)
    assert [one.finish_reason for one in replies] == ["tool_calls", "tool_calls", "stop"]
    assert [one.message.content for one in replies] == ["So.", None, "3"]
    assert [json.loads(one.function.arguments) for one in calls_of(0)] == [{"a": 1, "b": "é"}] * 2
    assert len(session.texts) == 3 and session.request_counts == {"answered": 3}


def test_two_requests_at_once_are_refused_and_a_repeated_one_is_answered_once() -> None:
    gate = Gate()

    async def script(endpoint: Endpoint) -> None:
        going = asyncio.create_task(ask(endpoint, USER))
        await gate.reached.wait()
        said = await ask(endpoint, USER)
        assert said["error"]["code"] == "parallel"
        body = json.dumps({"model": MODEL, "messages": [USER]}).encode()
        headers = {"Authorization": f"Bearer {endpoint.api_key}", "X-Stainless-Retry-Count": "1"}
        async with httpx.AsyncClient(headers=headers) as client:
            path = f"{endpoint.base_url}/chat/completions"
            assert (await client.post(path, content=body + b" ")).status_code == 400, "not the same"
            gate.opened.set()
            first = await going
            sent = json.dumps({"model": endpoint.model, "messages": [USER]}, separators=(",", ":")).encode()
            again = [(await client.post(path, content=sent)).json() for _ in range(2)]
        assert [one["choices"][0]["message"] for one in again] == [first, first]

    session = session_of(["ba<|end|>"], before=gate)
    play(session, script)
    assert session.texts == ["ba"]


def test_a_harness_that_begins_again_gets_the_same_answers() -> None:
    gate = Gate(1)

    async def script(endpoint: Endpoint) -> None:
        assert not endpoint.is_full
        more = {"role": "user", "content": "d"}
        first = await ask(endpoint, USER)
        left = asyncio.create_task(ask(endpoint, USER, first, more))
        await gate.reached.wait()
        left.cancel()  # it dies while it waits for the second answer
        endpoint.restart()
        assert await ask(endpoint, USER) == first
        asyncio.get_running_loop().call_soon(gate.opened.set)
        second = await ask(endpoint, USER, first, more)
        endpoint.restart()
        said = await ask(endpoint, more)
        assert "request 1 differs from that before the harness was started again" in said["error"]["message"]
        await ask(endpoint, USER, first, more, second, more)

    session = session_of(["ba<|end|>", "c<|end|>", "d<|end|>"], before=gate)
    play(session, script)
    assert session.texts == ["ba", "c", "d"] and session.request_counts == {"answered": 3, "refused/history": 1}


def test_a_harness_that_begins_again_is_refused_the_same() -> None:
    async def script(endpoint: Endpoint) -> None:
        told = list[Any]()
        for _ in range(2):
            first = await ask(endpoint, USER)
            too_long = await ask(endpoint, USER, first, {"role": "user", "content": "d" * 40})
            wrong = await ask(endpoint, USER, seed=1)
            second = await ask(endpoint, USER, first, {"role": "user", "content": "d"})
            told.append((first, too_long["error"]["code"], wrong["error"]["code"], second))
            if len(told) == 1:
                endpoint.restart()
        assert told[0] == told[1] and told[0][1] == "context_length_exceeded"

    session = session_of(["ba<|end|>", "c<|end|>"], seq_len=40)
    play(session, script)
    assert session.request_counts == {"answered": 2, "refused/full": 1, "refused/parameter": 1}


def test_nothing_is_answered_after_the_end() -> None:
    kept: list[Endpoint] = []

    async def first(endpoint: Endpoint) -> None:
        kept.append(endpoint)
        await ask(endpoint, USER)

    async def second(endpoint: Endpoint) -> None:
        said = await ask(kept[0], USER)
        assert "its rollout has ended" in said["error"]["message"]
        return await first(endpoint)

    async def both() -> None:
        for script in (first, second):
            await Scripted(script).run(session_of(["ba<|end|>"]), Task(prompt=""))
        assert kept[0].base_url != kept[1].base_url and await chat_server() is await chat_server()

    asyncio.run(both())


def test_what_is_left_behind_fails_the_rollout() -> None:
    gate, left = Gate(1), list[asyncio.Task[Any]]()

    async def script(endpoint: Endpoint) -> None:
        left.append(asyncio.create_task(ask(endpoint, USER, await ask(endpoint, USER), USER)))
        await gate.reached.wait()

    session = session_of(["ba<|end|>", "c<|end|>"], before=gate)
    with pytest.raises(RuntimeError, match=r"play\(\) returned while a request of it was being answered"):
        play(session, script)
    assert not session.is_sampling and len(session.texts) == 1


def test_room_that_is_used_up_is_told_in_openais_words() -> None:
    async def script(endpoint: Endpoint) -> float:
        said = await ask(endpoint, USER, await ask(endpoint, USER), {"role": "user", "content": "d" * 40})
        assert said["error"]["code"] == "context_length_exceeded"
        return 0.0

    session = session_of(["ba<|end|>"], seq_len=32)
    play(session, script)
    assert session.truncated and session.request_counts == {"answered": 1, "refused/full": 1}

    async def raises(endpoint: Endpoint) -> float:
        await script(endpoint)
        raise KeyError("choices")

    session = session_of(["ba<|end|>"], seq_len=32)
    assert play(session, raises) == [Score(0.0)] and session.truncated, "no failure of the environment"

    async def too_long(endpoint: Endpoint) -> float:
        said = await ask(endpoint, {"role": "user", "content": "d" * 40})
        raise KeyError(said["choices"])

    with pytest.raises(PromptTooLong, match=r"the prompt of the harness: 4\d more tokens leave no room"):
        play(session_of([], seq_len=32), too_long)

    async def shorter(endpoint: Endpoint) -> float:
        await ask(endpoint, {"role": "user", "content": "d" * 40})
        await ask(endpoint, USER)
        return 1.0

    assert play(session_of(["ba<|end|>"], seq_len=32), shorter) == [Score(1.0)]


def test_engines_that_fail_are_told_as_such() -> None:
    async def before(turn: int) -> None:
        raise InferenceError("no engine")

    async def script(endpoint: Endpoint) -> None:
        said = await ask(endpoint, USER)
        told = {"message": "the policy cannot be sampled: no engine", "type": "server_error"}
        assert said["error"] == told | {"param": None, "code": None}

    with pytest.raises(RuntimeError, match="play\\(\\) returned without a request that was answered"):
        play(session_of([], before=before), script)


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3_5_nothink", "llama3_1", "mistral_v3"])
def test_calls_of_tools_are_read_in_the_form_of_the_model(template: str) -> None:
    tokenizer, text = tokenizer_of(template), "So.\n" if template == "qwen2_5" else ""
    end = {"llama3_1": "<|eot_id|>", "mistral_v3": "</s>"}.get(template, "<|im_end|>")
    turns = [f"{text}{called(WITH_TOOLS[template], 'add', {'a': 1, 'b': '2'})}{end}", f"3{end}"]
    result = {"role": "tool", "content": "3", "tool_call_id": "t00010001", "name": "add"}

    async def script(endpoint: Endpoint) -> None:
        reply = await ask(endpoint, USER, tools=[TOOL])
        [call] = reply["tool_calls"]
        assert call["id"] == "t00010001" and call["function"]["name"] == "add"
        assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": "2"}
        assert reply["content"] == ("So." if template == "qwen2_5" else None)
        call["function"]["arguments"] = json.dumps({"b": "2", "a": 1}, indent=1)  # as clients write it again
        last = await ask(endpoint, USER, {**reply, "content": reply["content"] or ""}, result, tools=[TOOL])
        assert (last["content"], last.get("tool_calls")) == ("3", None)

    session = session_of(turns, tokenizer=tokenizer)
    play(session, script)
    prompt = tokenizer.prompt([Message("user", "ab")], tools=[TOOL])
    first, last = map(tokenizer.encode, turns)
    message = tool_message("3", name="add", turn=1, number=1)
    more = tokenizer.continuation([message], last_token_id=first[-1], tools=[TOOL])
    assert session.token_ids.tolist() == [*prompt, *first, *more, *last]
    parts = ((prompt, False), (first, True), (more, False), (last, True))
    assert session.loss_mask.tolist() == [used for part, used in parts for _ in part]


def test_a_call_that_cannot_be_read_is_text_and_thoughts_that_a_template_drops_split_the_conversation() -> None:
    tokenizer = tokenizer_of("qwen3")
    turns = ["<tool_call>\n{add\n</tool_call><|im_end|>", "<think>\nhm\n</think>\n\nyes<|im_end|>", "on<|im_end|>"]

    async def script(endpoint: Endpoint) -> None:
        reply = await ask(endpoint, USER, tools=[TOOL])
        assert "tool_calls" not in reply and "{add" in reply["content"]
        chat = [USER, reply, {"role": "user", "content": "Think."}]
        chat.append(await ask(endpoint, *chat, tools=[TOOL]))
        last = await ask(endpoint, *chat, {"role": "user", "content": "Go on."}, tools=[TOOL])
        assert last["content"] == "on"

    session = session_of(turns, tokenizer=tokenizer)
    play(session, script, parser="hermes")
    assert session.texts[1].endswith("yes") and len(session.branch_starts) == 2
    said = [{"role": "assistant", "content": turn.removesuffix("<|im_end|>")} for turn in turns]
    questions = [{"role": "user", "content": text} for text in ("Think.", "Go on.")]
    prompt = tokenizer.prompt([USER, said[0], questions[0], said[1], questions[1]], tools=[TOOL])
    assert session.token_ids[session.branch_starts[1] :].tolist() == [*prompt, *tokenizer.encode(turns[2])]
    assert "hm" not in tokenizer.decode(prompt) and session.request_counts == {"answered": 3}
    usage = completion_of({"role": "assistant", "content": "on"}, session, model="policy")["usage"]
    assert usage["prompt_tokens"] == len(prompt), "what the policy saw, without the branches before"


def test_messages_are_the_same_however_their_calls_are_written() -> None:
    def said(arguments: Any, **more: Any) -> dict[str, Any]:
        call = {"id": "t1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        return {"role": "assistant", "content": "", "tool_calls": [call], **more}

    assert is_same(said('{"a": 1, "b": 2}'), said('{"b":2,"a":1}', content=" "))
    assert is_same(said("{"), said("{")) and is_same(said({"a": 1}), said('{"a": 1}'))
    assert not is_same(said("{"), said("}")) and not is_same(said('{"a": 1}'), said('{"a": 2}'))
    assert not is_same(said("{}"), said("{}", tool_calls=["add"])) and not is_same(said("{}"), USER)
    assert not is_same(USER, {**USER, "content": "ab "}), "white space counts in what the harness says"


def test_a_session_gets_one_prompt() -> None:
    session = session_of([])
    session.begin([Message("user", "ab")])
    with pytest.raises(RuntimeError, match="this one has one"):
        session.begin([Message("user", "ab")])
    with pytest.raises(NotImplementedError, match="HarnessEnvironment needs a method play"):
        asyncio.run(HarnessEnvironment().run(session_of([]), Task(prompt="")))
