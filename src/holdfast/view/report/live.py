"""The process that makes the page of a run that goes on, for the launcher that serves it.

`python -m holdfast.view.report.live RUN` writes a `Built` to its standard output. It gives way to everything else.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.errors import ConfigError
from holdfast.process.child import die_with_launcher, run_reporting_errors, set_thread_environment
from holdfast.process.imports import is_checkout

if TYPE_CHECKING:
    from holdfast.view.report.serve import Built


def give_way() -> None:
    """Have this process wait for those that train, and be the one that ends where memory does."""
    os.nice(19)
    set_thread_environment(1)
    with contextlib.suppress(OSError):  # without /proc
        Path("/proc/self/oom_score_adj").write_text("1000")


def build(run: Path) -> Built:
    """Return the page of a run.

    Raises:
        ConfigError: there is no run, or what draws is not installed.
        OSError: something cannot be read.
    """
    # Not at the top: most of what is imported is imported after this process has given way.
    from holdfast.view.report.main import build_page, library, read_runs
    from holdfast.view.report.page import Live, render
    from holdfast.view.report.serve import Built

    (data,) = read_runs([run])
    page = build_page([data], made=time.time())
    # Names of directories are bytes, a page is text.
    place = shlex.quote(str(data.run_dir.path)).encode(errors="backslashreplace").decode()
    command = f"{'uv run ' if is_checkout() else ''}report {place}"
    live = Live(secrets.token_hex(8), data.run_dir.run_id(), command)
    whole, update = (render(page, script, live=live).encode() for script in (library(), ""))
    return Built(live.tag, time.process_time(), whole, update)


def main(argv: Sequence[str]) -> None:
    """Write the page of the run that `argv` names to standard output."""
    if len(argv) != 1:
        raise ConfigError("usage: python -m holdfast.view.report.live RUN")
    # What libraries print is no part of the page.
    output = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with open(output, "wb") as file:
        file.write(msgspec.msgpack.encode(build(Path(argv[0]))))


if __name__ == "__main__":
    die_with_launcher()
    # The launcher alone says when it is over: a scheduler may signal every process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    give_way()
    run_reporting_errors(lambda: main(sys.argv[1:]))
