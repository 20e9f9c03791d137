"""Supervised samples: formats and files, lengths, order, rows on several cores, and what is refused or told of them."""

import copy
import json
import logging
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from holdfast.config import DpoConfig, RewardTrainingConfig, SftConfig
from holdfast.config.data import MixedDataConfig, SftDataConfig
from holdfast.config.preference import PreferenceDataConfig
from holdfast.config.training import SupervisedCommand
from holdfast.errors import DataError, HoldfastError, ProcessDied
from holdfast.run.inputs import Survey
from holdfast.trainer.data import tokenizing
from holdfast.trainer.data.formats import SAMPLE_FORMATS, find_format
from holdfast.trainer.data.packing import Sample
from holdfast.trainer.data.samples import (
    MixedOrder,
    SampleOrder,
    chat_tokenizer,
    fingerprint_samples,
    load_samples,
    load_tokenizer,
    order_of,
)
from holdfast.trainer.data.tokenizing import workers_of_this_rank
from holdfast.trainer.preference.pairs import load_pairs
from holdfast.trainer.survey import take_survey, tell_data
from tests.builders.toy import DATA, MODEL, PAIRS
from tests.conftest import ModelFactory
from tests.models.chat_templates import make_tokenizer

Tokenizer = PreTrainedTokenizerBase
USER, HELLO = {"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}
TEXT_ROWS = [{"prompt": f"{k}>", "completion": "x" * (k + 1)} for k in range(6)]


def trained_text(sample: Sample, tokenizer: Tokenizer) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(sample.token_ids[sample.loss_mask].tolist()))


def tokenize_row(row: dict[str, Any], tokenizer: Tokenizer) -> Sample:
    """Return the sample of one row, as `load_samples` makes it."""
    chat = chat_tokenizer(tokenizer)
    (encoded,) = find_format(row, SAMPLE_FORMATS, name="data.jsonl").encode(row, chat, SftDataConfig())
    return Sample(np.array(encoded.ids), np.array(encoded.mask))


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path: Path, tokenizer: Tokenizer, **config: Any) -> list[Sample]:
    return load_samples(SftDataConfig(name=str(path), **config), tokenizer, seed=0)[0]


def refused(path: Path, tokenizer: Tokenizer, **config: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(path, tokenizer, **config)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(("name", "content", "said"), [
    ("gone.parquet", None, r"/gone\.parquet"), ("gone", None, "/gone"), ("a.txt", b"text", r"use a \.jsonl, \.json, "),
    ("broken.jsonl", b'{"prompt": "a", "completion": ', r"broken\.jsonl"),
    ("broken.parquet", b"PAR1 but not really", r"broken\.parquet"), ("empty.jsonl", b"", r"empty\.jsonl"),
    ("a.json", b'[{"text": "a"}, 3]', "row 2 is int, expected an object with columns"),
    ("a.json", b'[{"text": "a"}, ', "is not a JSON array: "),
    ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', "row 3 is not JSON"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "caf\xe9"}\n', "row 2 is not UTF-8: invalid .* byte 0xe9 at byte 13"),
    ("a.jsonl.gz", b"no gzip", "is not compressed by gzip"),
    ("a.jsonl.gz", b"\x1f\x8b but no more", "could not be read"),
])  # fmt: skip
def test_what_is_no_dataset(name: str, content: bytes | None, said: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert re.search(said, refused(tmp_path / name, tokenizer))


def test_an_empty_directory_missing_columns_and_messages_are_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    assert "directory" in refused(tmp_path / "directory", tokenizer)
    message = refused(write(tmp_path / "a.jsonl", [{"question": "q", "answer": "a"}]), tokenizer)
    assert all(part in message for part in ("a.jsonl", "['answer', 'question']", "messages", "prompt", "completion"))
    rows = [{"messages": [USER, HELLO]}, {"messages": None, "prompt": "a", "completion": "b"}, {"messages": None}]
    said = refused(write(tmp_path / "a.jsonl", rows), tokenizer)
    assert "row 2: it has no `messages`; it has `prompt`, `completion`" in said
    assert "row 3: it has no `messages`; it has nothing else" in said


def test_rows_of_other_programs_are_refused_with_the_way_out(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for row, said in (
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "which `dpo` and `reward-model` train"),
        ({"instruction": "a", "context": "b", "response": "c"}, "Rename `context` to `input`, and `response`"),
        ({"instruction": "a", "context": "b", "output": "c"}, "Rename `context` to `input`"),
    ):
        assert said in refused(write(tmp_path / "a.jsonl", [row]), tokenizer)
    row = {"conversations": [], "chosen": {"from": "gpt", "value": "a"}, "rejected": {"from": "gpt", "value": "b"}}
    with pytest.raises(DataError, match="holds pairs of LLaMA-Factory. Write `conversations` as `prompt`"):
        load_pairs(SftDataConfig(name=str(write(tmp_path / "b.jsonl", [row]))), tokenizer)


def test_samples_that_are_too_long(tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "a.jsonl", TEXT_ROWS)
    message = refused(path, tokenizer, seq_len=7)
    for part in ("2 of 6 rows", "row 5: ", "row 6: ", "8 tokens", "data.seq_len is 7", "data.too_long"):
        assert part in message
    for too_long, seq_len, lengths in (
        ("refuse", 9, [4, 5, 6, 7, 8, 9]),
        ("drop", 7, [4, 5, 6, 7]),
        ("truncate", 7, [4, 5, 6, 7, 7, 7]),
    ):
        kept = load(path, tokenizer, seq_len=seq_len, **({} if too_long == "refuse" else {"too_long": too_long}))
        assert [len(sample.token_ids) for sample in kept] == lengths, too_long
    assert trained_text(kept[-1], tokenizer) == "xxxxx"
    for done in ("dropped", "cut"):
        assert f"samples of more than 7 tokens are {done} (2 rows, the first: row 5)" in caplog.text
    said = refused(path, tokenizer, seq_len=7, too_long="drop", strict=True)
    assert "a.jsonl: samples of more than 7 tokens are dropped (2 rows, the first: row 5)\n       data.strict" in said
    for too_long, why in (("drop", "have more than 2 tokens and were dropped"), ("truncate", "were cut before their")):
        said = refused(path, tokenizer, seq_len=2, too_long=too_long)
        assert f"no samples to train on are left of 6: all {why}" in said


@pytest.mark.parametrize(("template", "said"), [
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{{ messages | no_such_filter }}", "No filter named"),
    ("{{ messages[-1]['content'] }}", "changes earlier turns"),
    (None, "no chat template"),
])  # fmt: skip
def test_bad_templates_are_told(template: str | None, said: str, tiny_model: ModelFactory, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_model()))
    tokenizer.chat_template = template
    with pytest.raises(HoldfastError, match=said) as caught:
        load(write(tmp_path / "a.jsonl", [{"messages": [USER, HELLO]}]), tokenizer)
    assert caught.value.exit_code == 2
    with pytest.raises(DataError, match="model.tokenizer"):
        load_tokenizer(str(tmp_path / "nowhere"))


def test_validation_samples_are_held_out_by_the_seed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "a", "completion": f"{k:03}"} for k in range(40)])

    def split(seed: int) -> list[list[str]]:
        parts = load_samples(SftDataConfig(name=str(path), validation_fraction=0.25), tokenizer, seed=seed)
        return [[trained_text(sample, tokenizer) for sample in part] for part in parts]

    training, held_out = split(0)
    assert len(held_out) == 10 and len(training) == 30
    assert sorted(training + held_out) == sorted(f"{k:03}<|end|>" for k in range(40))
    assert split(0) == [training, held_out] and split(1)[1] != held_out
    few = load_samples(SftDataConfig(name=str(path), validation_fraction=0.001), tokenizer, seed=0)
    assert len(few[1]) == 1, "a share that is less than a sample holds one out"


@given(n=st.integers(1, 40), size=st.integers(1, 50), seed=st.integers(0, 99), shuffle=st.booleans())
def test_every_epoch_has_every_sample_once_for_any_batch_size(n: int, size: int, seed: int, shuffle: bool) -> None:
    order = SampleOrder(n, seed=seed, shuffle=shuffle)
    taken: list[int] = []
    while len(taken) < 3 * n:
        taken += order.batch(len(taken), size)
    for epoch in range(3):
        own = taken[epoch * n : (epoch + 1) * n]
        assert sorted(own) == list(range(n)) and (shuffle or own == list(range(n)))


def test_epochs_and_seeds_differ() -> None:
    order = SampleOrder(50, seed=0, shuffle=True)
    first, second = order.batch(0, 50), order.batch(50, 50)
    assert first != second != list(range(50)) and SampleOrder(50, seed=1, shuffle=True).batch(0, 50) != first


@given(
    sizes=st.lists(st.integers(1, 30), min_size=2, max_size=4), weights=st.data(), seed=st.integers(0, 99),
    shuffle=st.booleans(),
)  # fmt: skip
def test_a_mix_has_each_source_by_its_weight_in_its_own_order(
    sizes: list[int], weights: st.DataObject, seed: int, shuffle: bool
) -> None:
    shares = weights.draw(st.lists(st.floats(0.01, 9), min_size=len(sizes), max_size=len(sizes)))
    order = MixedOrder(sizes, shares, seed=seed, shuffle=shuffle)
    taken = order.batch(0, 2000)
    assert MixedOrder(sizes, shares, seed=seed, shuffle=shuffle).batch(1337, 5) == taken[1337:1342]
    begin = 0
    for size, share in zip(sizes, shares, strict=True):
        own = [index - begin for index in taken if begin <= index < begin + size]
        exact = 1000 * share / sum(shares)
        for block in (taken[:1000], taken[1000:]):
            assert abs(sum(begin <= index < begin + size for index in block) - exact) <= 1
        for first in range(0, len(own) - size + 1, size):
            epoch = own[first : first + size]
            assert sorted(epoch) == list(range(size)) and (shuffle or epoch == list(range(size)))
        begin += size


def test_sources_are_mixed_and_told_apart(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for name, count in (("a", 12), ("b", 4)):
        write(tmp_path / f"{name}.jsonl", [{"prompt": ">", "completion": f"{name}{k:02}"} for k in range(count)])
    names = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    config = MixedDataConfig(mix={names[0]: 1, names[1]: 3}, validation_fraction=0.25)
    training, held_out = load_samples(config, tokenizer, seed=0)
    assert [len(training), len(held_out)] == [12, 4] and training.num_tokens == sum(
        len(one.token_ids) for one in training
    )
    texts = [trained_text(one, tokenizer) for one in training]
    assert [text[0] for text in texts] == ["a"] * 9 + ["b"] * 3 and len({*texts}) == 12
    order = order_of(training, config, seed=0).batch(0, 1000)
    assert sum(texts[index].startswith("b") for index in order) == 750
    for mix, said in (({names[0]: 0}, "above 0"), ({names[0]: 1, names[1]: 5000}, "less than 0.001 of all samples")):
        with pytest.raises(ValueError, match=said):
            MixedDataConfig(mix=mix)
    with pytest.raises(ValueError, match="put the name into mix"):
        MixedDataConfig(mix={names[0]: 1}, name=names[1])


@pytest.mark.parametrize("config", [SftConfig, DpoConfig])
def test_a_dry_run_shows_the_row_that_is_asked_for(config: type[SupervisedCommand], tmp_path: Path) -> None:
    rows = Path(DATA if config is SftConfig else PAIRS).read_text().splitlines()[:6]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([*rows[:2], "{", *rows[2:]]) + "\n")
    data = {"name": str(path), "validation_fraction": 0.5, "on_bad_row": "drop"}
    asked = config.model_validate({"model": {"name": MODEL}, "data": data, "dry_run": True, "sample": 5})
    row = json.loads(rows[3])
    answers = row["completion"] if config is SftConfig else row["chosen"] + row["rejected"]
    shown = take_survey(asked).first
    assert len(shown) == len(answers) and all(" of row 5" in name for name in shown)
    assert all(f"[[{answer['content']}" in text for answer, text in zip(answers, shown.values(), strict=True))
    for missing in (3, 9):
        with pytest.raises(DataError, match=f"nothing of row {missing} of "):
            take_survey(asked.model_copy(update={"sample": missing}))


@pytest.mark.parametrize(("config", "kind", "samples"), [
    (DpoConfig, "pairs", 4), (RewardTrainingConfig, "pairs", 4), (DpoConfig, "answers", 8), (SftConfig, "samples", 4),
])  # fmt: skip
def test_what_there_is_to_train_on_is_counted_as_the_trainer_counts_it(
    config: type[SupervisedCommand], kind: str, samples: int, tmp_path: Path
) -> None:
    lines = Path(DATA if kind == "samples" else PAIRS).read_text().splitlines()[:5]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([*lines[:3], "{", *lines[3:]]) + "\n")
    data = {"name": str(path), "validation_fraction": 0.2, "on_bad_row": "drop"}
    loss = {"loss": {"type": "kto"}} if kind == "answers" else {}
    survey = take_survey(config.model_validate({"model": {"name": MODEL}, "data": data, **loss}))
    assert (survey.kind, survey.samples) == (kind, samples) and survey.held_out == samples // 4
    assert survey.tokens > 10 and all("<|assistant|>[[" in text for text in survey.first.values())
    assert any("row 4 is not JSON" in note for note in survey.notes), json.dumps(survey.notes)


def test_a_run_tells_that_a_step_takes_more_than_all_samples(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = SftConfig.model_validate({"model": {"name": MODEL}, "data": {"name": DATA, "batch_size": 64}})
    for samples, is_told in ((64, False), (50, True)):
        caplog.clear()
        tell_data(config, Survey("samples", samples, 0, 900, {}), is_main=True)
        assert ("data.batch_size = 64 exceeds the 50 samples: " in caplog.text) is is_told


BYE = {"role": "assistant", "content": "dc"}
CHAT, OTHER = "<|user|>ab<|end|><|assistant|>ba<|end|>", "<|user|>ab<|end|><|assistant|>dc<|end|>"
CONVERSATION = [{"from": "human", "value": "ab"}, {"from": "gpt", "value": "ba"}]


@pytest.mark.parametrize(("row", "text", "trained"), [
    ({"prompt": "ab", "completion": "cd"}, "abcd<|end|>", "cd<|end|>"),
    ({"prompt": [USER], "completion": [HELLO]}, CHAT, "ba<|end|>"),
    ({"prompt": [USER, BYE, USER], "completion": [HELLO]}, OTHER + CHAT, "ba<|end|>"),
    ({"messages": [USER, HELLO, USER, BYE]}, CHAT + OTHER, "ba<|end|>dc<|end|>"),
    ({"messages": [USER, HELLO, USER]}, CHAT, "ba<|end|>"),  # nothing answers the last turn
    ({"conversations": CONVERSATION}, CHAT, "ba<|end|>"),
    ({"conversations": [USER, HELLO]}, CHAT, "ba<|end|>"),
    ({"conversations": CONVERSATION, "system": "s"}, f"<|system|>s<|end|>{CHAT}", "ba<|end|>"),
    ({"instruction": "ab", "output": "ba"}, CHAT, "ba<|end|>"),
    ({"instruction": "ab", "input": "", "output": "ba", "history": []}, CHAT, "ba<|end|>"),
    (
        {"instruction": "a", "input": "c", "output": "b", "history": [["ab", "ba"]], "system": "s"},
        f"<|system|>s<|end|>{CHAT}<|user|>a\nc<|end|><|assistant|>b<|end|>",
        "ba<|end|>b<|end|>",
    ),
    ({"messages": [USER, HELLO], "chat_template_kwargs": {"unset": None}}, CHAT, "ba<|end|>"),
    ({"text": "abc"}, "abc<|end|>", "abc<|end|>"),
    ({"text": "abc<|end|>"}, "abc<|end|>", "abc<|end|>"),
    ({"prompt": "ab", "completion": "c<|end|>"}, "abc<|end|>", "c<|end|>"),
])  # fmt: skip
def test_formats(row: dict[str, Any], text: str, trained: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (sample,) = load(write(tmp_path / "a.jsonl", [row]), tokenizer)
    assert "".join(tokenizer.convert_ids_to_tokens(sample.token_ids.tolist())) == text
    assert trained_text(sample, tokenizer) == trained


def test_the_last_turn_alone_and_a_changed_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for answer in (HELLO, BYE):
        path = write(tmp_path / "a.jsonl", [{"messages": [USER, HELLO, USER, answer]}])
        assert trained_text(load(path, tokenizer, train_on="last")[0], tokenizer) == f"{answer['content']}<|end|>"


def test_files_of_other_splits_are_told(tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for split in ("train", "test"):
        write(tmp_path / "lines" / f"{split}.jsonl", [{"messages": [USER, HELLO]}])
    assert len(load(tmp_path / "lines", tokenizer)) == 1
    assert "lines: data.split = 'train' leaves out test.jsonl" in caplog.text


@pytest.mark.parametrize(("row", "said"), [
    ({"messages": [USER]}, "no assistant message"), ({"messages": [{"role": "user"}]}, "`role` and `content`"),
    ({"messages": ["hello"]}, "`role` and `content`"),
    ({"prompt": "a", "completion": [HELLO]}, "both text or both lists"),
    ({"prompt": [USER], "completion": "ba"}, "both text or both lists"),
    ({"conversations": [{"from": "robot", "value": "x"}]}, "`from` is 'robot'; known are"),
    ({"conversations": [{"said": "x"}]}, "message 1: a turn needs `from` and `value`"),
    ({"instruction": ["x"], "output": "y"}, "`instruction` must be text"),
    ({"conversations": [{"from": ["human"], "value": "x"}]}, "`from` is ['human']; known are"),
    ({"text": 3}, "`text` must be text"), ({"text": "ab\ud800"}, "half of a surrogate pair, behind 'ab'"),
    ({"prompt": [USER], "completion": [USER, HELLO]}, "would come twice"),
    ({"conversations": {"from": "human"}}, "`conversations` must be a list, got {'from'"),
    ({"conversations": [{"from": "function_call", "value": "{"}]}, "message 1: the value of a function_call: this is"),
    ({"conversations": [{"from": "function_call", "value": '{"a": 1, "a": 2}'}]}, "the key 'a' occurs twice"),
    ({"instruction": "x", "output": "y", "history": [["x"]]}, "`history` must be a list of [instruction, output]"),
    ({"messages": [USER, HELLO], "chat_template_kwargs": "x"}, "`chat_template_kwargs` must be an object, got 'x'"),
    ({"messages": [USER, {"role": "assistant", "content": 3}]}, "message 2: `content` must be text or a list of"),
    ({"messages": [USER, {**HELLO, "tool_calls": {"name": "f"}}]}, "message 2: `tool_calls` must be a list, got {"),
    ({"messages": [USER, HELLO], "tools": {"name": "f"}}, "`tools` must be a list of JSON objects, got {'name'"),
    ({"messages": [USER, HELLO], "tools": ["3"]}, "`tools` must be a list of JSON objects, got ['3']"),
    ({"messages": [USER, HELLO], "tools": "{"}, "`tools`: this is not JSON"),
    ({"messages": [USER, HELLO], "tools": '[{"a": 1, "a": 2}]'}, "the key 'a' occurs twice"),
    ({"messages": [USER, HELLO], "functions": '[{"a": 1, "a": 2}]'}, "the key 'a' occurs twice"),
    ({"messages": [USER, HELLO], "tools": [{"name": "f"}]}, "`tools`, which the chat template"),
    ({"prompt": "a", "completion": "b", "tools": [{"name": "f"}]}, "`tools` goes with messages"),
])  # fmt: skip
def test_rows_that_cannot_be_used(row: dict[str, Any], said: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    message = refused(write(tmp_path / "a.jsonl", [row]), tokenizer)
    assert "a.jsonl, row 1: " in message and said in message


@pytest.mark.parametrize("missing", ["instruction", "output"])
def test_later_rows_of_alpaca_need_what_the_first_has(missing: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    row = {"instruction": "a", "input": "b", "output": "c"}
    said = refused(write(tmp_path / "a.jsonl", [row, {**row, missing: None}]), tokenizer)
    assert f"a.jsonl, row 2: it has no `{missing}`; it has `" in said


def test_calls_of_share_gpt_are_those_of_messages() -> None:
    template = (
        "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
        "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    theirs = make_tokenizer("byte-level", template, adds_bos=False)

    def tokens(key: str, *turns: dict[str, Any]) -> list[int]:
        return tokenize_row({key: [*turns]}, theirs).token_ids.tolist()

    calls = [{"name": "weather", "arguments": {"city": "東京"}}, {"name": "time", "arguments": {}}]
    tool_calls = [{"type": "function", "function": function} for function in calls]
    expected = tokens("messages", USER, {"role": "assistant", "content": "", "tool_calls": tool_calls})
    human, _ = CONVERSATION
    for value in (calls, json.dumps(calls)):
        assert tokens("conversations", human, {"from": "function_call", "value": value}) == expected
    text = theirs.decode(tokens("conversations", human, {"from": "function_call", "value": json.dumps(calls[0])}))
    assert text.endswith('<|assistant|>{"name": "weather", "arguments": {"city": "東京"}}<|end|>')


def test_alpaca_without_a_chat_template_has_the_prompt_of_stanford_alpaca(tokenizer: Tokenizer, tmp_path: Path) -> None:
    plain = copy.copy(tokenizer)
    plain.chat_template = None
    begin = "Below is an instruction that describes a task"
    end = "Write a response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n"
    with_input = f"{begin}, paired with an input that provides further context. {end}### Input:\n1+2\n\n### Response:"
    for more, prompt in (({}, f"{begin}. {end}### Response:"), ({"input": "1+2"}, with_input)):
        sample = tokenize_row({"instruction": "Add.", "output": "3", **more}, plain)
        assert plain.decode(sample.token_ids[~sample.loss_mask]) == prompt
        assert trained_text(sample, plain) == "3<|end|>"
    for name, value in (("system", "s"), ("history", [["ab", "ba"]])):
        path = write(tmp_path / "a.jsonl", [{"instruction": "Add.", "output": "3", name: value}])
        assert f"row 1: `{name}` needs a chat template" in refused(path, plain)


def test_pairs_of_text_with_an_implicit_prompt(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [{"chosen": "q a> good day", "rejected": "q a> good evening"}]
    (pair,) = load_pairs(PreferenceDataConfig(name=str(write(tmp_path / "a.jsonl", rows))), tokenizer)
    assert [trained_text(side, tokenizer) for side in pair.sides] == [" day<|end|>", " evening<|end|>"]
    assert (~pair.chosen.loss_mask).sum() == (~pair.rejected.loss_mask).sum() == len("q a> good")


def test_rows_are_tokenised_on_the_cores_of_the_machine_shared_among_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "available_cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads of torch: no word about these workers
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert workers_of_this_rank() == 8 and workers_of_this_rank(3) == 3
    for ranks, share, of_three in (("2", 4, 1), ("3", 2, 1), ("16", 1, 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert (workers_of_this_rank(), workers_of_this_rank(3)) == (share, of_three)


def test_several_workers_make_the_same_samples_and_name_the_first_bad_row(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tokenizing, "FEW_ROWS", 100)
    monkeypatch.setattr(tokenizing, "_CHUNK_ROWS", 30)
    monkeypatch.setattr("holdfast.process.events._TELL_S", 0.0)
    caplog.set_level("INFO")
    rows = [{"messages": [USER, {**HELLO, "content": "x" * (place % 7), "wait": 1}]} for place in range(400)]
    path = write(tmp_path / "a.jsonl", rows)
    monkeypatch.setattr(tokenizing, "available_cores", lambda: 1)
    serial = load(path, tokenizer)
    assert "(400 rows, the first: row 1)" in caplog.text and "have `wait`" in caplog.text
    monkeypatch.setattr(tokenizing, "available_cores", lambda: 3)
    caplog.clear()
    assert fingerprint_samples(load(path, tokenizer)) == fingerprint_samples(serial)
    assert "(400 rows, the first: row 1)" in caplog.text and "done=400 total=400 unit=rows" in caplog.text
    for bad in (390, 200, 95):
        rows[bad] = {"messages": "text"}
        assert f"row {bad + 1}: " in refused(write(path, rows), tokenizer)
    named = refused(path, tokenizer).splitlines()
    assert named[0].endswith("a.jsonl, 3 of 400 rows cannot be used:")
    assert [line.split(":")[0].strip() for line in named[1:4]] == ["row 96", "row 201", "row 391"]
    caplog.clear()
    kept = load(path, tokenizer, on_bad_row="drop")
    expected = [sample for place, sample in enumerate(serial) if place not in (95, 200, 390)]
    assert fingerprint_samples(kept) == fingerprint_samples(expected)
    assert "3 of 400 rows cannot be used and are left out. The first: row 96: expected a list" in caplog.text


def test_ten_bad_rows_are_named_and_the_rest_is_counted_whatever_is_wrong_with_them(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.jsonl"
    good = '{"prompt": "ab", "completion": "c"}'
    path.write_text("\n".join(["{", good, "[1]", '{"prompt": null, "completion": null}', *["{"] * 9, good]) + "\n")
    said = refused(path, tokenizer)
    assert "12 of 14 rows cannot be used" in said and "row 11 is not JSON" in said and "row 12" not in said
    for part in ("row 1 is not JSON", "row 3 is list", "row 4: rows need", "both text or both lists", "and 2 more"):
        assert part in said and "data.on_bad_row = 'drop'" in said
    assert len(load(path, tokenizer, on_bad_row="drop")) == 2
    path.write_text("\n".join(["{", '{"prompt": "ab"}', good]) + "\n")
    assert len(load(path, tokenizer, on_bad_row="drop")) == 1, "the first object says nothing of the format"
    path.write_text('{"prompt": "ab"}\n{"prompt": "cd"}\n')
    assert "Rename the columns" in refused(path, tokenizer, on_bad_row="drop")
    path.write_text('{"messages": [{"role": "user", "content": "a"}]}\n' * 3)
    said = refused(path, tokenizer)
    assert said.count("no assistant message") == 1 and "row 2: as row 1\n         row 3: as row 1" in said
    path.write_text("{\n")
    assert "row 1 is not JSON" in refused(path, tokenizer, on_bad_row="drop"), "nothing else is there"


def test_roles_no_template_knows_count(tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chat = [USER, HELLO, {"role": "human", "content": "ab"}, {"role": "gpt", "content": "ba"}, USER, HELLO]
    load(write(tmp_path / "a.jsonl", [{"messages": chat}, {"messages": [USER, HELLO]}] * 3), tokenizer)
    for role in ("human", "gpt"):
        assert f"messages have the role `{role}`, which is not one of assistant, developer, system" in caplog.text
    assert caplog.text.count("(3 rows, the first: row 1)") >= 2
    caplog.clear()
    load(write(tmp_path / "b.jsonl", [{"conversations": CONVERSATION}]), tokenizer)
    assert "role" not in caplog.text


@pytest.mark.parametrize(("empty", "full"), [
    ({"messages": [USER, {"role": "assistant", "content": ""}]}, {"messages": [USER, HELLO]}),
    ({"messages": [USER, {"role": "assistant", "content": " "}, USER, HELLO]}, {"messages": [USER, HELLO]}),
    (
        {"messages": [USER, {"role": "assistant", "content": "<think>\n\n</think>\n\n"}]},
        {"messages": [USER, {"role": "assistant", "content": "<yes>"}]},
    ),
    ({"prompt": "ab", "completion": ""}, {"prompt": "ab", "completion": "c"}),
    ({"text": ""}, {"text": "a"}),
])  # fmt: skip
def test_rows_with_an_empty_answer_are_counted(
    empty: dict[str, Any], full: dict[str, Any], tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(write(tmp_path / "a.jsonl", [full, empty, full, empty]), tokenizer)
    said = "an answer that is trained is empty, so that the model learns to end at once (2 rows, the first: row 2)"
    assert said in caplog.text
    caplog.clear()
    load(write(tmp_path / "b.jsonl", [full] * 3), tokenizer)
    assert "empty" not in caplog.text


def test_a_worker_that_dies_is_named(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "FEW_ROWS", 100)
    monkeypatch.setattr(tokenizing, "_CHUNK_ROWS", 30)
    monkeypatch.setattr(tokenizing, "available_cores", lambda: 2)
    path = write(tmp_path / "a.jsonl", [{"text": "abc"}] * 200)
    here = os.getpid()

    def ends(number: int) -> None:
        assert os.getpid() != here
        os.kill(os.getpid(), number)
        raise MemoryError

    for number, how in ((signal.SIGKILL, "was killed by signal 9"), (0, "ended with exit code 1")):
        monkeypatch.setattr(tokenizing, "_encode_chunk", lambda *_, number=number: ends(number))
        with pytest.raises(ProcessDied, match=f"a.jsonl: a process that tokenises rows {how}"):
            load(path, tokenizer)


@pytest.mark.parametrize(("config", "row"), [
    (SftConfig, {"prompt": "a", "completion": "b" * 30}),
    (DpoConfig, {"prompt": "a", "chosen": "b" * 30, "rejected": "a"}),
    (RewardTrainingConfig, {"prompt": "a", "chosen": "b", "rejected": "a" * 30}),
])  # fmt: skip
def test_samples_longer_than_the_positions_are_told_or_refused(
    config: type[SupervisedCommand], row: dict[str, Any], tiny_model: ModelFactory, tmp_path: Path
) -> None:
    short = {key: value[:1] for key, value in row.items()}
    path = write(tmp_path / "rows.jsonl", [short, row, row, short | {"prompt": "b"}])
    data = {"name": str(path), "batch_size": 1, "cache_dir": ""}

    def notes(kind: str, **more: Any) -> list[str]:
        model = {"name": str(tiny_model(kind, max_position_embeddings=16)), "tokenizer": MODEL}
        return take_survey(config.model_validate({"model": model, "data": data | more})).notes

    (note,) = notes("qwen3")
    assert re.search(r"samples have more tokens than .* up to 3\d of 16 .*\(2 rows, the first: .*2\)", note)
    with pytest.raises(DataError, match=r"data\.strict refuses"):
        notes("qwen3", strict=True)
    with pytest.raises(DataError, match=r"2 samples have more tokens .* the first in row 2 .* --data\.seq-len 16"):
        notes("gpt2")
    assert not any("positions" in note for note in notes("gpt2", seq_len=16, too_long="truncate"))
