"""A stop with an object store: the exit code says whether the upload landed, and it comes before any removal."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from holdfast.commands.launcher import watch
from holdfast.commands.resume.attempt import Attempt
from holdfast.shared.config import SftConfig
from holdfast.shared.errors import NOT_SAVED
from holdfast.shared.files import durable
from holdfast.shared.files.checkpoints import Retention
from holdfast.shared.files.metrics import MetricsWriter
from holdfast.shared.files.run_dir import RunDir
from holdfast.shared.process.heartbeat import HEARTBEAT_ENV
from holdfast.trainer.checkpoints.checkpointer import Checkpointer
from tests.builders.checkpoint_files import write_checkpoint
from tests.builders.train_states import NotifyingStorage

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
    """Before, a trainer that was killed in its upload ended the run with 143: saved."""
    monkeypatch.setattr(watch, "_TELLING_S", 0.1)
    write_checkpoint(run_dir, 5)
    ckpt = {"dir": store, "grace_s": 0.2 if end == "hangs" else 60}
    config = SftConfig.model_validate({"output_dir": str(run_dir.path), "max_steps": 9, "ckpt": ckpt})
    argv = [sys.executable, "-c", TRAINER, str(run_dir.metrics), end]
    plan = watch.Plan(Attempt(run_dir, 1, None), {"trainer": argv}, config, [])

    def signal_when_trained() -> None:
        while not run_dir.metrics.exists() or not run_dir.metrics.read_text():
            is_over.wait(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    is_over = threading.Event()
    thread = threading.Thread(target=signal_when_trained)
    thread.start()
    assert watch.watch(plan) == code
    thread.join()
    is_here_alone = f"step 5 is saved here, but not at {store}" in capsys.readouterr().out
    assert is_here_alone == (code == NOT_SAVED) and HEARTBEAT_ENV not in os.environ


def test_what_is_to_follow_a_commit_follows_before_anything_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the upload was submitted when large directories had been removed."""
    happened: list[str] = []
    remove = durable.remove_directory
    monkeypatch.setattr(durable, "remove_directory", lambda path: (happened.append(f"- {path.name}"), remove(path)))
    checkpointer = Checkpointer(
        tmp_path,
        {"counter": {"step": 0}},
        save_async=False,
        retention=Retention(keep=1),
        storage=NotifyingStorage(lambda path: happened.append(f"+ {path.name}")),
    )
    with checkpointer:
        for step in (1, 2):
            checkpointer.save(step)
    assert happened == ["+ step_1", "+ step_2", "- step_1"]


def test_what_a_step_needs_is_flushed_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, metrics were flushed when the run ended, and the generators of other ranks were never."""
    happened: list[str] = []
    fsync, publish = os.fsync, durable.publish_directory

    def noted(descriptor: int) -> None:
        happened.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def published(temporary: Path, final: Path) -> None:
        happened.append("published")
        publish(temporary, final)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(durable, "publish_directory", published)
    metrics = MetricsWriter(tmp_path / "metrics.jsonl")
    metrics.write(1, {"loss": 0.5})
    state = {"counter": {"step": 1}}
    with Checkpointer(tmp_path / "checkpoints", state, save_async=False, before_commit=metrics.flush) as checkpointer:
        checkpointer.save(1)
    before = happened[: happened.index("published")]
    assert "metrics.jsonl" in before and "random_rank_0.json" in before, before
    metrics.close()
