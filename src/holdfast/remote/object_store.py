"""Files below one URL (S3, a shared filesystem, memory), through fsspec.

Every call has a few tries and, where the filesystem is asynchronous as S3's is, a deadline. Objects appear whole or not
at all; they cannot be renamed.
"""

import asyncio
import concurrent.futures
import errno
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsspec.asyn import AsyncFileSystem
from fsspec.callbacks import Callback
from fsspec.core import url_to_fs
from fsspec.registry import get_filesystem_class

from holdfast.errors import ConfigError, StorageError, causes, is_storage_failure, masked
from holdfast.process.imports import keep_uploads_apart

TRIES = 4
"""How often a call is tried, when what stopped it may pass."""
FIRST_DELAY_S = 1.0
"""Pause after the first failure; doubled after each further one, of which a random half is left out."""
STALLED_S = 480.0
"""A call in which nothing moves for this long has failed: the four parts of a large file that are sent at once are
200 MB, and only the end of one shows. A request that moves no byte ends sooner, by `read_timeout`."""
_S3_OPTIONS: dict[str, Any] = {
    "max_concurrency": 4,  # parts of 50 MB in memory
    "config_kwargs": {
        "connect_timeout": 10,
        "read_timeout": 60,
        "retries": {"mode": "standard", "total_max_attempts": 3},  # of one request; a file may be a thousand
    },
}
_PASSING_ERRNOS = {errno.EBUSY, errno.EIO, errno.EAGAIN, errno.ETIMEDOUT, getattr(errno, "EREMOTEIO", errno.EIO)}
_LIMIT_ERRNOS = {errno.EMFILE, errno.ENFILE}
# A reader of a store writes here.
_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, *_LIMIT_ERRNOS}
_PASSING_NAMES = {
    "ConnectionError",  # of python and of botocore
    "HTTPClientError",
    "ClientConnectionError",
    "ClientPayloadError",
    "IncompleteRead",
    "ResponseParserError",
    "TimeoutError",
}


# Used only by this module: the global generator belongs to the training, and is saved with it.
_generator = random.Random()


def is_transient(error: BaseException) -> bool:
    """Return whether what stopped a call may pass: a broken connection, a busy server, a deadline."""
    if isinstance(error, FileNotFoundError | PermissionError | FileExistsError | NotADirectoryError):
        return False
    if any(base.__name__ in _PASSING_NAMES for base in type(error).__mro__):
        return True
    return isinstance(error, OSError) and error.errno in _PASSING_ERRNOS


def _pauses() -> Iterator[float]:
    for exponent in range(TRIES - 1):
        yield FIRST_DELAY_S * 2**exponent * _generator.uniform(0.5, 1.0)


class _TransferProgress(Callback):
    def __init__(self) -> None:
        super().__init__()
        self.moved_s = time.monotonic()

    def call(self, hook_name: str | None = None, **kwargs: Any) -> None:
        self.moved_s = time.monotonic()


class ObjectStore:
    """The files below `url`, by names relative to it. Safe for one thread at a time, `abort` for any.

    Credentials and endpoint come from the environment of the driver: AWS_ACCESS_KEY_ID,
    AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL, AWS_PROFILE and so on.

    Messages take `url`, which is without passwords. `connects`: unset to look at the URL only.

    Raise ConfigError if the URL cannot be used, or its driver is not installed; StorageError if there is no connection.
    Every method may raise StorageError with URL, operation and reason."""

    def __init__(self, url: str, *, connects: bool = True) -> None:
        self.url, place = masked(url.rstrip("/")), f"ckpt.dir = '{masked(url)}'"
        self._credentials = url.partition("://")[2].partition("/")[0].rpartition("@")[0]
        protocol = url.partition("://")[0] if "://" in url else "file"
        # Instances and listings are not shared: what another program wrote or removed must be seen.
        options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
        if protocol in ("s3", "s3a"):
            options |= _S3_OPTIONS
        elif protocol in ("file", "local"):
            options["auto_mkdir"] = True
        keep_uploads_apart()
        try:
            if connects:
                self._fs, root = url_to_fs(url, **options)
            else:
                root = get_filesystem_class(protocol.rpartition("::")[2])._strip_protocol(url.rpartition("::")[2])
        except ImportError as error:
            install = f"`pip install` the driver of {protocol}"
            if protocol in ("s3", "s3a"):
                install = "`uv sync --inexact --extra s3` in a checkout, or `pip install 'holdfast[s3]'`"
            raise ConfigError(f"{place}: {error}. Install it: {install}") from None
        except ValueError as error:
            raise ConfigError(f"{place}: {self._told(error)}. Write it as s3://bucket/prefix or file:///path") from None
        except Exception as error:  # some drivers connect now, and each raises errors of its own
            told = f"{type(error).__name__}: {self._told(error)}. Check its host and user, or try again later."
            failure = StorageError(f"{place}: connecting failed: {told}")
            failure.may_pass = is_transient(error)
            raise failure from error
        self._root = str(root).rstrip("/")
        if not url or not self._root.strip("/"):
            raise ConfigError(f"{place} names no place. Write it as s3://bucket/prefix or file:///path")
        if protocol in ("file", "local") and os.path.exists(self._root) and not os.path.isdir(self._root):  # noqa: PTH110, PTH112
            raise ConfigError(f"{place} is a file: name a directory, which need not exist")
        self._aborted = threading.Event()
        self._running: concurrent.futures.Future[Any] | None = None

    def names(self, directory: str = "") -> list[str]:
        """Return the names of the entries directly in `directory`, sorted."""
        path = self._path(directory)
        try:
            found = self._call(f"listing {directory or 'it'}", "ls", path, detail=False)
        except FileNotFoundError:
            return []
        return sorted({str(name).rstrip("/").rsplit("/", 1)[1] for name in found if str(name).rstrip("/") != path})

    def sizes(self, directory: str) -> dict[str, int]:
        """Return the size in bytes of every file below `directory`, by name relative to it."""
        path = self._path(directory)
        found = self._call(f"listing {directory}", "find", path, detail=True)
        return {str(name).removeprefix(f"{path}/"): int(info["size"]) for name, info in found.items()}

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file, None if it does not exist."""
        try:
            return bytes(self._call(f"reading {name}", "cat_file", self._path(name)))
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Write a small file."""
        operation = f"writing {name}"
        try:
            self._call(operation, "pipe_file", self._path(name), data)
        except FileNotFoundError as error:
            raise self._failure(operation, error) from error

    def put(self, path: Path, name: str) -> None:
        """Copy the local file `path` to `name`. Raise OSError if `path` cannot be read: no fault of the store."""
        operation = f"writing {name}"
        try:
            self._call(operation, "put_file", str(path), self._path(name), local=path, callback=_TransferProgress())
        except FileNotFoundError as error:
            if not path.exists():
                raise
            raise self._failure(operation, error) from error

    def get(self, name: str, path: Path) -> bool:
        """Copy `name` to the local file `path`; return whether there is such a file. Raise OSError if `path` cannot be
        written, which is not a fault of the store."""
        try:
            self._call(
                f"reading {name}", "get_file", self._path(name), str(path), local=path, callback=_TransferProgress()
            )
        except FileNotFoundError:
            return False
        return True

    def remove(self, name: str) -> None:
        """Remove one file, if it is there."""
        try:
            self._call(f"removing {name}", "rm_file", self._path(name))
        except FileNotFoundError:
            return

    def remove_tree(self, directory: str) -> list[str]:
        """Remove every file below `directory`; return them."""
        names = [f"{directory}/{name}" for name in self.sizes(directory)]
        for name in names:
            self.remove(name)
        # Unlike an object store, a filesystem keeps the empty directories.
        if not isinstance(self._fs, AsyncFileSystem) and self._fs.isdir(self._path(directory)):
            self._call(f"removing {directory}", "rm", self._path(directory), recursive=True)
        return names

    def remove_parts(self, begin: str) -> int:
        """Give up unfinished uploads of large files whose names begin so: S3 keeps their parts, unseen but paid for.
        Return how many."""
        if not hasattr(self._fs, "list_multipart_uploads"):
            return 0
        bucket, _, key = self._path(begin).partition("/")
        found = self._call("listing unfinished uploads", "call_s3", "list_multipart_uploads", Bucket=bucket, Prefix=key)
        uploads = found.get("Uploads", [])
        for upload in uploads:
            self._call("giving up an unfinished upload", "abort_mpu", bucket, upload["Key"], upload["UploadId"])
        return len(uploads)

    def abort(self) -> None:
        """Make the call in progress, and all later ones, fail now. For other threads."""
        self._aborted.set()
        # Once: the other thread may set it to None between two looks.
        running = self._running
        if running is not None:
            running.cancel()

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _call(self, operation: str, method: str, *arguments: Any, local: Path | None = None, **options: Any) -> Any:
        """Call a method of the filesystem, with retries. `local`: the file of this machine that it reads or writes.
        Raise FileNotFoundError if the object is missing and its bucket exists; OSError of `local`; else StorageError.
        """
        pauses = _pauses()
        while True:
            self._refuse_if_aborted(operation)
            try:
                return self._once(method, *arguments, **options)
            # It is an Exception, too; an abort must not be tried again.
            except concurrent.futures.CancelledError as error:
                self._refuse_if_aborted(operation)
                raise self._failure(operation, error) from error
            except FileNotFoundError as error:
                if _code(error) == "NoSuchBucket":
                    raise self._failure(operation, error) from error
                raise
            except Exception as error:
                # A file of this machine that fails is not a fault of the store: raise it as it is.
                if local is not None and _is_of(local, error, is_download=method == "get_file"):
                    raise
                pause = next(pauses, None)
                if pause is None or not is_transient(error):
                    raise self._failure(operation, error) from error
                # Not sleep: an abort ends the pause.
                self._aborted.wait(pause)

    def _once(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method once; give up when nothing moves for `STALLED_S`."""
        if not isinstance(self._fs, AsyncFileSystem):
            return getattr(self._fs, method)(*arguments, **options)
        loop = self._fs.loop
        assert loop is not None
        progress = options.get("callback") or _TransferProgress()
        progress.moved_s = time.monotonic()  # the tries before may have ended long ago, for nothing moved
        coroutine = getattr(self._fs, f"_{method}")(*arguments, **options)
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        self._running = future
        try:
            # An abort that came just before found no call to cancel.
            if self._aborted.is_set():
                future.cancel()
            while not future.done():
                left = progress.moved_s + STALLED_S - time.monotonic()
                if left <= 0:
                    future.cancel()
                    raise TimeoutError(f"nothing moved for {STALLED_S:.0f} s")
                concurrent.futures.wait([future], timeout=left)
            return future.result()
        finally:
            self._running = None

    def _refuse_if_aborted(self, operation: str) -> None:
        if self._aborted.is_set():
            raise StorageError(f"{self.url}: {operation} was given up, as the run ends")

    def _told(self, error: BaseException) -> str:
        """Return the reason of an error without the password, which some drivers take for a part of the path."""
        told = masked(str(error) or "no reason given")
        return told.replace(self._credentials, "***") if self._credentials else told

    def _failure(self, operation: str, error: BaseException) -> StorageError:
        hint = ""
        if _code(error) == "NoSuchBucket":
            hint = " Create the bucket, or correct ckpt.dir."
        elif isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
            hint = " Check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and what they may do there."
        elif is_transient(error):
            hint = f" It was tried {TRIES} times. Check the network and AWS_ENDPOINT_URL."
        failure = StorageError(f"{self.url}: {operation} failed: {type(error).__name__}: {self._told(error)}.{hint}")
        failure.may_pass = is_transient(error) or is_storage_failure(error)
        return failure


def _is_of(local: Path, error: Exception, *, is_download: bool) -> bool:
    """Whether a file of this machine is at fault for `error`, and not the store."""
    if not isinstance(error, OSError):
        return False
    if error.filename is not None:
        return str(error.filename) == str(local)
    return error.errno in (_FULL_ERRNOS if is_download else _LIMIT_ERRNOS)


def _code(error: BaseException | None) -> str:
    """Return the S3 error code of an error, empty for none."""
    for one in causes(error):
        response = getattr(one, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
    return ""
