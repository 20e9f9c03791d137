"""From a dataset to its samples: from the cache, or tokenised now.

One process of a machine makes what is cached, on all its cores, and the other ranks wait. They wait in collectives
that are repeated while it works, so that no deadline of a collective bounds how much data there may be.
"""

from __future__ import annotations

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

_TELL_S = 10.0
_Work = Generator[None, None, str | None]


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
    make = partial(_make, config, tokenizer, formats, encode_as, shapes=shapes)
    cached = _cached(config, make, mesh) if config.cache_dir != "" else None
    if cached is not None:
        form = formats[cached.about.format]
        if is_main:
            report("tokenised", rows=f"{cached.about.rows:,}", format=form.name, cache=str(cached.directory))
            say_remarks(cached.about.remarks, config.name)
        return cached.samples, form
    rows, place = open_dataset(config, formats, shapes=shapes, is_reported=is_main)
    encode = encode_as(formats[place])
    return tokenize_rows(rows, encode, name=config.name, num_proc=config.num_proc, mesh=mesh), formats[place]


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
    config: SftDataConfig,
    tokenizer: Tokenizer,
    formats: tuple[Format, ...],
    encode_as: Callable[[Format], Encode],
    *,
    shapes: str,
) -> _Work:
    """Put the samples into the cache unless they are there; return by which name, or None. Yields now and then."""
    yield
    try:
        directory = _directory(config)
    except RuntimeError as error:
        _say_not_kept("the home directory", str(error))
        return None
    key = cache_key(config, tokenizer, formats, encode_as)
    if open_cached(directory / key, verify=True, is_said=True) is not None:
        return key
    rows, place = open_dataset(config, formats, shapes=shapes, is_reported=False)
    if len(rows) <= FEW_ROWS:
        return None
    report("tokenising", rows=f"{len(rows):,}", format=formats[place].name, cache=str(directory / key))
    try:
        chunks = ordered_chunks(rows, encode_as(formats[place]), name=config.name, num_proc=config.num_proc)
        for _ in make_cached(
            directory / key,
            chunks,
            format_place=place,
            is_current=lambda: cache_key(config, tokenizer, formats, encode_as) == key,
        ):
            yield
    except OSError as error:
        _say_not_kept(str(directory), error.strerror or str(error))
        return None
    if open_cached(directory / key, verify=False) is None:
        report(f"WARNING: {config.name} changed while it was tokenised, which is done again, and not kept")
        return None
    return key


def _directory(config: SftDataConfig) -> Path:
    directory = cache_directory(config)
    assert directory is not None, "whoever wants no cache does not ask for it"
    return directory


def _say_not_kept(where: str, reason: str) -> None:
    report(
        f"WARNING: data.cache_dir: tokenised data cannot be kept in {where} ({reason}), so every start tokenises it "
        'again, and it has to fit into memory. Name another directory, or "" to be content with that'
    )


def _cached(config: SftDataConfig, make: Callable[[], _Work], mesh: Mesh | None) -> CachedSamples | None:
    """Return what the cache holds of the data, made if need be; None where it is not to hold it. Collective.

    Raises:
        DataError: machines have other data.
    """
    keys = _run_together(make() if mesh is None or mesh.is_main else None, mesh)
    if mesh is not None and mesh.world_size > 1 and None not in keys:
        # A machine that does not see the directory of rank 0 makes its own; the others find it.
        first_of_machine = not mesh.is_main and os.environ.get("LOCAL_RANK", "0") == "0"
        keys += _run_together(make() if first_of_machine else None, mesh)
    if None in keys:
        return None
    if len(set(keys)) > 1:
        raise DataError(
            f"data.name = '{config.name}', the tokenizer or the installed libraries are not the same on all machines"
        )
    found = open_cached(_directory(config) / str(keys[0]), verify=False)
    found_everywhere = [found is not None] if mesh is None else mesh.gather(found is not None)
    return found if all(found_everywhere) else None


def _run_together(work: _Work | None, mesh: Mesh | None) -> list[str | None]:
    """Run the work that some ranks have while the others wait; return what came out of it on those. Collective.

    Raises:
        HoldfastError: that of a rank, on every rank.
    """
    is_done, outcome, failure = work is None, None, None
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
        state = (work is not None, is_done, outcome, failure)
        states = [state] if mesh is None else mesh.gather(state)
        for *_, failed in states:
            if failed is not None:
                raise failed
        if all(done for _, done, _, _ in states):
            return [found for has_work, _, found, _ in states if has_work]
