"""Checkpoints are a library: whoever uses it in a loop of their own pays for torch alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import sys
import holdfast.trainer.checkpoint.checkpointer
import holdfast.trainer.checkpoint.init_from
print(*sorted({"transformers", "datasets", "peft", "vllm"} & sys.modules.keys()))
"""


@pytest.mark.launch
def test_checkpoints_of_any_loop_import_no_library_of_models() -> None:
    run = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""
