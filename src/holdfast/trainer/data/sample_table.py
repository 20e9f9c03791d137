"""Samples in an Arrow file that is mapped into memory: what is read is what is used, and nothing else is held.

One record batch for every chunk of rows, with a column for each field of a sample. The file is one that other programs
read as well (`pyarrow.ipc.open_file`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import overload

import numpy as np
import pyarrow as pa

from holdfast.trainer.data.packing import Sample
from holdfast.trainer.data.tokenizing import Chunk

UNTRAINED = np.iinfo(np.int32).max
"""In place of the first trained token of a sample that has none."""

_SCHEMA = pa.schema({"token_ids": pa.list_(pa.int32()), "loss_mask": pa.list_(pa.uint8()), "value": pa.float64()})


def write_chunk(writer: pa.ipc.RecordBatchFileWriter, chunk: Chunk) -> None:
    """Append the samples of a chunk."""
    borders = pa.array(np.concatenate([[0], np.cumsum(chunk.lengths)]), type=pa.int32())
    ids = pa.ListArray.from_arrays(borders, pa.array(chunk.ids, type=pa.int32()))
    mask = pa.ListArray.from_arrays(borders, pa.array(chunk.mask.view(np.uint8), type=pa.uint8()))
    values = pa.array(chunk.values, type=pa.float64())
    writer.write_batch(pa.record_batch([ids, mask, values], schema=_SCHEMA))


def open_writer(path: Path) -> pa.ipc.RecordBatchFileWriter:
    """Return what writes a new table to `path`; it and its file are complete once it is closed."""
    return pa.ipc.new_file(str(path), _SCHEMA)


class _Samples(Sequence[Sample], ABC):
    """What numbers and slices mean in a sequence of samples that are made when they are asked for."""

    @abstractmethod
    def _at(self, place: int) -> Sample:
        """Return the sample at `place`, from 0 on."""

    @overload
    def __getitem__(self, place: int) -> Sample: ...
    @overload
    def __getitem__(self, place: slice) -> list[Sample]: ...
    def __getitem__(self, place: int | slice) -> Sample | list[Sample]:
        # IndexError behind the end, and from the end where it is negative.
        found = range(len(self))[place]
        return self._at(found) if isinstance(found, int) else [self._at(number) for number in found]


class SampleTable(_Samples):
    """The samples of a file, in order; their arrays are parts of it and cannot be written to.

    Attributes:
        lengths: tokens of each, int32.
        first_targets: place of the first token of each that is trained, int32; `UNTRAINED` without one.

    Raises:
        OSError: (making it) the file cannot be read, or is no such table (`pyarrow.ArrowInvalid`, a ValueError).
    """

    def __init__(self, path: Path) -> None:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        if reader.schema != _SCHEMA:
            raise pa.ArrowInvalid(f"{path} has other columns: {reader.schema.names}")
        # Of each batch: borders of its samples, and the tokens, masks and values of all of them.
        self._parts: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        firsts: list[np.ndarray] = []
        for number in range(reader.num_record_batches):
            ids, mask, values = reader.get_batch(number).columns
            borders = ids.offsets.to_numpy()
            loss_mask = mask.values.to_numpy().view(bool)
            self._parts.append((borders, ids.values.to_numpy(), loss_mask, values.to_numpy()))
            firsts.append(_first_targets(borders, loss_mask))
        counts = [len(borders) - 1 for borders, *_ in self._parts]
        self._ends = np.cumsum(counts, dtype=np.int64)
        nothing = np.zeros(0, dtype=np.int32)
        self.lengths = np.concatenate([nothing, *(np.diff(borders) for borders, *_ in self._parts)])
        self.first_targets = np.concatenate([nothing, *firsts])

    def __len__(self) -> int:
        return len(self.lengths)

    def _at(self, place: int) -> Sample:
        part = int(np.searchsorted(self._ends, place, side="right"))
        borders, ids, mask, values = self._parts[part]
        own = place - (int(self._ends[part]) - len(values))
        start, end = borders[own], borders[own + 1]
        return Sample(ids[start:end], mask[start:end], value=float(values[own]))


class ChosenSamples(_Samples):
    """Some of the samples of a sequence, each cut to a length.

    Args:
        places: which, in order.
        most: tokens of each at most.
    """

    def __init__(self, samples: Sequence[Sample], places: np.ndarray, *, most: int) -> None:
        self._samples = samples
        self._places = places
        self._most = most

    def __len__(self) -> int:
        return len(self._places)

    def _at(self, place: int) -> Sample:
        sample = self._samples[int(self._places[place])]
        return sample if len(sample.token_ids) <= self._most else sample.cut(self._most)


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


def chunks_to_file(path: Path, chunks: Iterable[Chunk]) -> Iterable[Chunk]:
    """Write chunks to a new table as they come; yield each when it is written."""
    with open_writer(path) as writer:
        for chunk in chunks:
            write_chunk(writer, chunk)
            yield chunk
