"""Harnesses, environments of verifiers and faulty environments in real runs: through deaths, and trained on."""

import json
import math
import os
import shutil
import signal
import tomllib
from pathlib import Path

import pytest

from holdfast.chat.tokenizer import load_tokenizer
from holdfast.run.journal import read_batch
from holdfast.run.metrics import read_metrics
from tests.conftest import ROOT
from tests.faults.blows import Blow, deal
from tests.integration.conftest import REFERENCE_STEPS, UsedServer
from tests.pages.documentation import blocks
from tests.runs.interpreters import VERIFIERS_PYTHON, VERIFIERS_TASKS, needs_verifiers
from tests.runs.rl import MODEL, CompletedRun, RlRun, complete, succeeded

pytestmark = pytest.mark.launch

_STEPS = 2
_BLOWS = [
    Blow(3, "worker", signal.SIGKILL, ""),
    Blow(6, "orchestrator", signal.SIGKILL, "orchestrator was killed by signal 9"),
]
_VERIFIERS_PLAYER = ROOT / "src/holdfast/orchestrator/env/verifiers_player.py"
_REASONS = ("environment_error", "crash", "timeout", "memory")


def test_a_harness_trains_through_deaths(rl_server: UsedServer, reference: CompletedRun, tmp_path: Path) -> None:
    """The weights are those of the environment whose sessions it plays, undisturbed."""
    mine = '[{"id": "tests.runs.harness_environments:ReversedOverHttp", "name": "reverse_text", "workers": 1}]'
    flags = (*rl_server.flags, "--orchestrator.environments", mine)
    done = deal(tmp_path / "run", _BLOWS, *flags)
    assert done.exit_code == 0 and not done.survivors, done.output
    weights = [run.run_dir.weights_of(REFERENCE_STEPS) / "model.safetensors" for run in (done, reference)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert read_metrics(done.run_dir.metrics)[-1]["reverse_text/requests/answered"] == 1.0


@pytest.mark.timeout(900)  # verifiers is imported at every start
@needs_verifiers
def test_verifiers_train_through_deaths(rl_server: UsedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(VERIFIERS_TASKS), prepend=os.pathsep)
    agent = {"harness": {"id": "reversing"}, "runtime": {"type": "subprocess"}}
    section = {"id": "verifiers:reversing", "args": {"python": VERIFIERS_PYTHON, "agent": agent}, "workers": 1}
    flags = ("--orchestrator.environments", json.dumps([section]), *rl_server.flags, "--max-steps", "6")
    flags += ("--orchestrator.problems-per-step", "4", "--orchestrator.group-size", "4")  # an episode takes a while
    weights = []
    for name in ("undisturbed", "disturbed"):
        with RlRun(tmp_path / name, *flags, "--ckpt.interval", "2") as run:
            if name == "disturbed":
                run.wait_for_step(1)
                run.find(str(_VERIFIERS_PLAYER))[0].kill()
                run.wait_for_step(2)
                run.find("holdfast.orchestrator.main")[0].kill()
            done = complete(run)
        assert done.exit_code == 0, done.output
        lines = read_metrics(run.run_dir.metrics)
        assert [line["verifiers:reversing/requests/answered"] for line in lines] == [2.0] * 6
        assert any(line["grad_norm"] > 0.0 for line in lines)
        weights.append((run.run_dir.weights_of(6) / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


@pytest.mark.timeout(900)
@needs_verifiers
def test_the_documented_section_of_verifiers_trains(
    rl_server: UsedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Word for word, except the names: the harness `null`, which streams."""
    monkeypatch.setenv("PYTHONPATH", str(VERIFIERS_TASKS), prepend=os.pathsep)
    (written,) = (one.text for one in blocks(ROOT / "docs" / "tools.md") if "verifiers:my-taskset" in one.text)
    written = written.replace("my-taskset", "reversing").replace("verifiers-env/bin/python", str(VERIFIERS_PYTHON))
    section = tomllib.loads(written)["orchestrator"]["environments"]
    flags = ("--orchestrator.environments", json.dumps(section), *rl_server.flags, "--max-steps", "2")
    lines = read_metrics(succeeded(tmp_path / "run", *flags, "--orchestrator.problems-per-step", "2").run_dir.metrics)
    assert [line["verifiers:reversing/requests/answered"] for line in lines] == [1.0] * 2


def test_faults_of_environments_cost_their_groups_and_training_goes_on(rl_server: UsedServer, tmp_path: Path) -> None:
    faults = {"1": "raises", "2": "exits", "3": "prints", "4": "nan", "9": "blocks", "10": "type", "11": "leaks"}
    section = {
        "id": "tests.runs.faulty_environment:Faulty",
        "args": {"faults": faults, "marks": str(tmp_path)},
        "workers": 2,
        "on_error": "drop",
        "timeout_s": 10.0,  # of a group that is well, on a busy machine: seconds
        "worker_memory_gb": 0.7,
    }
    flags = ("--orchestrator.environments", json.dumps([section]), *rl_server.flags, "--max-steps", str(_STEPS + 1))
    lines = read_metrics(succeeded(tmp_path / "run", *flags).run_dir.metrics)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(math.isfinite(line["loss"]) and line["grad_norm"] > 0.0 for line in lines)
    counted = [{name: line[f"groups/dropped/{name}"] for name in _REASONS} for line in lines]
    assert counted == [
        {"environment_error": 2.0, "crash": 1.0, "timeout": 0.0, "memory": 0.0},
        {"environment_error": 1.0, "crash": 0.0, "timeout": 1.0, "memory": 1.0},
        dict.fromkeys(_REASONS, 0.0),
    ]


@pytest.mark.timeout(600)
def test_orchestrator_workers_and_evaluations_write_the_date_of_the_first_start(tmp_path: Path) -> None:
    model, output = tmp_path / "model", tmp_path / "run"
    shutil.copytree(MODEL, model)
    template = model / "chat_template.jinja"
    template.write_text("{{ '19' if strftime_now('%Y') == '1971' else '20' }}" + template.read_text())
    output.mkdir()
    # As if it had been started then: a directory without any work is no run, and keeps its identity.
    (output / "run.json").write_text(json.dumps({"run_id": "old", "created_unix_s": 400 * 86_400}))
    environments = [{"id": "reverse_text"}, {"id": "reverse_text", "name": "worked", "workers": 1}]
    evaluation = {"interval": 2, "num_tasks": 2, "environments": [{"id": "reverse_text", "name": "held_out"}]}
    run = succeeded(
        output, "--max-steps", "2", "--model.name", str(model),
        "--orchestrator.environments", json.dumps(environments), "--orchestrator.eval", json.dumps(evaluation),
    )  # fmt: skip
    batch, tokenizer = read_batch(run.run_dir, 2), load_tokenizer(str(model))
    written = {(rollout.environment, tokenizer.decode(rollout.token_ids[:2])) for rollout in batch.rollouts}
    assert written == {("reverse_text", "19"), ("worked", "19")}
    lines = (run.run_dir.evaluation(0) / "rollouts.jsonl").read_text().splitlines()
    assert len(lines) == 2 and all(json.loads(line)["turns"][0]["text"].startswith("19<|user|>") for line in lines)
