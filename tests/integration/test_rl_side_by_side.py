"""Two quick starts of the same moment, and an engine that is killed between two turns."""

import os
import re
import shutil
from pathlib import Path

import httpx
import pytest

from tests.forking.popen import Engine
from tests.integration.conftest import UsedServer
from tests.runs.processes import HANG_S
from tests.runs.rl import MODEL, SMALL_BATCH, RlRun, assert_same_end, complete, succeeded

pytestmark = [pytest.mark.launch, pytest.mark.timeout(900)]

_STEPS = 4
# Every session of a batch has had its first turn before one of them goes on: nobody asks the engine meanwhile.
_ENVIRONMENT = """
import asyncio, os
from holdfast import Message
from holdfast.orchestrator.env.reverse_text import ReverseText

SESSIONS = 4  # of a batch

class SlowTool(ReverseText):
    waiting = 0

    async def run(self, session, task):
        await session.sample()
        gates = os.environ.get("GATES")
        if gates:
            SlowTool.waiting += 1
            batch, rest = divmod(SlowTool.waiting - 1, SESSIONS)
            if rest == SESSIONS - 1:  # the last to come; a writer of the pipe opens it, and closes it again for all
                open(f"{gates}/reached_{batch + 1}", "w").close()
            await asyncio.to_thread(lambda: open(f"{gates}/go_{batch + 1}_{rest}").read())
        session.append_messages([Message("user", "again")])
        await session.sample()
"""
_BATCH = ("--orchestrator.problems-per-step", "2", "--orchestrator.group-size", "2")
_SHORT_TURNS = ("--orchestrator.sampling.max-tokens", "8")


class Gates:
    """The tool calls of a run: batch by batch, each waits until it is let through."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        for batch in range(1, _STEPS + 1):
            for session in range(4):
                os.mkfifo(directory / f"go_{batch}_{session}")

    def wait(self, run: RlRun, batch: int) -> None:
        run.wait_for((self.directory / f"reached_{batch}").exists, f"the tool calls of batch {batch}")

    def open(self, batch: int) -> None:
        for session in range(4):
            with open(self.directory / f"go_{batch}_{session}", "w"):
                pass


@pytest.fixture
def slow_tool(tmp_path: Path) -> tuple[tuple[str, ...], dict[str, str]]:
    """Flags and environment variables of runs with tool calls between two turns."""
    (tmp_path / "slow_tool.py").write_text(_ENVIRONMENT)
    flags = (*_BATCH, "--orchestrator.environments", '[{"id": "slow_tool:SlowTool"}]', "--max-steps", str(_STEPS))
    return (*flags, *_SHORT_TURNS, "--ckpt"), {"PYTHONPATH": str(tmp_path)}


@pytest.fixture
def foreign_model(foreign_weights: Path, tmp_path: Path) -> Path:
    """A whole model with weights that are not those of the example."""
    directory = tmp_path / "foreign_model"
    shutil.copytree(MODEL, directory)
    shutil.copy(foreign_weights / "model.safetensors", directory)
    return directory


def test_two_quick_starts_of_the_same_moment_end_with_the_bits_of_each_alone(tmp_path: Path) -> None:
    flags = ("--max-steps", str(_STEPS), "--ckpt", "--trainer.parallel.threads", "1", *SMALL_BATCH)
    other = (*flags, "--seed", "7")
    with RlRun(tmp_path / "one", *flags) as one, RlRun(tmp_path / "two", *other) as two:
        ended = [complete(run) for run in (one, two)]
    assert sum("is not free" in run.output for run in ended) >= 1
    for run, alone_flags in zip(ended, (flags, other), strict=True):
        assert_same_end(run, succeeded(tmp_path / f"{run.run_dir.path.name}_alone", *alone_flags), _STEPS)


def test_an_engine_that_is_killed_between_two_turns_changes_nothing(
    engine: Engine, slow_tool: tuple[tuple[str, ...], dict[str, str]], foreign_model: Path, tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    """Version 0 is not what the server loads when it comes back: whoever trained on its answers would differ."""
    flags, environment = slow_tool
    flags = (*flags, "--ckpt.init-from", str(foreign_model))
    server: UsedServer = request.getfixturevalue("rl_server" if engine == "stub" else "vllm_server")
    straight = succeeded(tmp_path / "straight", *server.flags, *flags, environment=environment)
    gates = Gates(tmp_path / "gates")
    killed_in = (1, 4)  # by version 0, and by version 2
    with RlRun(
        tmp_path / "killed", *flags, engine=engine, environment=environment | {"GATES": str(gates.directory)}
    ) as run:
        for batch in range(1, _STEPS + 1):
            gates.wait(run, batch)
            if batch in killed_in:
                run.find("holdfast.inference.main")[0].kill()
                run.wait_for_match(f"inference was killed by signal 9: starting it again .restart {1 + (batch == 4)} ")
                run.wait_for(lambda: _answers(run), "the server that came back")
            gates.open(batch)
        killed = complete(run)
    assert "was restarted" in (killed.run_dir.logs(1) / "orchestrator.log").read_text()
    assert_same_end(killed, straight, _STEPS)


def _answers(run: RlRun) -> bool:
    """Whether the run's own server answers, with whatever it loaded itself."""
    own = re.search(r"waiting for inference: (\S+)", run.output)
    assert own, run.output
    try:
        return httpx.get(f"{own[1]}/weights", timeout=HANG_S).status_code == 200
    except httpx.TransportError:
        return False
