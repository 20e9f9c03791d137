"""Where a run keeps its steps, by `ckpt.dir` and rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import DpoConfig, RewardTrainingConfig, SftConfig
from holdfast.run.run_dir import RunDir
from holdfast.trainer.checkpoint.storage import LocalStorage, ObjectStorage
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.saving import _is_to_be_evaluated, open_storage
from tests.builders.toy import ENVIRONMENTS
from tests.runs.processes import HANG_S


@pytest.mark.parametrize("ckpt", [None, {}])
def test_without_a_store_steps_stay_where_they_are(ckpt: dict[str, Any] | None, tmp_path: Path, mesh: Mesh) -> None:
    config = SftConfig.model_validate({"output_dir": str(tmp_path), "max_steps": 1, "ckpt": ckpt})
    storage = open_storage(config, RunDir(tmp_path), mesh, older_weights=0)
    assert isinstance(storage, LocalStorage) and storage.close_s == 0


def test_rank_0_alone_writes_to_a_store_and_all_wait_for_it_as_long(tmp_path: Path, mesh: Mesh) -> None:
    ckpt = {"dir": f"file://{tmp_path / 'there'}", "resume_step": 4}
    config = SftConfig.model_validate({"output_dir": str(tmp_path), "max_steps": 1, "ckpt": ckpt})
    main, other = (open_storage(config, RunDir(tmp_path), replace(mesh, rank=rank), older_weights=0) for rank in (0, 1))
    assert isinstance(main, ObjectStorage) and isinstance(other, LocalStorage)
    assert main.close_s == other.close_s > 0
    main.close(HANG_S)


def test_a_checkpoint_stays_until_it_is_evaluated(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    config = DpoConfig.model_validate(
        {"max_steps": 9, "eval": {"interval": 4, "environments": ENVIRONMENTS}, "ckpt": {"interval": 2, "keep": 1}}
    )
    assert [step for step in (2, 4, 6, 8, 9) if _is_to_be_evaluated(config, run_dir, step)] == [4, 8, 9]
    run_dir.evaluation(4).mkdir(parents=True)
    (run_dir.evaluation(4) / "summary.json").write_text("{}")
    assert not _is_to_be_evaluated(config, run_dir, 4) and _is_to_be_evaluated(config, run_dir, 8)
    run_dir.give_up_evaluations()
    assert not _is_to_be_evaluated(config, run_dir, 8), "nobody waits for it"
    run_dir.given_up.unlink()
    assert _is_to_be_evaluated(config, run_dir, 8)
    assert not _is_to_be_evaluated(DpoConfig(), run_dir, 8)
    assert not _is_to_be_evaluated(RewardTrainingConfig(), run_dir, 8)
