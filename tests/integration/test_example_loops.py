"""The loops in examples/ and in docs/checkpoints.md, as they stand there: killed and resumed each is itself."""

import builtins
import json
import os
import re
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.run import manifest
from holdfast.run.checkpoints import list_entries
from tests.conftest import ROOT
from tests.forking.commands import shared_commands
from tests.runs.processes import HANG_S, wait_until

pytestmark = pytest.mark.launch

# Beyond the first checkpoint, and beyond the first epoch of the page.
MAX_STEPS = {"sft_loop.py": 7, "rl_loop.py": 7, "checkpoints.md": 10}
_STEP = re.compile(r"^(?:step \d+/|\d+ \d+ ).*\n", re.MULTILINE)


def run_script(script: str, directory: str, max_steps: str, hold_at: str) -> None:
    """In a child: be `python SCRIPT DIRECTORY MAX_STEPS`; wait at a step, if one is given, until it is killed."""
    say = print

    def hold(*words: object, **options: Any) -> None:
        say(*words, **options)
        if str(words[0]).startswith((f"step {hold_at}/", hold_at)):
            signal.pause()

    if hold_at:
        builtins.print = hold
    sys.argv = [script, directory, max_steps]
    runpy.run_path(script, run_name="__main__")


def run(script: Path, directory: Path, max_steps: int, *, kill: bool = False) -> list[str]:
    """Run a loop; with `kill` until SIGKILL, after its first checkpoint. Return its lines about steps."""
    function = "tests.integration.test_example_loops:run_script"
    words = {"script": script, "directory": directory, "max_steps": max_steps, "hold_at": max_steps - 1 if kill else ""}
    fork = shared_commands().call(
        function, directory.with_suffix(".out"), **{key: str(word) for key, word in words.items()}
    )

    def lines() -> list[str]:
        return [match[0] for match in _STEP.finditer(fork.log)]

    if kill:
        wait_until(lambda: (len(lines()) > 5 and bool(committed(directory))) or fork.has_ended, "its first checkpoint")
        os.kill(fork.pid, signal.SIGKILL)
    assert fork.wait(HANG_S) == (-signal.SIGKILL if kill else 0), fork.log
    return lines()


def committed(directory: Path) -> list[int]:
    """Return the steps that have a whole checkpoint."""
    return [entry.step for entry in list_entries(directory) if entry.status == "committed"]


def script_of(name: str, scratch: Path) -> Path:
    """Return the script; that of the page is its first block of Python."""
    if not name.endswith(".md"):
        return ROOT / "examples" / name
    page = (ROOT / "docs" / name).read_text()
    path = scratch / "loop.py"
    path.write_text(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0])
    return path


@pytest.mark.parametrize("name", ["sft_loop.py", "rl_loop.py", "checkpoints.md"])
def test_an_example_that_was_killed_is_the_example_that_ran_through(name: str, tmp_path: Path) -> None:
    script, straight, killed = script_of(name, tmp_path), tmp_path / "straight", tmp_path / "killed"
    last = MAX_STEPS[name]
    whole = run(script, straight, last)
    assert len(whole) == len(set(whole)) == last
    first = run(script, killed, last, kill=True)
    step = committed(killed)[-1]
    assert 0 < step < last and len(first) < last
    second = run(script, killed, last)
    assert first == whole[: len(first)] and second == whole[step:]
    ends = [path / f"step_{last}" for path in (straight, killed)]
    listed = [manifest.verify(path).files for path in ends]
    for file in ("trainer/__0_0.distcp", "trainer/progress.json"):
        assert listed[0][file] == listed[1][file], file
    generators = [json.loads((path / "trainer" / "random_rank_0.json").read_bytes()) for path in ends]
    if name.endswith(".md"):
        assert all(generators[0][key] == generators[1][key] for key in ("torch_cpu", "python_keys"))
    else:
        weights = [(path / "model" / "model.safetensors").read_bytes() for path in (straight, killed)]
        assert weights[0] == weights[1]
