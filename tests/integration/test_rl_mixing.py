"""Mixed environments with settings of their own, and every part of the state at once, in real runs that are killed."""

import json
import signal
from collections import Counter
from pathlib import Path

import pytest
import tomli_w

from holdfast.protocol.rollouts import Sampling
from holdfast.remote.checkpoints import RemoteCheckpoints
from holdfast.run.journal import read_batch
from holdfast.run.metrics import read_metrics
from tests.faults.blows import kill_both, killed_twice
from tests.faults.held_steps import NEVER, at_start, held_after
from tests.integration.conftest import UsedServer
from tests.integration.test_rl_exact import LOG_RATIO_TOLERANCE
from tests.runs.rl import EVERYTHING, RlRun, assert_same, assert_same_end, complete, exact_metrics, outcome, succeeded
from tests.runs.training import write_data

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


_ALL_STEPS = 8
_RUN_OF_ALL = ("--max-steps", str(_ALL_STEPS), "--ckpt.interval", "2", "--trainer.parallel.threads", "1")


@pytest.mark.timeout(900)
def test_a_run_with_every_part_that_dies_and_restarts_has_the_same_bits(rl_server: UsedServer, tmp_path: Path) -> None:
    settings = tmp_path / "everything.toml"
    pretraining = {"coef": 0.1, "data": {"name": str(write_data(tmp_path / "text.jsonl")), "batch_size": 4}}
    optim = {"optim": {"type": "muon"}, "critic": EVERYTHING["critic"] | {"optim": {"type": "muon", "lr": 1e-3}}}
    settings.write_text(tomli_w.dumps(EVERYTHING | optim | {"pretraining": pretraining}))
    flags = ("--trainer", "@", str(settings), *rl_server.flags, *_RUN_OF_ALL)
    straight = succeeded(tmp_path / "straight", *flags).run_dir
    flags = (*flags, "--ckpt.keep", "1", "--ckpt.dir", f"file://{tmp_path}/store")
    held = at_start(held_after(_ALL_STEPS - 1, until=NEVER))
    with RlRun(tmp_path / "killed", *flags, environment=held) as run:
        kill_both(run, orchestrator=2, rank=4)
        run.wait_for_output("trainer ended with exit code 137: starting it again")
        run.wait_for_step(6)
        run.wait_for(RemoteCheckpoints(f"file://{tmp_path}/store").steps, "an upload")
        run.interrupt(signal.SIGKILL)
        assert complete(run).exit_code == -signal.SIGKILL
    # The machine is lost: an empty one goes on from what was uploaded.
    before = read_metrics((tmp_path / "killed").rename(tmp_path / "lost") / "metrics.jsonl")
    # By new Pythons: sets of other orders than those of the attempts before it and of the undisturbed run, all forks.
    resumed = succeeded(tmp_path / "killed", *flags, "--ckpt.resume-step", "auto", starts_python=True)
    assert "copied the checkpoint of step" in resumed.output and "copied the weights of version" in resumed.output
    killed, steps = resumed.run_dir, range(1, _ALL_STEPS + 1)
    assert_same(outcome(killed, _ALL_STEPS), outcome(straight, _ALL_STEPS))
    first = int(read_metrics(killed.metrics)[0]["step"])
    assert 2 < first <= len(before) + 1
    assert exact_metrics(killed, steps[first - 1 :]) == exact_metrics(straight, steps[first - 1 :])

    tensors = outcome(straight, _ALL_STEPS).tensors
    for name in ("optim.model.layers.0.mlp.up_proj.weight.momentum_buffer", "reference.model.embed_tokens.weight"):
        assert any(tensors[name]), name
    lines, state = exact_metrics(straight, steps), outcome(straight, _ALL_STEPS).trainer_state
    assert {"kl", "reward_moments", "ema"} <= json.loads(state["progress.json"]).keys()
    assert all(line["value_loss"] > 0 for line in lines)
    assert all(line["pretraining_loss"] > 0 and line["ppo_kl"] > 0 for line in lines[1:]) and lines[0]["lr"] == 0
