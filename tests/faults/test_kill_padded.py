"""Models that cannot be packed, killed in a save: each sample has a row of its own, and the run ends in equal bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ModelFactory
from tests.faults.faulty_calls import read_trail
from tests.faults.run_states import FLAGS, differing, end_state, whole_steps
from tests.forking.commands import Run, shared_commands

CONVOLUTIONS: dict[str, Any] = {
    "layer_types": ["conv", "full_attention"], "block_ff_dim": 64, "block_multiple_of": 8, "initializer_range": 0.1,
}  # fmt: skip
DROPOUT: dict[str, Any] = {"n_layer": 2, "n_head": 4, "hidden_dropout": 0.2, "attention_dropout": 0.2}
MODELS = [("lfm2", CONVOLUTIONS), ("bloom", DROPOUT)]


@pytest.mark.parametrize(("kind", "fields"), MODELS, ids=[kind for kind, _ in MODELS])
def test_killed_in_the_second_save_it_ends_as_if_nothing_had_happened(
    kind: str, fields: dict[str, Any], tiny_model: ModelFactory, sft_data: Path, tmp_path: Path
) -> None:
    model = tiny_model(kind, weights=False, **fields)

    def run(output: Path, *, fault: str) -> Run:
        watch = f"{str(output / 'checkpoints')!r}, {str(output.with_suffix('.trail'))!r}, {fault}"
        source = f"from tests.faults.faulty_calls import install\ninstall({watch})"
        return shared_commands().sft(output, model, sft_data, *FLAGS, trainer_fault=source).wait()

    straight, output = tmp_path / "straight", tmp_path / "killed"
    undisturbed = run(straight, fault="kill_at=None")
    assert undisturbed.code == 0 and "one sample a row" in undisturbed.log, undisturbed.log
    calls = read_trail(straight.with_suffix(".trail"))
    second_save = next(call.number for call in calls if call.path.startswith(".tmp-step_4/"))
    killed = run(output, fault=f"kill_at={second_save}")
    assert killed.was_killed, killed.log
    assert sorted(whole_steps(output / "checkpoints")) == [2]
    resumed = run(output, fault="kill_at=None")
    assert resumed.code == 0 and "resuming from step 2" in resumed.log, resumed.log
    assert differing(end_state(output), end_state(straight)) == []
