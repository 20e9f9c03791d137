"""A log of records that outlives a killed process at once and a power cut soon after: group commit.

A record is

    marker    4 bytes   b"\xc1REC" (0xc1 is the one byte that msgpack never uses)
    length    4 bytes   of the payload, unsigned, little-endian
    checksum  8 bytes   xxh3-64 of the payload, big-endian
    payload             `length` bytes; the users of this module write msgpack

and a log is one record after another, nothing else. docs/files.md reads one in plain Python.

Appending writes to the page cache, so a record survives its process. A thread makes records durable: one fdatasync for
all that came since the last one, so nobody waits for the disk.
"""

import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import xxhash

from holdfast.run import atomic

_log = logging.getLogger("holdfast")

MARKER = b"\xc1REC"
_LENGTH_BYTES = 4
_CHECK_BYTES = 8
_HEAD_BYTES = len(MARKER) + _LENGTH_BYTES + _CHECK_BYTES
# A fast disk would sync after every record, which costs a core for nothing; a power cut costs this much more.
_BETWEEN_SYNCS_S = 0.1


@dataclass(frozen=True)
class Damage:
    """Bytes of a log that are not a whole record.

    Attributes:
        record: how many whole records are before them.
        start: where they begin.
        num_bytes: how many they are.
        is_tail: nothing whole follows: a write was cut off there.
    """

    record: int
    start: int
    num_bytes: int
    is_tail: bool

    def __str__(self) -> str:
        what = "the torn end is cut" if self.is_tail else "they are damaged and passed over"
        return f"{self.num_bytes} bytes at record {self.record} (offset {self.start}): {what}"


def read_records(path: Path) -> tuple[list[bytes], list[Damage]]:
    """Return the payloads of the whole records of a log, in order, and the damaged parts between them."""
    data = path.read_bytes()
    payloads: list[bytes] = []
    damages: list[Damage] = []
    position = 0
    while position < len(data):
        payload = _payload(data, position)
        if payload is not None:
            payloads.append(payload)
            position += _HEAD_BYTES + len(payload)
            continue
        # One byte on, not one record: the damaged length cannot be trusted.
        following = _next_whole(data, position + 1)
        end = len(data) if following is None else following
        damages.append(Damage(len(payloads), position, end - position, is_tail=following is None))
        position = end
    return payloads, damages


def whole_bytes(path: Path, damages: list[Damage]) -> int:
    """Return how much of a log stays when its torn end, if `read_records` has found one, is cut."""
    return damages[-1].start if damages and damages[-1].is_tail else path.stat().st_size


class RecordLog:
    """Appends records to a file and makes them durable in a thread. `valid_bytes`: how much of the file to keep; what
    follows is cut. 0 begins a new log."""

    def __init__(self, path: Path, *, valid_bytes: int) -> None:
        atomic.make_directory(path.parent)
        self.path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        # Else records would follow a torn end, which then is damage in the middle of the log.
        os.ftruncate(self._descriptor, valid_bytes)
        os.lseek(self._descriptor, 0, os.SEEK_END)
        self._end = valid_bytes
        self._durable_bytes = 0
        self._failure: OSError | None = None
        self._changed = threading.Condition()
        self._closing = threading.Event()
        # A daemon: a log that nobody closed must not keep its process from ending.
        self._thread = threading.Thread(target=self._sync_until_closed, name=f"sync {path.name}", daemon=True)
        self._thread.start()

    def append(self, payload: bytes) -> None:
        """Write one record into the page cache, without waiting for the disk. Raise OSError if it cannot be
        written, or an earlier record could not be made durable."""
        if self._failure is not None:
            raise self._failure
        head = MARKER + len(payload).to_bytes(_LENGTH_BYTES, "little") + xxhash.xxh3_64_digest(payload)
        left = memoryview(head + payload)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:
            self._failure = error  # half a record may be there: nothing may follow it
            raise
        with self._changed:
            self._end += len(head) + len(payload)
            self._changed.notify()

    def close(self, *, wait: bool = False) -> None:
        """End the log. Its thread makes the rest durable and closes the file; `wait` waits until it has. Raise OSError,
        after waiting, if it could not be made durable."""
        self._closing.set()
        with self._changed:
            self._changed.notify()
        if wait:
            self._thread.join()
            if self._failure is not None:
                raise self._failure

    def _sync_until_closed(self) -> None:
        """The thread: waits for records and syncs all that are there, until the log is closed and all is durable."""
        try:
            atomic.fsync_directory(self.path.parent)  # a new log's name must last as long as its records
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._end > self._durable_bytes or self._closing.is_set())
                    # Both under the lock, before the sync: what is appended during it is not yet durable.
                    is_last, end = self._closing.is_set(), self._end
                if end > self._durable_bytes:
                    # Outside of the lock: appending must never wait for the disk. The size is synced too.
                    os.fdatasync(self._descriptor)
                    self._durable_bytes = end
                if is_last:
                    return
                self._closing.wait(_BETWEEN_SYNCS_S)
        except OSError as error:
            # The kernel has dropped these pages from its cache: another try would seem to succeed.
            self._failure = error
            _log.error("%s cannot be made durable: %s", self.path, error)
        finally:
            # Not at once after a failure: append may still write to this descriptor, or to its next owner.
            self._closing.wait()
            os.close(self._descriptor)


def _payload(data: bytes, start: int) -> bytes | None:
    """Return the payload of the record at `start`, or None if the record is not whole."""
    body = start + _HEAD_BYTES
    if data[start : start + len(MARKER)] != MARKER:
        return None
    length = int.from_bytes(data[start + len(MARKER) : body - _CHECK_BYTES], "little")
    payload = data[body : body + length]
    if len(payload) < length or xxhash.xxh3_64_digest(payload) != data[body - _CHECK_BYTES : body]:
        return None
    return payload


def _next_whole(data: bytes, start: int) -> int | None:
    """Return where the first whole record at or after `start` begins."""
    while (found := data.find(MARKER, start)) >= 0:
        if _payload(data, found) is not None:
            return found
        start = found + 1
    return None
