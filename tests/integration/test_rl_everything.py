"""A real `rl` run with every part of a trainer: it dies, its machine is lost, and it ends in the same bits."""

import json
import signal
from pathlib import Path

import pytest
import tomli_w

from holdfast.remote.checkpoints import RemoteCheckpoints
from holdfast.run.metrics import read_metrics
from tests.faults.held_steps import NEVER, at_start, held_after
from tests.integration.conftest import UsedServer
from tests.runs.rl import EVERYTHING, RlRun, assert_same, complete, exact_metrics, outcome, succeeded
from tests.runs.training import write_data

pytestmark = pytest.mark.launch

_STEPS = 8
_RUN = ("--max-steps", str(_STEPS), "--ckpt.interval", "2", "--trainer.parallel.threads", "1")


@pytest.mark.timeout(900)
def test_with_every_part_a_run_that_dies_and_is_started_again_ends_in_the_same_bits(
    rl_server: UsedServer, tmp_path: Path
) -> None:
    settings = tmp_path / "everything.toml"
    pretraining = {"coef": 0.1, "data": {"name": str(write_data(tmp_path / "text.jsonl")), "batch_size": 4}}
    optim = {"optim": {"type": "muon"}, "critic": EVERYTHING["critic"] | {"optim": {"type": "muon", "lr": 1e-3}}}
    settings.write_text(tomli_w.dumps(EVERYTHING | optim | {"pretraining": pretraining}))
    flags = ("--trainer", "@", str(settings), *rl_server.flags, *_RUN)
    straight = succeeded(tmp_path / "straight", *flags).run_dir
    flags = (*flags, "--ckpt.keep", "1", "--ckpt.dir", f"file://{tmp_path}/store")
    held = at_start(held_after(_STEPS - 1, until=NEVER))
    with RlRun(tmp_path / "killed", *flags, environment=held) as run:
        run.wait_for_step(2)
        (orchestrator,) = run.find("holdfast.orchestrator.main")
        orchestrator.kill()
        run.wait_for_output("orchestrator was killed by signal 9: starting it again")
        run.wait_for_step(4)
        _, rank = run.find("holdfast.trainer.launch")
        rank.kill()
        run.wait_for_output("trainer ended with exit code 137: starting it again")
        run.wait_for_step(6)
        run.wait_for(RemoteCheckpoints(f"file://{tmp_path}/store").steps, "an upload")
        run.interrupt(signal.SIGKILL)
        assert complete(run).exit_code == -signal.SIGKILL
    # The machine is lost: an empty one goes on from what was uploaded.
    before = read_metrics((tmp_path / "killed").rename(tmp_path / "lost") / "metrics.jsonl")
    # By new Pythons: sets of other orders than those of the attempts before it and of the undisturbed run, all forks.
    with RlRun(tmp_path / "killed", *flags, "--ckpt.resume-step", "auto", starts_python=True) as run:
        resumed = complete(run)
    assert resumed.exit_code == 0 and not resumed.survivors, resumed.output
    assert "copied the checkpoint of step" in resumed.output and "copied the weights of version" in resumed.output
    killed, steps = resumed.run_dir, range(1, _STEPS + 1)
    assert_same(outcome(killed, _STEPS), outcome(straight, _STEPS))
    first = int(read_metrics(killed.metrics)[0]["step"])
    assert 2 < first <= len(before) + 1
    assert exact_metrics(killed, steps[first - 1 :]) == exact_metrics(straight, steps[first - 1 :])

    tensors = outcome(straight, _STEPS).tensors
    for name in ("optim.model.layers.0.mlp.up_proj.weight.momentum_buffer", "reference.model.embed_tokens.weight"):
        assert any(tensors[name]), name
    lines, state = exact_metrics(straight, steps), outcome(straight, _STEPS).trainer_state
    assert {"kl", "reward_moments", "ema"} <= json.loads(state["progress.json"]).keys()
    assert all(line["value_loss"] > 0 for line in lines)
    assert all(line["pretraining_loss"] > 0 and line["ppo_kl"] > 0 for line in lines[1:]) and lines[0]["lr"] == 0
    assert [line["replay/groups"] for line in lines] == [0] + [2] * (_STEPS - 1)
