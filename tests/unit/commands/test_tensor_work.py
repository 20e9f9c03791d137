"""What `ckpt` does around torch: stdout is the report's alone, and errors end it as they end the processes of a run."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.commands.ckpt_dirs import TensorWorkFailed, tensor_work
from holdfast.errors import STORAGE_FAILED, CheckpointError


def test_what_libraries_print_does_not_come_into_the_report(capfd: pytest.CaptureFixture[str]) -> None:
    print("before")
    with tensor_work("reading"):
        print("python")
        subprocess.run(["echo", "below python"], check=True)
        os.write(1, b"straight\n")
    print("after")
    printed = capfd.readouterr()
    assert printed.out == "before\nafter\n"
    assert sorted(printed.err.splitlines()) == ["below python", "python", "straight"]


def test_nor_does_what_a_library_in_c_leaves_in_its_buffer() -> None:
    code = (
        "import ctypes\nfrom holdfast.commands.ckpt_dirs import tensor_work\n"
        "with tensor_work('reading'):\n    ctypes.CDLL(None).printf(b'from C')\nprint('{}')\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("{}\n", "from C")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (CheckpointError("step 3 is damaged"), 2, "error: step 3 is damaged\n"),
        (OSError(errno.ENOSPC, "No space left on device", "/data/x"), STORAGE_FAILED, "error: the storage failed at"),
        (ZeroDivisionError("a bug"), 1, "Traceback (most recent call last)"),
    ],
)
def test_an_error_ends_the_command(error: Exception, code: int, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TensorWorkFailed) as caught, tensor_work("reading"):
        raise error
    printed = capfd.readouterr()
    assert caught.value.exit_code == code
    assert printed.out == "" and said in printed.err


def test_ctrl_c_is_no_error_of_the_work() -> None:
    with pytest.raises(KeyboardInterrupt), tensor_work("reading"):
        raise KeyboardInterrupt


@pytest.mark.launch
def test_files_of_the_user_do_not_replace_those_of_torch(tmp_path: Path) -> None:
    for name in ("torch", "random", "safetensors"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of the user was imported')\n")
    code = "import sys; sys.path.pop(0); from holdfast.cli import ckpt; ckpt()"
    argv = [sys.executable, "-c", code, "import", "model.safetensors", "--to", "out", "--output-dir", "."]
    (tmp_path / "model.safetensors").write_bytes(b"")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "comes without a config.json" in done.stderr, done.stderr
