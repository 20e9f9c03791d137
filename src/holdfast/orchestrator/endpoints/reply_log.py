"""Every reply of servers, by what they were asked: `judgements.log` of a run, `answers.log` of an evaluation.

One record per reply behind a header, msgpack maps in the frame of `holdfast.shared.files.record_log`. A reply is found
again by its request alone, in every later attempt and at every step: it is never paid for twice. It is in the page
cache before anything uses it, so a killed process loses none; a power cut may lose those of the last moments, which are
asked for again.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from holdfast.shared.errors import RunDirError
from holdfast.shared.files.record_log import RecordLog, read_records, whole_bytes
from holdfast.shared.wire.chat_reply import ChatReply

_log = logging.getLogger("orchestrator")
_FORMAT = 1


class _Header(msgspec.Struct, frozen=True):
    """First record of the file."""

    format: int


class Replied(msgspec.Struct, frozen=True):
    """Any other record.

    Attributes:
        request: a hash of all that decides the reply.
        reply: to it.
    """

    request: str
    reply: ChatReply


class ReplyLog:
    """Replies by request: in memory, and in a file if there is one.

    Args:
        begins: make the file at once, not with the first reply.

    Raises:
        RunDirError: the file cannot be read or written, or is of another format.
    """

    def __init__(self, path: Path | None, *, begins: bool = False) -> None:
        self._path = path
        self._replies: dict[str, ChatReply] = {}
        self._records: RecordLog | None = None
        try:
            if path is not None and (begins or path.exists()):
                self._open(path, self._load(path) if path.exists() else 0)
        except OSError as error:
            raise self._unwritable(error) from error

    def find(self, request: str) -> ChatReply | None:
        """Return the reply to a request, or None."""
        return self._replies.get(request)

    def append(self, request: str, reply: ChatReply) -> None:
        """Keep a reply.

        Raises:
            RunDirError: it cannot be written, such as to a full disk.
        """
        try:
            if self._records is None and self._path is not None:
                self._open(self._path, 0)
            if self._records is not None:
                self._records.append(msgspec.msgpack.encode(Replied(request, reply)))
        except OSError as error:
            raise self._unwritable(error) from error
        self._replies[request] = reply

    def close(self, *, wait: bool = False) -> None:
        """Close the file; a thread makes the rest of it durable, which `wait` waits for."""
        if self._records is not None:
            self._records.close(wait=wait)

    def _open(self, path: Path, valid_bytes: int) -> None:
        self._records = RecordLog(path, valid_bytes=valid_bytes)
        if valid_bytes == 0:
            self._records.append(msgspec.msgpack.encode(_Header(_FORMAT)))

    def _load(self, path: Path) -> int:
        """Index the file; return how much of it is whole."""
        payloads, damages = read_records(path)
        for damage in damages:
            _log.warning("%s: %s; what it held is asked for again", path, damage)
        num_unknown = 0
        for number, payload in enumerate(payloads):
            if number == 0 and not (damages and damages[0].record == 0):
                self._require_format(path, payload)
                continue
            try:
                replied = msgspec.msgpack.decode(payload, type=Replied)
            except msgspec.DecodeError:
                num_unknown += 1
                continue
            self._replies[replied.request] = replied.reply
        if num_unknown:
            _log.warning("%s: %d records are no replies; what they held is asked for again", path, num_unknown)
        return whole_bytes(path, damages) if payloads else 0

    def _require_format(self, path: Path, payload: bytes) -> None:
        try:
            found = msgspec.msgpack.decode(payload, type=_Header).format
        except msgspec.DecodeError as error:
            raise RunDirError(f"{path} is no log of replies ({error}): move it away") from None
        if found != _FORMAT:
            raise RunDirError(f"{path} has format {found}, this version reads {_FORMAT}: move it away, or start anew")

    def _unwritable(self, error: OSError) -> RunDirError:
        return RunDirError(
            f"replies cannot be kept in {self._path}: {error.strerror or error}. Mend that and start again: what is "
            "there is not asked for again."
        )
