"""Tokenised data, kept on disk: made once, by one process on all its cores, and mapped into memory ever after.

A directory of the cache is named by what its tokens depend on: the bytes of the data, the tokenizer with its templates,
the settings, and the code that makes tokens of rows. So nothing has to be thrown away when one of them changes, and two
runs that make the same directory at once make the same bytes: the first to finish gives it its name, and the other uses
that. What is damaged is told by its digest, and made again. Where the disk cannot take it, a run does without.
"""

from __future__ import annotations

import datetime
import fcntl
import importlib.metadata
import inspect
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import msgspec
import xxhash

from holdfast.shared.chat import masking, messages, template
from holdfast.shared.chat import tokenizer as chat_tokenizer
from holdfast.shared.config.trainer import SftDataConfig
from holdfast.shared.files import durable
from holdfast.shared.process.events import report
from holdfast.trainer.data import row_files, row_formats, tokenizing
from holdfast.trainer.data.row_files import hub_fingerprint
from holdfast.trainer.data.row_formats import Format
from holdfast.trainer.data.sample_table import SampleTable, chunks_to_file
from holdfast.trainer.data.tokenizing import Chunk

_CACHE_ENV = "HOLDFAST_CACHE"
_SAMPLES, _ABOUT = "samples.arrow", "about.json"
_BLOCK_BYTES = 1 << 24
# What makes tokens of rows. Their code is part of the name: a mended template must not leave old tokens behind.
_CODE = (masking, messages, template, chat_tokenizer, row_files, row_formats, tokenizing)
_LIBRARIES = ("holdfast", "tokenizers", "jinja2", "datasets", "pyarrow")


class About(msgspec.Struct, frozen=True):
    """What a directory of the cache holds, beside the samples.

    Attributes:
        digest: xxh3-128 of the file of samples and of what is said here.
        format: place among the formats that were looked for.
        rows: of the data.
        remarks: what is in the data and not in the tokens, and in how many rows.
    """

    digest: str
    format: int
    rows: int
    remarks: dict[str, int]


@dataclass(frozen=True)
class CachedSamples:
    """The samples of a dataset, from the cache."""

    samples: SampleTable
    about: About
    directory: Path


def cache_directory(config: SftDataConfig) -> Path | None:
    """Return where tokenised data lies; None where it is not to be kept.

    Raises:
        RuntimeError: it is under the home directory of a user who has none.
    """
    if config.cache_dir == "":
        return None
    default = os.environ.get(_CACHE_ENV) or "~/.cache/holdfast"
    return Path(config.cache_dir or f"{default}/tokenised").expanduser()


def cache_key(
    config: SftDataConfig,
    tokenizer: chat_tokenizer.Tokenizer,
    formats: Sequence[Format],
    made_by: Callable[..., object],
) -> str:
    """Return the name of the directory for this data, tokenizer, code and these settings.

    Args:
        made_by: what makes samples of a row; its module is part of the code.

    Raises:
        DataError: the dataset is one of a hub, and cannot be had.
    """
    depends = {
        "content": _content_of_data(config),
        "split": config.split,
        "train_on": config.train_on,
        # A row that is too long is an error where it is made into tokens.
        "seq_len": config.seq_len if config.too_long == "error" else None,
        "formats": [form.name for form in formats],
        "tokenizer": tokenizer.identity(),
        "code": [_digest_of_file(Path(file)) for file in (*map(inspect.getfile, _CODE), inspect.getfile(made_by))],
        "libraries": [importlib.metadata.version(name) for name in _LIBRARIES],
    }
    if "strftime_now" in str(depends["tokenizer"]):
        depends["date"] = datetime.date.today().isoformat()  # such a template writes other prompts tomorrow
    return xxhash.xxh3_128(json.dumps(depends, sort_keys=True).encode()).hexdigest()


def open_cached(directory: Path, *, verify: bool, is_said: bool = False) -> CachedSamples | None:
    """Return what a directory of the cache holds; None where it is not there, or damaged.

    Args:
        verify: read all bytes and compare their digest, before any of them is taken for what it says.
        is_said: say that it is damaged, and made again.
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
    """Write chunks to a new directory of the cache, give it its name at their end; yield each when it is written.

    Args:
        is_current: asked at the end whether the data is still what the name says; if not, nothing is kept.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    # Its workers are forked by now: one that inherits the lock could hold it for longer than this process lives.
    begun = list(islice(chunks, 1))
    durable.make_directory(directory.parent)
    with _own_temporary(directory) as temporary:
        rows, remarks = 0, dict[str, int]()
        for chunk in chunks_to_file(temporary / _SAMPLES, chain(begun, chunks)):
            rows += chunk.num_rows
            for remark, count in chunk.remarks.items():
                remarks[remark] = remarks.get(remark, 0) + count
            yield chunk
        about = About("", format_place, rows, remarks)
        about = msgspec.structs.replace(about, digest=_digest_of_cached(temporary / _SAMPLES, about))
        (temporary / _ABOUT).write_bytes(msgspec.json.encode(about))
        if not is_current() or open_cached(directory, verify=True) is not None:
            return  # what was read may be something else; or another run was faster, with the same bytes
        if directory.exists():
            durable.remove_directory(directory)
        try:
            durable.publish_directory(temporary, directory)
        except OSError:
            if not (directory / _ABOUT).is_file():  # else another run was faster after all
                raise


@contextmanager
def _own_temporary(directory: Path) -> Iterator[Path]:
    """Give a new directory beside `directory`, which nobody takes for left behind while this process lives."""
    _clear_left_behind(directory.parent)
    temporary = durable.temporary_sibling(directory)
    temporary.mkdir()
    descriptor = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(descriptor)
        yield temporary
    finally:
        os.close(descriptor)
        shutil.rmtree(temporary, ignore_errors=True)


def _clear_left_behind(parent: Path) -> None:
    """Remove what killed processes left half made."""
    for path in parent.glob(f"{durable.TEMPORARY_PREFIX}*"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue  # another process removed it first
        try:
            if _lock(descriptor):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Lock a directory; return whether nobody else had."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # somebody else's, or a filesystem without locks, where nothing is cleared
        return False
    return True


def _content_of_data(config: SftDataConfig) -> str:
    """Return what tells the rows of a dataset: a digest of a file, or of all files of a directory, or the revision."""
    path = Path(config.name)
    if path.is_file():
        return f"{''.join(path.suffixes[-2:])} {_digest_of_file(path)}"
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        return json.dumps([(str(file.relative_to(path)), _digest_of_file(file)) for file in files])
    return f"hub {config.name} {hub_fingerprint(config.name, split=config.split)}"


def _digest_of_cached(samples: Path, about: About) -> str:
    said = msgspec.json.encode(msgspec.structs.replace(about, digest=""), order="sorted")
    return _digest_of_file(samples, begin=said)


def _digest_of_file(path: Path, *, begin: bytes = b"") -> str:
    digest = xxhash.xxh3_128(begin)
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
