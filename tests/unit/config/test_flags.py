"""Which flag is meant by one that there is not."""

from __future__ import annotations

import pytest

from holdfast.config import DpoConfig, RlConfig, SftConfig
from holdfast.config.load import ELSEWHERE, flags_of, meant


def test_every_name_of_another_system_stands_for_a_flag_that_there_is() -> None:
    known = {**flags_of(SftConfig), **flags_of(DpoConfig), **flags_of(RlConfig)}
    for theirs, ours in ELSEWHERE.items():
        assert any(flag == f"--{ours}" or flag.endswith(f".{ours}") for flag in known), (theirs, ours)
        assert f"{ours}'" in meant(f"--{theirs}", known)


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--lr", " Did you mean '--optim.lr'?"),
        ("--data.learning-rate", " Did you mean '--optim.lr'?"),
        ("--output_dir", " Did you mean '--output-dir'?"),
        ("--name", " Did you mean '--data.name' or '--model.name'?"),
        ("--max-stepz", " Did you mean '--max-steps'?"),
        ("--save_total_limit", ""),
        ("--unlike_any", ""),
    ],
)
def test_by_its_last_part_or_its_spelling(flag: str, said: str) -> None:
    known = ["-h", "--optim.lr", "--output-dir", "--eval.output-dir", "--data.name", "--model.name", "--max-steps"]
    assert meant(flag, known) == said
