"""Which deaths are worth another start, how often, after which delay."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.launcher import plan
from holdfast.launcher.plan import Restarts
from holdfast.launcher.resume.resume_step import clear_unpublished
from holdfast.run.run_dir import RunDir


@pytest.mark.parametrize("code", [1, 75, -signal.SIGKILL, 128 + signal.SIGKILL, -signal.SIGSEGV])
def test_crashes_and_deaths_by_a_signal_are_started_again(code: int) -> None:
    assert Restarts(3, 600).delay_s("trainer", code) is not None


@pytest.mark.parametrize("code", [2, 3, 4])
def test_an_error_that_was_told_is_not(code: int) -> None:
    restarts = Restarts(3, 600)
    assert restarts.delay_s("trainer", code) is None
    assert restarts.used("trainer") == 0


def test_delays_double_up_to_a_limit() -> None:
    restarts = Restarts(9, 600)
    delays = [restarts.delay_s("inference", 1) for _ in range(9)]
    assert delays == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10, 10])


def test_the_allowance_is_each_process_own_and_ends() -> None:
    restarts = Restarts(2, 600)
    assert [restarts.delay_s("trainer", 1) is None for _ in range(3)] == [False, False, True]
    assert restarts.used("trainer") == 2
    assert restarts.delay_s("orchestrator", 1) == 0.2


def test_what_lies_before_the_window_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(plan, "time", SimpleNamespace(monotonic=lambda: now))
    restarts = Restarts(1, 60)
    assert restarts.delay_s("trainer", 1) == 0.2
    now += 59
    assert restarts.delay_s("trainer", 1) is None
    now += 2
    assert restarts.delay_s("trainer", 1) == 0.2


def test_a_new_orchestrator_removes_nothing_that_the_trainer_is_removing(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for name in ("step_3", "step_4", ".tmp-step_2-0a1b2c3d", ".tmp-step_5-0a1b2c3d"):
        (run_dir.rollouts / name).mkdir(parents=True)
    clear_unpublished(run_dir)
    assert sorted(path.name for path in run_dir.rollouts.iterdir()) == [".tmp-step_2-0a1b2c3d", "step_3", "step_4"]
