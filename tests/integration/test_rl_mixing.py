"""Mixed environments with settings of their own, and every part of the state at once, in real runs that are killed."""

from collections import Counter
from pathlib import Path

import pytest

from holdfast.protocol.rollouts import Sampling
from holdfast.run.journal import read_batch
from tests.faults.blows import killed_twice
from tests.integration.conftest import UsedServer
from tests.integration.test_rl_exact import LOG_RATIO_TOLERANCE
from tests.runs.rl import assert_same_end, exact_metrics, succeeded

pytestmark = pytest.mark.launch

_OWN_SETTINGS = """
[[environments]]
id = "reverse_text"
group_size = 4

[[environments]]
id = "reverse_text"
name = "cold"
group_size = 2
sampling = { temperature = 0.6, top_k = 20, max_tokens = 9 }

[environments.curriculum]
levels = [{ max_length = 5 }, { max_length = 7 }, { max_length = 9 }]
window = 6
advance_reward = 0.01

[[environments]]
id = "examples.environments.sort_letters:SortLetters"
name = "sort_letters"
group_size = 3

[environments.curriculum]
levels = [{ max_length = 5 }, { max_length = 9 }]
advance_reward = 0.01
"""


def test_environments_with_own_settings_are_trained_as_they_were_sampled(rl_server: UsedServer, tmp_path: Path) -> None:
    """By the distribution of each, in one packed row; with the same levels after kills of trainer and orchestrator."""
    settings = tmp_path / "orchestrator.toml"
    settings.write_text(_OWN_SETTINGS)
    flags = ("--orchestrator", "@", str(settings), *rl_server.flags, "--orchestrator.problems-per-step", "9",
             "--async-level", "0", "--max-steps", "5", "--ckpt.interval", "2")  # fmt: skip
    straight = succeeded(tmp_path / "straight", *flags)
    metrics = exact_metrics(straight.run_dir, range(1, 6))
    for line in metrics:
        assert line["mismatch_kl/age_0"] <= 1e-10 and line["mismatch/max_log_ratio"] <= LOG_RATIO_TOLERANCE, line
        assert line["ppo_kl"] == 0 and line["clip_fraction"] == 0, line
    rollouts = read_batch(straight.run_dir, 3).rollouts
    assert Counter((one.environment, one.sampling) for one in rollouts) == {
        ("reverse_text", Sampling()): 3 * 4,
        ("cold", Sampling(0.6, top_k=20)): 3 * 2, ("sort_letters", Sampling()): 3 * 3
    }  # fmt: skip
    assert [line["curriculum/cold/level"] for line in metrics] == [0.0, 0.0, 1.0, 1.0, 2.0]
    assert all(0 <= line["curriculum/sort_letters/level"] <= 1 for line in metrics)
    killed = killed_twice(tmp_path / "killed", *flags, orchestrator=2, rank=3, held=4, starts_python=True)
    assert_same_end(killed, straight, 5)
