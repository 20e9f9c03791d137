"""`--log-format json`: every line on stdout is one JSON object, whatever prints it."""

from __future__ import annotations

import io
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from holdfast.commands.live.follow import News, Stepped
from holdfast.commands.live.state import Alarm
from holdfast.shared.errors import HoldfastError
from holdfast.shared.process.child import make_output_lossy

_SAVED = "saved checkpoint"


class JsonLines(io.TextIOBase):
    """Takes the place of stdout: a line that is printed becomes an object of type `message`.

    Attributes:
        end: what the object of type `end` says beside the exit code; whoever knows adds to it.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._begun = ""
        self.end: dict[str, Any] = {}

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] - of whom it stands for
        return self._stream.encoding

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            if line.strip():
                self.emit("message", text=line.rstrip())
        return len(text)

    def emit(self, kind: str, *, unix_s: float | None = None, **fields: Any) -> None:
        """Write one object of type `kind`.

        Args:
            unix_s: when it came about; unset: now.
        """
        fields = {"type": kind, "time": round(time.time() if unix_s is None else unix_s, 3), **fields}
        self._stream.write(json.dumps(_finite(fields), default=str) + "\n")
        self._stream.flush()

    def close_with(self, exit_code: int, **fields: Any) -> None:
        """Write what was begun, and the last object."""
        if self._begun.strip():
            self.write("\n")
        self.emit("end", exit_code=exit_code, **self.end, **fields)

    def tell_news(self, news: News, *, max_steps: int) -> None:
        """Write the object that says what has happened in a run."""
        if isinstance(news, Stepped):
            metrics = {name: value for name, value in news.metrics.items() if name != "step"}
            left_s = None if news.left_s is None else round(news.left_s, 1)
            self.emit("step", step=news.metrics["step"], max_steps=max_steps, left_s=left_s, metrics=metrics)
        elif isinstance(news, Alarm):
            self.emit(news.kind, unix_s=news.unix_s, step=news.step, text=news.text)
        elif news.name == _SAVED:
            self.emit("checkpoint", unix_s=news.since_unix_s, state="committed", **_unreserved(news.details))
        else:
            details = _unreserved(news.details)
            self.emit("phase", unix_s=news.since_unix_s, process=news.process, phase=news.name, details=details)


def json_lines() -> JsonLines | None:
    """Return what writes JSON lines to stdout, if `--log-format json` is on."""
    return sys.stdout if isinstance(sys.stdout, JsonLines) else None


@contextmanager
def as_json_lines() -> Iterator[JsonLines]:
    """Have stdout say everything as JSON lines, the last of which is of type `end`.

    The block calls `close_with` at its end; where it raises, that is done here.
    """
    make_output_lossy()  # `| head` ends no run
    stdout = sys.stdout
    lines = JsonLines(stdout)
    sys.stdout = lines
    try:
        yield lines
    except BaseException as error:
        lines.close_with(code_of_error(error), error=str(error) or type(error).__name__)
        raise
    finally:
        sys.stdout = stdout


def run_in_json_lines(action: Callable[[], int]) -> int:
    """Return the exit code of `action`, which is done with stdout in JSON lines."""
    with as_json_lines() as lines:
        code = action()
        lines.close_with(code)
    return code


def code_of_error(error: BaseException) -> int:
    """Return the exit code of a command that ends by `error`."""
    if isinstance(error, HoldfastError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    return 2 if isinstance(error, OSError) else 1


def _unreserved(details: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in details.items() if name not in ("type", "time", "kind", "unix_s", "state")}


def _finite(value: Any) -> Any:
    """Return `value` with null for numbers that JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
