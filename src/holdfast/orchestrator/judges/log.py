"""Every reply of a judge, by what was asked: `judgements.log` of a run or an evaluation.

One record per reply behind a header, msgpack maps in the frame of `holdfast.shared.files.record_log`. A reply is found
again by URL and request alone, in every later attempt and at every step: it is never paid for twice. It is in the page
cache before anything uses it, so a killed process loses none; a power cut may lose those of the last moments, which are
asked for again.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from holdfast.orchestrator.environments.judge import JudgeReply
from holdfast.shared.errors import RunDirError
from holdfast.shared.files.record_log import RecordLog, read_records

_log = logging.getLogger("orchestrator")
_FORMAT = 1


class _Header(msgspec.Struct, frozen=True):
    """First record of the file."""

    format: int


class Judged(msgspec.Struct, frozen=True):
    """Any other record.

    Attributes:
        request: `JudgeRequest.key`.
        reply: to it.
    """

    request: str
    reply: JudgeReply


class JudgementLog:
    """Replies by request: in memory, and in a file if there is one.

    Raises:
        RunDirError: the file cannot be read or written, or is of another format.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._replies: dict[str, JudgeReply] = {}
        self._records: RecordLog | None = None
        if path is None or not path.exists():
            return  # a file is begun with the first reply
        try:
            self._open(path, self._load(path))
        except OSError as error:
            raise self._unwritable(error) from error

    def find(self, key: str) -> JudgeReply | None:
        """Return the reply to a request, or None."""
        return self._replies.get(key)

    def append(self, key: str, reply: JudgeReply) -> None:
        """Keep a reply.

        Raises:
            RunDirError: it cannot be written, such as to a full disk.
        """
        try:
            if self._records is None and self._path is not None:
                self._open(self._path, 0)
            if self._records is not None:
                self._records.append(msgspec.msgpack.encode(Judged(key, reply)))
        except OSError as error:
            raise self._unwritable(error) from error
        self._replies[key] = reply

    def close(self) -> None:
        """Close the file; a thread makes the rest of it durable."""
        if self._records is not None:
            self._records.close()

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
                judged = msgspec.msgpack.decode(payload, type=Judged)
            except msgspec.DecodeError:
                num_unknown += 1
                continue
            self._replies[judged.request] = judged.reply
        if num_unknown:
            _log.warning("%s: %d records are no replies; what they held is asked for again", path, num_unknown)
        if not payloads:
            return 0
        return damages[-1].start if damages and damages[-1].is_tail else path.stat().st_size

    def _require_format(self, path: Path, payload: bytes) -> None:
        try:
            found = msgspec.msgpack.decode(payload, type=_Header).format
        except msgspec.DecodeError as error:
            raise RunDirError(f"{path} is no log of judgements ({error}): move it away") from None
        if found != _FORMAT:
            raise RunDirError(f"{path} has format {found}, this version reads {_FORMAT}: move it away, or start anew")

    def _unwritable(self, error: OSError) -> RunDirError:
        return RunDirError(
            f"replies of judges cannot be kept in {self._path}: {error.strerror or error}. Mend that and start again: "
            "the run goes on behind what is there."
        )
