"""What a process waits for: how long it does, and that its error names phase, process and policy version in the end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from orchestrator.main import orchestrate
from tests.unit.orchestrator_fakes import FakeEngine, make_config, publish_weights, serving
from trainer import rl
from triad.config import TrainerConfig
from triad.errors import InferenceError
from triad.run_dir import RunDir


def error_of(directory: Path, engine: FakeEngine, *, timeout_s: float = 10.0, ready_timeout_s: float = 10.0) -> str:
    """Run the orchestrator into its error, and return that."""
    config = make_config(directory, engine, weights_timeout_s=0.05)
    config.client.timeout_s, config.client.ready_timeout_s = timeout_s, ready_timeout_s
    with pytest.raises(InferenceError) as raised:
        asyncio.run(orchestrate(config))
    return str(raised.value)


def test_inference_that_does_not_come(tmp_path: Path) -> None:
    engine = FakeEngine()
    with serving(engine):
        pass
    told = error_of(tmp_path, engine, ready_timeout_s=0.05)
    assert told.startswith(f"waiting for inference: the inference server {engine.url} did not become ready within 0.05")


def test_weights_that_do_not_come(tmp_path: Path) -> None:
    engine = FakeEngine()
    with serving(engine):
        told = error_of(tmp_path, engine)
    assert told.startswith("waiting for weights, policy version 0: the trainer published no ")
    assert "within 0.05 s (weights_timeout_s)" in told


def test_weights_that_an_engine_does_not_take(tmp_path: Path) -> None:
    engine = FakeEngine(lie_version=1)
    publish_weights(RunDir(tmp_path), 0, b"zero")
    with serving(engine):
        told = error_of(tmp_path, engine)
    assert told.startswith("pushing weights and reading them back, policy version 0: ")
    assert f"{engine.url} was given policy version 0 and reports version 1" in told


def test_an_answer_takes_as_long_as_it_takes_while_its_server_is_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, run_dir = FakeEngine(), RunDir(tmp_path)

    async def answer_late(_: int) -> None:
        while "takes longer than 0.15 s; the server is well" not in caplog.text:
            await asyncio.sleep(0.01)

    engine.on_generate = answer_late
    publish_weights(run_dir, 0, b"zero")
    with serving(engine):
        error_of(tmp_path, engine, timeout_s=0.05)  # the next weights do not come
    assert run_dir.published_batches() == [1, 2]
    assert len(engine.requests) == len({str(request) for request in engine.requests}), "nothing was asked for twice"


def test_batches_that_do_not_come(tmp_path: Path) -> None:
    config = TrainerConfig.model_validate({"model": {"name": "x"}, "batch_timeout_s": 0.05})
    expected = "waiting for batches, policy version 3: the orchestrator published no batch 4 within 0.05 s"
    with pytest.raises(InferenceError, match=expected):
        rl._wait_for_batch(RunDir(tmp_path), 4, config)
