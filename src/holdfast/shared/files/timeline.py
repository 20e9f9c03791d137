"""Reading what the processes of a run recorded of their time: `logs/attempt_K/timeline_<process>.jsonl`."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from holdfast.shared.files.run_dir import RunDir
from holdfast.shared.process.timeline import Span

_DECODER = msgspec.json.Decoder(Span)
_ATTEMPT = re.compile(r"attempt_(\d+)$")


def read_timeline(run_dir: RunDir) -> list[Span]:
    """Return the spans of all processes and attempts whose logs are still there, by their begin.

    Lines that are not whole, of a process that was killed or is writing, are left out.

    Raises:
        OSError: a file is there and cannot be read.
    """
    spans: list[Span] = []
    for path in sorted((run_dir.path / "logs").glob("attempt_*/timeline_*.jsonl")):
        match = _ATTEMPT.match(path.parent.name)
        if match is not None:
            spans += read_spans(path, attempt=int(match[1]))
    return sorted(spans, key=lambda one: one.begin)


def read_spans(path: Path, *, attempt: int) -> list[Span]:
    """Return the whole lines of one file, as those of `attempt`.

    Raises:
        OSError: it cannot be read.
    """
    spans: list[Span] = []
    for line in path.read_bytes().splitlines():
        try:
            one = _DECODER.decode(line)
        except msgspec.DecodeError:
            continue
        spans.append(msgspec.structs.replace(one, attempt=attempt))
    return spans
