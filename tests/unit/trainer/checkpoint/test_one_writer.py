"""A directory of checkpoints has one writer: its saves are not pruned, and a second one is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from holdfast.errors import SaveError
from holdfast.run import atomic, lock
from holdfast.run.checkpoints import Entry
from holdfast.trainer.checkpoint.checkpointer import Checkpointer
from tests.builders.train_states import held_writes
from tests.runs.processes import HANG_S

HOLD = """
import sys
from pathlib import Path
from holdfast.run.lock import DirectoryLock
DirectoryLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def make(directory: Path) -> Checkpointer:
    return Checkpointer(directory, {"model": torch.nn.Linear(2, 2)})


def test_a_save_in_progress_is_not_pruned(
    tmp_path: Path, run_command: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(tmp_path) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        with held_writes(monkeypatch) as held:
            checkpointer.save(2)
            assert held.begun.wait(HANG_S)
            code, _, err = run_command("ckpt", "prune", "--output-dir", tmp_path)
            assert code == 2 and f"a training loop saves into {tmp_path}" in err
    assert sorted(path.name for path in tmp_path.glob("*step*")) == ["step_1", "step_2"]


def test_nobody_begins_to_save_while_prune_removes(
    tmp_path: Path, run_command: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step)
            checkpointer.wait()
    begun = []

    def remove(entry: Entry) -> None:
        another = [
            sys.executable,
            "-c",
            f"from holdfast.run import lock\nlock._DYING_S = 0.1\n{HOLD}",
            str(tmp_path),
        ]
        begun.append(subprocess.run(another, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False))
        atomic.remove_directory(entry.path)

    monkeypatch.setattr("holdfast.commands.ckpt._remove", remove)
    code, _, err = run_command("ckpt", "prune", "--output-dir", tmp_path, "--keep", "1")
    assert code == 0, err
    assert "another process saves into" in begun[0].stderr and not begun[0].stdout
    assert [path.name for path in tmp_path.glob("*step*")] == ["step_2"]


def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".tmp-step_9/trainer").mkdir(parents=True)
    monkeypatch.setattr(lock, "_DYING_S", 0.1)
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        refused = make(tmp_path)
        refused.save(9)
        with pytest.raises(SaveError, match=f"another process saves into {tmp_path}"):
            refused.close()
        assert (tmp_path / ".tmp-step_9/trainer").exists(), "it is the other's, who writes the same step"
        other.communicate("")
    with make(tmp_path) as checkpointer, make(tmp_path) as loading:
        checkpointer.save(1)
        checkpointer.wait()
        assert loading.load() == 1
        loading.save(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_2"], "leftovers are cleared"
