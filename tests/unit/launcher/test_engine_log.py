"""The reason of an engine's death is found in its log, and a death that comes again is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.launcher.exit_reasons import engine_failure
from holdfast.launcher.plan import Restarts

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
