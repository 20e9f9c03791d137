"""The same rows come in the same order through each way in; what cannot be read is named with file and line."""

import csv
import datetime
import decimal
import gzip
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as pf
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import DataError
from holdfast.run.rows import read_rows

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SCALAR = st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False) | TEXT
NESTED = st.recursive(SCALAR, lambda x: st.lists(x, max_size=3) | st.dictionaries(TEXT, x, max_size=3), max_leaves=6)
OBJECTS = st.dictionaries(TEXT, NESTED, max_size=4)
TYPED = st.fixed_dictionaries(
    {
        "content": st.none() | TEXT,
        "number": st.integers(-(2**63), 2**63 - 1) | st.none(),
        "real": st.floats(allow_nan=False, allow_infinity=False) | st.none(),
        "turns": st.none() | st.lists(st.fixed_dictionaries({"role": TEXT, "content": st.none() | TEXT}), max_size=3),
    }
)
SCHEMA = pa.schema(
    {
        "content": pa.string(), "number": pa.int64(), "real": pa.float64(),
        "turns": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
    }
)  # fmt: skip


def rows_of(path: Path | str, **options: Any) -> list[Any]:
    rows = read_rows(str(path), split=options.pop("split", "train"), **options)
    found = [row for _, row in rows.take(0, len(rows))]
    apart = [row for place in range(0, len(rows), 3) for _, row in rows.take(place, place + 3)]
    assert [str(row) for row in apart] == [str(row) for row in found]
    return found


def refused(path: Path | str, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        for row in rows_of(path, **options):
            if isinstance(row, DataError):
                raise row
    return str(caught.value)


def lines_of(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=len(str(row)) % 2 == 0) + "\n" for row in rows).encode()


def zst(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(OBJECTS, max_size=6), min_size=1, max_size=3).filter(any))
def test_rows_of_json_are_what_python_reads_of_them_through_each_way_in(files: list[list[Any]]) -> None:
    rows = [row for file in files for row in file]
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        ways: dict[str, bytes] = {
            "a.jsonl": lines_of(rows), "b.jsonl": b"\xef\xbb\xbf" + lines_of(rows),
            "c.jsonl.gz": gzip.compress(lines_of(rows)), "d.jsonl.zst": zst(lines_of(rows)),
            "e.json": json.dumps(rows, indent=1).encode(),
        }  # fmt: skip
        for name, content in ways.items():
            (here / name).write_bytes(content)
        (here / "parts/deep").mkdir(parents=True)
        for file, name in zip(files, ("a.jsonl", "b_train.jsonl", "deep/a.json"), strict=False):
            (here / "parts" / name).write_bytes(lines_of(file))
        # Texts are compared: equal values may be of different types, such as 1, 1.0 and true.
        for way in (*ways, "parts", "parts/**/*.json*"):
            assert repr(rows_of(here / way)) == repr(rows), way


@settings(max_examples=40, deadline=None)
@given(st.lists(TYPED, min_size=1, max_size=40), st.integers(1, 7))
def test_tables_have_the_rows_of_the_lines_they_were_made_of(rows: list[dict[str, Any]], group: int) -> None:
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    rows = table.to_pylist()  # whose keys have the order of the table
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        (here / "a.jsonl").write_bytes(lines_of(rows))
        pq.write_table(table, here / "a.parquet", row_group_size=group)
        pf.write_feather(table, str(here / "a.feather"), chunksize=group)
        with pa.ipc.new_stream(str(here / "b.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=group)
        expected = rows_of(here / "a.jsonl")
        for name in ("a.parquet", "a.feather", "b.arrow"):
            assert repr(rows_of(here / name)) == repr(expected), name


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=10))
def test_rows_of_csv_are_text_whatever_the_text_is(pairs: list[tuple[str, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, quoting=csv.QUOTE_ALL).writerows([("prompt", "answer"), *pairs])
        assert rows_of(path) == [{"prompt": prompt, "answer": answer} for prompt, answer in pairs]


def test_values_that_json_does_not_have_become_text(tmp_path: Path) -> None:
    day, time = datetime.date(2024, 2, 29), datetime.datetime(2024, 2, 29, 12, 30)
    row = {"day": day, "time": time, "price": decimal.Decimal("4.00"), "call": {"opt": None, "at": time}}
    table = pa.Table.from_pylist([row]).append_column("map", pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())))
    pq.write_table(table, tmp_path / "a.parquet")
    at = "2024-02-29T12:30:00"
    expected = {"day": "2024-02-29", "time": at, "price": "4.00", "call": {"at": at}, "map": {"a": 1}}
    assert rows_of(tmp_path / "a.parquet") == [expected]
    half, lists = np.array([0.1, 65504], np.float16), pa.array([[0.1], [3.7, 2.0**27]], pa.list_(pa.float32()))
    narrow = pa.table({"half": half, "lists": lists})
    pq.write_table(narrow, tmp_path / "a.parquet")
    assert rows_of(tmp_path / "a.parquet") == [{"half": 0.1, "lists": [0.1]}, {"half": 65504, "lists": [3.7, 2**27]}]
    pq.write_table(pa.table({"image": [b"x"]}), tmp_path / "b.parquet")
    assert "b.parquet': column 'image' holds values of type binary" in refused(tmp_path / "b.parquet")


def test_a_parameter_of_one_tool_is_not_a_null_of_the_others_in_a_table(tmp_path: Path) -> None:
    rows = [{"tools": [{"name": name, "properties": {name: {"type": "string"}}}]} for name in ("content", "city")]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert rows_of(tmp_path / "a.parquet") == rows


def test_numbers_that_only_python_writes_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": NaN, "b": -Infinity, "c": "\\ud800", "d": "\\u0022"}\n')
    (row,) = rows_of(tmp_path / "a.jsonl")
    assert math.isnan(row["a"]) and row["b"] == -math.inf and row["c"] == "\ud800" and row["d"] == '"'


def test_what_datasets_saved_is_read_as_it_reads_it(tmp_path: Path) -> None:
    import datasets

    rows = [{"a": {"x": 1, "y": "é"}, "many": [1, 2]}, {"a": {"x": 2, "y": ""}, "many": []}]
    mixed = [{"value": [1, "a", None]}]
    datasets.Dataset.from_list(mixed, on_mixed_types="use_json").save_to_disk(str(tmp_path / "mixed"))
    table = datasets.Dataset.from_list(rows)
    datasets.DatasetDict({"train": table, "test": table.select([1])}).save_to_disk(str(tmp_path / "both"))
    assert rows_of(tmp_path / "mixed") == mixed
    assert rows_of(tmp_path / "both") == rows and rows_of(tmp_path / "both", split="test") == rows[1:]
    table.to_parquet(str(tmp_path / "hub/data/train_sft-00000-of-00001.parquet"))
    table.select([1]).to_parquet(str(tmp_path / "hub/data/test_sft-00000-of-00001.parquet"))
    assert rows_of(tmp_path / "hub", split="test_sft") == rows[1:]
    assert "has the splits ['test_sft', 'train_sft']. Did you mean" in refused(tmp_path / "hub", split="train_sf")


def test_splits_are_chosen_by_the_names_of_files_if_all_tell_one(tmp_path: Path) -> None:
    for name in ("math_train", "dev", "test-00000-of-00001"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"is": name}) + "\n")
    for split, name in (
        ("train", "math_train"),
        ("validation", "dev"),
        ("dev", "dev"),
        ("test", "test-00000-of-00001"),
    ):
        assert rows_of(tmp_path, split=split) == [{"is": name}]
    assert len(rows_of(tmp_path / "*.jsonl")) == 3
    (tmp_path / "dev.jsonl").unlink()
    (tmp_path / "test-00000-of-00001.jsonl").rename(tmp_path / "code.jsonl")
    assert rows_of(tmp_path) == [{"is": "test-00000-of-00001"}, {"is": "math_train"}]
    assert "has the splits ['train']" in refused(tmp_path, split="test")


@pytest.mark.parametrize(("name", "content", "said"), [
    ("a.jsonl", b'{"a": 1}\n\n{"a": {"b": 1, "b": 2}}\n', "row 3 has the key 'b' twice in one object"),
    ("a.json", b'[{"a": 1},\n {"a": "x", "b": 1, "a": ""}]', "row 2 has the key 'a' twice in one object"),
    ("a.json", b'{\n "conversations": [\n  {"from": "human"}\n ]\n}\n', "goes over several lines, from row 1 on"),
    ("a.json", b'{"version": 1, "data": [{"messages": []}]}', "holds its rows under the key 'data'"),
    ("a.json", b'{\n"rows": [{"text": "a"}]}', "holds its rows under the key 'rows'"),
    ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "run `git lfs pull`"),
    ("a.jsonl.gz", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "run `git lfs pull`"),
    ("a.yaml", b"- text: a\n", "is YAML, which holds settings"),
    ("a.jsonl.zst", b"\x28\xb5\x2f\xfd and no more", "could not be read"),
    ("a.arrow", b"ARROW1 and no more", "could not be read"),
    ("a.csv", b"a,b\n1,2,3\n", "row 2 has 3 values, and the first line names 2 columns"),
    ("a.csv", b"a,a\n1,2\n", "must name each column once"),
    ("a.csv", b"a;b\n1;2\n", "its columns are divided by ';', expected ','"),
    ("a.csv", b'a,b\n1,2\n3,"\n', "line 3 is not CSV"), ("a.csv", b"a,b\n1,\xff\n", "line 2 is not UTF-8"),
    ("a.csv", b"a,b\n", "holds no rows"), ("d/a.jsonl", b'{"a": 1}\n[', "a.jsonl, row 2 is not JSON"),
])  # fmt: skip
def test_what_cannot_be_read_is_named_with_its_place(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    if name.startswith("d/"):
        (path.parent / "b.jsonl").write_text('{"a": 1}\n')
        path = path.parent
    assert said in refused(path)
