"""A process on this machine, as the launcher sees it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

from holdfast.commands.launcher.hosts.local import THIS_MACHINE
from tests.runs.processes import HANG_S


def test_a_process_on_this_machine(tmp_path: Path) -> None:
    code = "import os, time; print(os.environ['NAME'], flush=True); time.sleep(600)"
    process = THIS_MACHINE.start([sys.executable, "-c", code], tmp_path / "logs" / "a.log", {"NAME": "value"})
    assert process.wait(0.01) is None is process.poll() is process.returncode
    process.signal(signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM == process.poll() == process.returncode
    process.signal(signal.SIGTERM)  # nobody's any more
    process.kill()
    assert process.loss is None and THIS_MACHINE.name == "this machine"


def test_it_is_cleared_away_with_what_it_started(tmp_path: Path, ends: Callable[..., bool]) -> None:
    log = tmp_path / "a.log"
    code = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    process = THIS_MACHINE.start([sys.executable, "-c", code], log, {})
    while not log.read_text().endswith("\n"):
        assert process.poll() is None
    child = int(log.read_text())
    process.clear(HANG_S)
    assert process.returncode == -signal.SIGKILL
    assert ends(child, within_s=0)
