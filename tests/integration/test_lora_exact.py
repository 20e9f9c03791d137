"""`rl` with LoRA: engines get adapters; that its state is complete, `tests/unit/trainer/programs` says."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from holdfast.run.checkpoints import Kind, kind_of
from holdfast.run.metrics import read_metrics
from tests.integration.conftest import UsedServer
from tests.runs.rl import MODEL, succeeded

pytestmark = [pytest.mark.engine, pytest.mark.launch]

STEPS = 6
LORA = ("--trainer.model.lora.rank", "2", "--trainer.model.lora.alpha", "8")
# Trainer against sampler, float32 on both sides.
LOG_RATIO_TOLERANCE = 1e-4


def test_rl_sends_adapters_to_the_engine_which_computes_what_the_trainer_computes(
    rl_server: UsedServer, tmp_path: Path
) -> None:
    flags = (*rl_server.flags, *LORA, "--trainer.optim.lr", "5e-3", "--async-level", "0", "--ckpt.interval", "2")
    run_dir = succeeded(tmp_path / "run", *flags, "--max-steps", str(STEPS)).run_dir
    for version in run_dir.published_weights():
        directory = run_dir.weights_of(version)
        assert kind_of(directory) is (Kind.WEIGHTS if version == STEPS else Kind.ADAPTER)
    # Of a fresh batch, the ratio shows whether the engine computes what the trainer computes.
    lines = read_metrics(run_dir.metrics)
    for line in lines:
        assert 0 < line["mismatch/max_log_ratio"] <= LOG_RATIO_TOLERANCE, line
    base, trained = (load_file(place / "model.safetensors") for place in (MODEL, run_dir.weights_of(STEPS)))
    changes = [float((base[name] - trained[name]).abs().max()) for name in base]
    assert max(changes) > 1e-2, "an adapter that does not matter would show nothing"
