"""What goes wrong in a run is told in one message, and nothing is lost or broken by it."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI

from holdfast.run.metrics import read_metrics
from holdfast.run.run_dir import RunDir
from tests.integration.conftest import UsedServer
from tests.runs.rl import MODEL, CompletedRun, RlRun, complete
from tests.servers.quick_server import served

pytestmark = pytest.mark.launch

_ENVIRONMENT = """
from holdfast.orchestrator.env.reverse_text import ReverseText

class Broken(ReverseText):
    async def score(self, task, sessions):
        raise ZeroDivisionError("no score today")
"""


def _run(output_dir: Path, *flags: str, environment: dict[str, str] | None = None) -> CompletedRun:
    with RlRun(output_dir, *flags, environment=environment) as run:
        completed = complete(run)
    assert not completed.survivors and "Traceback" not in completed.output
    return completed


@pytest.fixture(scope="module")
def broken(rl_server: UsedServer, tmp_path_factory: pytest.TempPathFactory) -> CompletedRun:
    """A run with an environment that raises."""
    directory = tmp_path_factory.mktemp("broken")
    (directory / "failing_scores.py").write_text(_ENVIRONMENT)
    environments = '[{"id": "failing_scores:Broken", "name": "unlucky"}]'
    flags = (*rl_server.flags, "--orchestrator.environments", environments, "--max-steps", "4", "--ckpt")
    return _run(directory / "run", *flags, environment={"PYTHONPATH": str(directory)})


def test_an_environment_that_raises_is_named_with_its_task(broken: CompletedRun) -> None:
    assert broken.exit_code == 3, broken.output
    message = broken.output.split("error: ")[1]
    assert message.startswith("orchestrator: environment 'unlucky' failed on task ")
    assert "score() raised ZeroDivisionError: no score today" in message
    assert "failing_scores.py:6" in message and str(broken.run_dir.logs(1) / "orchestrator.log") in message
    assert broken.run_dir.published_batches() == []


def test_nan_stops_the_run_and_is_not_published(broken: CompletedRun, rl_server: UsedServer) -> None:
    """Also: `--clean` removes the run that the directory held."""
    run_id = broken.run_dir.run_id()
    # At async level 5 the broken weights of step 1 make no batch before step 2 has failed.
    flags = ("--clean", "--max-steps", "6", "--async-level", "5", "--ckpt.interval", "1", "--trainer.optim.lr", "1e30")
    run = _run(broken.run_dir.path, *rl_server.flags, *flags)
    run_dir = run.run_dir
    assert run.exit_code == 3, run.output
    assert "error: trainer: step 2: loss is" in run.output and "gradient norm is nan" in run.output
    assert "optim.lr" in run.output and run_dir.committed_steps() == [1]
    assert run_dir.published_weights() == [0, 1]
    assert [line["step"] for line in read_metrics(run_dir.metrics)] == [1] and run_dir.run_id() != run_id
    assert not list(run_dir.path.glob("logs/attempt_2"))


@pytest.fixture
def foreign_port() -> Iterator[int]:
    """The port of a server that says hello to everything."""
    app = FastAPI()
    app.get("/{path:path}")(lambda: "hello")
    with served(app) as url:
        yield int(url.rpartition(":")[2])


def test_a_port_in_use_by_something_else_ends_the_run_before_it_starts(foreign_port: int, tmp_path: Path) -> None:
    run = _run(tmp_path / "run", "--inference.server.port", str(foreign_port))
    assert run.exit_code == 2 and f"something answers at http://127.0.0.1:{foreign_port}" in run.output
    assert "--inference.server.port" in run.output and not run.run_dir.path.exists()


def test_a_server_with_another_model_is_refused_before_anything_starts(rl_server: UsedServer, tmp_path: Path) -> None:
    other = tmp_path / "another_model"
    shutil.copytree(MODEL, other)
    run = _run(tmp_path / "run", *rl_server.flags, "--model.name", str(other))
    assert run.exit_code == 2, run.output
    assert str(MODEL) in run.output and str(other) in run.output
    assert "--inference.server.port" in run.output and not RunDir(tmp_path / "run").holds_run()
