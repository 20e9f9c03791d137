"""Real orchestrators for tests of faults, each a process of its own, started in a fraction of a second.

A helper process imports the orchestrator once and forks a child for every request: one JSON line on stdin
with the configuration, the log and the fault, answered by a line with the exit code. This file is also the
helper's program (`python -m tests.faults.orchestrator_runs`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import tomli_w

from tests.conftest import ROOT
from triad.config.orchestrator import OrchestratorConfig


class Orchestrators:
    """Runs orchestrators one after the other. Use as a context manager."""

    def __enter__(self) -> Self:
        self._helper = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.orchestrator_runs"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._helper.kill()
        self._helper.communicate()

    def run(self, config: OrchestratorConfig, **fault: Any) -> int:
        """Run one to its end; return its exit code, negative for a signal.

        Args:
            fault: options of `faulty_calls.install`; its trail is `output_dir` with the suffix `.trail`.
        """
        output = config.output_dir
        toml = output.with_suffix(".toml")
        toml.write_text(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)))
        paths = {"toml": str(toml), "log": str(output.with_suffix(".log")), "trail": str(output.with_suffix(".trail"))}
        assert self._helper.stdin is not None and self._helper.stdout is not None
        self._helper.stdin.write(json.dumps({"directory": str(output), "fault": fault, **paths}) + "\n")
        self._helper.stdin.flush()
        return int(self._helper.stdout.readline())


def _main() -> None:
    from orchestrator.main import main
    from tests.faults import faulty_calls
    from triad.process import die_with_parent

    die_with_parent()
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            Path(request["trail"]).unlink(missing_ok=True)
            faulty_calls.install(request["directory"], request["trail"], **request["fault"])
            main([request["toml"]])
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    _main()
