"""Why an engine failed, by the log of its inference server: vLLM's engine is another process and tells nobody else."""

from __future__ import annotations

import re
from pathlib import Path

# What an inference server writes first; a log holds one start after the other.
_START = "inference INFO loading vllm"
_ENGINE = re.compile(r"^\((?:EngineCore|Worker)\w* pid=\d+\) (?:[A-Z]+ [\d-]+ [\d:]+ \[[^\]]*\] ?)?")
# How our server says that its engine was killed, which is no failure of its own, whatever it had logged before.
_KILLED = re.compile(
    r"inference ERROR the engine died .*(?:signal SIG(?:KILL|TERM|INT)|'EngineCore\w*': -(?:9|15|2)\b)"
)
_TRACEBACK = "Traceback (most recent call last):"
_CHAIN = ("During handling of the above", "The above exception was", _TRACEBACK)
_MOST_LINES = 6
_MOST_CHARACTERS = 300  # of a line: some list every parameter of the model


def engine_failure(log: Path, *, begin: int = 0) -> str | None:
    """Return the exception that ended the engine of the last start in `log`, all its lines.

    None where there is none, or where the engine was killed.

    Of several that followed from each other it is the first.

    Args:
        begin: bytes of `log` that others wrote before.
    """
    lines = log.read_bytes()[begin:].decode(errors="replace").splitlines() if log.exists() else []
    starts = [number for number, line in enumerate(lines) if _START in line]
    lines = lines[starts[-1] if starts else 0 :]
    # Only lines of the engine: what the server raises follows from them.
    own = [_ENGINE.sub("", line) for line in lines if _ENGINE.match(line)]
    if _TRACEBACK not in own or any(map(_KILLED.search, lines)):
        return None
    after = own[own.index(_TRACEBACK) + 1 :]
    first = next((number for number, line in enumerate(after) if line and not line.startswith(" ")), None)
    if first is None:
        return None
    source = [line.strip() for line in after[:first] if line.startswith("    ") and set(line.strip()) - set("^~ ")]
    # An assertion often says nothing but its own source.
    message = [after[first] if ":" in after[first] or not source else f"{after[first]}: {source[-1]}"]
    for line in after[first + 1 : first + _MOST_LINES]:
        if line.startswith(_CHAIN):
            break
        message.append(line)
    return "\n".join(line.rstrip()[:_MOST_CHARACTERS] for line in message if line.strip())
