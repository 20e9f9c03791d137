"""RLHF as the commands do it: pairs teach a reward model, and the reward model teaches the policy."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from holdfast.run.metrics import read_metrics
from holdfast.run.run_dir import RunDir
from tests.forking.commands import shared_commands
from tests.integration.conftest import UsedServer
from tests.runs.rl import succeeded

pytestmark = pytest.mark.launch

_STEPS = 30
_PPO = "configs/reverse_text/algorithms/ppo.toml"


@pytest.mark.timeout(900)
def test_a_policy_learns_from_the_scores_of_a_reward_model_that_pairs_taught(
    rl_server: UsedServer, tmp_path: Path
) -> None:
    """The environment's own reward is shown and not trained on; it rises since the pairs prefer what it pays for."""
    # With as many threads as cores, two runs side by side take ten times as long: the threads wait spinning.
    argv = ["@", "configs/reverse_text/reward_model.toml", "--output-dir", str(tmp_path / "judge")]
    taught = shared_commands().start("reward-model", tmp_path / "judge", [*argv, "--parallel.threads", "1"]).wait()
    assert taught.code == 0, taught.log
    (version,) = RunDir(tmp_path / "judge").published_weights()
    judge = str(RunDir(tmp_path / "judge").weights_of(version))
    parts = ("--trainer.reward-model.name", judge, "--trainer.critic.name", judge)
    run = succeeded(tmp_path / "run", "@", _PPO, *rl_server.flags, "--max-steps", str(_STEPS), "--ckpt", *parts)
    lines = read_metrics(run.run_dir.metrics)
    assert len(lines) == _STEPS
    scores = [line["reward_model/mean"] for line in lines]
    rules = [line["reward/mean"] for line in lines]
    assert mean(scores[-5:]) > mean(scores[:5]) and mean(rules[-5:]) > mean(rules[:5])
