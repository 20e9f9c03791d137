"""The tools of the tests: counted statements, which no death loses; changes of a source; differences from a record."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.coverage import __main__ as coverage
from tests.coverage.marking import Marking
from tests.mutants.copies import Copy
from tests.mutants.mutations import mutations
from tests.reference_losses.record import read_records
from tests.reference_losses.runs import COMMANDS, STEPS

SOURCE = '''"""Text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

class Thing:
    """Text."""

    size: int = 3
    """Text."""

    def grown(self, by: int) -> int:
        if by > 5:
            by = 5
        while by:
            self.size += 1
            by -= 1
        try:
            return self.size // (self.size - 4)
        except ZeroDivisionError:
            return -1
        finally:
            by = 0

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


def missed(code: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[tuple[int, str]], int]:
    """Run the marked source and then `code`; return what was not run, and how much has an excuse."""
    marking = Marking(SOURCE, "thing.py", 0)
    compiled = marking.code()
    marks = bytearray(len(marking.points))
    monkeypatch.setitem(sys.modules, "_coverage_marks", SimpleNamespace(marks=marks))
    names: dict[str, object] = {"__name__": "thing"}
    exec(compiled, names)
    exec(code, names)
    points = [(point, mark) for point, mark in zip(marking.points, marks, strict=True) if not point.excused]
    return [(point.line, point.kind) for point, mark in points if not mark], len(marks) - len(points)


UNUSED = [(17, "branch"), *((line, "statement") for line in (17, 18)), (19, "branch"),
          *((line, "statement") for line in (19, 20, 21, 22, 23, 25, 27, 34, 36, 38))]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "not_run"),
    [
        ("", UNUSED),
        ("Thing().grown(1); kind(1)", [(18, "statement"), (38, "statement")]),
        ("Thing().grown(6); kind(2)", [(17, "branch"), (25, "statement"), (36, "statement")]),
        ("Thing().grown(6); Thing().grown(1); kind(1); kind(2)", []),
    ],
)
def test_what_is_not_run_is_named(code: str, not_run: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    found, excused = missed(code, monkeypatch)
    assert sorted(found) == sorted(not_run)
    assert excused == 4, "the function, its condition and both ends"


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
    assert coverage.report(50.0) == 1
    assert "holdfast/thing.py: 11 of 19 not run: 17-23, 25, 27; never passed by: 17, 19" in capsys.readouterr().out
    assert coverage.report(40.0) == 0
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


@pytest.mark.launch
def test_all_processes_of_the_tests_of_a_mutant_have_its_source(tmp_path: Path) -> None:
    """Also the commands, and those that get another PYTHONPATH."""
    copy = Copy(tmp_path / "copy")
    test = copy.directory / "tests" / "unit" / "test_them.py"
    test.write_text(
        "import os, subprocess, sys\n\n\ndef test_them() -> None:\n"
        "    command = os.path.dirname(sys.executable) + '/ckpt'\n"
        "    for argv in ([sys.executable, '-c', 'import holdfast.commands.ckpt'], [command, 'ls']):\n"
        "        assert subprocess.run(argv, env={'PYTHONPATH': ''}).returncode == 7\n"
    )
    copy.write("holdfast/commands/ckpt.py", "raise SystemExit(7)\n")
    assert copy.run(["tests/unit/test_them.py"], timeout_s=600.0) == 0, copy.log.read_text()
    copy.close()


def test_every_command_is_recorded() -> None:
    records = read_records()
    assert tuple(records) == COMMANDS
    for command, record in records.items():
        assert all(len(values) == STEPS for values in record.numbers.metrics.values()) and record.numbers.weights
        assert len(record.numbers.rollouts) == len(set(record.numbers.rollouts)) == (STEPS if command == "rl" else 0)
        assert ("vllm" in record.numerics) == (command == "rl")
