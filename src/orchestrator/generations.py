"""What the engines sampled for the batch in progress, kept so that a killed orchestrator asks for nothing twice.

One file per batch beside the journal, one append per answer. It is keyed by everything that a
sampled token depends on (digest of the weights, prompt, seed, limits), and by nothing else: after a
restart the environments run again, with whatever code they have then, and get the same answers.
Appends are not fsynced: they outlive a killed process, and a power cut costs only sampling them again.
"""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Sequence
from pathlib import Path

import msgspec
import xxhash

from orchestrator.environment import Completion
from triad.run_dir import RunDir

_log = logging.getLogger("orchestrator")

_FORMAT = 1
_LENGTH_BYTES = 4
_CHECK_BYTES = 8


class _Header(msgspec.Struct, array_like=True, frozen=True):
    format: int
    weights_digest: str
    temperature: float
    stop_token_ids: list[int]


class _Record(msgspec.Struct, array_like=True):
    prompt: str
    max_tokens: int
    seeds: list[int]
    completions: list[Completion]


class GenerationLog:
    """Append-only log of finished generations of one batch, indexed in memory."""

    def __init__(
        self, run_dir: RunDir, step: int, *, weights_digest: str, temperature: float, stop_token_ids: list[int]
    ) -> None:
        self.path = _path(run_dir, step)
        self._header = msgspec.msgpack.encode(_Header(_FORMAT, weights_digest, temperature, stop_token_ids))
        self._found: dict[tuple[str, int, int], Completion] = {}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        valid_bytes = self._load()
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.truncate(self._descriptor, valid_bytes)
        os.lseek(self._descriptor, 0, os.SEEK_END)
        if valid_bytes == 0:
            self._write(self._header)
        if self._found:
            _log.info("batch %d: %d finished generations are there already", step, len(self._found))

    def find(self, token_ids: Sequence[int], *, max_tokens: int, seed: int) -> Completion | None:
        """Return what was sampled for this request, or None."""
        return self._found.get((_prompt_hash(token_ids), max_tokens, seed)) if self._found else None

    def append(
        self, token_ids: Sequence[int], *, max_tokens: int, seeds: Sequence[int], completions: Sequence[Completion]
    ) -> None:
        """Keep an answer. A few kilobytes into the page cache, so this may run on the event loop."""
        record = _Record(_prompt_hash(token_ids), max_tokens, list(seeds), list(completions))
        self._write(msgspec.msgpack.encode(record))

    def close(self) -> None:
        """Close the file and keep it."""
        os.close(self._descriptor)

    def _write(self, payload: bytes) -> None:
        check = xxhash.xxh3_64_digest(payload)
        data = len(payload).to_bytes(_LENGTH_BYTES, "little") + check + payload
        while data:
            data = data[os.write(self._descriptor, data) :]

    def _load(self) -> int:
        """Index the whole records of the file; return where they end. A log of something else counts as empty."""
        if not self.path.exists():
            return 0
        data = self.path.read_bytes()
        header, end = _next_record(data, 0)
        if header != self._header:
            return 0
        while True:
            payload, after = _next_record(data, end)
            if payload is None:
                return end
            end = after
            record = msgspec.msgpack.decode(payload, type=_Record)
            for seed, completion in zip(record.seeds, record.completions, strict=True):
                self._found[record.prompt, record.max_tokens, seed] = completion


def discard_generations(run_dir: RunDir, *, up_to: int) -> None:
    """Remove the logs of batches that are published: those up to step `up_to`."""
    for path in run_dir.rollouts.glob("generations_*.log"):
        step = path.stem.removeprefix("generations_")
        if step.isdecimal() and int(step) <= up_to:
            path.unlink(missing_ok=True)


def _path(run_dir: RunDir, step: int) -> Path:
    return run_dir.generations(step)


def _prompt_hash(token_ids: Sequence[int]) -> str:
    return xxhash.xxh3_128_hexdigest(array("q", token_ids).tobytes())


def _next_record(data: bytes, start: int) -> tuple[bytes | None, int]:
    """Return the record at `start` and where it ends, or (None, start) if it is torn."""
    body = start + _LENGTH_BYTES + _CHECK_BYTES
    length = int.from_bytes(data[start : start + _LENGTH_BYTES], "little")
    payload = data[body : body + length]
    check = data[start + _LENGTH_BYTES : body]
    if not length or len(payload) < length or xxhash.xxh3_64_digest(payload) != check:
        return None, start
    return payload, body + length
