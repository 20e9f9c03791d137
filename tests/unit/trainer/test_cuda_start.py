"""Ranks can use CUDA: whatever the process that forks them asks of torch, it never touches CUDA itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import ModelFactory
from tests.forking.commands import shared_commands

# In the process that forks the ranks: every child of it tells whether CUDA would refuse to start there, as it does in
# those of a process that has begun to use it. torch's own handler of forks runs before Python's.
_TELL = """
import os
import torch

def tell():
    with open({path!r}, "a") as file:
        file.write(f"{{torch._C._cuda_isInBadFork()}} {{os.environ.get('CUDA_VISIBLE_DEVICES')}}\\n")

os.register_at_fork(after_in_child=tell)
"""


# This machine has no NVML, and of MIG names torch does not ask it: both ways it asks CUDA how many devices there are.
@pytest.mark.parametrize("visible", [None, "MIG-5e1c0a2b-0000-0000-0000-000000000000"])
def test_ranks_do_not_inherit_a_touched_cuda(
    visible: str | None, tiny_model: ModelFactory, sft_data: Path, tmp_path: Path
) -> None:
    output, told = tmp_path / "run", tmp_path / "told"
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    run = shared_commands().sft(
        output,
        tiny_model(weights=False),
        sft_data,
        *("--max-steps", "1"),
        ranks=2,
        environment=environment,
        trainer_fault=_TELL.format(path=str(told)),
    )
    assert run.wait().code == 0, run.log
    lines = told.read_text().splitlines()
    assert len(lines) >= 2 and set(lines) == {f"False {visible}"}, lines
