"""The process between a library and a program of others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from holdfast.process.noted_end import Ending


def test_a_program_that_is_asked_to_end_has_the_time_to_clear_up() -> None:
    program = (
        "import signal, sys, time\n"
        "def end(*_):\n    time.sleep(0.3); print('cleared up', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\nprint('ready', flush=True)\nwhile True: time.sleep(10)\n"
    )
    ending = Ending()
    command = ending.command(sys.executable, "-c", program)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as between:
        assert between.stdout is not None and between.stdout.readline() == "ready\n"
        os.killpg(between.pid, signal.SIGTERM)
        assert between.stdout.read() == "cleared up\n"
    assert between.returncode == 0 and not ending.is_from_outside()
    ending.close()
