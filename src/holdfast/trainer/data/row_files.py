"""The rows of a dataset: files of JSON, Parquet, directories, what `save_to_disk` wrote, and hub datasets.

Files of JSON are read as they are. `datasets` would give all rows the same keys, also inside of messages and
tools, and fill them with null.
"""

from __future__ import annotations

import gzip
import json
import mmap
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from holdfast.shared.errors import DataError, nearest
from holdfast.shared.files.local_inputs import check_data_path

if TYPE_CHECKING:
    import datasets

Row = Mapping[str, Any]
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LINE_BREAK, _BLANK = ord("\n"), ord(" ")
_BLOCK_BYTES = 1 << 26


class Rows(Protocol):
    """The rows of a dataset, which have numbers from one; in a file of lines, that of the line."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def take(self, start: int, stop: int) -> Iterator[tuple[int, Row]]:
        """Yield (number, row) of the rows at places `start` to `stop`.

        Raises:
            DataError: a row is no JSON object; the message begins with its number.
        """
        ...


class LineRows:
    """One JSON object per line; empty lines do not count."""

    def __init__(self, content: bytes | mmap.mmap, *, begin: int = 0) -> None:
        """Args: content: of the file, from `begin`; of a mapped one nothing but the places of lines is in memory."""
        self._content = content
        bytes_N = np.frombuffer(content, dtype=np.uint8)
        blocks = range(begin, len(bytes_N), _BLOCK_BYTES)
        breaks = [np.flatnonzero(bytes_N[at : at + _BLOCK_BYTES] == _LINE_BREAK) + at for at in blocks]
        ends = np.concatenate([np.zeros(0, dtype=np.int64), *breaks, [len(bytes_N)]])
        starts = np.concatenate([[begin], ends[:-1] + 1])
        has_row = starts < ends
        # A line that begins with white space may hold nothing else.
        for line in np.flatnonzero(has_row)[bytes_N[starts[has_row]] <= _BLANK]:
            has_row[line] = not content[starts[line] : ends[line]].isspace()
        self._numbers = np.flatnonzero(has_row) + 1
        self._starts, self._ends = starts[has_row], ends[has_row]

    def __len__(self) -> int:
        return len(self._numbers)

    def take(self, start: int, stop: int) -> Iterator[tuple[int, Row]]:
        own = slice(start, stop)
        lines = zip(self._numbers[own].tolist(), self._starts[own], self._ends[own], strict=True)
        for number, first, end in lines:
            try:
                row = json.loads(self._content[first:end])
            except UnicodeDecodeError as error:
                raise DataError(
                    f"row {number} is not UTF-8: {error.reason} {hex(error.object[error.start])} at byte {error.start} "
                    "of the line. Convert the file, as with `iconv -f LATIN1 -t UTF-8`."
                ) from None
            except ValueError as error:
                what: object = error
                if isinstance(error, json.JSONDecodeError):
                    what = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
                raise DataError(
                    f"row {number} is not JSON: {what}. Each line must be one whole object, or the whole file a list "
                    "of them, [{...}, ...]: mend the line, or remove it."
                ) from None
            yield number, _checked(row, number)


class ListRows:
    """A JSON array of objects."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, start: int, stop: int) -> Iterator[tuple[int, Row]]:
        for number, row in enumerate(self._rows[start:stop], start=start + 1):
            yield number, _checked(row, number)


class TableRows:
    """A table, in which null stands for what a row does not have."""

    def __init__(self, table: datasets.Dataset) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def take(self, start: int, stop: int) -> Iterator[tuple[int, Row]]:
        columns = self._table[start:stop]
        names = list(columns)
        for number, values in enumerate(zip(*columns.values(), strict=True), start=start + 1):
            yield number, {name: _without_nulls(value) for name, value in zip(names, values, strict=True)}


def _checked(row: object, number: int) -> Row:
    if not isinstance(row, Mapping):
        raise DataError(f"row {number} is {type(row).__name__}, expected an object with columns")
    return row


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None or key == "content"}
    if isinstance(value, list):
        return [_without_nulls(entry) for entry in value]
    return value


def read_rows(name: str, *, split: str) -> Rows:
    """Return the rows of the dataset `name`.

    Args:
        split: which, where there are several.

    Raises:
        DataError: it is missing, unreadable or empty.
    """
    path = Path(name)
    check_data_path(name, key="data.name")
    if path.is_file() and path.suffix.lower() != ".parquet":
        rows = _read_json(path, name)
    else:
        rows = TableRows(_read_table(path, name, split))
    if not len(rows):
        raise DataError(f"data.name = '{name}' holds no rows")
    return rows


def hub_fingerprint(name: str, *, split: str) -> str:
    """Return what tells one revision of a hub's dataset from another: `datasets` derives it from the commit.

    Raises:
        DataError: the dataset is missing, unreadable or empty.
    """
    return _read_table(Path(name), name, split)._fingerprint  # it has no other name


def _read_json(path: Path, name: str) -> Rows:
    try:
        if path.suffix.lower() == ".gz":
            content = gzip.decompress(path.read_bytes())
        elif path.stat().st_size:
            with path.open("rb") as file:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        else:  # nothing cannot be mapped
            content = b""
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"data.name = '{name}' could not be read: {error}") from None
    begin = len(_BYTE_ORDER_MARK) if content[: len(_BYTE_ORDER_MARK)] == _BYTE_ORDER_MARK else 0
    if not content[begin : begin + 1024].lstrip().startswith(b"["):
        return LineRows(content, begin=begin)
    try:
        return ListRows(json.loads(content[begin:]))
    except ValueError as error:
        raise DataError(f"data.name = '{name}' is no JSON array: {error}") from None


def _read_table(path: Path, name: str, split: str) -> datasets.Dataset:
    import datasets
    import datasets.exceptions

    datasets.disable_progress_bars()
    try:
        if path.is_file():
            import pyarrow.parquet

            if not pyarrow.parquet.read_metadata(path).num_rows:
                raise DataError(f"data.name = '{name}' holds no rows")  # datasets: `BatchSize must be greater than 0`
            table: Any = datasets.load_dataset("parquet", data_files=str(path), split="train")
            return table
        if (path / "dataset_dict.json").is_file():
            splits: Any = datasets.load_from_disk(str(path))
            if split not in splits:
                raise DataError(
                    f"data.split = '{split}': '{name}' has the splits {sorted(map(str, splits))}."
                    f"{nearest(split, map(str, splits))}"
                )
            return splits[split]
        if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
            return datasets.load_from_disk(str(path))  # type: ignore[return-value]  # one split
        return datasets.load_dataset(name, split=split)  # type: ignore[return-value]
    except StopIteration:  # what datasets makes of an empty file
        raise DataError(f"data.name = '{name}' holds no rows") from None
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ or error
        raise DataError(f"data.name = '{name}' could not be read: {cause}") from None
