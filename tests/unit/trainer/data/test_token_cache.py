"""Tokenised data on disk: made once, named by what it depends on, whole or not there, and never in the way."""

import json
import logging
import os
import resource
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase as HfTokenizer

from holdfast.chat.tokenizer import Tokenizer
from holdfast.config.data import SftDataConfig
from holdfast.config.preference import PreferenceDataConfig
from holdfast.errors import DataError
from holdfast.process.child import DATE_ENV
from holdfast.process.scratch import scratch_name
from holdfast.trainer.data import samples as read_samples
from holdfast.trainer.data import tokenizing
from holdfast.trainer.data.formats import SAMPLE_FORMATS
from holdfast.trainer.data.samples import chat_tokenizer, fingerprint_samples, load_samples, load_tokenizer
from holdfast.trainer.data.tokenizing import ChosenSamples, Chunk, SampleTable, cache_directory, cache_key, sizes_of
from holdfast.trainer.preference.pairs import fingerprint_preferences, load_pairs
from tests.runs.processes import in_a_child

ROWS = [{"prompt": "ab" * (1 + k % 5), "completion": "c" * (1 + k % 7)} for k in range(1200)]


@pytest.fixture(scope="module")
def tokenizer() -> HfTokenizer:
    return load_tokenizer("examples/reverse_text/base")


@pytest.fixture(autouse=True)
def every_row_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_samples, "FEW_ROWS", 10)


@pytest.fixture
def config(tmp_path: Path) -> SftDataConfig:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return SftDataConfig(name=str(path), cache_dir=str(tmp_path / "cache"), seq_len=64)


def changed(config: SftDataConfig, **values: Any) -> SftDataConfig:
    return config.model_copy(update=values)


def entries(config: SftDataConfig) -> list[Path]:
    directory = cache_directory(config)
    return sorted(directory.iterdir()) if directory.exists() else []


Digest = Callable[..., str]


@pytest.fixture
def digest(tokenizer: HfTokenizer) -> Digest:
    """Return what reads the rows of a configuration, and digests the samples."""
    return lambda config, **values: fingerprint_samples(load_samples(changed(config, **values), tokenizer, seed=0)[0])


def refuse_to_tokenise(*_: object, **__: object) -> None:
    raise AssertionError("this was to come from the cache")


def test_the_second_start_reads_what_the_first_made_and_both_are_what_no_cache_gives(
    config: SftDataConfig, tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load_samples(changed(config, cache_dir="", validation_fraction=0.1), tokenizer, seed=3)
    assert entries(config) == []
    first = load_samples(changed(config, validation_fraction=0.1), tokenizer, seed=3)
    assert len(entries(config)) == 1
    monkeypatch.setattr(read_samples, "ordered_chunks", refuse_to_tokenise)
    monkeypatch.setattr(read_samples, "tokenize_rows", refuse_to_tokenise)
    second = load_samples(changed(config, validation_fraction=0.1), tokenizer, seed=3)
    for one, two, three in zip(plain, first, second, strict=True):
        assert len(one) == len(two) and fingerprint_samples(one) == fingerprint_samples(two)
        assert fingerprint_samples(two) == fingerprint_samples(three)


@pytest.mark.parametrize("too_long", ["drop", "truncate"])
def test_lengths_are_chosen_behind_the_cache(
    too_long: str, config: SftDataConfig, tokenizer: HfTokenizer, digest: Digest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every length that keeps some and loses some; the prompts alone fill the shorter ones."""
    digest(config, too_long="drop")
    monkeypatch.setattr(read_samples, "ordered_chunks", refuse_to_tokenise)
    for seq_len in (5, 8, 12):
        short = changed(config, too_long=too_long, seq_len=seq_len)
        cached, _ = load_samples(short, tokenizer, seed=0)
        assert len(cached) > 0 and fingerprint_samples(cached) == digest(short, cache_dir="")
        assert all(len(sample.token_ids) <= seq_len and sample.num_targets for sample in cached)


def test_pairs_come_from_the_cache(tmp_path: Path, tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": "a" * (1 + k % 9), "chosen": "bc", "rejected": "cb" * (1 + k % 4)} for k in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = PreferenceDataConfig(name=str(path), cache_dir=str(tmp_path / "cache"))
    first = load_pairs(data, tokenizer)
    monkeypatch.setattr(read_samples, "ordered_chunks", refuse_to_tokenise)
    plain = load_pairs(changed(data, cache_dir=""), tokenizer)
    assert fingerprint_preferences(first) == fingerprint_preferences(load_pairs(data, tokenizer))
    assert fingerprint_preferences(first) == fingerprint_preferences(plain)


def test_data_that_changes_before_it_is_read_is_not_kept_by_the_name_of_the_old(
    config: SftDataConfig, digest: Digest, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opens = Path(config.name), read_samples.open_dataset
    old, expected = path.read_bytes(), digest(config, cache_dir="")

    def replace_and_open(*arguments: Any, **named: Any) -> Any:
        path.write_text("".join(json.dumps(row | {"completion": "zz"}) + "\n" for row in ROWS))
        return opens(*arguments, **named)

    monkeypatch.setattr(read_samples, "open_dataset", replace_and_open)
    found = digest(config)
    assert entries(config) == []
    monkeypatch.setattr(read_samples, "open_dataset", opens)
    assert found == digest(config) != expected
    path.write_bytes(old)
    assert digest(config) == expected


def test_few_rows_are_not_worth_a_file(config: SftDataConfig, digest: Digest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_samples, "FEW_ROWS", len(ROWS))
    assert digest(config) == digest(config, cache_dir="") and entries(config) == []


def other_tokenizer(template: str = "", *, words: Sequence[str] = ()) -> Tokenizer:
    """The tokenizer of the example with something ahead of its template, or with more words."""
    made = load_tokenizer("examples/reverse_text/base")
    assert isinstance(made.chat_template, str)
    made.chat_template = template + made.chat_template
    made.add_tokens([*words])
    return chat_tokenizer(made)


def test_the_name_follows_what_tokens_depend_on(config: SftDataConfig, tokenizer: HfTokenizer, tmp_path: Path) -> None:
    def key(chat: Tokenizer | None = None, formats: Any = SAMPLE_FORMATS, **values: Any) -> str:
        return cache_key(changed(config, **values), chat or chat_tokenizer(tokenizer), formats)

    elsewhere, folder = tmp_path / "elsewhere.jsonl", tmp_path / "folder"
    folder.mkdir()
    for path in (elsewhere, folder / "rows.jsonl"):
        path.write_bytes(Path(config.name).read_bytes())
    assert {key(name=str(elsewhere)), key(name=str(folder)), key(batch_size=3), key(cache_dir="/other")} == {key()}
    (folder / "more.jsonl").write_text("{}")
    assert key(too_long="drop") == key(too_long="drop", seq_len=9)
    keys = [
        key(), key(too_long="drop"), key(train_on="last"), key(split="test"), key(seq_len=65), key(name=str(folder)),
        key(formats=SAMPLE_FORMATS[:2]), key(other_tokenizer(" ")), key(other_tokenizer(words=["ab"])),
    ]  # fmt: skip
    elsewhere.write_bytes(elsewhere.read_bytes().replace(b"abab", b"abba", 1))
    keys.append(key(name=str(elsewhere)))
    assert len(set(keys)) == len(keys)


def test_templates_with_dates_are_tokenised_each_day(config: SftDataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def keys(template: str) -> list[str]:
        found = []
        for second in (86_400, 86_400 + 7_200, 2 * 86_400):
            monkeypatch.setenv(DATE_ENV, str(second))
            found.append(cache_key(config, other_tokenizer(template), SAMPLE_FORMATS))
        return found

    assert len(set(keys(""))) == 1 and len(set(keys("{{ strftime_now('%H:%M') }}"))) == 3
    first, again, tomorrow = keys("{{ strftime_now('%d %b %Y') }}")
    assert first == again != tomorrow


def exit_codes(function: Callable[[], object], count: int = 1) -> list[int]:
    children = [in_a_child(function) for _ in range(count)]
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def test_two_runs_started_at_once_have_one_cache(config: SftDataConfig, digest: Digest) -> None:
    expected = digest(config, cache_dir="")

    def load() -> None:
        assert digest(config) == expected

    assert exit_codes(load, 3) == [0, 0, 0]
    assert len(entries(config)) == 1, "the slower ones left nothing behind"


def test_killed_while_it_makes_the_cache_the_next_start_makes_it(
    config: SftDataConfig, tokenizer: HfTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tokenizing.chunks_to_file

    def die_after_one(*arguments: Any) -> Any:
        for chunk in written(*arguments):
            yield chunk
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(tokenizing, "chunks_to_file", die_after_one)
    assert exit_codes(lambda: load_samples(config, tokenizer, seed=0)) == [-signal.SIGKILL]
    (left,) = entries(config)
    assert left.name.startswith(scratch_name())
    monkeypatch.setattr(tokenizing, "chunks_to_file", written)
    assert len(load_samples(config, tokenizer, seed=0)[0]) == len(ROWS)
    (whole,) = entries(config)
    assert not whole.name.startswith(scratch_name())


def test_a_full_disk_keeps_no_cache(config: SftDataConfig, digest: Digest, capfd: pytest.CaptureFixture[str]) -> None:
    expected = digest(config, cache_dir="")

    def load() -> None:
        logging.basicConfig(force=True, level=logging.INFO)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        found = digest(config)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert found == expected

    assert exit_codes(load) == [0]
    assert capfd.readouterr().err.count("data.cache_dir: tokenised data cannot be kept in") == 1
    assert entries(config) == []


@pytest.mark.parametrize("home", [True, False], ids=["no directory", "no home"])
def test_where_no_directory_can_be_made_there_is_no_cache_and_that_is_said_once(
    home: bool, config: SftDataConfig, digest: Digest, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = digest(config, cache_dir="")
    own, said = (f"{config.name}/cache", "kept in ") if home else (None, "kept in the home directory")
    if not home:
        monkeypatch.setenv("HOLDFAST_CACHE", "~nobody-of-this-name/cache")
    with caplog.at_level(logging.INFO):
        assert digest(config, cache_dir=own) == expected
    assert caplog.text.count(f"data.cache_dir: tokenised data cannot be {said}") == 1


def test_rows_of_a_hub_are_kept_by_their_revision(
    config: SftDataConfig, tokenizer: HfTokenizer, digest: Digest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `datasets` finds them without a network (tests have none): what a revision left here, by its commit."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    hub = changed(config, name="owner/rows")
    found = []
    for commit, rows in (("a" * 40, ROWS), ("b" * 40, ROWS[:-1])):
        Path(config.name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        table: Any = datasets.load_dataset("json", data_files=config.name, cache_dir=str(tmp_path / "x"), split="train")
        made = Path(table.cache_files[0]["filename"])
        revision = tmp_path / "hub" / "owner___rows" / "default" / "0.0.0" / commit
        revision.mkdir(parents=True)
        (revision / "rows-train.arrow").write_bytes(made.read_bytes())
        about = json.loads((made.parent / "dataset_info.json").read_text())
        (revision / "dataset_info.json").write_text(json.dumps({**about, "dataset_name": "rows"}))
        assert len(load_samples(hub, tokenizer, seed=0)[0]) == len(rows)
        with monkeypatch.context() as again:
            again.setattr(read_samples, "ordered_chunks", refuse_to_tokenise)
            found.append(digest(hub))
        assert found[-1] == digest(hub, cache_dir="")
    assert len(set(found)) == len(entries(config)) == 2


@pytest.mark.parametrize("cache", ["kept", "none"])
def test_the_number_of_processes_is_chosen_and_changes_nothing(
    cache: str, config: SftDataConfig, digest: Digest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizing, "FEW_ROWS", 10)
    monkeypatch.setattr(tokenizing, "_CHUNK_ROWS", 50)
    makes, pids = tokenizing._encode_chunk, tmp_path / "pids"

    def makes_and_tells(*arguments: Any) -> Any:
        with pids.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return makes(*arguments)

    monkeypatch.setattr(tokenizing, "_encode_chunk", makes_and_tells)
    found = set()
    for num_proc in (1, 3):
        own = str(tmp_path / f"cache_{num_proc}") if cache == "kept" else ""
        found.add(digest(config, cache_dir=own, num_proc=num_proc))
        made_by = pids.read_text().split()
        assert len(made_by) == len(ROWS) // 50
        own_pid = str(os.getpid())
        assert set(made_by) == {own_pid} if num_proc == 1 else own_pid not in made_by and len(set(made_by)) <= 3
        pids.unlink()
    assert len(found) == 1


def test_a_row_that_cannot_be_used_is_named_and_nothing_is_left(
    config: SftDataConfig, tokenizer: HfTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    lines = Path(config.name).read_text().splitlines()
    lines[700] = '{"prompt": "ab"}'
    Path(config.name).write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"rows\.jsonl, row 701: "):
        load_samples(config, tokenizer, seed=0)
    assert entries(config) == []
    for _ in range(2):  # also from the cache
        caplog.clear()
        samples, _ = load_samples(changed(config, on_bad_row="drop"), tokenizer, seed=0)
        assert len(samples) == len(lines) - 1 and "row 701: rows need" in caplog.text
    assert len(entries(config)) == 1


def test_the_cache_lies_where_it_should(config: SftDataConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path))
    assert cache_directory(SftDataConfig()) == tmp_path / "tokenised"
    monkeypatch.delenv("HOLDFAST_CACHE")
    assert cache_directory(SftDataConfig()) == Path.home() / ".cache" / "holdfast" / "tokenised"


def test_a_table_is_a_sequence(config: SftDataConfig, tokenizer: HfTokenizer) -> None:
    load_samples(config, tokenizer, seed=0)
    (directory,) = entries(config)
    table = SampleTable(directory / "samples.arrow")
    assert len(table) == len(ROWS) == len(list(table))
    np.testing.assert_array_equal(table[-1].token_ids, table[len(ROWS) - 1].token_ids)
    assert [len(sample.token_ids) for sample in table[498:502]] == table.lengths[498:502].tolist()
    with pytest.raises(IndexError):
        table[len(ROWS)]
    with pytest.raises(ValueError, match="read-only"):
        table[0].token_ids[0] = 1
    for found, expected in zip(sizes_of(table), sizes_of(list(table)), strict=True):
        np.testing.assert_array_equal(found, expected)
    some = ChosenSamples(table, np.array([5, 3]), most=2)
    assert [sample.token_ids.tolist() for sample in some[:]] == [table[k].token_ids[:2].tolist() for k in (5, 3)]


def test_a_file_with_other_columns_is_no_table(tmp_path: Path) -> None:
    import pyarrow as pa

    schema = pa.schema({"a": pa.int8()})
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), schema) as writer:
        writer.write_batch(pa.record_batch([pa.array([1], type=pa.int8())], schema=schema))
    with pytest.raises(pa.ArrowInvalid, match="other columns"):
        SampleTable(tmp_path / "a.arrow")


def test_chunks_come_in_order_and_few_are_ahead_of_a_slow_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "_CHUNKS_AHEAD", 3)
    made = tmp_path / "made"
    made.touch()

    def make(index: int) -> Chunk:
        # The first comes after all that the other process may be ahead. Were it fewer, this would not end.
        while index == 10 and made.stat().st_size < 4:
            os.sched_yield()
        with made.open("ab") as file:
            file.write(b".")
        return Chunk(index, num_rows=1, values=np.full(100_000, index))  # more than a pipe holds

    mine = range(10, 90, 2)
    chunks = tokenizing._encoded_by_workers(make, mine, 2, name="data")
    first = next(chunks)
    assert first.index == 10 and made.stat().st_size <= 6, "of the other three and one to send; its own, and the next"
    assert [first.index, *(chunk.index for chunk in chunks)] == list(mine) and made.stat().st_size == len(mine)
    assert [chunk.index for chunk in tokenizing._encoded_by_workers(Chunk, range(2), 5, name="data")] == [0, 1]
