"""Real processes for tests of faults, one after the other, each started in a fraction of a second.

A helper process imports a program once and forks a child for every request: one JSON line on stdin,
answered by a line with the child's exit code.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

from holdfast.shared.process.child import die_with_parent, heavy_imports
from tests.conftest import ROOT


class ForkingHelper:
    """The helper whose program is the module of the subclass. Use as a context manager."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", type(self).__module__],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, request: dict[str, Any], *, log: Path) -> int:
        """Have a child run `request` to its end, its output behind what `log` holds.

        Returns:
            its exit code, negative for a signal
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({**request, "log": str(log)}) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def import_trainer(modules: Sequence[str]) -> None:
    """Import `modules`, and make what every trainer would make anew: a quarter of the time of a short run."""
    with heavy_imports():
        for name in modules:
            importlib.import_module(name)
        if mapping := sys.modules.get("transformers.conversion_mapping"):
            mapping.get_checkpoint_conversion_mapping("qwen3")  # kept in a cache


def serve(modules: Sequence[str], child: Callable[[dict[str, Any]], NoReturn]) -> None:
    """Be the helper: import `modules`, then run `child` in a process of its own for every request."""
    die_with_parent()
    import_trainer(modules)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            child(request)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
