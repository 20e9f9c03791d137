"""A directory of checkpoints has one writer: a second one is refused."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from holdfast.errors import SaveError
from holdfast.run import lock
from holdfast.trainer.checkpoint.checkpointer import Checkpointer

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
