"""Environments in worker processes: the same batches as without, whatever happens to the processes."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.errors import ConfigError, EnvironmentFailure
from holdfast.launcher.preflight import check_orchestrator
from holdfast.orchestrator import group_players
from holdfast.orchestrator.client.client import Affinity
from holdfast.orchestrator.episodes import Problem, TurnRequest
from holdfast.orchestrator.group_players import WorkerDied, Workers
from holdfast.orchestrator.state import TaskSeed
from holdfast.protocol.rollouts import PLAIN_SAMPLING, Batch
from tests.conftest import ROOT
from tests.servers.orchestrator_fakes import make_config, played

STEPS = 4
DROPS = {"on_error": "drop", "timeout_s": 3.0}


def run(
    directory: Path, faults: dict[str, str] | None = None, *, load: str = "", schedule: Any = None, **settings: Any
) -> list[Batch]:
    """Return the batches of a run of four steps of three problems each."""
    args = {"faults": faults or {}, "marks": str(directory), "load": load}
    directory.mkdir(exist_ok=True)
    section = {"id": "tests.runs.faulty_environment:Faulty", "name": "mine", "args": args, **settings}
    return played(directory, section, max_steps=STEPS, **(schedule or {}))


def attempts_at(directory: Path, task: int | str) -> int:
    return len(list(directory.glob(f"{task}_*")))


@pytest.mark.launch
def test_every_fault_costs_its_group_and_counts_by_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faults = {"0": "raises", "1": "exits", "2": "prints", "3": "nan", "4": "blocks"}
    faults |= {"6": "type", "7": "faults", "9": "waits", "10": "leaks"}
    batches = run(tmp_path, faults, workers=2, worker_memory_gb=0.7, **DROPS)
    reasons = {one.task_id: one.reason for batch in batches for one in batch.dropped}
    raised = dict.fromkeys((0, 3, 6), "environment_error")
    assert reasons == raised | {1: "crash", 7: "crash", 4: "timeout", 9: "timeout", 10: "memory"}
    assert sorted({one.task_id for batch in batches for one in batch.rollouts}) == [2, 5, 8, 11]
    assert [attempts_at(tmp_path, task) for task in (1, 4, 7, 10)] == [2, 1, 2, 2]
    told = {one.task_id: one.detail for batch in batches for one in batch.dropped}
    assert "exited with code 7; its last words: my last words" in told[1] and "died of SIGSEGV" in told[7]
    assert "score() has blocked the event loop for longer than 3 s (timeout_s), at " in told[4]
    assert "faulty_environment.py:" in told[4] and "score() raised MemoryError" in told[10]
    assert capsys.readouterr().err.count("x") >= 1_000_000, "what is printed is shown"
    assert batches[0].metrics["groups/dropped/crash"] == 1.0


@pytest.mark.launch
def test_a_worker_that_no_thread_of_its_own_can_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_players, "_GRACE_S", 1.0)
    monkeypatch.setattr(group_players, "_LOOK_S", 0.2)
    batches = run(tmp_path, {"1": "holds", "4": "stopped once", "6": "detached once"}, workers=2, **DROPS)
    assert [(one.task_id, one.reason) for batch in batches for one in batch.dropped] == [(1, "timeout")]
    assert "made no progress for 4 s, and was killed" in batches[0].dropped[0].detail
    assert attempts_at(tmp_path, 4) == 2
    assert attempts_at(tmp_path, 6) >= 5, "the session that took its siblings along, and all four again"


@pytest.mark.launch
def test_what_cannot_be_read_from_a_worker_ends_it_and_keeps_nobody_waiting(tmp_path: Path) -> None:
    """Bytes that are no message, and a message at a wrong time: that the worker is ready, once more. A result that
    cannot be made into one ends it, too."""
    faults = {"1": "garbles once", "4": "garbles", "7": "greets", "9": "spoils"}
    dropped = [one for batch in run(tmp_path, faults, workers=2, **DROPS) for one in batch.dropped]
    assert [(one.task_id, one.reason) for one in dropped] == [(4, "crash"), (7, "crash"), (9, "crash")]
    assert all("its worker sent what cannot be read" in one.detail for one in dropped[:2])
    assert "exited with code 1; its last words: KeyError: 'answered'" in dropped[2].detail
    assert attempts_at(tmp_path, 1) == 2


@pytest.mark.launch
def test_a_fault_ends_the_run_where_that_is_wished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = r"'mine' failed on task 1 \(seed \d+\): its worker process exited with"
    with pytest.raises(EnvironmentFailure, match=said):
        run(tmp_path / "exits", {"1": "exits"}, workers=1)
    with pytest.raises(EnvironmentFailure, match=r"failed on task 1 .*: score\(\) raised KeyError: 'no'"):
        run(tmp_path / "raises", {"1": "raises"}, workers=1)
    monkeypatch.setattr(group_players, "MOST_KILLED", 2)
    with pytest.raises(EnvironmentFailure, match=r"on task 0 .* killed from outside \(SIGKILL\).*, 3 times in a row"):
        run(tmp_path / "killed", {"0": "killed"}, workers=1)


def test_a_process_of_an_environment_that_somebody_killed_costs_nothing(tmp_path: Path) -> None:
    undisturbed = run(tmp_path / "undisturbed")
    batches = run(tmp_path / "killed", {"1": "bereft once", "4": "bereft once"})
    assert [attempts_at(tmp_path / "killed", task) for task in (1, 4)] == [2, 2]
    assert [batch.rollouts for batch in batches] == [batch.rollouts for batch in undisturbed]
    assert not any(batch.dropped for batch in batches)


@pytest.mark.launch
@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_killed_repeatedly_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    monkeypatch.setattr("holdfast.orchestrator.group_players.MOST_KILLED", 2)
    told = r"failed on task 1 .*: its helper was killed from outside, 3 times in a row"
    with pytest.raises(EnvironmentFailure, match=told):
        run(tmp_path / "stops", {"1": "bereft"}, workers=workers)
    faults = {"1": "bereft"} | ({"4": "terminated"} if workers else {})
    batches = run(tmp_path / "drops", faults, workers=workers, **DROPS)
    dropped = [(one.task_id, one.reason) for batch in batches for one in batch.dropped]
    assert dropped == [(int(task), "environment_error") for task in faults]


def test_what_cannot_be_loaded_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it is not to be"):
        run(tmp_path / "refused", load="refused", workers=2)
    with pytest.raises(EnvironmentFailure, match="'mine': a worker ended while it loaded it: .* exited with code 9"):
        run(tmp_path / "exit", load="exit", workers=2)
    with pytest.raises(ValueError, match="worker_memory_gb = 2 limits workers, and there are none"):
        OrchestratorConfig.model_validate({"environments": [{"id": "a", "worker_memory_gb": 2}]})
    # A worker of an evaluation, whose numbers begin with `eval/`, gets such a name.
    named = OrchestratorConfig.model_validate({"environments": [{"id": "a", "name": "val"}]})
    with pytest.raises(ConfigError, match="environment 'val': metrics of the run begin with 'val/': give another"):
        check_orchestrator(named)


@pytest.mark.launch
def test_a_worker_killed_while_it_loads_is_loaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_players, "MOST_KILLED", 3)
    batches = run(tmp_path / "twice", {"1": "killed once"}, load="killed 2", workers=1)
    assert len(batches) == STEPS and not any(batch.dropped for batch in batches)
    assert [attempts_at(tmp_path / "twice", name) for name in ("load", "1")] == [4, 2]
    with pytest.raises(EnvironmentFailure, match="'mine': workers were killed 3 times while they load it"):
        run(tmp_path / "always", load="killed 9", workers=1)


def test_what_a_worker_prints_is_shown_up_to_a_limit(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_players, "_MOST_OUTPUT_BYTES", 200_001)

    async def show() -> str:
        script = "print('-' + 'é' * 100_000, flush=True)\nfor _ in range(3): print('x' * 99_999)"
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=subprocess.PIPE)
        output = group_players._WorkerOutput(process, "mine")
        await output.read_whole()
        await process.wait()
        return output.last_line()

    assert asyncio.run(show())[:500] == "x" * 500 and capsys.readouterr().err == "-" + "é" * 100_000
    assert caplog.text.count("a worker of environment 'mine' prints more than 200001 bytes") == 1


@pytest.mark.launch
def test_who_stops_waiting_for_the_end_of_a_worker_leaves_no_group_without_an_answer(tmp_path: Path) -> None:
    config = make_config(tmp_path, environments=[{"id": "reverse_text", "workers": 1}], client={})
    problem = Problem(None, config.environments[0], TaskSeed(0, "reverse_text", 0))

    async def stop_waiting() -> None:
        sampler: Any = SimpleNamespace(sample=lambda *_, **__: asyncio.Event().wait())
        async with Workers(config.environments[0], config) as all_of_it:
            (worker,) = all_of_it._living
            playing = asyncio.create_task(worker.play(problem, 1, sampler))
            is_read = asyncio.Event()
            worker._output.read_whole = is_read.wait  # type: ignore[method-assign]
            worker._kill()
            while not worker.is_over:
                await asyncio.sleep(0.01)
            closing = [asyncio.create_task(worker.close()) for _ in range(2)]
            for _ in range(20):  # turns of the event loop, in which nothing else is waited for
                await asyncio.sleep(0)
            closing[0].cancel()
            await asyncio.wait(closing[:1])
            is_read.set()
            await asyncio.wait([closing[1]])
            assert closing[0].cancelled() and not closing[1].cancelled() and not all_of_it._living
            with pytest.raises(WorkerDied, match="killed from outside"):
                await playing

    asyncio.run(stop_waiting())


def test_a_turn_with_another_limit_is_another_turn() -> None:
    asked: list[int] = []

    async def sample(turn: TurnRequest) -> int:
        asked.append(turn.max_tokens)
        return turn.max_tokens

    async def ask() -> list[object]:
        cache = group_players.TurnCache(SimpleNamespace(sample=sample))  # type: ignore[arg-type]
        turns = [TurnRequest([5], 0, PLAIN_SAMPLING, most, 1, Affinity()) for most in (3, 2, 3)]
        return [await cache.sample(turn) for turn in turns]  # type: ignore[misc]

    assert asyncio.run(ask()) == [3, 2, 3] and asked == [3, 2]


@pytest.mark.launch
def test_a_group_that_is_to_be_played_alone_stays_alone_when_it_is_killed(tmp_path: Path) -> None:
    """The third attempt is its last: alone again, it is known to be at fault."""
    batches = run(tmp_path, {"1": "exits then killed then exits"}, workers=1, **DROPS)
    assert [(one.task_id, one.reason) for batch in batches for one in batch.dropped] == [(1, "crash")]
    assert attempts_at(tmp_path, 1) == 3


@pytest.mark.launch
def test_what_an_environment_has_started_in_a_worker_ends_with_a_killed_orchestrator(
    tmp_path: Path, ends: Callable[..., bool]
) -> None:
    (tmp_path / "starting.py").write_text(
        "import subprocess\nfrom pathlib import Path\n"
        "from holdfast.orchestrator.env.interface import Environment\n"
        "class Starting(Environment):\n    def __init__(self):\n"
        "        started = subprocess.Popen(['sleep', '100000'])\n"
        "        Path('started').write_text(str(started.pid))\n"
    )
    model = {"name": str(ROOT / "examples" / "reverse_text" / "model")}
    environments = [{"id": "starting:Starting", "workers": 1}]
    config = OrchestratorConfig.model_validate({"model": model, "environments": environments})
    script = (
        "import asyncio, os, signal\nfrom holdfast.orchestrator.group_players import starting_workers\n"
        "from holdfast.config.orchestrator import OrchestratorConfig\n"
        f"config = OrchestratorConfig.model_validate_json({config.model_dump_json()!r})\n"
        "async def main():\n    async with starting_workers(config):\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    killed = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL and ends(int((tmp_path / "started").read_text()))
