"""`rl` on the real engine: what it samples is trained on, and a run of which nothing is left goes on in the same bits.

Most runs of the tests are on the stub engine; `test_rl_heals.py` has the deaths of vLLM alone.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from holdfast.shared.files.journal import read_batch
from tests.faults.held_steps import NEVER, at_start, held_after
from tests.integration.conftest import UsedServer
from tests.integration.test_rl_exact import LOG_RATIO_TOLERANCE
from tests.runs.ports import free_port
from tests.runs.processes import command_line
from tests.runs.rl import SMALL_BATCH, RlRun, assert_same_end, complete, exact_metrics, succeeded

pytestmark = [pytest.mark.engine, pytest.mark.launch]


@pytest.mark.everyday
def test_a_short_run_trains_on_what_vllm_samples(vllm_server: UsedServer, tmp_path: Path) -> None:
    before = vllm_server.generated_tokens()
    flags = (*vllm_server.flags, "--async-level", "0", "--max-steps", "3", "--ckpt.interval", "2")
    run = succeeded(tmp_path / "run", *flags)
    assert run.run_dir.committed_steps() == [2, 3] and vllm_server.weights()["version"] == 2
    lines = exact_metrics(run.run_dir, range(1, 4))
    assert all(0 < line["mismatch/max_log_ratio"] <= LOG_RATIO_TOLERANCE for line in lines), lines
    rollouts = [rollout for step in (1, 2, 3) for rollout in read_batch(run.run_dir, step).rollouts]
    assert vllm_server.generated_tokens() - before >= sum(rollout.loss_mask.num_sampled for rollout in rollouts) > 0


def test_everything_is_killed_at_once_and_the_run_goes_on(vllm_server: UsedServer, tmp_path: Path) -> None:
    steps = ("--max-steps", "6", "--ckpt.interval", "2")
    straight = succeeded(tmp_path / "straight", *vllm_server.flags, *steps)
    flags = (*SMALL_BATCH, "--inference.server.port", str(free_port()), *steps, "--ckpt.resume-step", "auto")
    held = at_start(held_after(5, until=NEVER))
    with RlRun(tmp_path / "run", *flags, engine="vllm", environment=held) as run:
        run.wait_for_step(3)
        processes = run.processes()
        assert any("EngineCore" in "".join(command_line(process)) for process in processes), [
            command_line(p) for p in processes
        ]
        run.interrupt(signal.SIGKILL)
        for process in processes:
            if process.is_running():
                process.kill()
        killed = complete(run)
    assert killed.exit_code == -signal.SIGKILL and not killed.survivors
    resumed = succeeded(tmp_path / "run", *flags, engine="vllm")
    assert "resuming from step" in resumed.output
    assert_same_end(resumed, straight, 6)
