"""Runs under dynamic sampling, and runs whose sessions split, are killed and end in the same bits."""

import json
import shutil
from pathlib import Path

import pytest
import tomli_w

from holdfast.protocol.rollouts import Dropped
from holdfast.run.journal import STATE_NAME, Accepted, Counts, read_accepted, read_batch
from holdfast.run.metrics import read_metrics
from holdfast.run.run_dir import RunDir
from tests.faults.blows import killed_twice
from tests.integration.conftest import UsedServer
from tests.models.chat_templates import FORGETFUL
from tests.runs.rl import EVERYTHING, MODEL, assert_same_end, exact_metrics, succeeded

pytestmark = pytest.mark.launch

_STEPS = 8
_SETTINGS = """
[dynamic_sampling]
max_problems_per_step = 24

[[environments]]
id = "reverse_text"
args = { min_length = 1, max_length = 3 }
on_error = "drop"
"""


def _accepted(run_dir: RunDir) -> Accepted:
    return read_accepted(run_dir.batch(_STEPS) / STATE_NAME, step=_STEPS)


def _dropped(run_dir: RunDir) -> dict[int, list[Dropped]]:
    return {step: read_batch(run_dir, step).dropped for step in run_dir.published_batches()}


def test_orchestrator_and_trainer_die_under_dynamic_sampling(rl_server: UsedServer, tmp_path: Path) -> None:
    settings = tmp_path / "orchestrator.toml"
    settings.write_text(_SETTINGS)
    flags = ("--orchestrator", "@", str(settings), *rl_server.flags, "--max-steps", str(_STEPS), "--ckpt.interval", "1")
    straight = succeeded(tmp_path / "straight", *flags)
    killed = killed_twice(tmp_path / "killed", *flags, orchestrator=2, rank=5, held=6)
    assert_same_end(killed, straight, _STEPS)
    assert _dropped(killed.run_dir) == _dropped(straight.run_dir)

    accepted = _accepted(straight.run_dir)
    (trained,) = exact_metrics(straight.run_dir, [_STEPS])
    num_dropped = accepted.dropped["zero_signal"].problems
    assert num_dropped > 0
    assert accepted.problems == accepted.next_task("reverse_text") == 8 * _STEPS + num_dropped
    assert accepted.batched == Counts(8 * _STEPS, int(trained["samples"]), int(trained["tokens"]))
    lines = exact_metrics(straight.run_dir, range(1, _STEPS + 1))
    seen = sum(line["groups/dropped/zero_signal"] for line in lines)
    assert seen == num_dropped


_STEPS = 6


@pytest.mark.timeout(900)
def test_a_run_whose_sessions_split_dies_and_ends_in_the_same_bits(rl_server: UsedServer, tmp_path: Path) -> None:
    """With every part of a trainer; the environment is played in workers where it is killed."""
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, tokenizer)
    (tokenizer / "chat_template.jinja").write_text(FORGETFUL)
    settings = tmp_path / "everything.toml"
    settings.write_text(tomli_w.dumps(EVERYTHING))
    section = {"id": "tests.runs.environments:TwoTurns"}
    flags = (
        "--trainer", "@", str(settings), *rl_server.flags, "--model.tokenizer", str(tokenizer),
        "--orchestrator.sampling.max-tokens", "8", "--max-steps", str(_STEPS), "--ckpt.interval", "2",
        "--trainer.parallel.threads", "1",
    )  # fmt: skip
    undisturbed = succeeded(tmp_path / "straight", *flags, "--orchestrator.environments", json.dumps([section]))
    played = json.dumps([section | {"workers": 2}])
    flags = (*flags, "--orchestrator.environments", played)
    killed = killed_twice(tmp_path / "killed", *flags, orchestrator=1, rank=3, held=4)
    assert_same_end(killed, undisturbed, _STEPS)

    straight = undisturbed.run_dir
    lines = read_metrics(straight.metrics)
    shares = [line["rollout/split"] for line in lines]
    assert all(0.0 < share < 1.0 for share in shares), shares
    assert [line["rollout/branches"] - 1 for line in lines] == pytest.approx(shares), "two turns split once at most"
    # Until the policy is trained, trainer and engine compute the same of every branch.
    assert all(line["mismatch_kl"] < 1e-9 for line in lines[:2])
    last = read_batch(straight, _STEPS)
    assert {len(rollout.branch_starts) for rollout in last.rollouts} == {1, 2}
