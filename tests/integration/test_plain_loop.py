"""The loop in docs/checkpoints_api.md, as it stands there: killed and started again it is the loop that ran through."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.shared.files import manifest
from holdfast.shared.files.checkpoints import list_entries
from tests.conftest import ROOT
from tests.runs.processes import HANG_S

MAX_STEPS = 40
_HELD = """
import builtins, runpy, signal, sys
*sys.argv, last = sys.argv[1:]
say = print
def hold(step, *words, **options):
    say(step, *words, **options)
    if str(step) == last:
        signal.pause()
builtins.print = hold
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""The program of the first argument, which waits behind the step of the last one: until then it must be killed."""


def example() -> str:
    """The one program of the page: its first block of Python."""
    page = (ROOT / "docs" / "checkpoints_api.md").read_text()
    return re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("example") / "loop.py"
    path.write_text(example())
    return path


def run(script: Path, directory: Path, *, kill_after: int | None = None) -> list[str]:
    """Run the loop, killing it by SIGKILL as soon as it prints step `kill_after`; return the lines that it printed."""
    words = [str(script), str(directory), str(MAX_STEPS)]
    command = [sys.executable, *(words if kill_after is None else ["-c", _HELD, *words, str(kill_after + 10)])]
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            lines.append(line)
            if kill_after is not None and line.startswith(f"{kill_after} "):
                process.kill()  # what it has printed by then is read as well
        errors = process.stderr.read()
        code = process.wait(HANG_S)
    assert code == (0 if kill_after is None else -9), errors
    return lines


def test_the_example_killed_twice_is_the_example_that_ran_through(script: Path, tmp_path: Path) -> None:
    straight = run(script, tmp_path / "straight")
    assert len(straight) == MAX_STEPS and len({line.split()[2] for line in straight}) == MAX_STEPS
    assert {line.split()[1] for line in straight} == {"1", "2", "3", "4", "5"}, "the order of five epochs"

    killed = tmp_path / "killed"
    first = run(script, killed, kill_after=9)
    committed = [entry.step for entry in list_entries(killed) if entry.status == "committed"]
    last = int(first[-1].split()[0])
    assert committed and committed[-1] in (last - 2, last - 1, last)
    second = run(script, killed, kill_after=27)
    assert second[0] == straight[committed[-1]], "it goes on with the step after the newest checkpoint"
    third = run(script, killed)
    for lines in (first, second, third):
        start = int(lines[0].split()[0]) - 1
        whole = [line for line in lines if line.endswith("\n")]
        assert whole == straight[start : start + len(whole)]

    files = [manifest.verify(path / f"step_{MAX_STEPS}").files for path in (tmp_path / "straight", killed)]
    for name in ("__0_0.distcp", "progress.json"):
        assert files[0][f"trainer/{name}"] == files[1][f"trainer/{name}"], name
    generators = [
        json.loads((path / f"step_{MAX_STEPS}" / "trainer" / "random_rank_0.json").read_bytes())
        for path in (tmp_path / "straight", killed)
    ]
    for name in ("torch_cpu", "python_keys"):  # NumPy's the example does not seed
        assert generators[0][name] == generators[1][name]
