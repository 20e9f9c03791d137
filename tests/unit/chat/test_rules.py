"""Rules of chat templates: a refusal names the rule and a change that works, in `sft` and in prompts of `rl`."""

from typing import Any

import pytest

from holdfast.chat.masking import Chat, encode_chat
from holdfast.config.data import SftDataConfig
from holdfast.errors import DataError, EnvironmentFailure
from holdfast.orchestrator.env.guard import prompt_ids_of
from holdfast.orchestrator.env.interface import Task
from holdfast.trainer.data.formats import PAIR_FORMATS, SAMPLE_FORMATS, find_format
from tests.unit.chat.test_keys import ANSWER, SYSTEM, USER, sides
from tests.unit.chat.test_tool_calls import tokenizer_of

NO_SYSTEM = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
    "\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is not defined or enable_thinking %}"
    "<think>{% endif %}{% endif %}"
)


@pytest.mark.parametrize(("template", "row", "said"), [
    ("gemma", [ANSWER, USER, ANSWER], "must alternate.* a message of the user before the first"),
    ("gemma4", [ANSWER, USER, ANSWER], r"a chat of \[\].* a message of the user before the first"),
    ("gemma", [USER, USER, ANSWER], "must alternate.* one role after another joined"),
    ("gemma", [SYSTEM, USER, ANSWER], "System role not supported.* into the first message of the user"),
    ("gemma3", [SYSTEM, ANSWER], "must alternate.* a message of the user before the first"),
    (THINKS, [USER, ANSWER], "data.chat_template_kwargs = {enable_thinking = false}"),
    ("{{ messages[0].nothing.at_all }}", [USER, ANSWER], "has no attribute.* without this rule: name the"),
])  # fmt: skip
def test_a_refusal_names_a_change_that_works(template: str, row: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(DataError, match=f"(?s){said}"):
        encode_chat(Chat(row), tokenizer_of(template))


def test_variables_for_the_whole_file_and_of_a_row() -> None:
    row = {"messages": [USER, ANSWER]}
    off = SftDataConfig(chat_template_kwargs={"enable_thinking": False})
    on = SftDataConfig(chat_template_kwargs={"enable_thinking": True})
    form, tokenizer = find_format(row, SAMPLE_FORMATS, name="a"), tokenizer_of(THINKS)
    (by_file,) = form.encode(row, tokenizer, off)
    (by_row,) = form.encode(row | {"chat_template_kwargs": {"enable_thinking": False}}, tokenizer, on)
    assert by_file.ids == by_row.ids and not by_file.remarks
    with pytest.raises(DataError, match="goes with messages"):
        find_format({"text": "a"}, SAMPLE_FORMATS, name="a").encode({"text": "a"}, tokenizer, off)


def test_a_begun_answer_at_the_end_of_a_prompt_is_refused() -> None:
    for more, formats in (
        ({"completion": [ANSWER]}, SAMPLE_FORMATS),
        ({"chosen": [ANSWER], "rejected": [ANSWER]}, PAIR_FORMATS),
    ):
        with pytest.raises(DataError, match="the prompt ends with a message of the assistant"):
            sides({"prompt": [USER, ANSWER], **more}, formats)
    with pytest.raises(EnvironmentFailure, match="ends with a message of the assistant"):
        prompt_ids_of(Task(prompt=[USER, ANSWER]), tokenizer_of("chatml"), what="task 0", seq_len=99)


def test_a_prompt_that_the_template_leaves_out_is_refused() -> None:
    with pytest.raises(EnvironmentFailure, match="leaves out what messages of role `system` say.*model.chat_template"):
        prompt_ids_of(Task(prompt=[SYSTEM, USER]), tokenizer_of(NO_SYSTEM), what="task 0", seq_len=99)
    assert prompt_ids_of(Task(prompt=[SYSTEM, USER]), tokenizer_of("chatml"), what="task 0", seq_len=999)
    with pytest.raises(EnvironmentFailure, match="System role not supported. Change the messages, or use another"):
        prompt_ids_of(Task(prompt=[SYSTEM, USER]), tokenizer_of("gemma"), what="task 0", seq_len=99)
