"""A `dpo` run that is killed while the reference is computed keeps what is computed, and ends with the same bits."""

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.run.run_dir import REFERENCE_NAME, RunDir
from tests.conftest import ModelFactory
from tests.faults.forked_programs import Program, be_program, run
from tests.faults.run_states import differing
from tests.forking.server import Fork
from tests.runs.training import PAIRS
from tests.unit.trainer.programs.in_process import end_state

pytestmark = pytest.mark.launch

LAST, BATCH = 4, 4


def noting_blocks(dies_in: str, **program: str) -> None:
    """In a child: be a run that prints a line for each block of the reference, keeps it at once, and dies in one."""
    from holdfast.trainer.preference import reference

    compute = reference._block_logprobs
    numbers = itertools.count(1)

    def noting(*arguments: Any) -> Any:
        if next(numbers) == int(dies_in):
            os.kill(os.getpid(), signal.SIGKILL)
        print("a block", flush=True)
        return compute(*arguments)

    reference._SAVE_EVERY_S = 0.0
    reference._block_logprobs = noting
    be_program(**program)


def test_a_run_killed_in_its_reference_ends_with_the_same_bits(tiny_model: ModelFactory, tmp_path: Path) -> None:
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(PAIRS.read_text().splitlines(keepends=True)[:48]))
    settings = {
        "model": {"name": str(tiny_model(attention_dropout=0.3))}, "optim": {"lr": 1e-3},
        "data": {"name": str(data), "batch_size": BATCH, "micro_batch_size": 1, "seq_len": 40},
        "ckpt": {"resume_step": "auto"},
    }  # fmt: skip

    def start(output: Path, *, dies_in: int = 0) -> Fork:
        by = {"function": "tests.faults.test_kill_in_reference:noting_blocks", "dies_in": str(dies_in)}
        return run(Program("dpo", settings, LAST), output, by=by)

    straight = start(tmp_path / "straight")
    with np.load(RunDir(tmp_path / "straight").path / REFERENCE_NAME) as arrays:
        assert np.isnan(arrays["logprobs"]).any(), "pairs that no step reaches are left out"
    assert start(tmp_path / "killed", dies_in=6).code == -signal.SIGKILL
    again = start(tmp_path / "killed")
    assert straight.code == again.code == 0, again.log
    assert not differing(*[end_state(RunDir(tmp_path / name), last=LAST) for name in ("straight", "killed")])
    assert again.log.count("a block") == straight.log.count("a block") - 5 > 0
