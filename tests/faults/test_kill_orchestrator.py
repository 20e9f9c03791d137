"""The orchestrator dies before, within and after every call that changes the run directory; the next one goes on.

The engine is a stand-in that answers over real HTTP as a function of its inputs, and the trainer a stand-in
whose weights depend on every batch before: a difference shows in all later batches.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.orchestrator.generation_log import decode_answer
from holdfast.run.record_log import read_records
from holdfast.run.run_dir import RunDir
from tests.faults.faulty_calls import Call, Instant, read_trail
from tests.faults.orchestrators import journaled, run_orchestrator
from tests.servers.orchestrator_fakes import FakeEngine, FakeTrainer, make_config, serving

pytestmark = [pytest.mark.launch, pytest.mark.clock]

_STEPS = 3


def _instants(calls: list[Call]) -> Iterator[tuple[int, Instant]]:
    """Before every call; after the last step of each publication and removal; and in the middle of every write."""
    for call in calls:
        yield call.number, "before"
        if call.name in ("rename", "unlink", "mkdir"):
            yield call.number, "after"
        if call.name == "write":
            yield call.number, "half way"


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
        straight = RunDir(tmp_path / "straight")
        straight.path.mkdir()
        with FakeTrainer(straight, start=0, max_steps=_STEPS):
            assert run_orchestrator(make_config(straight.path, engine, max_steps=_STEPS)) == 0
        expected = journaled(straight, _STEPS)
        calls = read_trail(straight.path.with_suffix(".trail"))
        names = {(call.name, call.path.split("/")[-1].split("-")[0]) for call in calls}
        assert {("rename", ".tmp"), ("write", "generations_2.log"), ("unlink", "generations_2.log")} <= names, names

        died = 0
        for number, instant in _instants(calls):
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
            again = {seed for request in engine.requests[asked:] for seed in request["seeds"]}
            assert not logged & again, where
            assert len(engine.requests) - asked <= 3 * (_STEPS - len(visible)), where
        assert died > 0.9 * len(list(_instants(calls)))
