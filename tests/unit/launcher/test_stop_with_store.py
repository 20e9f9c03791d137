"""A stop with an object store: the exit code says whether the upload landed, and it comes before any removal."""

import os
import signal
import sys
import threading

import pytest

from holdfast.config import SftConfig
from holdfast.errors import NOT_SAVED
from holdfast.launcher import heal
from holdfast.launcher.resume.attempt import Attempt
from holdfast.process.heartbeat import HEARTBEAT_ENV
from holdfast.run.run_dir import RunDir
from tests.builders.checkpoint_files import write_checkpoint

# Saves its step here at once, and then goes on "uploading" as its argument says.
TRAINER = """
import signal, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
with open(sys.argv[1], "a") as metrics:
    metrics.write('{"step": 5}\\n')
signal.sigwait([signal.SIGTERM])
if sys.argv[2] == "hangs":
    signal.pause()
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("store", "end", "code"),
    [
        ("s3://bucket/run", "hangs", NOT_SAVED),
        ("s3://bucket/run", "137", NOT_SAVED),
        ("s3://bucket/run", "3", NOT_SAVED),
        ("s3://bucket/run", "143", 143),
        (None, "hangs", 143),
    ],
)
def test_the_exit_code_is_that_of_the_upload(
    store: str | None,
    end: str,
    code: int,
    run_dir: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(heal, "_TELLING_S", 0.1)
    write_checkpoint(run_dir, 5)
    ckpt = {"dir": store, "grace_s": 0.2 if end == "hangs" else 60}
    config = SftConfig.model_validate({"output_dir": str(run_dir.path), "max_steps": 9, "ckpt": ckpt})
    argv = [sys.executable, "-c", TRAINER, str(run_dir.metrics), end]
    plan = heal.Plan(Attempt(run_dir, 1, None), {"trainer": argv}, config, [])

    def signal_when_trained() -> None:
        while not run_dir.metrics.exists() or not run_dir.metrics.read_text():
            is_over.wait(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    is_over = threading.Event()
    thread = threading.Thread(target=signal_when_trained)
    thread.start()
    assert heal.watch(plan) == code
    thread.join()
    is_here_alone = f"step 5 is saved here, but not at {store}" in capsys.readouterr().out
    assert is_here_alone == (code == NOT_SAVED) and HEARTBEAT_ENV not in os.environ
