"""Reads the rows of a dataset: JSON files, Parquet files, directories of `datasets`, a hub.

JSON files are read directly: `datasets` would give all rows the same keys, also inside of messages and tools, and fill
them with null.
"""

from __future__ import annotations

import gzip
import json
import logging
import mmap
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from holdfast.config.training import SftDataConfig
from holdfast.errors import DataError, nearest
from holdfast.run.inputs import check_data_path

if TYPE_CHECKING:
    import datasets


Row = Mapping[str, Any]
_log = logging.getLogger("trainer")
_MOST_NAMED = 10
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LINE_BREAK, _BLANK = ord("\n"), ord(" ")
_BLOCK_BYTES = 1 << 26


@dataclass(frozen=True)
class Sample:
    """One sequence to train on; or several, one after the other, which a loss sees as one.

    Attributes:
        token_ids: int32 array of length L.
        loss_mask: bool array of length L: which tokens are trained. The first is never trained,
            since nothing predicts it.
        per_token: further float32 arrays of length L that follow the tokens, such as advantages.
        value: a number that its row says of it, such as the margin of a pair; 0 where it says none.
        starts: where its sequences begin. No token sees tokens of another sequence, and the first token of each is
            never trained.
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    per_token: dict[str, np.ndarray] = field(default_factory=dict)
    value: float = 0.0
    starts: tuple[int, ...] = (0,)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each of its sequences."""
        return [end - start for start, end in pairwise([*self.starts, len(self.token_ids)])]

    @property
    def num_tokens(self) -> int:
        """Tokens of all its sequences."""
        return len(self.token_ids)

    @property
    def num_targets(self) -> int:
        """Tokens that are predicted and trained."""
        return int(self.loss_mask[1:].sum())

    @property
    def prompt_length(self) -> int:
        """Tokens before the first target, which other samples may share; 0 if its first sequence has no target."""
        first = self.targets[:1]
        return int(first[0]) if len(first) and first[0] < self.lengths[0] else 0

    @property
    def shared_prompt(self) -> bytes:
        """Those tokens as bytes, to compare with other samples."""
        return self.token_ids[: self.prompt_length].tobytes()

    @cached_property
    def stems(self) -> tuple[int, ...]:
        """For each sequence, the number of first tokens that the sequence before has, too; never all tokens."""
        found = [0]
        for before, tokens in pairwise(np.split(self.token_ids, self.starts[1:])):
            most = min(len(before), len(tokens) - 1)
            differs = np.flatnonzero(before[:most] != tokens[:most])
            found.append(int(differs[0]) if len(differs) else most)
        return tuple(found)

    def cut(self, length: int) -> Sample:
        """Return its first `length` tokens."""
        per_token = {name: values[:length] for name, values in self.per_token.items()}
        starts = tuple(start for start in self.starts if start < max(1, length))
        return Sample(self.token_ids[:length], self.loss_mask[:length], per_token, self.value, starts)

    @property
    def targets(self) -> np.ndarray:
        """Places of the tokens that are predicted and trained."""
        return np.flatnonzero(self.loss_mask[1:]) + 1


class BadRows(msgspec.Struct, frozen=True):
    """Rows that cannot be used: how many, and what is wrong with the first, each text with the row's number."""

    count: int = 0
    first: tuple[str, ...] = ()

    def __add__(self, other: BadRows) -> BadRows:
        return BadRows(self.count + other.count, (*self.first, *other.first)[:_MOST_NAMED])

    def settle(self, config: SftDataConfig, rows: int) -> None:
        """Warn of rows that are left out.

        Raises:
            DataError: it is not to be left out, or nothing else is there.
        """
        if not self.count:
            return
        named = self.first[0]
        if self.count > 1:
            left = [f"and {self.count - len(self.first):,} more"] if self.count > len(self.first) else []
            named = "\n         ".join([f"{self.count:,} of {rows:,} rows cannot be used:", *self.first, *left])
        if config.on_bad_row == "drop" and self.count < rows:
            shown = named if self.count > 1 else f"1 of {rows:,} rows cannot be used: {named}"
            _log.warning("%s, left out: %s", config.name, shown)
            return
        raise DataError(f"{config.name}, {named}\n       data.on_bad_row = 'drop' leaves such rows out.")


class Rows(Protocol):
    """The rows of a dataset, which have numbers from one; in a file of lines, the number of the line."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def take(self, start: int, stop: int) -> Iterator[tuple[int, Row | DataError]]:
        """Yield (number, row) of the rows at places `start` to `stop`.

        For a row that is not a JSON object comes the error, whose message begins with the row's number.
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

    def take(self, start: int, stop: int) -> Iterator[tuple[int, Row | DataError]]:
        own = slice(start, stop)
        lines = zip(self._numbers[own].tolist(), self._starts[own], self._ends[own], strict=True)
        for number, first, end in lines:
            yield number, self._row(number, self._content[first:end])

    def _row(self, number: int, line: bytes) -> Row | DataError:
        try:
            return _checked(json.loads(line), number)
        except UnicodeDecodeError as error:
            return DataError(
                f"row {number} is not UTF-8: {error.reason} {hex(error.object[error.start])} at byte {error.start} "
                "of the line. Convert the file, as with `iconv -f LATIN1 -t UTF-8`."
            )
        except ValueError as error:
            what: object = error
            if isinstance(error, json.JSONDecodeError):
                what = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
            return DataError(
                f"row {number} is not JSON: {what}. Each line must be one whole object, or the whole file a list "
                "of them, [{...}, ...]: mend the line, or remove it."
            )


class ListRows:
    """A JSON array of objects."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, start: int, stop: int) -> Iterator[tuple[int, Row | DataError]]:
        for number, row in enumerate(self._rows[start:stop], start=start + 1):
            yield number, _checked(row, number)


class TableRows:
    """A table. Null means that a row lacks the column."""

    def __init__(self, table: datasets.Dataset) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def take(self, start: int, stop: int) -> Iterator[tuple[int, Row | DataError]]:
        columns = self._table[start:stop]
        names = list(columns)
        for number, values in enumerate(zip(*columns.values(), strict=True), start=start + 1):
            yield number, {name: _without_nulls(value) for name, value in zip(names, values, strict=True)}


def _checked(row: object, number: int) -> Row | DataError:
    if not isinstance(row, Mapping):
        return DataError(f"row {number} is {type(row).__name__}, expected an object with columns")
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
        split: which one, if there are several.

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
        raise DataError(f"data.name = '{name}' is not a JSON array: {error}") from None


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
