"""A resumed run says which settings are not those of the attempt before."""

from __future__ import annotations

from pathlib import Path

from triad.config import SftConfig
from triad.config.base import CkptConfig
from triad.config.drift import describe_drift
from triad.config.load import to_toml


def _written(path: Path, config: SftConfig) -> Path:
    path.write_text(to_toml(config))
    return path


def test_every_changed_setting_is_named_with_both_values(tmp_path: Path) -> None:
    before = SftConfig(max_steps=20, ckpt=CkptConfig(interval=5))
    after = before.model_copy(deep=True)
    after.max_steps, after.optim.lr, after.val_interval = 40, 0.5, 7
    old, new = _written(tmp_path / "old", before), _written(tmp_path / "new", after)
    assert describe_drift(old, new) == ["max_steps: 20 -> 40", "optim.lr: 1e-05 -> 0.5", "val_interval: unset -> 7"]
    assert describe_drift(old, old) == []


def test_where_and_from_which_step_an_attempt_starts_is_no_drift(tmp_path: Path) -> None:
    before = SftConfig(ckpt=CkptConfig(interval=5))
    after = SftConfig(ckpt=CkptConfig(interval=5, resume_step=5), clean=True, output_dir=Path("elsewhere"))
    assert describe_drift(_written(tmp_path / "old", before), _written(tmp_path / "new", after)) == []
