"""The file of rollouts: what is in it when it cannot be written any more."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from pathlib import Path

import pytest

from holdfast.errors import RunDirError
from holdfast.orchestrator.evaluation.results import EvaluatedRollout, ResultsFile, read_tasks
from tests.runs.processes import in_a_child


def test_a_task_that_found_no_room_leaves_nothing_for_others_to_follow(tmp_path: Path) -> None:
    def check() -> None:
        results = ResultsFile(tmp_path, {"kind": "test"}, samples_per_task=1)
        path = tmp_path / "rollouts.jsonl"

        def append(task: int, detail: str = "") -> None:
            asyncio.run(results.append([EvaluatedRollout(environment="e", task=task, detail=detail)]))

        append(0)
        size = path.stat().st_size
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 60, size + 60))
        with pytest.raises(RunDirError, match=r"cannot be written.* goes on behind the tasks that are done"):
            append(1, "long" * 100)
        assert path.stat().st_size == size
        append(2)  # for whose fewer bytes there is room
        assert list(read_tasks(path, samples_per_task=1).tasks) == [("e", 0), ("e", 2)]

    assert os.waitstatus_to_exitcode(os.waitpid(in_a_child(check), 0)[1]) == 0
