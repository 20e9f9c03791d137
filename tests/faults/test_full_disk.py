"""The disk is full at any call of the orchestrator, and stays so: its exit code says so, and the next one goes on."""

import errno
import re
from pathlib import Path

import pytest

from holdfast.errors import STORAGE_FAILED
from holdfast.run.run_dir import RunDir
from tests.faults.faulty_calls import Call, read_trail
from tests.faults.orchestrators import journaled, run_orchestrator
from tests.servers.orchestrator_fakes import FakeEngine, FakeTrainer, make_config, serving

pytestmark = pytest.mark.launch

_STEPS = 2
_FAILING = ("mkdir", "open", "write", "rename", "fsync")


def _first_and_last_of_each_kind(calls: list[Call]) -> list[int]:
    """Return numbers of calls, from 1, that fail on a full disk: two of every function and kind of file."""
    kinds: dict[tuple[str, str], list[int]] = {}
    for number, call in enumerate(calls, start=1):
        if call.name in _FAILING:
            kinds.setdefault((call.name, re.sub(r"\d+", "N", call.path)), []).append(number)
    return sorted({number for numbers in kinds.values() for number in (numbers[0], numbers[-1])})


def test_wherever_the_disk_is_full_it_says_so_and_the_journal_comes_out_the_same(tmp_path: Path) -> None:
    engine = FakeEngine()
    with serving(engine):
        straight = RunDir(tmp_path / "straight")
        straight.path.mkdir()
        with FakeTrainer(straight, start=0, max_steps=_STEPS):
            assert run_orchestrator(make_config(straight.path, engine, max_steps=_STEPS)) == 0
        expected = journaled(straight, _STEPS)
        calls = [call for call in read_trail(straight.path.with_suffix(".trail")) if call.path.startswith("rollouts")]
        assert {call.name for call in calls} >= set(_FAILING)

        told = tried = 0
        for number in _first_and_last_of_each_kind(calls):
            call = calls[number - 1]
            run_dir = RunDir(tmp_path / f"full_{number}")
            run_dir.path.mkdir()
            config = make_config(run_dir.path, engine, max_steps=_STEPS)
            log = run_dir.path.with_suffix(".log")
            with FakeTrainer(run_dir, start=0, max_steps=_STEPS):
                code = run_orchestrator(config, fail="* rollouts", nth=number, until_nth=10**9, error=errno.ENOSPC)
                said = log.read_text()
                assert code in (STORAGE_FAILED, 0), said  # 0: this time there were fewer calls
                assert "Traceback" not in said, said
                tried, told = tried + 1, told + (code == STORAGE_FAILED)
                assert run_orchestrator(config) == 0, log.read_text()
            assert journaled(run_dir, _STEPS) == expected, f"call {number}: {call}"
        assert told > 0.8 * tried
