"""The process between a library and a program of others."""

import os
import signal
import subprocess
import sys

import pytest

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
    assert between.returncode == 0 and ending.is_from_outside(), "it would not have ended by itself"
    ending.close()


@pytest.mark.parametrize(
    ("script", "is_killed"),
    [
        ("kill -KILL $$", True),
        ("sh -c 'kill -KILL $$'; exit $?", True),
        ("kill -SEGV $$", False),
        ("exit 0", False),
        ("exit 1", False),
        ("exit 127", False),
    ],
)
def test_a_program_that_was_killed_is_told_from_one_that_ended(script: str, is_killed: bool) -> None:
    ending = Ending()
    subprocess.run(ending.command("sh", "-c", script), check=False)
    assert ending.is_from_outside() == is_killed
    ending.close()
