"""Supervised samples: files, lengths, validation, order, what is refused, and what a start says of them.

Their formats: test_row_formats.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable
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
from holdfast.config.training import SftDataConfig, SupervisedCommand
from holdfast.errors import DataError, HoldfastError
from holdfast.run.inputs import Survey
from holdfast.trainer.data.packing import Sample
from holdfast.trainer.data.rows import SAMPLE_FORMATS, SAMPLE_SHAPES, encode_example, find_format
from holdfast.trainer.data.samples import SampleOrder, chat_tokenizer, load_samples, load_tokenizer
from holdfast.trainer.survey import take_survey, tell_data
from tests.builders.toy import DATA, MODEL, PAIRS

Tokenizer = PreTrainedTokenizerBase
USER, HELLO = {"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}
TEXT_ROWS = [{"prompt": f"{k}>", "completion": "x" * (k + 1)} for k in range(6)]


def trained_text(sample: Sample, tokenizer: Tokenizer) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(sample.token_ids[sample.loss_mask].tolist()))


def whole_text(sample: Sample, tokenizer: Tokenizer) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(sample.token_ids.tolist()))


def tokenize_row(row: dict[str, Any], tokenizer: Tokenizer) -> Sample:
    """Return the sample of one row, as `load_samples` makes it."""
    chat = chat_tokenizer(tokenizer)
    (example,) = find_format(row, SAMPLE_FORMATS, name="data.jsonl", shapes=SAMPLE_SHAPES).examples(row, chat)
    encoded = encode_example(example, chat, train_on="all")
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


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("as_directory", [False, True])
def test_files_and_directories(suffix: str, as_directory: bool, tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "data" / f"train.{suffix}", TEXT_ROWS)
    samples = load(path.parent if as_directory else path, tokenizer)
    assert [whole_text(sample, tokenizer) for sample in samples] == [
        f"{k}>{'x' * (k + 1)}<|end|>" for k in range(len(TEXT_ROWS))
    ]


def test_a_changed_file_is_read_again(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", TEXT_ROWS)
    assert len(load(path, tokenizer)) == 6
    write(path, [{"prompt": "a", "completion": "new"}])
    (sample,) = load(path, tokenizer)
    assert trained_text(sample, tokenizer) == "new<|end|>"


def refused(path: Path, tokenizer: Tokenizer, **config: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(path, tokenizer, **config)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_missing_columns_are_named_with_those_that_are_there(tokenizer: Tokenizer, tmp_path: Path) -> None:
    message = refused(write(tmp_path / "a.jsonl", [{"question": "q", "answer": "a"}]), tokenizer)
    for part in ("a.jsonl", "['answer', 'question']", "messages", "prompt", "completion"):
        assert part in message


@pytest.mark.parametrize("name", ["gone.jsonl", "gone.parquet", "gone"])
def test_a_missing_dataset_is_named(name: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert str(tmp_path / name) in refused(tmp_path / name, tokenizer)


def test_what_is_no_dataset_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    assert ".jsonl, .json or .parquet" in refused(tmp_path / "a.txt", tokenizer)
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a", "completion": ')
    assert "broken.jsonl" in refused(tmp_path / "broken.jsonl", tokenizer)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 but not really")
    assert "broken.parquet" in refused(tmp_path / "broken.parquet", tokenizer)
    (tmp_path / "empty.jsonl").write_text("")
    assert "empty.jsonl" in refused(tmp_path / "empty.jsonl", tokenizer)
    (tmp_path / "directory").mkdir()
    assert "directory" in refused(tmp_path / "directory", tokenizer)


def test_a_sample_that_is_too_long_is_an_error_that_names_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", TEXT_ROWS)
    message = refused(path, tokenizer, seq_len=7)
    for part in ("2 of 6 rows", "row 5: ", "row 6: ", "8 tokens", "data.seq_len is 7", "data.too_long"):
        assert part in message
    assert len(load(path, tokenizer, seq_len=9)) == 6


def test_too_long_samples_can_be_dropped_or_cut_and_are_counted(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a.jsonl", TEXT_ROWS)
    dropped = load(path, tokenizer, seq_len=7, too_long="drop")
    assert [len(sample.token_ids) for sample in dropped] == [4, 5, 6, 7]
    assert "2 samples of more than 7 tokens were dropped" in caplog.text
    cut = load(path, tokenizer, seq_len=7, too_long="truncate")
    assert [len(sample.token_ids) for sample in cut] == [4, 5, 6, 7, 7, 7]
    assert trained_text(cut[-1], tokenizer) == "xxxxx"
    assert "2 samples of more than 7 tokens were cut" in caplog.text


def test_when_nothing_is_left_it_is_an_error(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", TEXT_ROWS)
    said = refused(path, tokenizer, seq_len=2, too_long="drop")
    assert "no samples to train on are left of 6: all have more than 2 tokens and were dropped" in said
    said = refused(path, tokenizer, seq_len=2, too_long="truncate")
    assert "no samples to train on are left of 6: all were cut before their answer" in said


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages | no_such_filter }}", "No filter named"),
        ("{{ messages[-1]['content'] }}", "changes earlier turns"),
        (None, "no chat template"),
    ],
)
def test_a_template_that_cannot_be_used_is_told(
    template: str | None, said: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(str(tiny_model()))
    tokenizer.chat_template = template
    with pytest.raises(HoldfastError) as caught:
        load(write(tmp_path / "a.jsonl", [{"messages": [USER, HELLO]}]), tokenizer)
    assert said in str(caught.value) and caught.value.exit_code == 2


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="model.tokenizer"):
        load_tokenizer(str(tmp_path / "nowhere"))


def test_validation_samples_are_held_out_by_the_seed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "a", "completion": f"{k:03}"} for k in range(40)])

    def split(seed: int) -> tuple[list[str], list[str]]:
        parts = load_samples(SftDataConfig(name=str(path), validation_fraction=0.25), tokenizer, seed=seed)
        return tuple([trained_text(s, tokenizer) for s in part] for part in parts)  # type: ignore[return-value]

    training, held_out = split(0)
    assert len(held_out) == 10 and len(training) == 30
    assert sorted(training + held_out) == sorted(f"{k:03}<|end|>" for k in range(40))
    assert split(0) == (training, held_out) and split(1)[1] != held_out


@given(n=st.integers(1, 40), size=st.integers(1, 50), seed=st.integers(0, 99), shuffle=st.booleans())
def test_every_epoch_has_every_sample_once_for_any_batch_size(n: int, size: int, seed: int, shuffle: bool) -> None:
    order = SampleOrder(n, seed=seed, shuffle=shuffle)
    taken: list[int] = []
    while len(taken) < 3 * n:
        taken += order.batch(len(taken), size)
    for epoch in range(3):
        assert Counter(taken[epoch * n : (epoch + 1) * n]) == Counter(range(n))
    if not shuffle:
        assert taken[: 2 * n] == [*range(n), *range(n)]


@given(n=st.integers(1, 40), start=st.integers(0, 200), size=st.integers(1, 30), seed=st.integers(0, 9))
def test_the_position_is_the_whole_state(n: int, start: int, size: int, seed: int) -> None:
    straight = SampleOrder(n, seed=seed, shuffle=True)
    taken = [straight.at(position) for position in range(start + size)]
    assert SampleOrder(n, seed=seed, shuffle=True).batch(start, size) == taken[start:]


def test_epochs_and_seeds_differ() -> None:
    order = SampleOrder(50, seed=0, shuffle=True)
    first, second = order.batch(0, 50), order.batch(50, 50)
    assert first != second != list(range(50))
    assert SampleOrder(50, seed=1, shuffle=True).batch(0, 50) != first


@pytest.mark.parametrize(
    ("config", "kind", "samples"),
    [(DpoConfig, "pairs", 4), (RewardTrainingConfig, "pairs", 4), (DpoConfig, "answers", 8), (SftConfig, "samples", 4)],
)
def test_what_there_is_to_train_on_is_counted_as_the_trainer_counts_it(
    config: type[SupervisedCommand], kind: str, samples: int, tmp_path: Path
) -> None:
    lines = Path(DATA if kind == "samples" else PAIRS).read_text().splitlines()[:5]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([*lines[:3], "{", *lines[3:]]) + "\n")
    settings = {
        "model": {"name": MODEL},
        "data": {"name": str(path), "validation_fraction": 0.2, "on_bad_row": "drop"},
        "loss": {"type": "kto"} if kind == "answers" else {},
    }
    if config is SftConfig:
        settings.pop("loss")
    survey = take_survey(config.model_validate(settings))
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
