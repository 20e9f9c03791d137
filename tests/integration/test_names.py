"""Files of a user with the names of our modules, Python's and other packages': none is imported in their place."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forking.commands import shared_commands
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


@pytest.fixture
def traps(tmp_path: Path) -> Path:
    """Return a directory full of traps, and of a user's modules."""
    for name in (*_OURS, *_OTHERS):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(_TRAP)
    for name in ("envs", "orchestrator"):
        (tmp_path / f"{name}.py").write_text(_ENVIRONMENT)
    (tmp_path / "helpers.py").write_text(_HELPERS)
    (tmp_path / "badly.py").write_text("from torch import something\n")
    return tmp_path


@pytest.fixture(params=["", "."], ids=["no PYTHONPATH", "PYTHONPATH=."])
def run(request: pytest.FixtureRequest, command: Callable[[str], str], traps: Path) -> Run:
    if not request.param:
        # Were it on PYTHONPATH, the installed script itself would import it, before anything of ours.
        (traps / "holdfast.py").write_text(_TRAP)

    def to_end(program: str, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": request.param}
        done = subprocess.run(
            [command(program), *words], cwd=traps, env=environment, capture_output=True, text=True, timeout=DEADLINE_S
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


def test_a_users_module_is_found(run: Run) -> None:
    found = run("rl", "--model.name", str(MODEL), "--dry-run", *environment("orchestrator:Mine"))
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_message_says_whose_the_name_is(traps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of commands that are forked: they find modules as those do that a user starts."""
    monkeypatch.setenv("PYTHONPATH", "")
    there = f"import os; os.chdir({str(traps)!r})"
    for place, (flags, said) in enumerate(
        (
            (
                (*environment("reverse_text"), "--trainer.loss.type", "torch:loss"),
                "loss.type = 'torch': the name 'torch' belongs to",
            ),
            (environment("torch:Mine"), "environments[0].id: 'torch': the name 'torch' belongs to"),
            (environment("datasets.load:Mine"), "the name 'datasets' belongs to"),
            (environment("badly:Mine"), "The name 'torch' belongs to"),
            (environment("nowhere:Mine"), "there is no module 'nowhere'"),
        )
    ):
        argv, output = ["--model.name", str(MODEL), "--dry-run", *flags], traps / str(place)
        refused = shared_commands().start("rl", output, argv, fault=there).wait()
        assert refused.code == 2, refused.log
        assert said in refused.log and "Traceback" not in refused.log and "was imported" not in refused.log, refused.log
        if "belongs" in said:
            assert "torch.py" in refused.log or "datasets.py" in refused.log


@pytest.mark.engine
@pytest.mark.parametrize("run", ["."], indirect=True)
def test_rl_trains_beside_them(run: Run) -> None:
    flags = ("--model.name", str(MODEL), "--inference.model.max-len", "64", "--orchestrator.seq-len", "64")
    flags = (*flags, "--orchestrator.problems-per-step", "2", "--orchestrator.group-size", "2", "--max-steps", "2")
    flags = (*flags, "--inference.server.port", str(free_port()), "--orchestrator.sampling.max-tokens", "8")
    done = run("rl", *flags, *environment("envs:Mine"))
    assert done.returncode == 0, done.stdout + done.stderr
