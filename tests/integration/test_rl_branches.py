"""A real run whose template forgets earlier thoughts: sessions split, and a run that dies ends in the same bits."""

import json
import shutil
from pathlib import Path

import pytest
import tomli_w

from holdfast.run.journal import read_batch
from holdfast.run.metrics import read_metrics
from tests.faults.blows import killed_twice
from tests.integration.conftest import UsedServer
from tests.models.chat_templates import FORGETFUL
from tests.runs.rl import EVERYTHING, MODEL, assert_same_end, succeeded

pytestmark = pytest.mark.launch

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
    section = {"id": "tests.runs.two_turns:TwoTurns"}
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
