"""A real run whose trainer comes no further in a loss of the user's own: named, killed, started again, the same end."""

from pathlib import Path

import pytest

from tests.integration.conftest import UsedServer
from tests.runs.rl import RlRun, assert_same_end, complete, succeeded

pytestmark = [pytest.mark.launch, pytest.mark.clock]

_LOSS = """
import os
import time
from pathlib import Path

def loss(data):
    once = Path(os.environ["STUCK_ONCE"])
    if not once.exists() and (once.parent / "run" / "weights" / "step_3").exists():
        once.touch()
        time.sleep(3600)
    return -(data.weights_N * data.advantages_N * data.logprobs_N).sum(), {}
"""


def test_a_loss_that_never_returns_costs_a_restart(rl_server: UsedServer, tmp_path: Path) -> None:
    (tmp_path / "stuck_loss.py").write_text(_LOSS)
    once = tmp_path / "once"
    environment = {"PYTHONPATH": str(tmp_path), "STUCK_ONCE": str(once)}
    flags = (*rl_server.flags, "--max-steps", "6", "--ckpt.interval", "2", "--trainer.hang-timeout-s", "20")
    flags = (*flags, "--trainer.loss.type", "stuck_loss:loss")
    straight = succeeded(tmp_path / "straight", *flags, environment=environment)
    with RlRun(tmp_path / "run", *flags, environment=environment) as run:
        run.wait_for_match(r"trainer \(rank 0\) has made no progress for \d+ s in step \d: killing it")
        healed = complete(run)
    assert once.exists()
    assert 'stuck_loss.py", line 10 in loss' in (healed.run_dir.logs(1) / "trainer.log").read_text()
    assert_same_end(healed, straight, 6)
