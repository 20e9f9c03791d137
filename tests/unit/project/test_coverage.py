"""The tools of the tests: counted statements, which no death loses; changes of a source."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.coverage import __main__ as coverage
from tests.mutants.mutations import mutations

SOURCE = '''"""Text."""

class Thing:
    size: int = 3
    """Text."""

    def grown(self, by: int) -> int:
        if by > 5:
            by = 5
        return self.size + by

def unused(device) -> None:  # untested: there is no such device
    if device:
        device()

def kind(value):
    match value:
        case 1:
            return "one"
        case _:
            return "other"
'''


def test_what_a_killed_process_has_run_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "src/holdfast").mkdir(parents=True)
    (tmp_path / "src/holdfast/thing.py").write_text(SOURCE)
    monkeypatch.setattr(coverage, "ROOT", tmp_path)
    monkeypatch.setattr(coverage, "MARKS", tmp_path / "marks")
    monkeypatch.setattr(coverage, "_PTH", tmp_path / "start.pth")
    coverage.begin()
    program = (
        "import os, sys; import _coverage_marks; sys.path.insert(0, 'src')\n"
        "import holdfast.thing\n"
        "if os.fork() == 0: holdfast.thing.kind(1); os.kill(os.getpid(), 9)\n"
        "os.wait(); holdfast.thing.kind(2); os.kill(os.getpid(), 9)"
    )
    environment = os.environ | {"COVERAGE_MARKS": str(tmp_path / "marks"), "PYTHONPATH": str(coverage._STARTUP)}
    ended = subprocess.run([sys.executable, "-S", "-c", program], cwd=tmp_path, env=environment, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert coverage.report(70.0) == 1
    assert "holdfast/thing.py: 4 of 11 not run: 8-10; never passed by: 8\n" in capsys.readouterr().out
    assert coverage.report(60.0) == 0
    coverage.end()
    assert not (tmp_path / "start.pth").exists()
    assert coverage.resume() == 1, "no lane has passed with these marks"
    monkeypatch.setenv("COVERAGE_MARKS", str(tmp_path / "marks"))
    coverage.passed("everyday")
    assert coverage.resume() == 0 and (tmp_path / "start.pth").exists()
    assert coverage.report(40.0) == 0, "the marks are kept"
    (tmp_path / "src/holdfast/thing.py").write_text(f"{SOURCE}\n")
    assert coverage.resume() == 1


CHANGED = '''"""Not this one: 1 < 2."""

def f(a: int | None, *, b: float = 0.5) -> bool:
    if a is None:
        raise ValueError(f"{a} == {b}")  # nor what is said
    log("x" + "y")
    for one in (a, b):
        if not one:
            continue
        a += 1
    return a < b and True

def g(device):  # untested: there is no such device
    return 1 + device
'''


def test_every_kind_of_change_is_made_once_and_texts_are_left_alone() -> None:
    found = [(one.line, one.before.strip(), one.after.strip()) for one in mutations(CHANGED)]
    assert found == [
        (3, "0.5", "1.5"),
        (4, "is", "is not"),
        (5, 'raise ValueError(f"{a} == {b}")', "pass"),
        (6, 'log("x" + "y")', "None"),
        (8, "not one", "one"),
        (9, "continue", "break"),
        (10, "a += 1", "pass"),
        (10, "1", "2"),
        (11, "a < b and True", "None"),
        (11, "<", "<="),
        (11, "and", "or"),
        (11, "True", "False"),
    ]
    for one in mutations(CHANGED):
        assert one.source != CHANGED and one.source.count("\n") == CHANGED.count("\n")
