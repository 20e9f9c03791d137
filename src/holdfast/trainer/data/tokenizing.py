"""Tokenises rows on all cores, and keeps the tokens in a cache on disk that is mapped into memory.

Forked workers encode chunks of rows. One function encodes every chunk, and results come in the order of the rows. The
samples do not depend on the number of cores. Only a few chunks are in progress at once. Rows that cannot be used are an
error, which names the first of them, or are left out.

The name of a cache directory is a digest of everything that its tokens depend on: the bytes of the data, the tokenizer
with its templates, the settings, and the code that makes tokens of rows. If two runs make the same directory at once,
they make the same bytes; the first to finish names the directory, and the other run uses it. A damaged directory is
made again. If the disk cannot take the cache, the run continues without it. Samples are in an Arrow file, with one
record batch per chunk of rows and one column per field (`pyarrow.ipc.open_file` reads it).
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import multiprocessing
import os
import re
import signal
import sys
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import cycle, islice
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import overload

import msgspec
import numpy as np
import pyarrow as pa
import xxhash

from holdfast.chat import forms as chat_forms
from holdfast.chat import masking, messages, template, written
from holdfast.chat import tokenizer as chat_tokenizer
from holdfast.chat.masking import Encoded
from holdfast.chat.template import template_date
from holdfast.config.data import SftDataConfig
from holdfast.errors import DataError, ProcessDied
from holdfast.process.child import available_cores, die_with_parent
from holdfast.process.events import Counted, report
from holdfast.process.scratch import scratch_directory
from holdfast.run import atomic, data_files
from holdfast.run import rows as row_files
from holdfast.run.data_files import find_files
from holdfast.run.rows import Row, Rows, hub_fingerprint
from holdfast.trainer.data import formats as row_formats
from holdfast.trainer.data import rows as samples_of_rows
from holdfast.trainer.data.formats import Format
from holdfast.trainer.data.remarks import Remark, Remarks, join, lines_of, tell
from holdfast.trainer.data.rows import BadRows, Sample

_CHUNK_ROWS = 500
FEW_ROWS = 4000
"""For so many, neither workers nor a cache save time."""
_CHUNKS_AHEAD = 4
"""Chunks of each worker that are held in memory if an earlier one of another worker is late."""

Encode = Callable[[Row], list[Encoded]]


@dataclass
class Chunk:
    """The samples of some consecutive rows, as arrays that are cheap to send.

    Attributes:
        index: place of the chunk in the dataset.
        num_rows: rows encoded, without unusable rows.
        ids, mask, lengths, values: of all samples, one after the other.
        rows: for each sample, the place of its row in the data.
        remarks: warnings about rows.
        bad: rows that cannot be used.
        error: a bug, or an error of the settings; nothing after it is encoded.
    """

    index: int
    num_rows: int = 0
    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    mask: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool))
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    values: np.ndarray = field(default_factory=lambda: np.zeros(0))
    rows: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    remarks: Remarks = field(default_factory=dict)
    bad: BadRows = field(default_factory=BadRows)
    error: Exception | None = None

    def samples(self) -> Iterator[Sample]:
        """Yield the samples in order."""
        ends = np.cumsum(self.lengths)
        for start, end, value, row in zip(
            ends - self.lengths, ends, self.values.tolist(), self.rows.tolist(), strict=True
        ):
            yield Sample(self.ids[start:end].copy(), self.mask[start:end].copy(), value=value, row=row)


def tokenize_rows(rows: Rows, encode: Encode, config: SftDataConfig, *, is_told: bool = True) -> list[Sample]:
    """Return the samples of all rows, in their order, made on this rank's share of the cores. Raise ConfigError or
    DataError if rows cannot be used; the message names the first.

    Args:
        encode: makes the samples of one row: the same number of every row.
        is_told: whether progress and warnings are reported.
    """
    workers = workers_of_this_rank(config.num_proc) if len(rows) > FEW_ROWS else 1
    chunks = list(ordered_chunks(rows, encode, config, workers=workers, is_told=is_told))
    bad = sum((chunk.bad for chunk in chunks), BadRows()).settle(config, len(rows))
    tell([*bad, *lines_of(join(chunk.remarks for chunk in chunks))], config, is_told=is_told)
    return [sample for chunk in chunks for sample in chunk.samples()]


def ordered_chunks(
    rows: Rows, encode: Encode, config: SftDataConfig, *, workers: int | None = None, is_told: bool = True
) -> Iterator[Chunk]:
    """Yield all chunks in the order of the rows. At the end, raise ConfigError or DataError if rows cannot be used and
    are not to be left out. `workers`: processes; unset: `data.num_proc`, or one for each core that this process may run
    on."""
    places = range(-(-len(rows) // _CHUNK_ROWS))
    workers = min(workers or config.num_proc or available_cores(), len(places))
    progress = Counted("tokenising", len(rows), unit="rows", is_told=is_told)
    bad = BadRows()
    made = (_encode_chunk(rows, encode, place) for place in places)
    if workers > 1:
        made = _encoded_by_workers(lambda place: _encode_chunk(rows, encode, place), places, workers, name=config.name)
    with closing(made):
        for chunk in made:
            if chunk.error is not None:
                raise chunk.error
            bad += chunk.bad
            progress.add(chunk.num_rows + chunk.bad.count)
            yield chunk
    if config.on_bad_row == "error" or bad.count == len(rows):
        bad.settle(config, len(rows))


def workers_of_this_rank(num_proc: int | None = None) -> int:
    """Return its share of `num_proc` processes, or of the cores that it may run on."""
    return max(1, (num_proc or available_cores()) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _encode_chunk(rows: Rows, encode: Encode, index: int) -> Chunk:
    chunk = Chunk(index)
    encoded: list[Encoded] = []
    made_of: list[int] = []
    first = index * _CHUNK_ROWS
    try:
        for place, (where, row) in enumerate(rows.take(first, first + _CHUNK_ROWS), start=first):
            if isinstance(row, DataError):
                chunk.bad += BadRows(1, (str(row),))
                continue
            try:
                parts = encode(row)
            except DataError as error:
                chunk.bad += BadRows(1, (f"{where}: {error}",))
                continue
            encoded += parts
            made_of += [place] * len(parts)
            chunk.num_rows += 1
            for remark in {remark for part in parts for remark in part.remarks}:
                known = chunk.remarks.get(remark, Remark(0, where))
                chunk.remarks[remark] = Remark(known.count + 1, known.first)
    except Exception as error:  # noqa: BLE001 (ConfigError, or a bug: raised where all chunks come together)
        chunk.error = error
    chunk.lengths = np.array([len(part.ids) for part in encoded], dtype=np.int64)
    chunk.values = np.array([part.value for part in encoded], dtype=np.float64)
    chunk.rows = np.array(made_of, dtype=np.int64)
    if encoded:
        chunk.ids = np.concatenate([np.array(part.ids, dtype=np.int32) for part in encoded])
        chunk.mask = np.concatenate([np.array(part.mask, dtype=bool) for part in encoded])
    return chunk


def _encoded_by_workers(
    make: Callable[[int], Chunk], places: range, workers: int, *, name: str
) -> Generator[Chunk, None, None]:
    """Yield the chunks of `places` in order. Each process makes every `workers`th of them.

    Not by `ProcessPoolExecutor`, which waits for ever if a worker is killed while it sends a chunk."""
    processes: dict[Connection, BaseProcess] = {}
    try:
        for first in range(min(workers, len(places))):
            connection, process = _start_worker(make, places[first::workers])
            processes[connection] = process
        early = {connection: deque[Chunk]() for connection in processes}
        for connection in islice(cycle(processes), len(places)):
            while not early[connection]:
                for ready in wait([one for one, chunks in early.items() if len(chunks) < _CHUNKS_AHEAD]):
                    early[ready].append(_received(ready, processes[ready], name))  # type: ignore[index, arg-type]
            yield early[connection].popleft()
    finally:
        for connection, process in processes.items():
            connection.close()
            process.kill()
            process.join()


def _start_worker(make: Callable[[int], Chunk], places: range) -> tuple[Connection, BaseProcess]:
    """Fork a process for its rows and tokenizer, which it only reads; it uses neither torch nor threads."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_chunks, args=(make, places, sender, os.getpid()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        process.start()
    sender.close()
    return receiver, process  # type: ignore[return-value]  # a PipeConnection is of Windows


def _send_chunks(make: Callable[[int], Chunk], places: range, sender: Connection, parent: int) -> None:
    die_with_parent(parent=parent)
    for place in places:
        sender.send(make(place))
    while True:  # the parent ends it, with whose connection it would seem to have died
        signal.pause()


def _received(connection: Connection, process: BaseProcess, name: str) -> Chunk:
    try:
        return connection.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise ProcessDied(f"{name}: a process that tokenises rows {how}") from None


UNTRAINED = np.iinfo(np.int32).max
"""The first trained token of a sample that has none."""

_SCHEMA = pa.schema(
    {"token_ids": pa.list_(pa.int32()), "loss_mask": pa.list_(pa.uint8()), "value": pa.float64(), "row": pa.int64()}
)


def chunks_to_file(path: Path, chunks: Iterable[Chunk]) -> Iterable[Chunk]:
    """Write chunks to a new table as they come; yield each when it is written."""
    with pa.ipc.new_file(str(path), _SCHEMA) as writer:
        for chunk in chunks:
            writer.write_batch(_table_of(chunk))
            yield chunk


def _table_of(chunk: Chunk) -> pa.RecordBatch:
    borders = pa.array(np.concatenate([[0], np.cumsum(chunk.lengths)]), type=pa.int32())
    ids = pa.ListArray.from_arrays(borders, pa.array(chunk.ids, type=pa.int32()))
    mask = pa.ListArray.from_arrays(borders, pa.array(chunk.mask.view(np.uint8), type=pa.uint8()))
    values = pa.array(chunk.values, type=pa.float64())
    rows = pa.array(chunk.rows, type=pa.int64())
    return pa.record_batch([ids, mask, values, rows], schema=_SCHEMA)


class _Samples(Sequence[Sample], ABC):
    """A sequence of samples, each made on access."""

    @abstractmethod
    def _at(self, place: int) -> Sample:
        """Return the sample at `place`, from 0 on."""

    @overload
    def __getitem__(self, place: int) -> Sample: ...
    @overload
    def __getitem__(self, place: slice) -> list[Sample]: ...
    def __getitem__(self, place: int | slice) -> Sample | list[Sample]:
        # As of a list: negative numbers count from the end, and IndexError beyond it.
        found = range(len(self))[place]
        return self._at(found) if isinstance(found, int) else [self._at(number) for number in found]


class SampleTable(_Samples):
    """The samples of a file, in order; their arrays are parts of it and cannot be written to. Making it raises
    OSError if the file cannot be read, and ArrowInvalid, a ValueError, if the file is not such a table.

    Attributes:
        lengths: tokens of each, int32.
        first_targets: place of the first token of each that is trained, int32; `UNTRAINED` without one.
    """

    def __init__(self, path: Path) -> None:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        if reader.schema != _SCHEMA:
            raise pa.ArrowInvalid(f"{path} has other columns: {reader.schema.names}")
        # For each batch: borders, tokens, masks, values and rows of its samples.
        self._parts: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        firsts: list[np.ndarray] = []
        for number in range(reader.num_record_batches):
            ids, mask, values, rows = reader.get_batch(number).columns
            # Not `to_numpy`, which imports pandas: most of the time of a start from the cache.
            columns = map(np.from_dlpack, (ids.offsets, ids.values, mask.values, values, rows))
            borders, tokens, trained, values_of, rows_of = columns
            self._parts.append((borders, tokens, trained.view(bool), values_of, rows_of))
            firsts.append(_first_targets(borders, trained.view(bool)))
        counts = [len(borders) - 1 for borders, *_ in self._parts]
        self._ends = np.cumsum(counts, dtype=np.int64)
        nothing = np.zeros(0, dtype=np.int32)
        self.lengths = np.concatenate([nothing, *(np.diff(borders) for borders, *_ in self._parts)])
        self.first_targets = np.concatenate([nothing, *firsts])

    def __len__(self) -> int:
        return len(self.lengths)

    def _at(self, place: int) -> Sample:
        part = int(np.searchsorted(self._ends, place, side="right"))
        borders, ids, mask, values, rows = self._parts[part]
        own = place - (int(self._ends[part]) - len(values))
        start, end = borders[own], borders[own + 1]
        return Sample(ids[start:end], mask[start:end], value=float(values[own]), row=int(rows[own]))


class TrainedSamples(_Samples):
    """Samples as they are trained, with their lengths."""

    @property
    @abstractmethod
    def lengths(self) -> np.ndarray:
        """Tokens of each."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all of them."""
        return int(self.lengths.sum(dtype=np.int64))


class JoinedSamples(TrainedSamples):
    """The samples of several sources, one source after the other.

    Attributes:
        parts: the samples of each source.
        sizes: their numbers.
    """

    def __init__(self, parts: Sequence[TrainedSamples]) -> None:
        self.parts = parts
        self.sizes = [len(part) for part in parts]
        self._ends = np.cumsum(self.sizes)

    def __len__(self) -> int:
        return sum(self.sizes)

    @property
    def lengths(self) -> np.ndarray:
        return np.concatenate([part.lengths for part in self.parts])

    def _at(self, place: int) -> Sample:
        part = int(np.searchsorted(self._ends, place, side="right"))
        return self.parts[part][place - (int(self._ends[part]) - self.sizes[part])]


@dataclass(frozen=True, eq=False)
class ChosenSamples(TrainedSamples):
    """The samples at `places` of a sequence, each cut to at most `most` tokens."""

    samples: Sequence[Sample]
    places: np.ndarray
    most: int

    def __len__(self) -> int:
        return len(self.places)

    @property
    def lengths(self) -> np.ndarray:
        return np.minimum(sizes_of(self.samples)[0][self.places], self.most)

    def _at(self, place: int) -> Sample:
        sample = self.samples[int(self.places[place])]
        return sample if len(sample.token_ids) <= self.most else sample.cut(self.most)


def sizes_of(samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """Return length and first trained place of each, as `SampleTable` has them."""
    if isinstance(samples, SampleTable):
        return samples.lengths, samples.first_targets
    lengths = np.array([len(sample.token_ids) for sample in samples], dtype=np.int32)
    borders = np.concatenate([[0], np.cumsum(lengths)])
    mask = np.concatenate([np.zeros(0, dtype=bool), *(sample.loss_mask for sample in samples)])
    return lengths, _first_targets(borders, mask)


def _first_targets(borders: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the place of the first trained token of each sample; the first token of a sample is never trained."""
    trained = mask.copy()
    starts = borders[:-1][np.diff(borders) > 0]
    trained[starts] = False
    places = np.append(np.flatnonzero(trained), len(mask))
    nearest = places[np.searchsorted(places, borders[:-1])]
    return np.where(nearest < borders[1:], nearest - borders[:-1], UNTRAINED).astype(np.int32)


_CACHE_ENV = "HOLDFAST_CACHE"
_SAMPLES, _ABOUT = "samples.arrow", "about.json"
_BLOCK_BYTES = 1 << 24
# The modules that make tokens of rows. Their code is part of the name: a mended template must not leave old tokens.
_CODE = (
    *(masking, messages, template, written, chat_forms, chat_tokenizer),
    *(data_files, row_files, samples_of_rows, row_formats, sys.modules[__name__]),
)
_LIBRARIES = ("holdfast", "tokenizers", "jinja2", "datasets", "pyarrow")
_TIME_OF_DAY = re.compile(r"%[-_0^#EO]*[HIklMSfspPXcTRr+]")
"""Directives of strftime that write another text within a day. If other text looks so, runs share no cache."""


class About(msgspec.Struct, frozen=True):
    """Description of the samples in a directory of the cache.

    Attributes:
        digest: xxh3-128 of the file of samples and of the other attributes.
        format: place among the formats that were looked for.
        rows: of the data.
        remarks: what is in the data and not in the tokens, and in which rows.
        bad: rows that are left out.
    """

    digest: str
    format: int
    rows: int
    remarks: Remarks
    bad: BadRows


@dataclass(frozen=True)
class CachedSamples:
    """The samples of a dataset, from the cache."""

    samples: SampleTable
    about: About
    directory: Path


def cache_directory(config: SftDataConfig) -> Path:
    """Return the directory of tokenised data, unless `cache_dir` is empty. Raise RuntimeError if it is under the home
    directory of a user who has none."""
    default = os.environ.get(_CACHE_ENV) or "~/.cache/holdfast"
    return Path(config.cache_dir or f"{default}/tokenised").expanduser()


def cache_key(config: SftDataConfig, tokenizer: chat_tokenizer.Tokenizer, formats: Sequence[Format]) -> str:
    """Return the name of the directory for this data, tokenizer, code and these settings. Raise DataError if the
    dataset of a hub cannot be downloaded."""
    depends = {
        "content": _content_of_data(config),
        "split": config.split,
        "train_on": config.train_on,
        "chat_template_kwargs": config.chat_template_kwargs,
        "on_bad_row": config.on_bad_row,
        # Rows that are too long are bad rows then.
        "seq_len": config.seq_len if config.too_long == "error" else None,
        "formats": [form.name for form in formats],
        "tokenizer": tokenizer.identity(),
        "code": [_digest_of_file(Path(file)) for file in map(inspect.getfile, _CODE)],
        "libraries": [importlib.metadata.version(name) for name in _LIBRARIES],
    }
    if "strftime_now" in tokenizer.identity():  # such a template writes other prompts in another run
        now = template_date()
        depends["date"] = now.isoformat() if _TIME_OF_DAY.search(tokenizer.identity()) else now.date().isoformat()
    return xxhash.xxh3_128(json.dumps(depends, sort_keys=True).encode()).hexdigest()


def open_cached(directory: Path, *, verify: bool, is_said: bool = False) -> CachedSamples | None:
    """Return what a directory of the cache holds; None if it is missing or damaged.

    Args:
        verify: read all bytes and compare their digest first.
        is_said: warn of damage.
    """
    try:
        about = msgspec.json.decode((directory / _ABOUT).read_bytes(), type=About)
        if verify and _digest_of_cached(directory / _SAMPLES, about) != about.digest:
            raise ValueError("its bytes are not those that were written")
        return CachedSamples(SampleTable(directory / _SAMPLES), about, directory)
    except (FileNotFoundError, NotADirectoryError):
        if not directory.exists():
            return None
        reason = "a file is missing"
    # msgspec's and Arrow's errors are ValueErrors.
    except (OSError, ValueError) as error:
        reason = str(error)
    if is_said:
        report(f"WARNING: the tokenised data in {directory} is damaged ({reason}) and is made again")
    return None


def make_cached(
    directory: Path, chunks: Iterator[Chunk], *, format_place: int, is_current: Callable[[], bool]
) -> Iterator[Chunk]:
    """Write chunks to a new directory of the cache, give it its name at their end; yield each when it is written. Raise
    OSError if it cannot be written; nothing is left of it. `is_current`: asked at the end whether the data still has
    that name; if not, nothing is kept."""
    atomic.make_directory(directory.parent)
    with scratch_directory(directory.parent) as scratch:
        temporary = scratch / directory.name
        temporary.mkdir()
        rows, bad = 0, BadRows()
        remarks: Remarks = {}
        for chunk in chunks_to_file(temporary / _SAMPLES, chunks):
            rows += chunk.num_rows + chunk.bad.count
            bad += chunk.bad
            remarks = join([remarks, chunk.remarks])
            yield chunk
        about = About("", format_place, rows, remarks, bad)
        about = msgspec.structs.replace(about, digest=_digest_of_cached(temporary / _SAMPLES, about))
        (temporary / _ABOUT).write_bytes(msgspec.json.encode(about))
        if not is_current() or open_cached(directory, verify=True) is not None:
            return  # what was read may be something else; or another run was faster, with the same bytes
        if directory.exists():
            atomic.remove_directory(directory)
        try:
            atomic.publish_directory(temporary, directory)
        except OSError:
            if not (directory / _ABOUT).is_file():  # else another run was faster after all
                raise


def _content_of_data(config: SftDataConfig) -> str:
    """Return what tells the rows of a dataset: the names and digests of its files, or the revision."""
    files = find_files(config.name, key="data.name", split=config.split)
    if files is None:
        return f"hub {config.name} {hub_fingerprint(config.name, split=config.split)}"
    # The name of the only file is in no message, and its suffixes say how it is read.
    labels = ["".join(files[0].path.suffixes[-2:])] if len(files) == 1 else [file.label for file in files]
    return json.dumps([(label, _digest_of_file(file.path)) for label, file in zip(labels, files, strict=True)])


def _digest_of_cached(samples: Path, about: About) -> str:
    said = msgspec.json.encode(msgspec.structs.replace(about, digest=""), order="sorted")
    return _digest_of_file(samples, begin=said)


def _digest_of_file(path: Path, *, begin: bytes = b"") -> str:
    digest = xxhash.xxh3_128(begin)
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
