"""Tools: their schemas, calls in every format, sessions that stay token-exact, and failures that the policy is told."""

import asyncio
import json
import re
import signal
import threading
import time
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import pytest

from holdfast.chat.tokenizer import Tokenizer
from holdfast.config.environments import EnvironmentConfig
from holdfast.errors import ConfigError, EnvironmentFailure
from holdfast.orchestrator.env.guard import prompt_ids_of
from holdfast.orchestrator.env.interface import Environment, Message, Score, Session, SessionFull, Task, TaskSeed
from holdfast.orchestrator.env.tool_loop import check_tools, tool_metrics, tool_use_of
from holdfast.orchestrator.env.tools import FAILURE_REASONS, PARSERS, Tool, ToolCall, ToolFailed
from tests.builders.scripted_sessions import scripted_session
from tests.models.chat_templates import make_chat_tokenizer
from tests.models.tool_templates import tool_templates

WITH_TOOLS = {
    "qwen2_5": "hermes", "qwen3": "hermes", "qwen3_instruct_2507": "hermes", "qwen3_5_nothink": "qwen3_coder",
    "llama3_1": "llama3_json", "mistral_v3": "mistral", "hermes": "hermes",
}  # fmt: skip


@cache
def tokenizer_of(template: str) -> Tokenizer:
    # How GPT-2 splits text, and how Llama 3 and Qwen do: line breaks stay together.
    kind = "byte-level" if template in ("mistral_v3", "hermes") else "llama 3"
    return make_chat_tokenizer(kind, tool_templates()[template], adds_bos=True)


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first one.
        b: the second one,
            which may be left out."""
    return a + b


async def wait(what: str) -> str:
    """Wait for ever.

    Args:
        what: for this."""
    await asyncio.Event().wait()
    return what


def block() -> None:
    """Block."""
    try:
        time.sleep(1000)
    except Exception:  # noqa: BLE001 - as tools of users do
        block()


def fail(how: str) -> Any:
    """Fail.

    Args:
        how: in this way."""
    if how == "object":
        return object()
    if how == "memory":
        raise MemoryError
    if how == "full":
        raise SessionFull("no room")
    if how == "exit":
        raise SystemExit(2)
    raise KeyError(how + "\ud800")


class Adds(Environment):
    """Has all of these, and a tool of its own that reads the session."""

    def __init__(self, first: int = 0) -> None:
        self.first = first

    def note(self, session: Session, text: Literal["x", "y"]) -> dict[str, Any]:
        """Note a text.

        Args:
            text: to note."""
        assert session.task is not None
        session.state.setdefault("noted", []).append(text)
        return {"noted": session.state["noted"], "by": session.task.answer, "first": self.first}

    tools = (add, wait, block, fail, note)

    def make_task(self, seed: TaskSeed) -> Task:
        return Task(prompt=[{"role": "user", "content": "What is 1 + 2?"}], answer="3")

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        return [Score(float(task.answer in session.completion)) for session in sessions]


def play(
    template: str, turns: list[str], environment: Environment | None = None, *, seq_len: int = 20_000, **settings: Any
) -> Session:
    """Return the session of an environment whose policy says `turns`, each ended as the template ends it."""
    environment = environment or Adds()
    tokenizer = tokenizer_of(template)
    end = {"llama3_1": "<|eot_id|>", "mistral_v3": "</s>"}.get(template, "<|im_end|>")
    config = EnvironmentConfig(id="reverse_text", **settings)
    tool_use = tool_use_of(environment, config, tokenizer)
    assert tool_use is tool_use_of(environment, config, tokenizer), "made once"
    task = environment.make_task(TaskSeed(0, "adds", 0))
    assert not isinstance(task.prompt, str)
    session = scripted_session(
        tokenizer, tokenizer.prompt(task.prompt, tools=tool_use.schemas if tool_use else None),
        [[*tokenizer.encode_after(turn), *tokenizer.encode(end)] for turn in turns],
        seq_len=seq_len, task=task, tool_use=tool_use, keeps_history=config.history == "keep",
    )  # fmt: skip
    asyncio.run(environment.run(session, task))
    return session


def answers(session: Session) -> list[str]:
    """Return what tools have answered."""
    text = tokenizer_of("hermes").decode(session.token_ids, skip_special_tokens=False)
    return [part.partition("<|im_end|>")[0] for part in text.split("<|im_start|>tool\n")[1:]]


def called(parser: str, name: str, arguments: Any) -> str:
    """Return a call as a model of that format writes it."""
    text = json.dumps({"name": name, "arguments": arguments})
    match parser:
        case "hermes":
            return f"<tool_call>\n{text}\n</tool_call>"
        case "qwen3_coder":
            parts = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()]
            return f"<tool_call>\n<function={name}>\n{''.join(parts)}</function>\n</tool_call>"
        case "mistral":
            return f"[TOOL_CALLS] [{text}]"
        case _:
            return json.dumps({"name": name, "parameters": arguments})


def test_functions_that_are_no_tools_are_refused_with_the_reason() -> None:
    def silent(a: int) -> None: ...

    def untyped(a) -> None:  # type: ignore[no-untyped-def]
        """Do."""

    def many(*numbers: int) -> None:
        """Do."""

    def odd(a: Environment) -> None:
        """Do."""

    def unresolved(a: "Nowhere") -> None:  # type: ignore[name-defined]  # noqa: F821
        """Do."""

    def misspelt(number: int) -> None:
        """Do.

        Args:
            numbr: a number."""

    reasons = {
        silent: "'silent' has no docstring", untyped: "`a` has no annotation",
        many: r"`\*numbers: int` cannot be given",
        odd: "annotations are not all of kinds that JSON has", unresolved: "cannot be evaluated: name 'Nowhere'",
        misspelt: "describes `numbr`. Did you mean 'number'",
    }  # fmt: skip
    for function, reason in reasons.items():
        with pytest.raises(ConfigError, match=reason):
            Tool(function, session_class=Session)
    wrong: dict[str, Any] = {"a list of functions, got 'add'": "add", "got 3 in it": [3], "two functions": [add, add]}
    for reason, tools in wrong.items():
        environment = Adds()
        environment.tools = tools
        with pytest.raises(ConfigError, match=f"environment 'reverse_text': `tools` .*{reason}"):
            play("qwen3", [], environment)


def test_arguments_are_checked_as_json() -> None:
    tool = Tool(add, session_class=Session)
    assert tool.call({"a": 2}, None) == 3
    for arguments, told in {
        '{"a": "2"}': "`a`: Input should be a valid integer",
        '{"b": 2}': "`a` is missing",
        '{"a": 1, "c": 2}': "there is no parameter `c`. Parameters: a, b",
        "[1]": "must be a JSON object",
        '{"a": NaN}': "`a`",
    }.items():
        with pytest.raises(ToolFailed, match=told):
            tool.call(json.loads(arguments), None)
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ToolFailed, match="nested too deeply"):
        tool.call({"a": deep}, None)

    def json_(json: str, model_fields: tuple[int, int] = (0, 0)) -> Any:
        """Take names that pydantic has, too."""
        return json, model_fields

    assert Tool(json_, session_class=Session).call({"json": "x", "model_fields": [1, 2]}, None) == ("x", (1, 2))


_F = ToolCall("f", {"a": 1})


@pytest.mark.parametrize(("parser", "text", "calls"), [
    ("hermes", "12", []),
    ("hermes", '<think><tool_call>{"name": "f"}</tool_call></think>12', []),
    ("hermes", 'a<tool_call>{"name": "f", "arguments": {}}', [ToolCall("f")]),
    ("hermes", "<tool_call>f</tool_call>", ["not JSON"]),
    ("hermes", "<tool_call>[1]</tool_call><tool_call>" + "[" * 100_000, ["must be {", "not JSON"]),
    ("qwen3_coder", "<tool_call>f</tool_call>", ["no <function=name>"]),
    ("qwen3_coder", "<tool_call><function=f>3</function></tool_call>", ["<parameter=name>value</parameter>: 3"]),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g"}', [_F, ToolCall("g")]),
    ("llama3_json", '{"answer": 3}', []),
    ("llama3_json", 'So {"name": "f"}', []),
    ("llama3_json", '{"name": "f"', ["not JSON"]),
    ("llama3_json", '{"name": "f"} and', [ToolCall("f"), "not JSON"]),
    ("mistral", 'So [TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[ARGS]{}', [ToolCall("f", {"a": 1}), ToolCall("g")]),
    ("mistral", "[TOOL_CALLS]f{1}", ["arguments are not JSON"]),
    ("mistral", "[TOOL_CALLS] [", ["calls are not JSON"]),
    ("mistral", '[TOOL_CALLS] {"name": "f"}', [ToolCall("f")]),
    # What a policy repeats without an end takes no longer than it is long.
    ("mistral", "[TOOL_CALLS]f" + " " * 100_000 + "x", ["calls are not JSON"]),
    ("qwen3_coder", "<tool_call><function=f>" + "<parameter=a>" * 50_000, ["<parameter=name>value</parameter>"]),
])  # fmt: skip
def test_calls_that_are_none_and_calls_that_cannot_be_read(parser: str, text: str, calls: list[Any]) -> None:
    found = PARSERS[parser](text)
    assert len(found) == len(calls), found
    for one, wanted in zip(found, calls, strict=True):
        assert one == wanted if isinstance(wanted, ToolCall) else wanted in one.error


def said(tokenizer: Tokenizer, chat: list[Any], message: dict[str, Any], schemas: list[Any]) -> str:
    """Return what a policy says in the turn that a template writes as `message`."""
    before = tokenizer.render(chat, open_turn=True, tools=schemas)
    whole = tokenizer.render([*chat, message], open_turn=False, tools=schemas)
    assert whole.startswith(before)
    return re.sub(r"(<\|im_end\|>|<\|eot_id\|>|</s>)\n?$", "", whole[len(before) :])


# Qwen 3.5's is not here: it opens a turn with empty thoughts, which it does not write of the same turn later.
@pytest.mark.parametrize("template", [name for name in WITH_TOOLS if name != "qwen3_5_nothink"])
def test_a_session_with_tools_is_one_sample_with_the_tokens_of_the_whole_chat(template: str) -> None:
    tokenizer = tokenizer_of(template)
    tool_use = tool_use_of(Adds(), EnvironmentConfig(id="adds"), tokenizer)
    assert tool_use is not None
    schemas = tool_use.schemas
    noted = json.dumps({"noted": ["x"], "by": "3", "first": 0})
    thought = "<think>\nHm.\n</think>\n\n" if template == "qwen3" else ""
    chat: list[Any] = [{"role": "user", "content": "What is 1 + 2?"}]
    turns, prompts = [], [tokenizer.prompt(chat, tools=schemas)]
    steps = [("add", {"a": 1, "b": 2}, "3"), ("note", {"text": "x"}, noted)]
    for turn, (name, arguments, answer) in enumerate(steps, start=1):
        call = {"id": f"t{turn:04d}0001", "type": "function", "function": {"name": name, "arguments": arguments}}
        message = {"role": "assistant", "content": thought, "tool_calls": [call]}
        turns.append(said(tokenizer, chat, message, schemas))
        chat += [message, {"role": "tool", "name": name, "content": answer, "tool_call_id": call["id"]}]
        prompts.append(tokenizer.prompt(chat, tools=schemas))
    turns.append(said(tokenizer, chat, {"role": "assistant", "content": f"{thought}It is 3."}, schemas))
    session = play(template, turns)
    assert session.texts[-1].endswith("It is 3.") and session.state == {"noted": ["x"]}
    assert session.tool_counts == {"calls": 2, "unanswered": 0}
    ids, mask, start = session.token_ids.tolist(), session.loss_mask.tolist(), 0
    for prompt, end in zip(prompts, session.turn_ends, strict=True):
        assert prompt == ids[: len(prompt)], "what the template makes of the chat so far"
        assert not any(mask[start : len(prompt)]) and all(mask[len(prompt) : end]) and len(prompt) < end
        start = end
    assert start == len(ids)


def test_whatever_fails_is_told_to_the_policy_and_counted() -> None:
    told = {
        "<tool_call>add</tool_call>": "error: the call is not JSON",
        called("hermes", "ad", {"a": 1}): "error: there is no tool 'ad'. Did you mean 'add'? Tools: add, wait, block",
        called("hermes", "a\ud800", {}): "error: there is no tool",
        called("hermes", "add", {"a": "1"}): "error: add: `a`: Input should be a valid integer",
        called("hermes", "fail", {"how": "so"}): "error: KeyError: 'so",
        called("hermes", "fail", {"how": "object"}): "error: TypeError: it returned <object object",
        called("hermes", "fail", {"how": "exit"}): "error: SystemExit: 2",
        called("hermes", "wait", {"what": "it"}): "error: wait took longer than 0.5 s",
        called("hermes", "block", {}): "error: block took longer than 0.5 s",
        called("hermes", "add", {"a": 1}) + called("hermes", "add", {"a": 2}): "3",
    }
    session = play("hermes", [*told, "done", "never"], max_turns=20, tool_timeout_s=0.5)
    *found, _, last = answers(session)
    for answer, begin in zip([*found, last], told.values(), strict=True):
        assert answer.startswith(begin), answer
    counts = {"unreadable": 1, "unknown": 2, "arguments": 1, "raised": 3, "timeout": 2, "server": 0}
    assert set(counts) == set(FAILURE_REASONS) and session.texts[-1] == "done"
    assert tool_metrics(session) == {"tools/calls": 11.0, "tools/unanswered": 0.0} | {
        f"tools/failed/{reason}": float(number) for reason, number in counts.items()
    }


def test_the_last_turn_gets_no_answer_and_a_tool_may_not_swallow_what_is_not_its_own() -> None:
    call = called("hermes", "add", {"a": 1})
    session = play("hermes", [call] * 3, max_turns=2)
    assert session.texts == [call] * 2 and session.tool_counts == {"calls": 2, "unanswered": 1}
    for how, error in (("memory", MemoryError), ("full", SessionFull)):
        with pytest.raises(error):
            play("hermes", [called("hermes", "fail", {"how": how})])
    with pytest.raises(SessionFull):
        play("hermes", [call] * 100, seq_len=1600, max_turns=1000)


def test_an_alarm_of_somebody_else_rings_behind_a_tool() -> None:
    rung: list[int] = []
    previous = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    before = signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        session = play("hermes", [called("hermes", "block", {}), "done"], tool_timeout_s=0.1)
        assert session.tool_counts["failed/timeout"] == 1
        while not rung:
            signal.sigtimedwait([], 0.01)
        play("hermes", [called("hermes", "add", {"a": 1}), "done"])
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0 and rung == [1]
    finally:
        signal.signal(signal.SIGALRM, previous)
        signal.setitimer(signal.ITIMER_REAL, *before)


def test_a_tool_in_a_thread_is_not_interrupted() -> None:
    sessions: list[Session] = []
    turns = [called("hermes", "add", {"a": 1}), "done"]
    thread = threading.Thread(target=lambda: sessions.append(play("hermes", turns)))
    thread.start()
    thread.join()
    assert sessions[0].tool_counts == {"calls": 1, "unanswered": 0}


def test_what_answers_no_call() -> None:
    class Plain(Adds):
        tools = ()

    session = play("hermes", ["It is 3."], Plain())
    assert tool_metrics(session) == {}
    with pytest.raises(RuntimeError, match="the environment has no `tools`"):
        asyncio.run(session.answer_tool_calls())

    class Early(Adds):
        async def run(self, session: Session, task: Task) -> None:
            await session.answer_tool_calls()

    with pytest.raises(RuntimeError, match="nothing was sampled"):
        play("hermes", [], Early())


def test_templates_that_cannot_show_tools_are_refused_before_anything_is_sampled() -> None:
    for template, reason in {
        "gemma": "writes calls of tools in no form that is known. Name the one",
        "deepseek_r1_distill": "in no form that is known",
    }.items():
        with pytest.raises(ConfigError, match=reason):
            play(template, [])
    with pytest.raises(ConfigError, match="does not write tools: the policy would not see `add`"):
        play("gemma", [], tool_parser="hermes")


def test_the_tokenizer_of_a_hub_is_not_fetched_to_check_tools() -> None:
    check_tools({"adds": Adds()}, [EnvironmentConfig(id="adds")], tokenizer_name="nobody/nothing-of-this-name")


def test_a_prompt_of_text_has_no_place_for_tools() -> None:
    tokenizer = tokenizer_of("hermes")
    schemas = [Tool(add, session_class=Session).schema]
    with pytest.raises(EnvironmentFailure, match="an environment with tools needs messages"):
        prompt_ids_of(Task(prompt="x"), tokenizer, what="it", seq_len=100, tools=schemas)
    assert "add" in tokenizer.decode(
        prompt_ids_of(Task(prompt=[Message("user", "x")]), tokenizer, what="it", seq_len=5000, tools=schemas)
    )
