"""Rows to tokens, on all cores: forked workers encode chunks of rows, and ranks share the work.

Every chunk is encoded by the same function wherever that is, and the results come in the order of the rows, so the
samples do not depend on how many cores or ranks there were. Only a few chunks are under way at once. A row that cannot
be used ends it; of several the first is reported.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection, wait

import numpy as np

from holdfast.shared.chat.masking import Encoded
from holdfast.shared.errors import DataError, ProcessDied
from holdfast.shared.process.child import available_cores, die_with_parent
from holdfast.shared.process.events import report
from holdfast.trainer.data.packing import Sample
from holdfast.trainer.data.row_files import Row, Rows
from holdfast.trainer.mesh import Mesh

_log = logging.getLogger("trainer")
_CHUNK_ROWS = 500
FEW_ROWS = 4000
"""So many are encoded before workers would have begun, or a cache would have been read."""
_REPORT_S = 10.0
_CHUNKS_UNDER_WAY = 4
"""For each worker: so many are held in memory when one of them comes late."""
_INDEX_BYTES = 8

Encode = Callable[[Row], list[Encoded]]


@dataclass
class Chunk:
    """The samples of some consecutive rows, as arrays that are cheap to send.

    Attributes:
        index: place of the chunk in the dataset.
        num_rows: rows encoded, without one that cannot be used.
        ids, mask, lengths, values: of all samples, one after the other.
        remarks: what is in the data and not in the tokens, and in how many rows.
        error: why a row cannot be used; nothing after it is encoded.
    """

    index: int
    num_rows: int = 0
    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    mask: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=bool))
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    values: np.ndarray = field(default_factory=lambda: np.zeros(0))
    remarks: Counter[str] = field(default_factory=Counter)
    error: Exception | None = None

    def samples(self) -> Iterator[Sample]:
        """Yield the samples in order."""
        ends = np.cumsum(self.lengths)
        for start, end, value in zip(ends - self.lengths, ends, self.values.tolist(), strict=True):
            yield Sample(self.ids[start:end].copy(), self.mask[start:end].copy(), value=value)


def tokenize_rows(
    rows: Rows, encode: Encode, *, name: str, num_proc: int | None = None, mesh: Mesh | None = None
) -> list[Sample]:
    """Return the samples of all rows, in their order.

    Args:
        encode: makes the samples of one row: the same number of every row.
        name: of the dataset, for messages.
        num_proc: processes of this machine, shared by its ranks; unset: as many as this process may use cores.
        mesh: the ranks that share the work, all of which get all samples; collective where there are many rows.

    Raises:
        ConfigError, DataError: a row cannot be used; the message begins with its number.
    """
    num_chunks = -(-len(rows) // _CHUNK_ROWS)
    shared = mesh if mesh is not None and mesh.world_size > 1 and len(rows) > FEW_ROWS else None
    mine = range(shared.rank, num_chunks, shared.world_size) if shared else range(num_chunks)
    workers = min(workers_of_this_rank(num_proc), len(mine)) if len(rows) > FEW_ROWS else 1
    is_reported = mesh is None or mesh.is_main
    chunks = []
    progress = _Progress(sum(_chunk_size(rows, index) for index in mine), is_reported=is_reported)
    for chunk in _encoded(rows, encode, mine, name=name, workers=workers):
        chunks.append(chunk)
        progress.add(chunk.num_rows)
    if shared:
        chunks = _gathered(chunks, len(rows), shared, name)
    for chunk in chunks:
        if chunk.error is not None:
            raise chunk.error
    if is_reported:
        say_remarks(sum((chunk.remarks for chunk in chunks), Counter()), name)
    return [sample for chunk in chunks for sample in chunk.samples()]


def ordered_chunks(rows: Rows, encode: Encode, *, name: str, num_proc: int | None = None) -> Iterator[Chunk]:
    """Yield all chunks in the order of the rows, made on all cores that this process may run on.

    Args:
        encode, name, num_proc: see `tokenize_rows`.

    Raises:
        ConfigError, DataError: a row cannot be used; what is before it has been yielded.
    """
    num_chunks = -(-len(rows) // _CHUNK_ROWS)
    progress = _Progress(len(rows), is_reported=True)
    workers = min(num_proc or available_cores(), num_chunks)
    with closing(_encoded(rows, encode, range(num_chunks), name=name, workers=workers)) as chunks:
        for chunk in chunks:
            if chunk.error is not None:
                raise chunk.error
            progress.add(chunk.num_rows)
            yield chunk


def workers_of_this_rank(num_proc: int | None = None) -> int:
    """Its share of `num_proc` processes, or of the cores that it may run on, whatever `parallel.threads` says."""
    return max(1, (num_proc or available_cores()) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _chunk_size(rows: Rows, index: int) -> int:
    return min(len(rows), (index + 1) * _CHUNK_ROWS) - index * _CHUNK_ROWS


def _encode_chunk(rows: Rows, encode: Encode, index: int, name: str) -> Chunk:
    chunk = Chunk(index)
    encoded: list[Encoded] = []
    number = index * _CHUNK_ROWS + 1
    try:
        for number, row in rows.take(index * _CHUNK_ROWS, (index + 1) * _CHUNK_ROWS):
            try:
                parts = encode(row)
            except DataError as error:
                raise DataError(f"row {number}: {error}") from None
            encoded += parts
            chunk.num_rows += 1
            chunk.remarks.update({remark for part in parts for remark in part.remarks})
    except DataError as error:
        chunk.error = DataError(f"{name}, {error}")
    except Exception as error:  # noqa: BLE001 (ConfigError, or a bug: raised where all chunks come together)
        chunk.error = error
    chunk.lengths = np.array([len(part.ids) for part in encoded], dtype=np.int64)
    chunk.values = np.array([part.value for part in encoded], dtype=np.float64)
    if encoded:
        chunk.ids = np.concatenate([np.array(part.ids, dtype=np.int32) for part in encoded])
        chunk.mask = np.concatenate([np.array(part.mask, dtype=bool) for part in encoded])
    return chunk


def _encoded(rows: Rows, encode: Encode, mine: range, *, name: str, workers: int) -> Generator[Chunk, None, None]:
    """Yield the chunks `mine` in their order, up to one that has an error."""
    made = (_encode_chunk(rows, encode, index, name) for index in mine)
    if workers > 1:
        made = _encoded_by_workers(lambda index: _encode_chunk(rows, encode, index, name), mine, workers, name=name)
    for chunk in made:
        yield chunk
        if chunk.error is not None:
            return


def _encoded_by_workers(make: Callable[[int], Chunk], mine: range, workers: int, *, name: str) -> Iterator[Chunk]:
    """Yield the chunks `mine` in their order, each made by the next process that is free."""
    taken, given = os.pipe()
    processes: dict[Connection, int] = {}
    early: dict[int, Chunk] = {}
    try:
        for _ in range(workers):
            connection, pid = _fork(make, taken)
            processes[connection] = pid
        waiting = iter(mine)
        for index in islice(waiting, workers * _CHUNKS_UNDER_WAY):
            _give(given, index)
        for following in mine:
            while following not in early:
                for connection in wait(list(processes)):
                    chunk = _received(connection, processes, name)  # type: ignore[arg-type]  # no socket is among them
                    early[chunk.index] = chunk
            yield early.pop(following)
            for index in islice(waiting, 1):
                _give(given, index)
    finally:
        os.close(taken)
        os.close(given)
        for connection, pid in processes.items():  # nobody wants the rest of what they make
            connection.close()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _give(given: int, index: int) -> None:
    # So few bytes are written and read at once, whoever else reads from the pipe.
    os.write(given, index.to_bytes(_INDEX_BYTES, "little"))


def _received(connection: Connection, processes: dict[Connection, int], name: str) -> Chunk:
    try:
        return pickle.loads(connection.recv_bytes())
    except EOFError:
        connection.close()
        code = os.waitstatus_to_exitcode(os.waitpid(processes.pop(connection), 0)[1])
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise ProcessDied(f"{name}: a process that tokenises rows {how}") from None


def _fork(make: Callable[[int], Chunk], taken: int) -> tuple[Connection, int]:
    """Start a process that makes the chunks whose numbers it reads from `taken`; return where they come from, and
    its id.

    It is forked for the rows and the tokenizer, which it only reads, and it uses neither torch nor threads.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        pid = os.fork()
    if pid:
        sender.close()
        return receiver, pid  # type: ignore[return-value]  # a PipeConnection is Windows's
    try:
        die_with_parent(parent=parent)
        receiver.close()
        while True:
            chunk = make(int.from_bytes(os.read(taken, _INDEX_BYTES), "little"))
            sender.send_bytes(pickle.dumps(chunk, protocol=pickle.HIGHEST_PROTOCOL))
    except BaseException:  # noqa: BLE001 (the process ends here, whatever it was)
        traceback.print_exc()
    finally:
        os._exit(1)


def _gathered(chunks: list[Chunk], num_rows: int, mesh: Mesh, name: str) -> list[Chunk]:
    """Return the chunks of all ranks, in their order. Collective."""
    parts = mesh.gather((num_rows, chunks))
    counts = {count for count, _ in parts}
    if len(counts) > 1:
        raise DataError(f"data.name = '{name}' has other numbers of rows on other machines: {sorted(counts)}")
    return sorted((chunk for _, part in parts for chunk in part), key=lambda chunk: chunk.index)


def say_remarks(remarks: Mapping[str, int], name: str) -> None:
    """Warn of what is in the data and not in the tokens, and in how many rows."""
    for remark, count in sorted(remarks.items()):
        _log.warning("%s: %s (%d rows)", name, remark, count)


class _Progress:
    """Says every few seconds how many rows are done."""

    def __init__(self, total: int, *, is_reported: bool) -> None:
        self._total = total
        self._is_reported = is_reported
        self._done = 0
        self._last = time.monotonic()

    def add(self, rows: int) -> None:
        self._done += rows
        now = time.monotonic()
        if self._is_reported and now - self._last >= _REPORT_S:
            self._last = now
            report("tokenising", rows=f"{self._done:,} of {self._total:,}")
