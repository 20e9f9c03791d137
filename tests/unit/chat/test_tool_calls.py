"""Tool calls: the same tokens for every way to write them, in each template that reads calls; else a refusal."""

import importlib.util
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.chat.masking import Chat, Encoded, encode_chat
from holdfast.chat.tokenizer import Tokenizer
from holdfast.errors import DataError
from tests.models.chat_templates import ODD, TEMPLATES, make_chat_tokenizer

USER = {"role": "user", "content": "Hot?"}
ABSENT = "absent"


def of_trl() -> dict[str, str]:
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.origin is not None
    return {path.stem: path.read_text() for path in (Path(spec.origin).parent / "chat_templates").glob("*.jinja")}


ALL = of_trl() | TEMPLATES | ODD
WITH_CALLS = ("qwen2_5", "qwen3", "gptoss", "glm4moe", "gemma4", "lfm2_2_5", "muse_glimmer", "hermes")


@cache
def tokenizer_of(template: str) -> Tokenizer:
    return make_chat_tokenizer("byte-level", ALL.get(template, template), adds_bos=False)


def call(arguments: object, name: str = "weather") -> dict[str, Any]:
    return {"id": "callcall0", "type": "function", "function": {"name": name, "arguments": arguments}}


def asking(*calls: dict[str, Any], content: str | None = "") -> list[dict[str, Any]]:
    message = {"role": "assistant", "tool_calls": list(calls)}
    return [USER, message if content is ABSENT else message | {"content": content}]


def encoded(template: str, messages: list[dict[str, Any]]) -> Encoded:
    return encode_chat(Chat(messages), tokenizer_of(template))


@pytest.mark.parametrize("template", sorted(ALL))
def test_every_way_to_write_a_call_gives_the_same_tokens_or_the_same_kind_of_refusal(template: str) -> None:
    arguments = {"city": "東京", "days": 2}
    function = {"name": "weather", "arguments": json.dumps(arguments, ensure_ascii=False)}
    without_id = {key: value for key, value in call(arguments).items() if key != "id"}
    rows = [asking(without_id, content=content) for content in ("", None, ABSENT)]
    rows += [
        asking({**without_id, "function": function}),
        asking(function),
        [USER, {"role": "assistant", "function_call": function}],
    ]
    outcomes = set[tuple[int, ...]]()
    for row in rows:
        try:
            outcomes.add(tuple(encoded(template, row).ids))
        except DataError as error:
            assert template not in WITH_CALLS, error
            outcomes.add(())
    assert len(outcomes) == 1


JSON = st.recursive(
    st.booleans() | st.integers(0, 99) | st.text("ab1 é", max_size=3), lambda x: st.lists(x, max_size=2)
)
CALLS = st.lists(st.dictionaries(st.text("abc", min_size=1, max_size=2), JSON, max_size=3), min_size=1, max_size=3)


@pytest.mark.parametrize("template", WITH_CALLS)
@settings(max_examples=25, derandomize=True, deadline=None)
@given(arguments=CALLS, data=st.data())
def test_a_changed_argument_changes_the_tokens(template: str, arguments: list[dict[str, Any]], data: Any) -> None:
    place = data.draw(st.integers(0, len(arguments) - 1))
    key = data.draw(st.sampled_from([*arguments[place], "new"]))
    changed = [*arguments]
    changed[place] = {**arguments[place], key: data.draw(st.just("other") | st.lists(st.just("x"), min_size=1))}
    found = []
    for one in (arguments, changed):
        try:
            found.append(encoded(template, asking(*map(call, one))).ids)
        except DataError as error:
            assert template == "gptoss" and len(arguments) > 1, error
            return
    assert found[0] != found[1]


FIRST_NAME_ONLY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.tool_calls %}CALL {{ m.tool_calls[0].function.name }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_ARGUMENTS = FIRST_NAME_ONLY.replace("{{ m.tool_calls[0]", "{% for c in m.tool_calls %}{{ c").replace(
    ".name }}", ".name }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "row", "said"),
    [
        ("qwen3", asking(call("[1]")), "message 2: the arguments of a tool call must be a JSON object, got '\\[1\\]'"),
        ("qwen3", asking(call([1])), "message 2: the arguments of a tool call must be a JSON object"),
        ("qwen3", asking(call(json.dumps('{"a": 1}'))), "message 2: the arguments of a tool call must be a JSON"),
        ("qwen3", asking(call('{"a": ')), "message 2: the arguments of a tool call: this is not JSON .Expecting"),
        ("qwen3", asking(call('{"a": 1, "a": 2}')), "the key 'a' occurs twice"),
        ("qwen3", asking(call('{"a": NaN}')), "NaN is not JSON"),
        ("qwen3", asking(call({"a": [math.nan]})), "NaN, Infinity and .* are not JSON, got .*nan"),
        ("qwen3", asking(call('{"a": 1e400}')), "NaN, Infinity and .* are not JSON, got .*inf"),
        (
            "qwen3",
            [USER, {"role": "user", "content": "", "function_call": {"name": "f"}}],
            "message 2: `function_call`",
        ),
        (FIRST_NAME_ONLY, asking(call({"a": 1})), "message 2 .*leaves out the key 'a' in the arguments of a call"),
        (FIRST_NAME_ONLY, asking(call({}), call({})), "message 2 .*leaves out the name of a call"),
        (NO_ARGUMENTS, asking(call({"a": 1})), "message 2 .*leaves out the key 'a'"),
        ("chatml", asking(call({}, "user"), content="user"), "message 2 has `tool_calls`, .*model.chat_template"),
    ],
)
def test_calls_that_would_be_trained_otherwise_are_refused(template: str, row: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        encoded(template, row)


def test_roles_of_other_formats_become_those_that_the_template_knows() -> None:
    def ids(first: str, answers: str) -> list[int]:
        result = {"role": answers, "name": "weather", "content": "12"}
        rest = [*asking(call({"city": "Rom"})), result, {"role": "assistant", "content": "It is 12."}]
        return encoded("qwen2_5", [{"role": first, "content": "Say it."}, *rest]).ids

    assert ids("system", "tool") == ids("developer", "function") == ids("developer", "observation")
    told = {"role": "function_call", "content": '{"name": "weather", "arguments": {"city": "Rom"}}'}
    assert encoded("qwen2_5", [USER, told]).ids == encoded("qwen2_5", asking(call({"city": "Rom"}))).ids
    knows = "developer" + tokenizer_of("gptoss").render([{"role": "developer", "content": "Say it."}], open_turn=False)
    assert "# Instructions" in knows, "a template that knows developers keeps them"
