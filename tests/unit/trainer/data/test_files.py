"""The same rows give the same samples, and the same is said of them, whatever kind of file they come in."""

import csv
import gzip
import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.feather as pf
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from holdfast.config.data import SftDataConfig
from holdfast.errors import DataError
from holdfast.trainer.data import samples as reader
from holdfast.trainer.data import tokenizing
from holdfast.trainer.data.samples import fingerprint_samples, load_samples

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
SCALARS = st.none() | TEXT | st.integers(0, 2**60)
EXTRA = st.fixed_dictionaries({}, optional={"note": st.none() | TEXT, "source": st.fixed_dictionaries({"id": SCALARS})})
WEIGHT = st.fixed_dictionaries({}, optional={"weight": st.sampled_from([0, 1, 0.5])})


def turn(role: str) -> Any:
    return st.fixed_dictionaries({"role": st.just(role), "content": TEXT}, optional={"name": st.none() | TEXT})


CHAT = st.builds(
    lambda system, pairs: [*system, *(turn for user, answer, weight in pairs for turn in (user, answer | weight))],
    st.lists(turn("system"), max_size=1),
    st.lists(st.tuples(turn("user"), turn("assistant"), WEIGHT), min_size=1, max_size=2),
)
SAID = st.tuples(*(st.fixed_dictionaries({"from": st.just(kind), "value": TEXT}) for kind in ("human", "gpt")))
SHARED = st.lists(SAID, min_size=1, max_size=2).map(lambda pairs: [turn for pair in pairs for turn in pair])
FORMATS = {
    "messages": st.fixed_dictionaries({"messages": CHAT}),
    "conversations": st.fixed_dictionaries({"conversations": SHARED}, optional={"system": TEXT}),
    "prompt": st.fixed_dictionaries({"prompt": TEXT, "completion": TEXT}),
    "alpaca": st.fixed_dictionaries({"instruction": TEXT, "output": TEXT}, optional={"input": st.none() | TEXT}),
    "text": st.fixed_dictionaries({"text": TEXT}),
}


def lines_of(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def write_all(folder: Path, files: list[list[dict[str, Any]]]) -> list[str]:
    """Write the rows through each way in; return the names."""
    rows = [row for file in files for row in file]
    lines = lines_of(rows)
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "bom.jsonl.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + lines))
    (folder / "a.json").write_text(json.dumps(rows))
    (folder / "parts").mkdir()
    for number, file in enumerate(files):
        (folder / "parts" / f"{number}.jsonl").write_bytes(lines_of(file))
    names = ["a.jsonl", "bom.jsonl.gz", "a.json", "parts", "parts/*.jsonl"]
    if rows:
        # What a row lacks is a null in a table.
        table = pa.Table.from_struct_array(pa.array(rows))
        pq.write_table(table, folder / "a.parquet", row_group_size=700)
        pf.write_feather(table, str(folder / "a.feather"))
        names += ["a.parquet", "a.feather"]
    if rows and all(isinstance(value, str) for row in rows for value in row.values()) and len({*map(tuple, rows)}) == 1:
        with (folder / "a.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, quoting=csv.QUOTE_ALL).writerows([tuple(rows[0]), *(row.values() for row in rows)])
        names.append("a.csv")
    return names


def outcomes_of(
    files: list[list[dict[str, Any]]], tokenizer: PreTrainedTokenizerBase, few: int, folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> dict[str, tuple[str, ...]]:  # fmt: skip
    """Return, for each way in, the fingerprint of the samples or the refusal, and the warnings."""
    outcomes = {}
    for name in write_all(folder, files):
        caplog.clear()
        try:
            config = SftDataConfig(name=str(folder / name), cache_dir=str(folder / "cache"), seq_len=64)
            with patch.object(tokenizing, "FEW_ROWS", few), patch.object(reader, "FEW_ROWS", few):
                outcome = fingerprint_samples(load_samples(config, tokenizer, seed=0)[0])
        except DataError as error:
            outcome = str(error)
        said = (line for line in caplog.messages if "WARNING" in line)
        # A row is named by its file, if there are several, and so is a file without rows.
        outcome = "no rows" if "holds no rows" in outcome else outcome
        lines = (line.replace(str(folder / name), "DATA") for line in (outcome, *said))
        outcomes[name] = tuple(re.sub(r"([^\s(]+jsonl, )?row \d+", "ROW", line) for line in lines)
    return outcomes


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_each_way_in_gives_the_same_samples_and_says_the_same(
    data: Any, tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    form = data.draw(st.sampled_from([*FORMATS]))
    extra = data.draw(EXTRA)  # all rows have the same kinds of values, as tables want
    row = st.builds(lambda given, more: given | (extra if more else {}), FORMATS[form], st.booleans())
    files = data.draw(st.lists(st.lists(row, max_size=4), min_size=1, max_size=3))
    few = data.draw(st.sampled_from([5, 4000]))  # more rows are tokenised by several processes, and cached
    outcomes = outcomes_of(files, tokenizer, few, tmp_path_factory.mktemp("files"), caplog)
    assert len(set(outcomes.values())) == 1, outcomes
