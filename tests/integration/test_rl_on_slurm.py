"""`rl --slurm` on a real SLURM of two nodes: preempted and queued again, it is the run of one machine, bit for bit."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.shared.files.run_dir import RunDir
from tests.conftest import ROOT
from tests.runs.processes import HANG_S
from tests.runs.rl import CONFIG, SMALL_BATCH, assert_same, last_step, outcome, succeeded
from tests.runs.slurm_nodes import SlurmNodes, install

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
STEPS = 30
TIMEOUT_S = 400.0
FLAGS = (
    *SMALL_BATCH,
    *("--max-steps", str(STEPS), "--ckpt.interval", "5"),
    *("--trainer.parallel.threads", "1", "--inference.engine.threads", "1"),
)


def test_a_job_that_is_preempted_goes_on_when_it_is_started_again(tmp_path: Path) -> None:
    install()
    local = succeeded(tmp_path / "local", *FLAGS, "--trainer.parallel.num-ranks", "2", timeout_s=TIMEOUT_S)
    run_dir = RunDir(tmp_path / "run")
    (tmp_path / "slurm").mkdir()
    with SlurmNodes(tmp_path / "slurm") as slurm:
        rl = [str(Path(sys.executable).with_name("rl")), "@", CONFIG, "--output-dir", str(run_dir.path), *FLAGS]
        flags = ("--slurm.nodes", "2", "--slurm.time", "1:00:00", "--trainer.parallel.nodes", "2")
        submitted = subprocess.run([*rl, *flags], cwd=ROOT, env=slurm.environment, capture_output=True, text=True)
        assert submitted.returncode == 0, submitted.stderr
        found = re.match(r"submitted job (\d+); its output: (.*)", submitted.stdout)
        assert found is not None, submitted.stdout
        job, output = found[1], Path(found[2])

        def wait_for(what: str, condition: object) -> None:
            deadline = time.monotonic() + HANG_S
            assert callable(condition)
            while not condition():
                said = output.read_text() if output.exists() else ""
                assert time.monotonic() < deadline, f"{what} did not come: {slurm.state(job)}\n{said}"
                time.sleep(0.05)

        wait_for("step 7", lambda: last_step(run_dir) >= 7)
        slurm.ask("scontrol", "requeue", job)
        wait_for("the queue", lambda: slurm.state(job) == "PENDING")
        said, before = output.read_text(), last_step(run_dir)
        assert "SIGTERM: saving the current step" in said and f"stopped at step {before} of {STEPS}, which" in said
        assert 7 <= before < STEPS
        # It would begin minutes later, so that whoever preempted it begins before.
        slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
        wait_for("the end", lambda: f"finished step {STEPS} of {STEPS}" in output.read_text())
        wait_for("the end of the job", lambda: slurm.state(job) in ("COMPLETED", ""))
    assert f"resuming from step {before}" in output.read_text()
    assert_same(outcome(run_dir, STEPS), outcome(local.run_dir, STEPS))
