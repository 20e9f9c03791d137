"""The quick start as a user runs it: `rl` starts the server itself, the reward rises, nothing stays behind."""

import signal
from pathlib import Path
from statistics import mean

import httpx
import pytest

from holdfast.run.metrics import read_metrics
from tests.pages.metrics import undocumented
from tests.runs.ports import free_port
from tests.runs.processes import HANG_S
from tests.runs.rl import RlRun, complete

pytestmark = pytest.mark.engine

# From the first 3 to the last 10 of 50 steps; measured: 0.15 to 0.2.
REWARD_RISE = 0.08


def _listens(port: int) -> bool:
    try:
        httpx.get(f"http://127.0.0.1:{port}/weights", timeout=HANG_S)
    except httpx.TransportError:
        return False
    return True


def test_the_quick_start_trains_and_leaves_nothing_behind(tmp_path: Path) -> None:
    port = free_port()
    flags = ("--inference.server.port", str(port), "--trainer.kl")
    with RlRun(tmp_path / "run", *flags, starts_python=True) as run:
        run.wait_for_step(1)
        assert _listens(port) and run.find("holdfast.inference.main")
        completed = complete(run)
    assert completed.exit_code == 0, completed.output
    assert not completed.survivors and not _listens(port)
    for phase in ("loading vllm", "importing torch", "waiting for batches", "finished step 50 of 50; weights: "):
        assert phase in completed.output
    run_dir = completed.run_dir
    assert all((run_dir.logs(1) / f"{name}.log").stat().st_size for name in ("trainer", "orchestrator", "inference"))
    assert (run_dir.weights_of(50) / "model.safetensors").exists()
    lines = read_metrics(run_dir.metrics)
    assert [line["step"] for line in lines] == list(range(1, 51))
    rewards = [line["reward/mean"] for line in lines]
    assert mean(rewards[-10:]) >= mean(rewards[:3]) + REWARD_RISE, rewards
    assert not undocumented(lines[-1]) and {line["ppo_kl"] for line in lines} == {0.0}
    assert lines[0]["ref_kld"] == 0.0 and all(line["ref_kld"] > 0.0 for line in lines[1:])


def test_a_launcher_killed_at_the_start_takes_its_server_along(tmp_path: Path) -> None:
    with RlRun(tmp_path / "run", "--inference.server.port", str(free_port()), starts_python=True) as run:
        run.wait_for_output("loading vllm")
        assert run.find("holdfast.inference.main")
        run.interrupt(signal.SIGKILL)
        completed = complete(run)
    assert completed.exit_code == -signal.SIGKILL and not completed.survivors
