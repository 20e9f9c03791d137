"""`metrics.jsonl`: one JSON object per optimizer step, with `step` and slash-separated names."""

import json
import math
import os
from pathlib import Path

from holdfast.errors import DataError
from holdfast.run import atomic


class MetricsWriter:
    """Appends one line per step. One process (rank 0 of the trainer) writes."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Appending: lines of an attempt before stay, and a part of a line is never written over.
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Append the metrics of `step`; values that JSON lacks (nan, inf) become null. Raise OSError if it does not
        fit; the next attempt removes a part that may be there."""
        plain = {name: plain_value(value) for name, value in metrics.items()}
        atomic.write_all(self._descriptor, (json.dumps({"step": step, **plain}) + "\n").encode())

    def flush(self) -> None:
        """Flush to the disk: before a checkpoint counts, the lines up to its step are there. For any thread."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Flush to the disk and close."""
        self.flush()
        os.close(self._descriptor)


def plain_value(value: float) -> float | int | None:
    """Return a value as its line has it: eight digits, and None for nan and inf."""
    if isinstance(value, int):
        return value
    return float(f"{value:.8g}") if math.isfinite(value) else None


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """Return every complete line of a `metrics.jsonl`, or of the run in a directory. Raise DataError if the file is
    missing. Raise DataError that names the line if a line is not JSON."""
    path = Path(path)
    path = path / "metrics.jsonl" if path.is_dir() else path
    if not path.exists():
        raise DataError(f"there is no file {path}: name the directory of a run that has trained a step")
    metrics: list[dict[str, float]] = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if line.endswith(b"\n"):
            try:
                metrics.append(json.loads(line))
            except ValueError as error:
                raise DataError(
                    f"{path}, line {number}, is damaged: {error}. Remove the line, or resume: that sets it aside."
                ) from None
    return metrics
