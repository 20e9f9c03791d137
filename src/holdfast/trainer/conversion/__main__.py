"""The part of `ckpt` that needs torch: `python -m holdfast.trainer.conversion REQUEST`.

The request is JSON as in `holdfast.commands.ckpt.requests`; the answer is one JSON document on stdout. One
process, no process group: it never holds more than a file's worth of tensors, except to import.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from holdfast.commands.ckpt.requests import Compare, Comparison, Describe, Description, Export, Import, Request, Written
from holdfast.shared.process.child import die_with_launcher, heavy_imports, run_reporting_errors


def _answer(request: Request) -> Description | Comparison | Written:
    with heavy_imports():
        program = _program_for(request)
    return program(request)


def _program_for(request: Request) -> Callable[[Any], Description | Comparison | Written]:
    match request:
        case Describe():
            from holdfast.trainer.conversion.reading import describe

            return describe
        case Compare():
            from holdfast.trainer.conversion.reading import compare

            return compare
        case Export():
            from holdfast.trainer.conversion.writing import export

            return export
        case Import():
            from holdfast.trainer.conversion.importing import import_weights

            return import_weights


def main(argv: list[str]) -> None:
    """Answer the request in `argv` and exit, with the code of an error if there is one."""
    die_with_launcher()
    # Until torch is imported, Ctrl-C ends this process at once; then it cleans up first.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    request = msgspec.json.decode(argv[0], type=Request)
    try:
        run_reporting_errors(lambda: sys.stdout.buffer.write(msgspec.json.encode(_answer(request))))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main(sys.argv[1:])
