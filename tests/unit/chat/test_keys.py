"""Keys of messages and columns of rows: each is read, obeyed, refused, or named as left out."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.chat.masking import Chat, Encoded, encode_chat
from holdfast.config.training import SftDataConfig
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
    assert [*remarks] == [
        "text parts have `cache`, which the chat template does not read",
        "messages after the last trained answer are left out",
    ]
    (side,) = sides({"messages": [USER, ANSWER], "source": "web", "null": None})
    assert side.remarks == ("the column `source` is not read",)


@pytest.mark.parametrize(
    ("row", "formats"),
    [
        ({"messages": [USER, ANSWER]}, SAMPLE_FORMATS),
        ({"prompt": [USER], "completion": [ANSWER]}, SAMPLE_FORMATS),
        ({"prompt": [], "completion": [USER, ANSWER]}, SAMPLE_FORMATS),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ahoy"}]}, SAMPLE_FORMATS),
        ({"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER | {"content": "Hi"}]}, PAIR_FORMATS),
        ({"chosen": [USER, ANSWER], "rejected": [USER, ANSWER | {"content": "Hi"}]}, PAIR_FORMATS),
        ({"prompt": [USER], "completion": [ANSWER], "label": True}, ANSWER_FORMATS),
    ],
)
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


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a", "completion": "b", "label": False}, "`label` is false"),
        ({"messages": [USER, ANSWER], "label": False}, "`label` is false"),
        ({"messages": [USER, ANSWER], "loss_weight": 0.5}, "`loss_weight` is 0.5"),
        ({"messages": [USER, ANSWER | {"train_detail": [{"begin_offset": 0}]}]}, "`train_detail` trains parts"),
        ({"messages": [USER, ANSWER | {"weight": 0, "train": True}]}, "`weight` and `train` contradict each other"),
        (
            {"messages": [USER, ANSWER], "tools": [{"name": "f"}], "functions": [{"name": "f"}]},
            "`tools` and `functions`",
        ),
    ],
)
def test_rows_that_cannot_be_obeyed_are_refused(row: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        sides(row)


def test_functions_are_tools() -> None:
    function = {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {}}}
    rows = [{"functions": [function]}, {"tools": [{"type": "function", "function": function}]}]
    first, second = (sides({"messages": [USER, ANSWER], **row}, template="qwen2_5")[0] for row in rows)
    assert first == second
