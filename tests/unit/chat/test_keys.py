"""Keys of messages and columns of rows: each is read, obeyed, refused, or named as left out."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.chat.masking import Chat, Encoded, encode_chat
from holdfast.chat.messages import bare
from holdfast.chat.written import _with
from holdfast.config.data import SftDataConfig
from holdfast.errors import DataError
from holdfast.trainer.data.formats import ANSWER_FORMATS, PAIR_FORMATS, SAMPLE_FORMATS, find_format
from tests.unit.chat.test_tool_calls import asking, call, tokenizer_of

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ahoy"}
SYSTEM = {"role": "system", "content": "Talk like a pirate."}
TRAINED_BY = (
    "{% if messages[0].role != 'system' %}You are a fox, trained by name.{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def said(encoded: Encoded, template: str = "chatml") -> str:
    ids = [token for token, is_trained in zip(encoded.ids, encoded.mask, strict=True) if is_trained]
    return tokenizer_of(template).decode(ids, skip_special_tokens=True)


def sides(row: dict[str, Any], formats: Any = SAMPLE_FORMATS, template: str = "chatml") -> list[Encoded]:
    return find_format(row, formats, name="a.jsonl").encode(row, tokenizer_of(template), SftDataConfig())


@pytest.mark.parametrize("key", ["weight", "loss_weight", "train", "trainable", "training", "loss"])
def test_a_message_says_whether_it_is_trained(key: str) -> None:
    for no, yes in ((False, True), (0, 1), (0.0, 1.0)):
        row = [USER, ANSWER | {key: no}, USER, ANSWER | {"content": "Aye", key: yes}]
        encoded = encode_chat(Chat(row), tokenizer_of("chatml"))
        assert "Aye" in said(encoded) and "Ahoy" not in said(encoded) and not encoded.remarks
        (last,) = (encode_chat(Chat(row[::-1][::-1]), tokenizer_of("chatml"), train_on="last"),)
        assert said(last) == said(encoded)
    assert not any(encode_chat(Chat([USER, ANSWER | {key: 0}]), tokenizer_of("chatml")).mask)
    with pytest.raises(DataError, match=f"message 2: `{key}` must be 0 or 1.*got 0.5"):
        encode_chat(Chat([USER, ANSWER | {key: 0.5}]), tokenizer_of("chatml"))
    with pytest.raises(DataError, match="message 1 has the role `user` and"):
        encode_chat(Chat([USER | {key: 1}, ANSWER]), tokenizer_of("chatml"))
    assert said(encode_chat(Chat([USER | {key: 0}, ANSWER]), tokenizer_of("chatml")))


@settings(max_examples=25, derandomize=True, deadline=None)
@given(flags=st.lists(st.sampled_from([None, 0, 1]), min_size=1, max_size=4))
def test_exactly_the_turns_that_want_it_are_trained(flags: list[int | None]) -> None:
    turns = [{"role": "assistant", "content": f"Answer{place}", "weight": flag} for place, flag in enumerate(flags)]
    text = said(encode_chat(Chat([message for turn in turns for message in (USER, turn)]), tokenizer_of("chatml")))
    assert [f"Answer{place}" in text for place in range(len(flags))] == [flag != 0 for flag in flags]


@pytest.mark.parametrize("key", ["trained", "name", "role_name", "zzz"])
def test_a_key_that_only_occurs_in_the_source_of_the_template_is_named(key: str) -> None:
    for value in ("x", 1, True, ["x"], {"a": 1}):
        (remark,) = encode_chat(Chat([USER, ANSWER | {key: value}]), tokenizer_of(TRAINED_BY)).remarks
        assert remark == f"messages have `{key}`, which the chat template does not read"


def test_what_is_left_out_of_calls_parts_and_rows_is_named() -> None:
    remarks = encode_chat(Chat(asking(call({"city": "Rom"}) | {"index": 3})), tokenizer_of("qwen2_5")).remarks
    assert {f"tool calls have `{key}`, which the chat template does not read" for key in ("id", "index")} <= {*remarks}
    part = {"type": "text", "text": "Hi", "cache": "x"}
    remarks = encode_chat(Chat([{"role": "user", "content": [part]}, ANSWER, USER]), tokenizer_of("chatml")).remarks
    assert encode_chat(
        Chat([{"role": "user", "content": [part | {"cache": None}]}, ANSWER]), tokenizer_of("chatml")
    ) == (
        encode_chat(
            Chat([{"role": "user", "content": [{"type": "text", "value": "Hi"}]}, ANSWER]), tokenizer_of("chatml")
        )
    )
    assert [*remarks] == [
        "text parts have `cache`, which the chat template does not read",
        "messages after the last trained answer are left out",
    ]
    (side,) = sides({"messages": [USER, ANSWER], "source": "web", "null": None})
    assert side.remarks == ("the column `source` is not read",)


@pytest.mark.parametrize(("row", "formats"), [
    ({"messages": [USER, ANSWER]}, SAMPLE_FORMATS),
    ({"prompt": [USER], "completion": [ANSWER]}, SAMPLE_FORMATS),
    ({"prompt": [], "completion": [USER, ANSWER]}, SAMPLE_FORMATS),
    ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ahoy"}]}, SAMPLE_FORMATS),
    ({"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER | {"content": "Hi"}]}, PAIR_FORMATS),
    ({"chosen": [USER, ANSWER], "rejected": [USER, ANSWER | {"content": "Hi"}]}, PAIR_FORMATS),
    ({"prompt": [USER], "completion": [ANSWER], "label": True}, ANSWER_FORMATS),
])  # fmt: skip
def test_a_system_column_comes_first_in_every_format(row: dict[str, Any], formats: Any) -> None:
    expected = encode_chat(Chat([SYSTEM, USER, ANSWER]), tokenizer_of("chatml"))
    found = sides({**row, "system": SYSTEM["content"]}, formats)
    assert (found[0].ids, found[0].mask) == (expected.ids, expected.mask)
    assert all(one.ids[:20] == expected.ids[:20] and not one.remarks for one in found)


def test_a_system_column_beside_a_system_message() -> None:
    row = {"messages": [SYSTEM, USER, ANSWER], "system": SYSTEM["content"]}
    assert sides(row)[0].ids == encode_chat(Chat([SYSTEM, USER, ANSWER]), tokenizer_of("chatml")).ids
    with pytest.raises(DataError, match="`system` and the system message say different things"):
        sides({**row, "system": "Other."})
    with pytest.raises(DataError, match="`system` goes with messages"):
        sides({"prompt": "a", "completion": "b", "system": "Other."})


@pytest.mark.parametrize(("row", "said"), [
    ({"prompt": "a", "completion": "b", "label": False}, "`label` is false"),
    ({"messages": [USER, ANSWER], "label": False}, "`label` is false"),
    ({"instruction": "1 - 1?", "output": 0}, "`output` must be text, got 0"),
    ({"conversations": [{"from": "human", "value": None}]}, "needs `from` and `value`"),
    ({"messages": [USER, ANSWER], "loss_weight": 0.5}, "`loss_weight` is 0.5: .* Remove the column"),
    ({"messages": [USER, ANSWER], "weight": 0}, "`weight` is 0: .* Leave out such rows"),
    ({"prompt": "a", "completion": "b", "train": False}, "`train` is False: .* Leave out such rows"),
    ({"messages": [USER, ANSWER | {"train_detail": [{"begin_offset": 0}]}]}, "`train_detail` trains parts"),
    ({"messages": [USER, ANSWER | {"weight": 0, "train": True}]}, "`weight` and `train` contradict each other"),
    (
        {"messages": [USER, ANSWER], "tools": [{"name": "f"}], "functions": [{"name": "f"}]},
        "`tools` and `functions`",
    ),
])  # fmt: skip
def test_rows_that_cannot_be_obeyed_are_refused(row: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        sides(row)


WORD = st.sampled_from([f"word{number}" for number in range(99)])
VALUE = WORD | st.integers(2, 9) | st.booleans()
MORE = {"description": WORD, "enum": st.lists(VALUE, min_size=1), "default": VALUE, "nullable": VALUE, "title": WORD}
SCHEMA = st.recursive(
    st.fixed_dictionaries({"type": st.sampled_from(["string", "integer", "object"])}, optional=MORE),
    lambda one: (
        st.fixed_dictionaries({"type": st.just("object"), "properties": st.dictionaries(WORD, one, min_size=1)})
        | st.fixed_dictionaries({"type": st.just("array"), "items": one})
    ),
    max_leaves=3,
)
PARAMETERS = st.fixed_dictionaries({"type": st.just("object"), "properties": st.dictionaries(WORD, SCHEMA)})
FUNCTION = st.fixed_dictionaries(
    {"name": WORD, "description": WORD}, optional={"parameters": PARAMETERS, "strict": VALUE}
)
TOOL = st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTION}, optional={"cache": VALUE})
KEYS = st.dictionaries(st.sampled_from(["name", "note", "reasoning_content"]), VALUE | st.none(), max_size=1)
PART = st.fixed_dictionaries({"type": st.just("text"), "text": WORD}, optional={"cache": VALUE | st.none()})
CONTENT = WORD | st.lists(PART, min_size=1, max_size=2)


@st.composite
def conversations(draw: Any, tools: list[Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [SYSTEM] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 2))):
        messages.append({"role": "user", "content": draw(CONTENT)} | draw(KEYS))
        if tools and draw(st.booleans()):
            made = call(draw(st.dictionaries(WORD, VALUE, max_size=1)), tools[0]["function"]["name"])
            ids = draw(st.sampled_from([{"name": made["function"]["name"]}, {"tool_call_id": made["id"]}, {}]))
            made = made if draw(st.booleans()) else {"function": made["function"]}
            messages.append({"role": "assistant", "content": draw(st.none() | WORD), "tool_calls": [made]})
            messages.append({"role": "tool", "content": draw(CONTENT)} | ids)
        flag = draw(st.sampled_from([{}, {}, {"weight": 0}]))
        messages.append({"role": "assistant", "content": draw(CONTENT)} | draw(KEYS) | flag)
    return messages


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Any:
    """Yield the path of each value within `value`, and a copy of `value` with another value there."""
    if isinstance(value, dict | list):
        for place, inner in value.items() if isinstance(value, dict) else enumerate(value):
            for found, changed in leaves(inner, (*path, place)):
                yield found, _with(value, place, changed)
    elif isinstance(value, bool):
        yield path, not value
    elif value not in (None, "", "function", "object", "user", "assistant", "system", "tool", "text"):
        yield path, value + (1 if isinstance(value, int) else "other")


@pytest.mark.parametrize("template", ["qwen3", "gemma4", "gptoss", "muse_glimmer", "lfm2_2_5", "idefics3", "chatml"])
@settings(max_examples=25, derandomize=True, deadline=None)
@given(data=st.data())
def test_each_value_of_a_row_is_in_a_token_obeyed_or_named(template: str, data: Any) -> None:
    tools = data.draw(st.lists(TOOL, max_size=2)) if template not in ("idefics3", "chatml") else []
    label = data.draw(st.sampled_from([{}, {"label": True}, {"label": 0}, {"label": "bad"}]))
    row = {"messages": data.draw(conversations(tools)), "tools": tools, **label}
    try:
        (found,) = sides(row, template=template)
    except DataError:
        return
    assert [found] == sides(bare(row), template=template)
    named = " ".join(found.remarks)
    for path, changed in leaves(row):
        try:
            (other,) = sides(changed, template=template)
        except DataError:
            continue  # the value is read, or the change would not be refused
        is_left_out = "leaves out" in named or "after the last trained" in named
        is_named = any(f"`{key}`" in named for key in path) or (path[0] == "messages" and is_left_out)
        assert is_named or (other.ids, other.mask) != (found.ids, found.mask), (path, found.remarks)


@pytest.mark.parametrize("key", ["name", "cache"])
def test_a_null_counts_as_absent_on_one_side_of_a_pair(key: str) -> None:
    part = {"type": "text", "text": "Hi"}
    for first, other in ((USER, USER | {key: None}), ({"content": [part]}, {"content": [part | {key: None}]})):
        asked, told = USER | first, USER | other
        row = {"chosen": [asked, ANSWER], "rejected": [told, ANSWER | {"content": "Hi"}]}
        expected = {"chosen": [asked, ANSWER], "rejected": [asked, ANSWER | {"content": "Hi"}]}
        assert sides(row, PAIR_FORMATS) == sides(expected, PAIR_FORMATS)


def test_functions_are_tools() -> None:
    function = {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {}}}
    rows = [{"functions": [function]}, {"tools": [{"type": "function", "function": function}]}]
    first, second = (sides({"messages": [USER, ANSWER], **row}, template="qwen2_5")[0] for row in rows)
    assert first == second
