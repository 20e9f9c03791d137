"""From a dataset to its samples: from the cache, or tokenised now.

One process of a machine makes what is cached, on all its cores, and the other ranks wait. They wait in collectives
that are repeated while it works, so that no deadline of a collective bounds how much data there may be.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path

from holdfast.shared.chat.tokenizer import Tokenizer
from holdfast.shared.config.trainer import SftDataConfig
from holdfast.shared.errors import DataError
from holdfast.shared.files.local_inputs import check_data_path
from holdfast.shared.process.events import report
from holdfast.trainer.data.packing import Sample
from holdfast.trainer.data.row_files import Rows, read_rows
from holdfast.trainer.data.row_formats import Format, find_format
from holdfast.trainer.data.token_cache import (
    CachedSamples,
    cache_directory,
    cache_key,
    make_cached,
    open_cached,
)
from holdfast.trainer.data.tokenizing import FEW_ROWS, Encode, ordered_chunks, say_remarks, tokenize_rows
from holdfast.trainer.mesh import Mesh

_log = logging.getLogger("trainer")
_TELL_S = 10.0
_Work = Generator[None, None, str]


def read_samples(
    config: SftDataConfig,
    tokenizer: Tokenizer,
    formats: tuple[Format, ...],
    encode_as: Callable[[Format], Encode],
    *,
    shapes: str,
    mesh: Mesh | None,
) -> tuple[Sequence[Sample], Format]:
    """Return the samples of all rows, in their order, and how the rows are written.

    Args:
        encode_as: gives what makes the samples of a row that is written so.
        shapes: of rows, in words, for the message where the first row has none of the formats.
        mesh: the ranks, if there are several: all get all samples. Collective then.

    Raises:
        ConfigError, DataError: the dataset is missing, lacks columns, or has a row that cannot be used.
    """
    check_data_path(config.name, key="data.name")
    is_main = mesh is None or mesh.is_main
    directory, key = cache_directory(config), cache_key(config, tokenizer, formats)
    if directory is not None and key is not None:
        make = partial(
            _make,
            directory / key,
            config,
            formats,
            encode_as,
            shapes=shapes,
            is_current=lambda: cache_key(config, tokenizer, formats) == key,
        )
        cached = _cached(directory / key, make, mesh)
        if cached is not None:
            form = formats[cached.about.format]
            if is_main:
                report("tokenised", rows=f"{cached.about.rows:,}", format=form.name, cache=str(directory / key))
                say_remarks(cached.about.remarks, config.name)
            return cached.samples, form
    rows, place = open_dataset(config, formats, shapes=shapes, is_reported=is_main)
    return tokenize_rows(rows, encode_as(formats[place]), name=config.name, mesh=mesh), formats[place]


def open_dataset(
    config: SftDataConfig, formats: tuple[Format, ...], *, shapes: str, is_reported: bool
) -> tuple[Rows, int]:
    """Return the rows of a dataset and the place of their format, which is reported as well where `is_reported`.

    Raises:
        DataError: the dataset is missing, unreadable or empty, or its first row has no known columns.
    """
    rows = read_rows(config.name, split=config.split)
    try:
        _, first = next(rows.take(0, 1))
    except DataError as error:
        raise DataError(f"{config.name}, {error}") from None
    form = find_format(first, formats, name=config.name, shapes=shapes)
    if is_reported:
        unused = form.unused(first)
        rest = {"columns_not_read": ", ".join(unused)} if unused else {}
        report("tokenising", rows=f"{len(rows):,}", format=form.name, **rest)
    return rows, formats.index(form)


def _make(
    directory: Path,
    config: SftDataConfig,
    formats: tuple[Format, ...],
    encode_as: Callable[[Format], Encode],
    *,
    shapes: str,
    is_current: Callable[[], bool],
) -> _Work:
    """Put the samples into the cache unless they are there; return why not, or nothing. Yields now and then."""
    yield
    if open_cached(directory, verify=True) is not None:
        return ""
    rows, place = open_dataset(config, formats, shapes=shapes, is_reported=False)
    if len(rows) <= FEW_ROWS:
        return "few rows"
    report("tokenising", rows=f"{len(rows):,}", format=formats[place].name, cache=str(directory))
    try:
        chunks = ordered_chunks(rows, encode_as(formats[place]), name=config.name)
        for _ in make_cached(directory, chunks, format_place=place, is_current=is_current):
            yield
    except OSError as error:
        reason = error.strerror or str(error)
        _log.warning(
            "data.cache_dir: tokenised data cannot be kept in %s (%s), so every start tokenises it again, and it has "
            "to fit into memory. Name another directory, or the empty one to be content with that.",
            directory.parent,
            reason,
        )
        return reason
    return "" if open_cached(directory, verify=False) is not None else "the data changed while it was read"


def _cached(directory: Path, make: Callable[[], _Work], mesh: Mesh | None) -> CachedSamples | None:
    """Return what the cache holds of the data, made if need be; None where it is not to hold it. Collective."""
    if any(_run_together(make() if mesh is None or mesh.is_main else None, mesh)):
        return None
    if mesh is not None and mesh.world_size > 1:
        # A machine that does not see the directory of rank 0 makes its own; the others find it.
        first_of_machine = not mesh.is_main and os.environ.get("LOCAL_RANK", "0") == "0"
        outcomes = _run_together(make() if first_of_machine else None, mesh)
        if any(outcomes):
            return None
    found = open_cached(directory, verify=False)
    found_everywhere = [found is not None] if mesh is None else mesh.gather(found is not None)
    return found if all(found_everywhere) else None


def _run_together(work: _Work | None, mesh: Mesh | None) -> list[str]:
    """Run the work that some ranks have while the others wait; return what came out on each rank. Collective.

    Raises:
        HoldfastError: that of a rank, on every rank.
    """
    is_done, outcome, failure = work is None, "", None
    while True:
        began = time.monotonic()
        while work is not None and not is_done:
            try:
                next(work)
            except StopIteration as end:
                is_done, outcome = True, end.value
            except Exception as error:  # noqa: BLE001 (raised on every rank)
                is_done, failure = True, error
            if time.monotonic() - began >= _TELL_S:
                break
        state = (is_done, outcome, failure)
        states = [state] if mesh is None else mesh.gather(state)
        for _, _, failed in states:
            if failed is not None:
                raise failed
        if all(done for done, _, _ in states):
            return [found for _, found, _ in states]
