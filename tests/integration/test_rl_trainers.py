"""`rl` with trainers of other kinds: two ranks, adapters, and the rewards of a model that pairs taught."""

from pathlib import Path
from statistics import mean

import pytest
from safetensors.torch import load_file

from holdfast.run.checkpoints import Kind, kind_of
from holdfast.run.metrics import read_metrics
from holdfast.run.run_dir import RunDir
from tests.forking.commands import shared_commands
from tests.integration.conftest import UsedServer
from tests.runs.rl import MODEL, CompletedRun, succeeded

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
        assert mine["reward/mean"] == theirs["reward/mean"]
        assert theirs["grad_norm"] > 0.1
        for name in ("loss", "grad_norm", "entropy", "mismatch_kl"):
            assert mine[name] == pytest.approx(theirs[name], rel=RELATIVE, abs=ABSOLUTE), f"{name} of step {step}"
    assert two[1]["loss"] != 0.0


STEPS = 6
LORA = ("--trainer.model.lora.rank", "2", "--trainer.model.lora.alpha", "8")
# Trainer against sampler, float32 on both sides.
LOG_RATIO_TOLERANCE = 1e-4


def test_rl_sends_adapters_to_the_engine_which_computes_as_the_trainer(rl_server: UsedServer, tmp_path: Path) -> None:
    flags = (*rl_server.flags, *LORA, "--trainer.optim.lr", "5e-3", "--async-level", "0", "--ckpt.interval", "2")
    run_dir = succeeded(tmp_path / "run", *flags, "--max-steps", str(STEPS)).run_dir
    for version in run_dir.published_weights():
        directory = run_dir.weights_of(version)
        assert kind_of(directory) is (Kind.WEIGHTS if version == STEPS else Kind.ADAPTER)
    # Of a fresh batch, the ratio shows whether the engine computes what the trainer computes.
    lines = read_metrics(run_dir.metrics)
    for line in lines:
        assert 0 < line["mismatch/max_log_ratio"] <= LOG_RATIO_TOLERANCE, line
    base, trained = (load_file(place / "model.safetensors") for place in (MODEL, run_dir.weights_of(STEPS)))
    changes = [float((base[name] - trained[name]).abs().max()) for name in base]
    assert max(changes) > 1e-2, "an adapter that does not matter would show nothing"


_STEPS = 30
_PPO = "configs/reverse_text/algorithms/ppo.toml"


@pytest.mark.timeout(900)
def test_a_policy_learns_from_a_reward_model_that_pairs_taught(rl_server: UsedServer, tmp_path: Path) -> None:
    """The environment's own reward is shown and not trained on; it rises since the pairs prefer what it pays for."""
    # With as many threads as cores, two runs side by side take ten times as long: the threads wait spinning.
    argv = ["@", "configs/reverse_text/reward_model.toml", "--output-dir", str(tmp_path / "judge")]
    shared_commands().start("reward-model", tmp_path / "judge", [*argv, "--parallel.threads", "1"]).succeed()
    (version,) = RunDir(tmp_path / "judge").published_weights()
    judge = str(RunDir(tmp_path / "judge").weights_of(version))
    parts = ("--trainer.reward-model.name", judge, "--trainer.critic.name", judge)
    run = succeeded(tmp_path / "run", "@", _PPO, *rl_server.flags, "--max-steps", str(_STEPS), "--ckpt", *parts)
    lines = read_metrics(run.run_dir.metrics)
    assert len(lines) == _STEPS
    scores = [line["reward_model/mean"] for line in lines]
    rules = [line["reward/mean"] for line in lines]
    assert mean(scores[-5:]) > mean(scores[:5]) and mean(rules[-5:]) > mean(rules[:5])
