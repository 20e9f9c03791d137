"""Which deaths are worth another start, how often, after which delay; and what an engine died of, by its log."""

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.launcher import plan
from holdfast.launcher.exit_reasons import engine_failure
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


START = "00:12:20 inference INFO loading vllm"
ENGINE = "(EngineCore pid=26418) ERROR 11-22 00:12:32 [core.py:1512] "
MAIN = "(MainProcess pid=26947) ERROR 11-22 00:12:33 [async_llm.py:906] "
CHAIN = (
    "EngineCore encountered a fatal error.", "Traceback (most recent call last):", '  File "core.py", line 14, in run',
    "    engine_core.run_busy_loop()", "RuntimeError: Unsupported CPU attention configuration: head_dim=16",
    "  Value error, the second line", "", "The above exception was the direct cause of the following exception:", "",
    "Traceback (most recent call last):", '  File "core.py", line 1', "ValueError: something else",
)  # fmt: skip
KILLED = "00:12:40 inference ERROR the engine died (EngineCore_DP0 %s); the server ends"
SAID = "RuntimeError: Unsupported CPU attention configuration: head_dim=16\n  Value error, the second line"
MUTE = "AssertionError: assert not x.y"
CLIENT = ("Traceback (most recent call last):", "vllm.EngineDeadError: EngineCore encountered an issue")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([START, *(ENGINE + line for line in CHAIN), *(MAIN + line for line in CLIENT)], SAID),
        ([ENGINE + line for line in (CHAIN[1], "  File", "    assert not x.y", "        ^^^", "AssertionError")], MUTE),
        ([START, *(ENGINE + line for line in CHAIN), START, "00:13:00 inference INFO ready"], None),
        ([START, *(MAIN + line for line in CLIENT)], None),
        ([START, ENGINE + CHAIN[1], ENGINE + CHAIN[2]], None),
        ([START, *(ENGINE + line for line in CHAIN), KILLED % "ended with signal SIGKILL"], None),
        ([START, *(ENGINE + line for line in CHAIN), KILLED % "ended with exit code 1"], SAID),
        ([], None),
    ],
    ids=[
        "chain",
        "an assertion",
        "an earlier start",
        "of the client alone",
        "cut",
        "logged, then killed",
        "died of it",
        "empty",
    ],
)
def test_the_last_engine_died_of_its_first_exception(lines: list[str], expected: str | None, tmp_path: Path) -> None:
    log = tmp_path / "inference.log"
    log.write_text("\n".join(lines))
    assert engine_failure(log) == expected
    assert engine_failure(tmp_path / "none.log") is None


def test_the_same_failure_at_the_same_step_comes_again() -> None:
    restarts = Restarts(9, 600)
    told = [
        restarts.comes_again("inference", failure, step=step)
        for failure, step in [("a", 1), ("b", 1), ("b", 2), ("b", 2), (None, 2), (None, 2), ("b", 2)]
    ]
    assert told == [False, False, False, True, False, False, False]
    assert not restarts.comes_again("trainer", "b", step=2)
