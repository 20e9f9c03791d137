"""Commands whose stdout or stderr is closed, full, or read by nobody: they end as they would, or say why not."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import STORAGE_FAILED
from holdfast.run.run_dir import RunDir

CLOSED, FULL, GONE = ">&-", ">/dev/full", "| true"
Started = Callable[..., tuple[int, str]]


@pytest.fixture
def started(in_root: Path) -> Started:
    """Run a command in a shell; return its exit code, and what it said on stderr."""

    def start(words: str, redirected: str) -> tuple[int, str]:
        command = f'"$0" -P -m holdfast {words} {redirected}'
        if redirected.startswith("|"):
            command += "; exit ${PIPESTATUS[0]}"
        done = subprocess.run(["bash", "-c", command, sys.executable], capture_output=True, text=True)
        assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
        return done.returncode, done.stderr

    return start


@pytest.mark.launch
@pytest.mark.parametrize("words", ["monitor {run} --json", "sft --help"])
def test_what_was_to_be_printed_and_was_not_is_told(words: str, started: Started, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    words = words.format(run=run.path)
    assert started(words, ">/dev/null") == (0, "")
    assert started(words, CLOSED) == (0, ""), "nobody wants to read it"
    assert started(words, ">&- 2>&- <&-") == (0, "")
    assert started(words, FULL) == (
        STORAGE_FAILED,
        "error: what it prints cannot be written: No space left on device\n",
    )
    assert started(words, f"{FULL} 2>/dev/full") == (STORAGE_FAILED, "")


@pytest.mark.launch
def test_an_error_that_nobody_hears_has_its_exit_code(started: Started, tmp_path: Path) -> None:
    words = f"ckpt ls --output-dir {tmp_path / 'nowhere'}"
    for redirected in ("2>&-", "2>/dev/full", ">&- 2>&-", ">/dev/full 2>/dev/full"):
        assert started(words, redirected) == (2, ""), redirected
    code, said = started(words, CLOSED)
    assert code == 2 and "nowhere" in said


@pytest.mark.launch
def test_help_to_a_reader_that_has_gone_is_no_error(started: Started) -> None:
    for words in ("ckpt --help", "sft --help"):
        code, said = started(words, GONE)
        assert code in (0, 128 + signal.SIGPIPE) and said == ""


def test_files_do_not_get_the_numbers_of_closed_streams(tmp_path: Path) -> None:
    """What a library prints would go into the first file that is opened."""
    code = (
        "import json, os, sys; from holdfast.process.streams import open_closed_streams\n"
        "open_closed_streams(); opened = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)\n"
        "os.write(1, b'of a library'); print('out'); print('err', file=sys.stderr)\n"
        "assert sys.stdin.read() == '' and opened > 2\n"
        "os.write(opened, json.dumps([os.readlink(f'/proc/self/fd/{n}') for n in range(3)]).encode())\n"
    )
    path = tmp_path / "file"
    done = subprocess.run(["bash", "-c", '"$0" -c "$1" "$2" <&- >&- 2>&-', sys.executable, code, str(path)])
    assert done.returncode == 0
    assert json.loads(path.read_text()) == [os.devnull] * 3
