"""A chat template that writes the date writes that of the run's first start, in each process that makes prompts."""

import json
import shutil
from pathlib import Path

import pytest

from holdfast.chat.tokenizer import load_tokenizer
from holdfast.run.journal import read_batch
from tests.runs.rl import MODEL, succeeded

pytestmark = pytest.mark.launch


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
