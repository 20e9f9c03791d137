"""Benchmarks whose contestants are forks, with the stub engine: `run_benchmark(log, "benchmarks.learning", …)`."""

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from holdfast.cli import COMMANDS
from holdfast.process.child import die_with_parent
from tests.forking.commands import be_command, shared_commands
from tests.forking.popen import run_module
from tests.runs.processes import in_a_child

_run = subprocess.run


def run_benchmark(log: Path, module: str, *flags: str, timeout_s: float = 1200) -> str:
    """Run `python -m MODULE FLAGS` to its end, which must be a success; return what it printed."""
    fault = f"import {__name__} as forked; forked.fork_programs()"
    spec = find_spec(module)
    program = f"{module}.__main__" if spec and spec.submodule_search_locations else module
    fork = shared_commands().module(log, program, *flags, fault=fault)
    assert fork.wait(timeout_s) == 0, fork.log
    return fork.log


def fork_programs() -> None:
    """In a benchmark: have `subprocess.run` fork the programs of this environment; others it starts as ever."""
    subprocess.run = run  # type: ignore[assignment]


def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Do what `subprocess.run` does, with the options that benchmarks give it."""
    is_ours = Path(command[0]).parent == Path(sys.executable).parent and Path(command[0]).name in COMMANDS
    if not is_ours and command[0] != sys.executable:
        return _run(command, **options)
    stdout, stderr = options.get("stdout"), options.get("stderr")
    if options.get("capture_output"):
        stdout = stderr = subprocess.PIPE
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        sys.stdout.flush()
        targets = [(1, out if stdout is not None else None), (2, err if stderr == subprocess.PIPE else None)]
        if stderr == subprocess.STDOUT:
            targets[1] = (2, targets[0][1])
        descriptors = {number: file.fileno() for number, file in targets if file is not None}
        _, status = os.waitpid(in_a_child(lambda: _be(list(command), descriptors)), 0)
        for file in (out, err):
            file.seek(0)
        code, said = os.waitstatus_to_exitcode(status), (out.read().decode(), err.read().decode())
    if options.get("check") and code:
        raise subprocess.CalledProcessError(code, command, *said)
    return subprocess.CompletedProcess(command, code, *said)


def _be(command: list[str], descriptors: dict[int, int]) -> NoReturn:
    die_with_parent()
    for target, source in {0: os.open(os.devnull, os.O_RDONLY), **descriptors}.items():
        os.dup2(source, target)
    subprocess.run = _run
    if command[0] != sys.executable:
        be_command(Path(command[0]).name, command[1:], "", "", "trained", "stub")
    if command[1] == "-m":
        run_module(command[2:])
    else:
        sys.argv = command[1:]
        runpy.run_path(command[1], run_name="__main__")
    sys.exit(0)
