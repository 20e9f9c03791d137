"""Chats as tokens: equal to transformers for templates and tokenizers of every kind, with the right mask."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers
from transformers.utils import get_json_schema

from holdfast.chat.masking import Chat, encode_chat, encode_completion, encode_text
from holdfast.chat.template import _tell_the_date
from holdfast.chat.tokenizer import Tokenizer, _warn_of_what_is_left_out
from holdfast.config.data import SftDataConfig
from holdfast.errors import ConfigError, DataError
from holdfast.orchestrator.env.interface import Session
from holdfast.orchestrator.env.tools import Tool
from holdfast.process.child import DATE_ENV, keep_date
from holdfast.trainer.data.samples import chat_tokenizer, check_same_tokens, load_samples, load_tokenizer
from tests.models.chat_templates import KINDS, ODD, SPECIAL, TEMPLATES, make_chat_tokenizer, make_tokenizer
from tests.models.tool_templates import tool_templates
from tests.unit.orchestrator.env.test_environment_tools import WITH_TOOLS, add, block

_WORDS = ["a", "fox", "The dog", "It is 12.", "  ", "\n", "é", "東京", "😀", "###", "12", *SPECIAL[3:6], "</s>"]
_TEXTS = st.lists(st.sampled_from(_WORDS), max_size=5).map("".join) | st.text(max_size=6)


@cache
def tokenizers_of(kind: str, template: str, adds_bos: bool) -> tuple[Any, Tokenizer]:
    theirs = make_tokenizer(kind, (TEMPLATES | ODD).get(template, template), adds_bos=adds_bos)
    return theirs, chat_tokenizer(theirs)


@st.composite
def chats(draw: st.DrawFn) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": draw(_TEXTS)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(_TEXTS)})
        messages.append({"role": "assistant", "content": draw(_TEXTS)})
    return messages


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=25, derandomize=True)
@given(messages=chats(), adds_bos=st.booleans(), train_on=st.sampled_from(["all", "last"]))
def test_a_chat_has_the_tokens_of_transformers_or_is_refused(
    kind: str, template: str, messages: list[dict[str, str]], adds_bos: bool, train_on: Any
) -> None:
    theirs, ours = tokenizers_of(kind, template, adds_bos)
    try:
        encoded = encode_chat(Chat(messages), ours, train_on=train_on)
    except DataError as error:
        assert any(reason in str(error) for reason in REASONS), error
        return
    assert encoded.ids == theirs.apply_chat_template(messages, return_dict=False)
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    spans = spans_of(encoded.mask)
    prompts = []
    for number in turns if train_on == "all" else turns[-1:]:
        prompt = theirs.apply_chat_template(messages[:number], add_generation_prompt=True, return_dict=False)
        assert ours.prompt(messages[:number]) == prompt, "what rl feeds"
        assert encoded.ids[: len(prompt)] == prompt
        prompts.append(len(prompt))
    assert [start for start, _ in spans] == prompts, "every trained turn begins where its prompt ends"
    for number, (start, end) in zip(turns if train_on == "all" else turns[-1:], spans, strict=True):
        said = "".join(ours.decode(encoded.ids[start:end], skip_special_tokens=False).split())
        if kind != "wordpiece":  # which does not give back every text
            assert "".join(messages[number]["content"].split()) in said


REASONS = (
    "System role not supported", "Only user and assistant roles", "the tokenizer joins the end of its prompt",
    "the generation prompt of the chat template ends with '<think>", "takes the thoughts out", "changes earlier turns",
    "leaves out part",
)  # fmt: skip


def spans_of(mask: list[bool]) -> list[tuple[int, int]]:
    """Return the (first, one after the last) of the stretches that are trained."""
    around = [False, *mask, False]
    edges = [place for place in range(len(mask) + 1) if around[place] != around[place + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_chat_is_refused_only_for_a_reason(kind: str) -> None:
    messages = [*chat("What is it?", "It is 12."), *chat("The dog", "The fox.")]
    for template in TEMPLATES:
        theirs, ours = tokenizers_of(kind, template, True)
        if template == "opened" or (template, kind) == ("llama 3", "byte-level"):
            with pytest.raises(DataError, match="ends with '<think>|joins the end of its prompt"):
                encode_chat(Chat(messages), ours)
            continue
        encoded = encode_chat(Chat(messages), ours)
        assert encoded.ids == theirs.apply_chat_template(messages, return_dict=False)
        said = [ours.decode(encoded.ids[start:end]).strip() for start, end in spans_of(encoded.mask)]
        said = [text.removeprefix("<think>").strip().removeprefix("</think>").strip() for text in said]
        assert said == ["It is 12.", "The fox."]


def chat(question: object, answer: object, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}]


THOUGHT = chat("What?", "<think>\nLet me think.\n</think>\n\nIt is 12.")


def trained(kind: str, template: str, row: Chat, train_on: Any = "all") -> list[str]:
    """Return the trained stretches as text, with special tokens."""
    _, ours = tokenizers_of(kind, template, False)
    encoded = encode_chat(row, ours, train_on=train_on)
    return [ours.decode(encoded.ids[start:end], skip_special_tokens=False) for start, end in spans_of(encoded.mask)]


@pytest.mark.parametrize(("template", "opened", "why"), [
    ("qwen 3", "<think>\n", "takes the thoughts out of earlier turns"), ("opened", "", ""),
])  # fmt: skip
def test_stripped_thoughts_are_refused_and_the_last_turn_works(template: str, opened: str, why: str) -> None:
    with pytest.raises(DataError, match=rf"message 2(.|\n)*{why}(.|\n)*data.train_on = last"):
        trained("byte-level", template, Chat([*THOUGHT, *THOUGHT]))
    expected = [f"{opened}Let me think.\n</think>\n\nIt is 12.<|im_end|>\n"]
    assert trained("byte-level", template, Chat([*THOUGHT, *THOUGHT]), "last") == expected
    if template == "qwen 3":
        apart = Chat(chat("What?", "It is 12.", reasoning_content="Let me think."))
        assert trained("byte-level", template, apart) == expected


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


def call(arguments: object) -> dict[str, Any]:
    return {"id": "callcall0", "type": "function", "function": {"name": "weather", "arguments": arguments}}


@pytest.mark.parametrize("template", ["hermes", "qwen 3"])
@pytest.mark.parametrize("arguments", [{"city": "東京"}, '{"city": "東京"}'], ids=["object", "text"])
def test_tools_and_calls_are_rendered_as_transformers_does(template: str, arguments: object) -> None:
    theirs, ours = tokenizers_of("byte-level", template, False)

    def messages(arguments: object) -> list[dict[str, Any]]:
        asked = {"role": "assistant", "content": "" if template == "qwen 3" else None, "tool_calls": [call(arguments)]}
        return [*chat("Hot?", "")[:1], asked, {"role": "tool", "content": "12"}, *chat("", "It is 12.")[1:]]

    encoded = encode_chat(Chat(messages(arguments), tools=TOOLS), ours)
    assert encoded.ids == theirs.apply_chat_template(messages({"city": "東京"}), tools=TOOLS, return_dict=False)
    assert '{"type": "function", "function": {"name": "weather"' in ours.decode(encoded.ids, skip_special_tokens=False)
    first, second = (ours.decode(encoded.ids[start:end]) for start, end in spans_of(encoded.mask))
    assert "<tool_call>" in first and '"arguments": {"city": "東京"}' in first and "It is 12." in second


def test_a_null_content_becomes_empty_text_where_the_template_would_write_none() -> None:
    row = Chat(chat("a", None, tool_calls=[call({"city": "Rom"})]))
    (said,) = trained("byte-level", "writes None", row)
    assert "None" not in said and "weather" in said
    assert trained("byte-level", "writes None", Chat(chat("a", "", tool_calls=[call({"city": "Rom"})]))) == [said]


CHANGING = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' and not loop.last %}{{ '<think>' }}{% endif %}"
    "{{ message.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}{% endif %}"
)


@pytest.mark.parametrize(("template", "row", "said"), [
    ("chatml", Chat(THOUGHT, tools=TOOLS), "`tools`, which the chat template .* does not write"),
    ("chatml", Chat(chat("a", "b", tool_calls=[call({})])), "message 2 has `tool_calls`"),
    ("chatml", Chat(chat([{"type": "image"}], "b")), "message 1: only text can be trained"),
    ("qwen 3", Chat(THOUGHT, options={"enable_thinkng": False}), "does not read. Did you mean 'enable_thinking'"),
    ("qwen 3", Chat(THOUGHT, options={"tools": TOOLS}), "must not hold `tools`: it has a column of its own"),
    ("deepseek r1", Chat(THOUGHT), r"message 2: the chat template leaves out part .* \(thoughts"),
    (CHANGING, Chat([*chat("a", "It is 12."), *chat("b", "The fox.")]), "message 2: .*changes earlier turns once"),
])  # fmt: skip
def test_what_a_template_would_silently_leave_out_or_change_is_refused(template: str, row: Chat, said: str) -> None:
    with pytest.raises(DataError, match=said):
        trained("byte-level", template, row)


def test_what_a_template_leaves_out_of_rows_that_can_be_trained() -> None:
    messages = [*chat("a", "It is 12."), *chat("b", "The fox.")]
    assert trained("byte-level", "marked", Chat(messages)) == ["It is 12.<|im_end|>\n", "The fox.<|im_end|>\n"]
    parts = [{"type": "text", "text": "It is"}, {"type": "text", "text": " 12."}]
    assert trained("byte-level", "chatml", Chat(chat("a", parts))) == ["It is 12.<|im_end|>\n"]
    _, ours = tokenizers_of("byte-level", "chatml", False)
    remarks = encode_chat(Chat(chat("a", "b", wait=0)), ours).remarks
    assert remarks == ("messages have `wait`, which the chat template does not read",)
    without_ends = chat_tokenizer(make_tokenizer("byte-level", _GLM_4, adds_bos=True))
    (remark,) = encode_chat(Chat(messages), without_ends).remarks
    assert "does not learn to stop" in remark
    assert not encode_chat(Chat(chat("a", "It is 12.</s>")), without_ends).remarks


def test_calls_are_given_to_a_template_in_the_form_that_it_reads() -> None:
    """With or without `function` around the function, its arguments as an object or as text."""
    _, ours = tokenizers_of("byte-level", "calls as text", False)
    as_text = '{"city": "東京"}'
    function = {"name": "weather", "arguments": {"city": "東京"}}
    for asked in (call({"city": "東京"}), call(as_text), function, function | {"arguments": as_text}):
        encoded = encode_chat(Chat(chat("a", "", tool_calls=[asked])), ours)
        said = ours.decode([token for token, is_trained in zip(encoded.ids, encoded.mask, strict=True) if is_trained])
        assert said == f"<call>weather {as_text}</call>\n", asked


def test_variables_of_the_template_come_from_the_row() -> None:
    theirs, ours = tokenizers_of("llama 3", "qwen 3", False)
    encoded = encode_chat(Chat(chat("a", "It is 12."), options={"enable_thinking": False}), ours)
    assert encoded.ids == theirs.apply_chat_template(chat("a", "It is 12."), enable_thinking=False, return_dict=False)
    ((start, _),) = spans_of(encoded.mask)
    assert encoded.ids[:start] == ours.prompt([{"role": "user", "content": "a"}], options={"enable_thinking": False})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adds_bos", [True, False])
def test_text_has_one_bos_and_no_blank_inside(kind: str, adds_bos: bool) -> None:
    theirs, ours = tokenizers_of(kind, "chatml", adds_bos)
    prompt, completion = "The dog:", "It is 12."
    whole = theirs(prompt + completion)["input_ids"]
    if kind == "wordpiece" and adds_bos:
        assert whole.pop() == ours.eos_token_id, "the end that BERT adds comes once, at the very end"
    encoded = encode_completion(prompt, completion, ours)
    assert encoded.ids == [*whole, ours.eos_token_id]
    start = encoded.mask.index(True)
    assert encoded.ids[:start] == ours.text_prompt(prompt), "what rl feeds for Task(prompt=text)"
    assert ours.text_prompt(f"<s>{prompt}").count(whole[0]) == 1 or not adds_bos
    assert encode_text(prompt + completion, ours).ids == encoded.ids and all(encode_text("a", ours).mask)


@pytest.mark.parametrize("kind", ["metaspace-first", "metaspace-always", "sentencepiece", "byte-level"])
def test_a_completion_that_joins_the_prompt_is_tokenised_alone_and_reads_the_same(kind: str) -> None:
    _, ours = tokenizers_of(kind, "chatml", True)
    encoded = encode_completion("The qui", "ck brown", ours)
    assert encoded.ids[: encoded.mask.index(True)] == ours.text_prompt("The qui")
    assert ours.decode(encoded.ids) == "The quick brown"
    _, wordpiece = tokenizers_of("wordpiece", "chatml", True)
    with pytest.raises(DataError, match="joins the end of the prompt"):
        encode_completion("The qui", "ck brown", wordpiece)


@pytest.mark.parametrize("kind", KINDS)
def test_a_session_that_goes_on_has_the_tokens_of_the_whole_chat(kind: str) -> None:
    for template in ("chatml", "gemma", "zephyr", "hermes", "marked"):
        theirs, ours = tokenizers_of(kind, template, True)
        messages = [*chat("What is it?", "It is 12."), {"role": "user", "content": "The dog"}]
        encoded = encode_chat(Chat(messages[:2]), ours)
        sampled = encoded.ids[encoded.mask.index(True) :]
        stop = next(place for place, token in enumerate(sampled) if token in ours.stop_token_ids)
        session = [*ours.prompt(messages[:1]), *sampled[: stop + 1]]
        session += ours.continuation(messages[2:], last_token_id=session[-1])
        assert session == theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False), template


_LLAMA_2 = """{% for message in messages %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""  # noqa: E501
_GLM_4 = """{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}{% endfor %}\
{% if add_generation_prompt %}<|assistant|>{% endif %}"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_that_the_policy_closed_is_not_closed_again_and_what_closes_it_stops_sampling(kind: str) -> None:
    """Llama 2 writes a blank before the token that closes a turn, which the policy need not sample."""
    ours = chat_tokenizer(make_tokenizer(kind, _LLAMA_2, adds_bos=True))
    closed = ours.continuation([{"role": "user", "content": "The dog"}], last_token_id=ours.eos_token_id or 0)
    assert ours.eos_token_id not in closed
    assert ours.decode(closed, skip_special_tokens=False).lstrip().startswith("<s>")
    still_open = ours.continuation([{"role": "user", "content": "The dog"}], last_token_id=ours.encode("dog")[-1])
    assert still_open.count(ours.eos_token_id or 0) == 1 and still_open[-len(closed) :] == closed
    template = "{% for message in messages %}<|{{ message.role }}|> {{ message.content }} \n<|end|>{% endfor %}"
    ours = chat_tokenizer(make_tokenizer(kind, template, adds_bos=True))
    assert ours.encode("<|end|>")[-1] in ours.stop_token_ids and len(ours.stop_token_ids) == 2


def test_what_a_template_would_leave_out_of_a_session_is_refused_or_told(caplog: pytest.LogCaptureFixture) -> None:
    _warn_of_what_is_left_out.cache_clear()
    ours = chat_tokenizer(make_tokenizer("byte-level", _LLAMA_2, adds_bos=True))
    with pytest.raises(DataError, match="leaves out what messages of role `tool` say"):
        ours.continuation([{"role": "tool", "content": "It is 12."}], last_token_id=1)
    with pytest.raises(DataError, match="message 2 has `tool_calls`"):
        ours.prompt([*chat("a", "b", tool_calls=[call({})]), *chat("c", "")[:1]])
    ours.prompt([{"role": "system", "content": "The fox."}, *chat("a", "")[:1]])
    assert "leaves out what messages of role `system` say" in caplog.text
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    ours = chat_tokenizer(make_tokenizer("byte-level", template, adds_bos=True))
    with pytest.raises(DataError, match="adds nothing after an assistant's turn.*use append_text"):
        ours.continuation([{"role": "user", "content": ""}], last_token_id=1)


def test_a_template_that_writes_the_date_writes_that_of_its_run_and_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    _tell_the_date.cache_clear()
    template = "Of {{ strftime_now('%Y') }}. {% for message in messages %}{{ message.content }}{% endfor %}"
    ours = chat_tokenizer(make_tokenizer("byte-level", template, adds_bos=False))
    for _ in range(2):
        assert re.fullmatch(r"Of 20\d\d\. a", ours.render([{"role": "user", "content": "a"}], open_turn=False))
    assert caplog.text.count("writes a date into the prompts: 20") == 1
    monkeypatch.setenv(DATE_ENV, "")  # what `keep_date` sets goes with the test
    keep_date(86_400 * 400)
    assert ours.render([{"role": "user", "content": "a"}], open_turn=False) == "Of 1971. a"


def test_a_tokenizer_without_a_template_or_a_fast_backend() -> None:
    backend = make_tokenizer("byte-level", "", adds_bos=False).backend_tokenizer
    plain = Tokenizer(backend, name="plain", templates=None, special={})
    assert (plain.stop_token_ids, encode_text("a", plain).ids) == ([], plain.encode("a")), "no token ends a text"
    several = Tokenizer(backend, name="several", templates={"rag": "{{ messages }}", "tool_use": "a"}, special={})
    assert several.template(TOOLS).source == "a"
    with pytest.raises(ConfigError, match=r"several chat templates and none is named `default`: rag, tool_use\. Name"):
        several.template()

    class Slow:
        name_or_path = "a/model"

    with pytest.raises(DataError, match="the tokenizer 'a/model' is a Slow, which has no tokenizer.json"):
        chat_tokenizer(Slow())  # type: ignore[arg-type]


@pytest.mark.parametrize(("as_class", "kind", "said"), [
    ("LlamaTokenizerFast", "byte-level", r"a text reads 'Thedog's12345apples' instead of 'The dog's 12345 apples'"),
    ("GemmaTokenizer", "sentencepiece", "it makes other tokens of 'The dog's 12345 apples'"),
    ("Qwen2Tokenizer", "byte-level", "it makes other tokens of"),
    ("GPT2Tokenizer", "llama 3", "it makes other tokens of 'def f"), ("LlamaTokenizer", "sentencepiece", None),
    ("LlamaTokenizer", "metaspace-first", ""), ("BertTokenizer", "byte-level", "a text reads"),
])  # fmt: skip
def test_tokenizers_that_transformers_builds_otherwise_are_refused(
    as_class: str, kind: str, said: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """None: only around special tokens, which `rl` refuses and the other programs report."""
    model, data = str(tmp_path), tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"prompt": "Say it", "completion": "  Hello! I am 12.\n\ta <s> cat 😀"}))
    config = SftDataConfig(name=str(data), batch_size=1)
    path = tmp_path / "tokenizer_config.json"
    make_tokenizer(kind, TEMPLATES["chatml"], adds_bos=False).save_pretrained(tmp_path)

    def check(as_class: str) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": as_class}))
        load_samples(config, load_tokenizer(model), seed=0)

    check(as_class="TokenizersBackend")
    check_same_tokens(load_tokenizer(model), model)
    if said:
        with pytest.raises(ConfigError, match=f"{said}.*names the class {as_class}.*this was tried"):
            check(as_class)
        assert "WARNING" not in caplog.text
    else:
        check(as_class)
        assert (f"loads '{model}' differently" in caplog.text) == (said is None)
    if said != "":
        with pytest.raises(ConfigError, match=r'write "tokenizer_class": "PreTrainedTokenizerFast"'):
            check_same_tokens(load_tokenizer(model), model)
    check(as_class="PreTrainedTokenizerFast")  # the remedy
    check_same_tokens(load_tokenizer(model), model)


def test_first_rows_are_compared_as_well(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("byte-level", "", adds_bos=False)
    tokenizer.save_pretrained(tmp_path)
    tokenizer.name_or_path = str(tmp_path)
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("zebra", "horse")
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"prompt": "a", "completion": "A zebra."}) + "\n")
    with pytest.raises(ConfigError, match=r"reads 'A horse.' instead of 'A zebra.'"):
        load_samples(SftDataConfig(name=str(data), batch_size=1), tokenizer, seed=0)


def test_a_class_that_cannot_load_the_file_is_an_error_in_words(tmp_path: Path) -> None:
    make_tokenizer("byte-level", "", adds_bos=False).save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T5Tokenizer"}))
    with pytest.raises(DataError, match="no tokenizer could be loaded.*names the right class"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_that_ends_texts_or_chats_in_another_way_is_refused_by_rl(tmp_path: Path) -> None:
    make_tokenizer("byte-level", TEMPLATES["chatml"], adds_bos=False).save_pretrained(tmp_path)
    for name, value, said in (
        ("eos_token", "<|end|>", "another token that ends a text"),
        ("chat_template", "{{ raise_exception('No.') }}", "other tokens of a chat"),
    ):
        theirs = load_tokenizer(str(tmp_path))
        setattr(theirs, name, value)
        with pytest.raises(ConfigError, match=said):
            check_same_tokens(theirs, str(tmp_path))


@pytest.mark.parametrize("template", WITH_TOOLS)
def test_a_chat_with_tools_has_the_tokens_of_transformers(template: str) -> None:
    kind = "byte-level" if template in ("mistral_v3", "hermes") else "llama 3"
    text = tool_templates()[template]
    theirs, ours = (make(kind, text, adds_bos=True) for make in (make_tokenizer, make_chat_tokenizer))
    schemas = [Tool(function, session_class=Session).schema for function in (add, block)]
    added = {"id": "t00010001", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    result = {"role": "tool", "name": "add", "content": "3", "tool_call_id": added["id"]}
    messages = [*chat("What is 1 + 2?", "", tool_calls=[added]), result]
    for some in (messages[:1], messages):
        rendered = theirs.apply_chat_template(some, tools=schemas, add_generation_prompt=True, return_dict=False)
        assert ours.prompt(some, tools=schemas) == rendered


def test_a_schema_is_what_transformers_makes_of_the_function() -> None:
    def every(
        text: str, number: float, flag: bool, words: list[str], table: dict[str, int], kind: Literal["a", "b"] = "a"
    ):
        """Take every kind of argument.
        In two lines.

        Args:
            text: a text.
            number: a number.
            flag: a flag.
            words: some words.
            table: a table.
            kind: a kind.

        Returns:
            Nothing."""

    for function in (every, block):
        theirs = get_json_schema(function)
        theirs["function"].pop("return", None)  # which templates leave out
        ours = Tool(function, session_class=Session).schema
        assert ours == theirs and list(ours["function"]) == list(theirs["function"])
    theirs, ours = get_json_schema(add), Tool(add, session_class=Session).schema
    theirs["function"].pop("return")
    assert json.dumps(ours) == json.dumps(theirs), "the policy is shown the very same text"


_ONLY_PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("form", ["text", "parts", "image"])
def test_templates_of_vision_models_get_text_parts(form: str) -> None:
    ours = make_chat_tokenizer("byte-level", _ONLY_PARTS, adds_bos=False)
    parts = {"text": "Say it", "parts": [{"type": "text", "text": "Say it"}], "image": [{"type": "image"}]}
    asked: dict[str, Any] = {"role": "user", "content": parts[form]}
    if form == "image":
        for encode in (ours.prompt, lambda messages: encode_chat(Chat([*messages, _answer("It.")]), ours)):
            with pytest.raises(DataError, match="only text can be trained, got the part {'type': 'image'}"):
                encode([asked])
        return
    assert ours.decode(ours.prompt([asked]), skip_special_tokens=False).endswith(
        "user\nSay it<|im_end|><|im_start|>assistant\n"
    )
    encoded = encode_chat(Chat([asked, _answer("It.")]), ours)
    (span,) = spans_of(encoded.mask)
    assert ours.decode(encoded.ids[slice(*span)], skip_special_tokens=False) == "It.<|im_end|>"


def _answer(said: str) -> dict[str, Any]:
    return {"role": "assistant", "content": said}


@pytest.mark.parametrize("said", ["a", "a</s>", "a</s>\n", "a<|im_end|>", "</s> a"])
def test_a_trained_turn_with_two_end_tokens_is_told(said: str) -> None:
    ours = make_chat_tokenizer("byte-level", TEMPLATES["chatml"], adds_bos=False)
    chat = encode_chat(Chat([{"role": "user", "content": "q"}, _answer(said)]), ours)
    texts = [encode_text(said, ours), encode_completion("q ", said, ours)]
    told = [any("ends twice" in remark for remark in encoded.remarks) for encoded in (chat, *texts)]
    is_twice = said.startswith("a<")
    assert told == [is_twice, *2 * [is_twice and said != "a</s>"]], "EOS after a text is not added again"
    ends_twice = TEMPLATES["chatml"].replace("<|im_end|>", "<|im_end|></s>")
    by_template = make_chat_tokenizer("byte-level", ends_twice, adds_bos=False)
    chat = encode_chat(Chat([{"role": "user", "content": "q"}, _answer(said)]), by_template)
    assert any("ends twice" in remark for remark in chat.remarks) == ("<" in said)
