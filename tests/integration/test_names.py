"""Files of a user with the names of our modules, Python's and other packages': none is imported in their place."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runs.ports import free_port
from tests.runs.rl import MODEL
from tests.runs.training import DEADLINE_S

pytestmark = pytest.mark.launch
_TRAP = "raise SystemExit(f'{__file__} was imported')\n"
_OURS = ("trainer", "inference/__init__", "inference/main")  # as our processes are called
_OTHERS = (
    "config", "logging", "queue", "tempfile", "random", "torch", "numpy", "datasets", "safetensors", "tomli", "rich",
    "pydantic", "httpx", "tokenizers", "vllm", "tests", "utils", "models", "runpy", "multiprocessing", "inspect",
)  # fmt: skip
_ENVIRONMENT = """
import helpers
from holdfast import Environment, Score, Task

class Mine(Environment):
    def make_task(self, seed):
        return Task(prompt=[{"role": "user", "content": helpers.letters(seed.random())}])

    def score(self, task, sessions):
        return [Score(len(session.completion)) for session in sessions]
"""
_HELPERS = """
def letters(random):
    return "".join(random.choices("abc", k=4))
"""
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(params=["", "."], ids=["no PYTHONPATH", "PYTHONPATH=."])
def run(request: pytest.FixtureRequest, command: Callable[[str], str], tmp_path: Path) -> Run:
    """Run a command in a directory full of traps."""
    traps = [*_OURS, *_OTHERS]
    if not request.param:
        # Were it on PYTHONPATH, the installed script itself would import it, before anything of ours.
        traps.append("holdfast")
    for name in traps:
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(_TRAP)
    for name in ("envs", "orchestrator"):
        (tmp_path / f"{name}.py").write_text(_ENVIRONMENT)
    (tmp_path / "helpers.py").write_text(_HELPERS)
    (tmp_path / "badly.py").write_text("from torch import something\n")

    def to_end(program: str, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": request.param}
        done = subprocess.run(
            [command(program), *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert "was imported" not in done.stdout + done.stderr, done.stdout + done.stderr
        return done

    return to_end


@pytest.mark.parametrize("run", ["."], indirect=True)
def test_sft_trains_and_ckpt_reads_beside_them(run: Run, tiny_model: Callable[..., Path], sft_data: Path) -> None:
    flags = ("--model.name", str(tiny_model()), "--data.name", str(sft_data), "--data.seq-len", "32")
    trained = run("sft", *flags, "--data.batch-size", "4", "--max-steps", "1", "--ckpt", "--parallel.threads", "1")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    for words in (["ckpt", "ls"], ["ckpt", "export", "latest", "--to", "exported"]):
        done = run(*words)
        assert done.returncode == 0, done.stdout + done.stderr


def environment(identity: str) -> tuple[str, str]:
    return "--orchestrator.environments", json.dumps([{"id": identity}])


def test_a_users_module_is_found_and_a_name_that_is_taken_is_refused(run: Run) -> None:
    flags = ("--model.name", str(MODEL), "--dry-run")
    found = run("rl", *flags, *environment("orchestrator:Mine"))
    assert found.returncode == 0, found.stdout + found.stderr
    refused = run("rl", *flags, "--trainer.loss.type", "torch:loss")
    assert refused.returncode == 2 and "loss.type = 'torch': the name 'torch' belongs to" in refused.stderr


@pytest.mark.parametrize("run", [""], indirect=True)
def test_the_message_says_whose_the_name_is(run: Run) -> None:
    flags = ("--model.name", str(MODEL), "--dry-run")
    for identity, said in (
        ("torch:Mine", "environments[0].id: 'torch': the name 'torch' belongs to"),
        ("datasets.load:Mine", "the name 'datasets' belongs to"),
        ("badly:Mine", "The name 'torch' belongs to"),
        ("nowhere:Mine", "there is no module 'nowhere'"),
    ):
        refused = run("rl", *flags, *environment(identity))
        assert refused.returncode == 2, refused.stdout + refused.stderr
        assert said in refused.stderr and "Traceback" not in refused.stderr, refused.stderr
        if "belongs" in said:
            assert "torch.py" in refused.stderr or "datasets.py" in refused.stderr


@pytest.mark.engine
@pytest.mark.parametrize("run", ["."], indirect=True)
def test_rl_trains_beside_them(run: Run) -> None:
    flags = ("--model.name", str(MODEL), "--inference.model.max-len", "64", "--orchestrator.seq-len", "64")
    flags = (*flags, "--orchestrator.problems-per-step", "2", "--orchestrator.group-size", "2", "--max-steps", "2")
    flags = (*flags, "--inference.server.port", str(free_port()), "--orchestrator.sampling.max-tokens", "8")
    done = run("rl", *flags, *environment("envs:Mine"))
    assert done.returncode == 0, done.stdout + done.stderr
