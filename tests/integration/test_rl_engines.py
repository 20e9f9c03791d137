"""Several engines under `rl`: the end is that of the run with one, and a death costs what was in flight."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import psutil
import pytest

from holdfast.shared.config import InferenceConfig
from holdfast.shared.files.metrics import read_metrics
from tests.faults.held_steps import at_start, exists, held_after
from tests.forking.engines import start_server
from tests.integration.conftest import REFERENCE_STEPS, UsedServer
from tests.runs.ports import free_port
from tests.runs.processes import command_line
from tests.runs.rl import MODEL, SMALL_BATCH, CompletedRun, RlRun, assert_same_end, complete, succeeded

pytestmark = pytest.mark.launch

_STEPS = ("--max-steps", str(REFERENCE_STEPS), "--ckpt.interval", "2")


def _check_same_end(run: CompletedRun, reference: CompletedRun) -> list[dict[str, float]]:
    """Return the metrics of every step."""
    assert_same_end(run, reference, REFERENCE_STEPS)
    return list(read_metrics(run.run_dir.metrics))


def test_one_of_two_servers_that_were_named_may_die_for_good(
    rl_server: UsedServer, reference: CompletedRun, tmp_path: Path
) -> None:
    """Nobody starts it again, so the run ends with the other one."""
    values = {"model": {"name": str(MODEL), "max_len": 64}, "server": {"port": free_port()}, "engine": {"threads": 1}}
    dying = start_server("stub", InferenceConfig.model_validate(values), tmp_path / "dying.log")
    dying.wait_ready()
    urls = json.dumps([dying.url, rl_server.handle.url])
    flags, held = ("--orchestrator.client.urls", urls), at_start(held_after(8, until=exists(tmp_path / "dead")))
    try:
        with RlRun(tmp_path / "run", *_STEPS, *SMALL_BATCH, *flags, environment=held) as run:
            run.wait_for_step(4)
            dying.kill()
            (tmp_path / "dead").touch()
            done = complete(run)
    finally:
        dying.kill()
    metrics = _check_same_end(done, reference)
    assert metrics[2]["engine/0/requests"] > 0 and metrics[2]["engine/1/requests"] > 0
    assert sum(step["engine/0/failures"] for step in metrics) == 1
    assert metrics[-1]["engine/0/requests"] == 0 < metrics[-1]["engine/1/requests"]


def _server(run: RlRun, number: int) -> psutil.Process:
    # Its engine has the same command line for a moment.
    found, *_ = [
        process
        for process in run.find("holdfast.inference.main")
        if any(word.endswith(f"/inference_{number}.toml") for word in command_line(process))
    ]
    return found


def _engines(run: RlRun, number: int) -> list[psutil.Process]:
    return [child for child in _server(run, number).children() if "EngineCore" in "".join(command_line(child))]


@pytest.mark.timeout(1800)
@pytest.mark.engine
def test_two_engines_of_a_run_die_at_random_and_come_back(vllm_server: UsedServer, tmp_path: Path) -> None:
    """With vLLM, whose log-probabilities must not depend on which requests share a batch."""
    seed = random.SystemRandom().randrange(1000)
    reference = succeeded(tmp_path / "reference", *vllm_server.flags, *_STEPS)
    rng = random.Random(seed)
    flags = ("--inference.engines", "2", "--inference.server.port", str(free_port(2)), "--ckpt.interval", "2")
    flags = (*SMALL_BATCH, "--max-steps", str(REFERENCE_STEPS), *flags)
    with RlRun(tmp_path / "run", *flags, engine="vllm") as run:
        run.wait_for_step(rng.randrange(1, 6))
        run.wait_for(lambda: _engines(run, 1), f"the second engine (seed {seed})")
        _server(run, 0).kill()
        run.wait_for_match(r"inference_0 was killed by signal 9: starting it again \(restart 1 of 3\)")
        # The first one still loads: now and then nobody is there.
        run.wait_for_step(rng.randrange(6, 12))
        _engines(run, 1)[0].send_signal(signal.SIGKILL)
        run.wait_for_match(r"inference_1 ended with exit code 75: starting it again \(restart 1 of 3\)")
        done = complete(run)
    metrics = _check_same_end(done, reference)
    assert any(step["engine/0/requests"] for step in metrics) and any(step["engine/1/requests"] for step in metrics)
    # Trainer and orchestrator went on as they were.
    assert [path.name for path in (done.run_dir.path / "configs").iterdir()] == ["attempt_1"]
