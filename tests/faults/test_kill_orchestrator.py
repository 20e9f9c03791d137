"""The orchestrator dies in every state that its calls leave the run directory in; the next one goes on. Stand-ins
answer over real HTTP and train, as functions of all before: a difference shows in all later batches."""

import signal
from pathlib import Path

import pytest

from holdfast.orchestrator.generation_log import decode_answer
from holdfast.run.record_log import read_records
from holdfast.run.run_dir import RunDir
from tests.faults.faulty_calls import Call, Instant, deaths
from tests.faults.orchestrators import journaled, run_orchestrator, run_undisturbed
from tests.servers.orchestrator_fakes import FakeEngine, FakeTrainer, make_config, serving

pytestmark = [pytest.mark.launch, pytest.mark.clock]

_STEPS, _TIMELINE_CALLS = 2, 5


def _instants(calls: list[Call]) -> list[tuple[int, Instant]]:
    """The timeline in `logs` is no part of the journal: the process dies at its first calls only."""
    skipped = [call for call in calls if call.path.startswith("logs/")][_TIMELINE_CALLS:]
    return deaths([call for call in calls if call not in skipped], halves=True)


def _logged_seeds(run_dir: RunDir) -> set[int]:
    """The seeds of all generations that are in a log: no two requests share one."""
    answers = [
        decode_answer(payload)
        for path in run_dir.rollouts.glob("generations_*.log")
        for payload in read_records(path)[0][1:]
    ]
    return {seed for answer in answers for seed in answer.seeds}


def test_whatever_call_it_dies_at_the_journal_comes_out_the_same(tmp_path: Path) -> None:
    engine = FakeEngine()
    with serving(engine):
        expected, calls = run_undisturbed(tmp_path / "straight", engine, _STEPS)
        names = {(call.name, call.path.split("/")[-1].split("-")[0]) for call in calls}
        assert {("rename", ".tmp"), ("write", "generations_2.log"), ("unlink", "generations_2.log")} <= names, names
        died, instants = 0, _instants(calls)
        for number, instant in instants:
            run_dir = RunDir(tmp_path / f"killed_{number}_{instant.replace(' ', '_')}")
            run_dir.path.mkdir()
            config = make_config(run_dir.path, engine, max_steps=_STEPS)
            with FakeTrainer(run_dir, start=0, max_steps=_STEPS):
                code = run_orchestrator(config, kill_at=number, instant=instant)
                assert code in (-signal.SIGKILL, 0)  # 0: this time there were fewer calls
                died += code != 0
                logged, asked = _logged_seeds(run_dir), len(engine.requests)
                visible = run_dir.published_batches()
                assert run_orchestrator(config) == 0, run_dir.path.with_suffix(".log").read_text()
            where = f"call {number}, {instant}: {calls[number - 1]}"
            assert journaled(run_dir, _STEPS) == expected, where
            assert not logged & {seed for request in engine.requests[asked:] for seed in request["seeds"]}, where
            assert len(engine.requests) - asked <= 3 * (_STEPS - len(visible)), where
        assert died > 0.9 * len(instants)
