"""`rl` on two ranks trains as on one."""

from pathlib import Path

import pytest

from holdfast.run.metrics import read_metrics
from tests.integration.conftest import UsedServer
from tests.runs.rl import CompletedRun, succeeded

pytestmark = pytest.mark.launch

# Sums in another order, float32.
RELATIVE = 1e-4
ABSOLUTE = 1e-6


@pytest.mark.ranks
@pytest.mark.parametrize("division", [(), pytest.param(("--trainer.parallel.sequence-parallel", "2"))])
def test_two_ranks_train_as_one_does(
    division: tuple[str, ...], reference: CompletedRun, rl_server: UsedServer, tmp_path: Path
) -> None:
    flags = (*rl_server.flags, "--trainer.parallel.num-ranks", "2", "--trainer.row-tokens", "256", *division)
    run = succeeded(tmp_path / "run", *flags, "--max-steps", "4", "--ckpt")
    sharded = run.run_dir.checkpoint(4) / "trainer"
    assert len(list(sharded.glob("*.distcp"))) == len(list(sharded.glob("random_rank_*.json"))) == 2
    one, two = read_metrics(reference.run_dir.metrics), read_metrics(run.run_dir.metrics)
    # Both first batches are by version 0, so they are the same; the second trains on the first update.
    for step in (1, 2):
        mine, theirs = two[step - 1], one[step - 1]
        assert mine["reward/mean"] == theirs["reward/mean"] and theirs["grad_norm"] > 0.1
        for name in ("loss", "grad_norm", "entropy", "mismatch_kl"):
            assert mine[name] == pytest.approx(theirs[name], rel=RELATIVE, abs=ABSOLUTE), f"{name} of step {step}"
    assert two[1]["loss"] != 0.0
