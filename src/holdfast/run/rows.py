"""Reads the rows of a data set, for the trainers and for the environment `jsonl`.

Local files are read here, and not by `datasets`, which gives all rows of a JSON file the same keys, fills them with
null, and makes dates of texts that look like dates. In a table (Parquet, Arrow) each row has all keys: null means there
that the row lacks the key, except `content`. Rows of JSON keep their nulls.
"""

from __future__ import annotations

import csv
import gzip
import json
import mmap
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
import pyarrow as pa

from holdfast.errors import DataError
from holdfast.run.data_files import DataFile, find_files, format_of

if TYPE_CHECKING:
    import datasets
    import pyarrow.parquet

Row = Mapping[str, Any]
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LINE_BREAK, _BLANK = ord("\n"), ord(" ")
_BLOCK_BYTES = 1 << 26
_BATCH_ROWS = 500
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
_COLUMNS = {"messages", "conversations", "prompt", "completion", "chosen", "rejected", "text", "instruction"}
_OF_MESSAGES = {"role", "from", "content", "value", "function"}


class Rows(Protocol):
    """The rows of a data set."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def take(self, start: int, stop: int) -> Iterator[tuple[str, Row | DataError]]:
        """Yield (where, row) of the rows at places `start` to `stop`; `where` is such as `row 3`.

        Numbers begin at one; in a file of lines, it is the number of the line. For a row that is not a JSON object, an
        error takes the place of the row. Its message begins with `where`."""
        ...


def read_rows(
    name: str, *, split: str, key: str = "data.name", prefix: Callable[[DataFile, bool], str] | None = None
) -> Rows:
    """Return the rows of the data set `name`.

    Args:
        split: which one, if there are several.
        key: the setting that has the name.
        prefix: the text before the number of a row of a file; told whether the file is the only one. Unset: `row `,
            after the name of the file among several.

    Raise DataError if the data set is missing, unreadable or empty; ReadError if a file is there and cannot be read.
    """
    files = find_files(name, key=key, split=split)
    if files is None:
        rows: Rows = TableRows(_ArrowBatches(_hub_table(name, split).data.table), "row ", f"{key} = '{name}'")
    else:
        prefix = prefix or _prefix
        parts = [_rows_of_file(file, prefix(file, len(files) == 1), key, name, len(files) == 1) for file in files]
        rows = parts[0] if len(parts) == 1 else JoinedRows([part for part in parts if len(part)])
    if not len(rows):
        raise DataError(f"{key} = '{name}' holds no rows")
    return rows


def _prefix(file: DataFile, is_only: bool) -> str:
    return "row " if is_only else f"{file.label}, row "


def hub_fingerprint(name: str, *, split: str) -> str:
    """Return what tells one revision of a hub's dataset from another: `datasets` derives it from the commit. Raise
    DataError if the dataset is missing, unreadable or empty."""
    return _hub_table(name, split)._fingerprint  # it has no other name


def _hub_table(name: str, split: str) -> datasets.Dataset:
    import datasets
    import datasets.exceptions

    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(name, split=split)  # type: ignore[return-value]  # one split
    except StopIteration:  # what datasets makes of an empty file
        raise DataError(f"data.name = '{name}' holds no rows") from None
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ or error
        raise DataError(f"data.name = '{name}' could not be read: {cause}") from None


def _rows_of_file(file: DataFile, prefix: str, key: str, name: str, is_only: bool) -> Rows:
    what = f"{key} = '{name}'" + ("" if is_only else f": {file.label}")
    kind = format_of(file.path)
    try:
        if kind == "parquet":
            return TableRows(_ParquetBatches(file.path), prefix, what)
        if kind == "arrow":
            return TableRows(_open_arrow(file.path), prefix, what)
        content = _content_of(file.path)
    except (OSError, EOFError, zlib.error, ValueError) as error:  # Arrow's errors are ValueErrors
        raise DataError(f"{what} could not be read: {error}") from None
    begin = len(_BYTE_ORDER_MARK) if content[: len(_BYTE_ORDER_MARK)] == _BYTE_ORDER_MARK else 0
    if kind == "csv":
        return CsvRows(content, begin, prefix, what, delimiter="\t" if ".tsv" in file.path.suffixes[-2:] else ",")
    return _json_rows(content, begin, prefix, what)


def _content_of(path: Path) -> bytes | mmap.mmap:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return gzip.decompress(path.read_bytes())
    if suffix == ".zst":
        with pa.input_stream(str(path), compression="zstd") as stream:
            return stream.read()
    if not path.stat().st_size:  # nothing cannot be mapped
        return b""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


class JoinedRows:
    """The rows of several files, one after the other."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def take(self, start: int, stop: int) -> Iterator[tuple[str, Row | DataError]]:
        stop = min(stop, len(self))
        while start < stop:
            place = int(np.searchsorted(self._ends, start, side="right"))
            end = int(self._ends[place])
            before = end - len(self._parts[place])
            yield from self._parts[place].take(start - before, min(stop, end) - before)
            start = end


class LineRows:
    """One JSON object per line; empty lines do not count."""

    def __init__(self, content: bytes | mmap.mmap, *, begin: int = 0, prefix: str = "row ") -> None:
        """Args: content: of the file, from `begin`; of a mapped one nothing but the places of lines is in memory."""
        self._content, self._prefix = content, prefix
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

    def take(self, start: int, stop: int) -> Iterator[tuple[str, Row | DataError]]:
        own = slice(start, stop)
        lines = zip(self._numbers[own].tolist(), self._starts[own], self._ends[own], strict=True)
        for number, first, end in lines:
            where = f"{self._prefix}{number}"
            line = self._content[first:end]
            try:
                row = _decode(line)
            except (msgspec.MsgspecError, ValueError, RecursionError):  # JSON of Python takes more, and says more
                yield where, _row_of_line(line, where)
                continue
            yield where, _checked(row, where) if _has_each_key_once(row, line) else _row_of_line(line, where)


def _has_each_key_once(value: object, content: bytes) -> bool:
    """Whether no object has a key twice, by the quotes: such a key leaves fewer of them. False also if unsure."""
    try:
        return _encode(value).count(b'"') == content.count(b'"') and b"\\u0022" not in content
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError):  # such as half of a surrogate pair
        return False


def _row_of_line(line: bytes, where: str) -> Row | DataError:
    try:
        return _checked(json.loads(line, object_pairs_hook=_object), where)
    except UnicodeDecodeError as error:
        return DataError(
            f"{where} is not UTF-8: {error.reason} {hex(error.object[error.start])} at byte {error.start} "
            "of the line. Convert the file, as with `iconv -f LATIN1 -t UTF-8`."
        )
    except _TwiceError as error:
        return error.told(where)
    except RecursionError:
        return DataError(f"{where} nests lists and objects too deeply to be read. Flatten them.")
    except ValueError as error:
        what: object = error
        if isinstance(error, json.JSONDecodeError):
            what = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
        return DataError(
            f"{where} is not JSON: {what}. Each line must be one whole object, or the whole file a list "
            "of them, [{...}, ...]: mend the line, or remove it."
        )


class _TwiceError(ValueError):
    """An object has a key twice."""

    def told(self, where: str) -> DataError:
        return DataError(
            f"{where} has the key {self.args[0]!r:.80} twice in one object, of which only the last would be read. "
            "Remove or rename one of them."
        )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _TwiceError(next(key for key in keys if keys.count(key) > 1))
    return found


class ListRows:
    """A JSON array of objects."""

    def __init__(self, rows: Sequence[Any], *, prefix: str = "row ") -> None:
        self._rows, self._prefix = rows, prefix

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, start: int, stop: int) -> Iterator[tuple[str, Row | DataError]]:
        for number, row in enumerate(self._rows[start:stop], start=start + 1):
            where = f"{self._prefix}{number}"
            yield where, row if isinstance(row, DataError) else _checked(row, where)


def _checked(row: object, where: str) -> Row | DataError:
    if not isinstance(row, Mapping):
        return DataError(f"{where} is {type(row).__name__}, expected an object with columns")
    return row


def _json_rows(content: bytes | mmap.mmap, begin: int, prefix: str, what: str) -> Rows:
    if content[begin : begin + 1024].lstrip().startswith(b"["):
        return ListRows(_array(content[begin:], prefix, what), prefix=prefix)
    rows = LineRows(content, begin=begin, prefix=prefix)
    first = next((row for _, row in rows.take(0, 1)), None)
    if isinstance(first, DataError):
        _refuse_object_over_lines(content[begin : begin + _BLOCK_BYTES], what)
    elif first is not None and len(rows) == 1 and (key := _key_of_rows(first)):
        raise DataError(f"{what} {_under_key(key)}")
    return rows


def _array(content: bytes, prefix: str, what: str) -> list[Any]:
    try:
        rows = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what} is not a JSON array: {error}") from None
    if _has_each_key_once(rows, content):
        return rows
    text, place, found = content.decode("utf-8", "surrogatepass"), 0, []
    decoder = json.JSONDecoder(object_pairs_hook=_object)
    while (place := _after_blanks(text, place + 1)) < len(text) and text[place] != "]":  # after `[` or `,`
        where = f"{prefix}{len(found) + 1}"
        try:
            found.append(decoder.raw_decode(text, place)[0])
        except _TwiceError as error:
            found.append(error.told(where))
        place = _after_blanks(text, json.JSONDecoder().raw_decode(text, place)[1])
    return found


def _after_blanks(text: str, place: int) -> int:
    while place < len(text) and text[place] in " \t\r\n":
        place += 1
    return place


def _refuse_object_over_lines(content: bytes, what: str) -> None:
    """Refuse a file whose first line is the beginning of an object."""
    text = content.decode("utf-8", "replace").lstrip()
    try:
        found, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return
    if not isinstance(found, dict) or "\n" not in text[:end]:
        return
    if key := _key_of_rows(found):
        raise DataError(f"{what} {_under_key(key)}")
    raise DataError(
        f"{what} has an object that goes over several lines, from row 1 on. Write each object on one line, as "
        "`jq -c .` does, or the whole file as a list of objects, [{...}, ...]."
    )


def _key_of_rows(found: Mapping[str, Any]) -> str | None:
    """Return the key of an object under which there seem to be rows."""
    for key, value in found.items():
        is_list = isinstance(value, list) and value and all(isinstance(one, dict) for one in value)
        if is_list and key not in _COLUMNS and not _COLUMNS & found.keys() and not _OF_MESSAGES & value[0].keys():
            lists = [one for one in found.values() if isinstance(one, list | dict)]
            if len(lists) == 1:
                return key
    return None


def _under_key(key: str) -> str:
    return (
        f"is one object that holds its rows under the key {key!r}. Write the list alone, as `jq '.{key}' FILE` prints "
        "it, or one row per line."
    )


class CsvRows:
    """A table of text: its first line names the columns, and all values are text."""

    def __init__(self, content: bytes | mmap.mmap, begin: int, prefix: str, what: str, *, delimiter: str) -> None:
        """Raises DataError: the first line does not name columns, or the file is not CSV in UTF-8."""
        self._content, self._prefix, self._delimiter = content, prefix, delimiter
        csv.field_size_limit(sys.maxsize)
        starts, ends, numbers, line, end = [], [], [], 0, begin

        def lines() -> Iterator[str]:
            nonlocal end, line
            while end < len(content):
                stop = content.find(b"\n", end) + 1 or len(content)
                line += 1
                text = content[end:stop].decode()
                end = stop
                yield text

        reader = csv.reader(lines(), delimiter=delimiter, strict=True)
        self._names: list[str] = []
        try:
            while True:
                before, number = end, line + 1
                fields = next(reader, None)
                if fields is None:
                    break
                if fields and not self._names:
                    self._names = fields
                elif fields:
                    starts.append(before)
                    ends.append(end)
                    numbers.append(number)
        except (csv.Error, UnicodeDecodeError) as error:
            told = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else "is not CSV"
            raise DataError(f"{what}: line {line} {told}: {error}. Mend the line, or write the file again.") from None
        names = self._names
        if len(set(names)) < len(names) or not all(name.strip() for name in names):
            raise DataError(f"{what}: the first line must name each column once, got {names!r:.200}")
        if len(names) == 1 and (other := next((one for one in ";\t|" if one in names[0] and one != delimiter), None)):
            raise DataError(f"{what}: its columns are divided by {other!r}, expected {delimiter!r}. Write it again.")
        self._starts, self._ends, self._numbers = (np.array(one, dtype=np.int64) for one in (starts, ends, numbers))

    def __len__(self) -> int:
        return len(self._numbers)

    def take(self, start: int, stop: int) -> Iterator[tuple[str, Row | DataError]]:
        for place in range(start, min(stop, len(self))):
            where = f"{self._prefix}{self._numbers[place]}"
            text = self._content[self._starts[place] : self._ends[place]].decode()
            fields = next(csv.reader([text], delimiter=self._delimiter, strict=True))
            if len(fields) == len(self._names):
                yield where, dict(zip(self._names, fields, strict=True))
            else:
                told = f"{len(fields)} values, and the first line names {len(self._names)} columns"
                yield where, DataError(f"{where} has {told}. Put values with commas or line breaks into quotes.")


class _Batches(Protocol):
    """A table that is read in parts."""

    schema: pa.Schema
    num_rows: int

    def slices(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows at places `start` to `stop`."""
        ...


class TableRows:
    """The rows of a table. Null means that a row lacks the column."""

    def __init__(self, batches: _Batches, prefix: str, what: str) -> None:
        """Raises DataError: a column holds what no JSON could, or has the name of another."""
        self._batches, self._prefix, self._what = batches, prefix, what
        names = batches.schema.names
        if len(set(names)) < len(names):
            raise DataError(f"{what} has two columns of one name, among {names}. Rename one of them.")
        self._plain = [_plain_value(field.type, f"{what}: column '{field.name}'") for field in batches.schema]

    def __len__(self) -> int:
        return self._batches.num_rows

    def take(self, start: int, stop: int) -> Iterator[tuple[str, Row | DataError]]:
        number = start
        names = self._batches.schema.names
        try:
            for batch in self._batches.slices(start, min(stop, len(self))):
                columns = []
                for values, plain in zip(batch.columns, self._plain, strict=True):
                    column = values.to_pylist(maps_as_pydicts="strict")
                    columns.append(column if plain is None else [None if v is None else plain(v) for v in column])
                for place in range(batch.num_rows):
                    number += 1
                    yield (
                        f"{self._prefix}{number}",
                        {name: column[place] for name, column in zip(names, columns, strict=True)},
                    )
        except (OSError, ValueError, OverflowError, KeyError) as error:  # Arrow's errors are ValueErrors
            raise DataError(f"{self._what} could not be read from row {number + 1} on: {error}") from None


def _plain_value(type_: pa.DataType, what: str) -> Callable[[Any], Any] | None:
    """Return what makes a value of JSON of a value of this type; None if it is one. Raise DataError if values of this
    type are none of JSON."""
    types = pa.types
    if isinstance(type_, pa.JsonType):
        return json.loads
    if isinstance(type_, pa.UuidType):
        return str
    if isinstance(type_, pa.BaseExtensionType):
        return _plain_value(type_.storage_type, what)
    if types.is_dictionary(type_) or types.is_run_end_encoded(type_):
        return _plain_value(type_.value_type, what)
    if types.is_struct(type_):
        parts = {field.name: _plain_value(field.type, f"{what}, key '{field.name}'") for field in type_}
        return lambda value: _plain_object(value, parts)
    if types.is_map(type_):
        of_map = _plain_value(type_.item_type, what)
        return lambda value: _plain_object(value, dict.fromkeys(value, of_map))
    if hasattr(type_, "value_type"):  # lists of all kinds
        inner = _plain_value(type_.value_type, what)
        return None if inner is None else lambda values: [None if v is None else inner(v) for v in values]
    if types.is_date(type_) or types.is_timestamp(type_) or types.is_time(type_):
        return lambda value: value.isoformat()
    if types.is_decimal(type_):
        return str
    if types.is_float32(type_) or types.is_float16(type_):  # 0.1, not the next number of 64 bits
        kind = type_.to_pandas_dtype()
        return lambda value: value if float(value).is_integer() else float(str(kind(value)))
    if types.is_null(type_) or types.is_boolean(type_) or types.is_integer(type_) or types.is_float64(type_):
        return None
    if types.is_string(type_) or types.is_large_string(type_) or types.is_string_view(type_):
        return None
    raise DataError(f"{what} holds values of type {type_}, which no text or number can be. Write text, or drop it.")


def _plain_object(value: Mapping[str, Any], parts: Mapping[str, Callable[[Any], Any] | None]) -> dict[str, Any]:
    found = {}
    for key, entry in value.items():
        if entry is not None:
            plain = parts[key]
            found[key] = entry if plain is None else plain(entry)
        elif key == "content" and isinstance(value.get("role"), str):  # not an argument or parameter of a tool
            found[key] = None
    return found


class _ArrowBatches:
    """A table that is in memory or mapped, in parts."""

    def __init__(self, table: pa.Table) -> None:
        self.schema, self.num_rows, self._table = table.schema, table.num_rows, table

    def slices(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        yield from self._table.slice(start, stop - start).to_batches()


class _FeatherBatches:
    """A file of Arrow, whose batches are read one at a time, since they may be compressed."""

    def __init__(self, reader: pa.ipc.RecordBatchFileReader) -> None:
        self.schema, self._reader = reader.schema, reader
        counts = [reader.get_batch(place).num_rows for place in range(reader.num_record_batches)]
        self._ends = np.cumsum(counts, dtype=np.int64)
        self.num_rows = sum(counts)
        self._held: tuple[int, pa.RecordBatch] | None = None

    def slices(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        while start < stop:
            place = int(np.searchsorted(self._ends, start, side="right"))
            if self._held is None or self._held[0] != place:
                self._held = (place, self._reader.get_batch(place))
            batch, end = self._held[1], int(self._ends[place])
            own = batch.slice(start - (end - batch.num_rows), min(stop, end) - start)
            start += own.num_rows
            yield own


def _open_arrow(path: Path) -> _Batches:
    with path.open("rb") as file:
        is_stream = file.read(6) != b"ARROW1"
    source = pa.memory_map(str(path))
    return (
        _ArrowBatches(pa.ipc.open_stream(source).read_all()) if is_stream else _FeatherBatches(pa.ipc.open_file(source))
    )


class _ParquetBatches:
    """A Parquet file. Each process decodes it from the front, a few hundred rows at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        file = self._open()
        self.schema, self.num_rows = file.schema_arrow, file.metadata.num_rows
        counts = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
        self._ends = np.cumsum(counts, dtype=np.int64)
        self._process = 0
        self._at = 0  # place of the first row of the batch that is held
        self._held: pa.RecordBatch | None = None
        self._rest: Iterator[pa.RecordBatch] = iter(())

    def _open(self) -> pyarrow.parquet.ParquetFile:
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(self._path, memory_map=True)

    def _group_of(self, place: int) -> int:
        return int(np.searchsorted(self._ends, place, side="right"))

    def _go_to(self, place: int) -> None:
        """Begin again at the group of rows that has `place`."""
        group = self._group_of(place)
        groups = list(range(group, len(self._ends)))
        self._rest = self._open().iter_batches(_BATCH_ROWS, row_groups=groups, use_threads=False)
        self._process, self._at, self._held = os.getpid(), int(self._ends[group - 1]) if group else 0, None

    def slices(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        while start < stop:
            is_behind = start < self._at or self._group_of(start) > self._group_of(self._at) + 1
            if self._process != os.getpid() or is_behind:
                self._go_to(start)
            while self._held is None or start >= self._at + self._held.num_rows:
                self._at += self._held.num_rows if self._held is not None else 0
                self._held = next(self._rest)
            own = self._held.slice(start - self._at, min(stop - start, self._at + self._held.num_rows - start))
            start += own.num_rows
            yield own
