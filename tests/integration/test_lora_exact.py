"""`rl` with LoRA: engines get adapters, and a killed run ends in the same bits."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from holdfast.run.checkpoints import Kind, kind_of
from holdfast.run.metrics import read_metrics
from holdfast.run.run_dir import RunDir
from tests.faults.held_steps import NEVER, at_start, held_after
from tests.integration.conftest import UsedServer
from tests.runs.rl import MODEL, RlRun, assert_same, complete, exact_metrics, outcome, succeeded

pytestmark = [pytest.mark.engine, pytest.mark.launch]

STEPS, HALF = 6, 3
LORA = ("--trainer.model.lora.rank", "2", "--trainer.model.lora.alpha", "8")
# Trainer against sampler, float32 on both sides.
LOG_RATIO_TOLERANCE = 1e-4


def test_rl_sends_adapters_to_the_engine_and_is_exact_after_a_kill(rl_server: UsedServer, tmp_path: Path) -> None:
    flags = (*rl_server.flags, *LORA, "--trainer.optim.lr", "5e-3", "--async-level", "0", "--ckpt.interval", "2")
    flags = (*flags, "--max-steps", str(STEPS))
    straight = succeeded(tmp_path / "straight", *flags).run_dir
    held = at_start(held_after(STEPS - 1, until=NEVER))
    with RlRun(tmp_path / "killed", *flags, environment=held) as run:
        run.wait_for_step(HALF)
        run.interrupt(signal.SIGKILL)
        assert complete(run).exit_code == -signal.SIGKILL
    resumed = succeeded(tmp_path / "killed", *flags)
    assert "resuming from step" in resumed.output
    assert_same(outcome(resumed.run_dir, STEPS), outcome(straight, STEPS))
    assert exact_metrics(resumed.run_dir, range(1, STEPS + 1)) == exact_metrics(straight, range(1, STEPS + 1))
    _check_what_engines_got(straight)


def _check_what_engines_got(run_dir: RunDir) -> None:
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
