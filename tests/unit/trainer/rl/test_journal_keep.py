"""Which batches stay after they are trained."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.config.rl_trainer import JournalConfig
from holdfast.run import manifest
from holdfast.run.run_dir import RunDir
from holdfast.trainer.programs.rl import _prune_batches


@pytest.mark.parametrize(
    ("keep", "checkpoints", "first"),
    [(0, [4, 8], 5), (5, [4, 8], 4), (20, [4, 8], 1), ("all", [8], 1), (0, [8], 9), (2, [8], 7), (0, [], 1)],
)
def test_batches_stay_for_checkpoints_and_to_be_looked_into(
    tmp_path: Path, keep: Any, checkpoints: list[int], first: int
) -> None:
    run_dir = RunDir(tmp_path)
    for step in range(1, 9):
        run_dir.batch(step).mkdir(parents=True)
    for step in checkpoints:
        run_dir.checkpoint(step).mkdir(parents=True)
        listing = manifest.Manifest(kind="checkpoint", step=step, policy_version=step, files={})
        manifest.write_manifest(run_dir.checkpoint(step), listing)
    session: Any = SimpleNamespace(
        run_dir=run_dir, mesh=SimpleNamespace(is_main=True), progress=SimpleNamespace(step=8)
    )
    assert _prune_batches(session, JournalConfig(keep=keep)) == checkpoints
    assert run_dir.published_batches() == list(range(first, 9))
