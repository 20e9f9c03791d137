"""A process on this machine, as the launcher sees it."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from holdfast.commands.launcher.hosts.local import THIS_MACHINE


def test_a_process_on_this_machine(tmp_path: Path) -> None:
    code = "import os, time; print(os.environ['NAME'], flush=True); time.sleep(600)"
    process = THIS_MACHINE.start([sys.executable, "-c", code], tmp_path / "logs" / "a.log", {"NAME": "value"})
    assert process.wait(0.01) is None is process.poll() is process.returncode
    process.signal(signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM == process.poll() == process.returncode
    process.signal(signal.SIGTERM)  # nobody's any more
    process.kill()
    assert process.loss is None and THIS_MACHINE.name == "this machine"
