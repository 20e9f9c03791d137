"""`sft`, the real command, killed and resumed; two ranks, resumed: what every day shows of either."""

import os
import signal
from pathlib import Path

import pytest

from holdfast.config import SftConfig
from holdfast.config.load import read_toml
from holdfast.run import manifest
from holdfast.run.run_dir import RunDir
from holdfast.trainer.mesh import Mesh
from holdfast.view.run_data import read_run
from tests.conftest import ModelFactory
from tests.faults.held_steps import held_commit
from tests.faults.run_states import FLAGS, LAST, differing, end_state
from tests.forking.commands import shared_commands
from tests.ranks.programs import on_two_ranks
from tests.runs.processes import wait_until
from tests.unit.trainer.programs import in_process
from tests.unit.trainer.programs.cases import Programs

pytestmark = pytest.mark.everyday


@pytest.mark.launch
def test_a_killed_run_ends_in_the_same_bits(tiny_model: ModelFactory, sft_data: Path, tmp_path: Path) -> None:
    """With dropout, shuffling, packing and accumulation; everything is killed while step 6 is being saved. How many
    steps there are follows from the data, and the schedule from the steps: a resume takes what is stored."""
    model = tiny_model(weights=False, attention_dropout=0.3)
    flags = ("--epochs", "0.75", "--optim.schedule", "linear", *FLAGS[2:])  # of 60 samples, in batches of 8
    straight = shared_commands().sft(tmp_path / "straight", model, sft_data, *flags).wait()
    assert straight.code == 0 and "7.5 steps an epoch; this run: 0.8 epochs" in straight.log, straight.log
    output = tmp_path / "killed"
    killed = shared_commands().sft(output, model, sft_data, *flags, trainer_fault=held_commit(LAST))
    wait_until(lambda: "checkpoint saved: step 4" in killed.log or killed.has_ended, "the checkpoint of step 4")
    os.killpg(killed.pid, signal.SIGKILL)
    run_dir = RunDir(output)
    assert killed.wait().code == -signal.SIGKILL and run_dir.published_weights() == [], killed.log
    resumed = shared_commands().sft(output, model, sft_data, *flags).wait()
    assert resumed.code == 0 and "resuming from step 4" in resumed.log, resumed.log
    assert f"finished step {LAST} of {LAST}" in resumed.log and str(run_dir.weights_of(LAST)) in resumed.log
    assert differing(end_state(output), end_state(straight.output)) == []
    configs = [read_toml(SftConfig, run_dir.configs(attempt) / "sft.toml") for attempt in (1, 2)]
    assert [one.ckpt.resume_step for one in configs if one.ckpt] == [None, 4]
    phases = [(run_dir.logs(attempt) / "events.jsonl").read_text() for attempt in (1, 2)]
    assert all("importing torch" in one for one in phases)
    assert ["checking the model" in one for one in phases] == [True, False]
    assert [(one.max_steps, one.epochs) for one in configs] == [(LAST, 0.75)] * 2
    assert (run_dir.logs(1) / "trainer.log").stat().st_size > 0


@pytest.mark.launch
def test_what_is_left_out_of_the_data_is_said_where_people_look(
    tiny_model: ModelFactory, sft_data: Path, tmp_path: Path
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(
        f'{sft_data.read_text()}{{"prompt": "a"}}\n' + '{"prompt": "a", "completion": "b", "score": 3}\n' * 2
    )
    flags = ("--max-steps", "1", "--data.on-bad-row", "drop")
    run = shared_commands().sft(tmp_path / "run", tiny_model(), data, *flags).wait()
    expected = (
        "rows.jsonl: 1 of 63 rows cannot be used and are left out. The first: row 61: rows need",
        "rows.jsonl: the column `score` is not read (2 rows, the first: row 62)",
    )
    told = [alarm.text for alarm in read_run(run.output).alarms]
    assert run.code == 0, run.log
    for said in expected:
        assert f"WARNING: {data.parent}/{said}" in " ".join(run.log.split()) and any(said in text for text in told)
    strict = shared_commands().sft(tmp_path / "strict", tiny_model(), data, *flags, "--data.strict").wait()
    assert strict.code == 2 and all(said in " ".join(strict.log.split()) for said in expected), strict.log
    assert not RunDir(tmp_path / "strict").published_weights() and "data.strict refuses such data" in strict.log


@pytest.mark.ranks
def test_two_ranks_resume_in_equal_bits(tiny_model: ModelFactory, sft_data: Path, mesh: Mesh, tmp_path: Path) -> None:
    """With dropout, from a generator of each rank; a resume from an older step sets aside what it supersedes."""
    assert mesh.world_size == 1
    settings = Programs(tmp_path, tiny_model, sft_data).settings("sft") | {"val_interval": 2, "ckpt": {"interval": 2}}
    common = {"program": "sft", "settings": settings, "until": 4}
    runs = [{"name": "straight"}, {"name": "resumed", "after": "straight", "resume": 2}]
    on_two_ranks(tmp_path / "two", [common | run for run in runs])
    straight, resumed = (RunDir(tmp_path / "two" / run["name"]) for run in runs)
    assert differing(*(in_process.end_state(run_dir, last=4) for run_dir in (straight, resumed))) == []
    assert manifest.verify(resumed.checkpoint(4)).world_size == 2
    aside = resumed.discarded(2)
    assert manifest.verify(aside / "checkpoints" / "step_4").step == 4
    assert len((aside / "metrics.jsonl").read_text().splitlines()) == 2
