"""Stopping `sft`: however it ends, it ends in seconds and leaves no process behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.shared.files import manifest
from tests.runs.processes import HANG_S
from tests.runs.training import LiveSft

Start = Callable[..., LiveSft]
Ends = Callable[..., bool]


@pytest.fixture
def start(tmp_path: Path, tiny_model: Callable[..., Path], sft_data: Path) -> Start:
    return lambda *flags: LiveSft(tmp_path / "run", tiny_model(weights=False), sft_data, *flags)


def test_sigterm_stops_all_ranks_and_what_was_committed_is_whole(start: Start, ends: Ends) -> None:
    with start("--parallel.num-ranks", "2", "--ckpt.interval", "1", "--ckpt.keep", "2") as run:
        run.wait_for("step       3/")
        assert len(run.ranks()) == 2
        run.process.send_signal(signal.SIGTERM)
        assert run.wait(within_s=HANG_S) == 128 + signal.SIGTERM
        assert all(ends(pid) for pid in run.descendants)
        assert "SIGTERM: saving the current step" in run.output and "stopped at step" in run.output
        steps = run.run_dir.committed_steps()
        assert steps and steps[-1] >= 2  # the line of step 3 is written before its checkpoint
        for step in steps:
            manifest.verify(run.run_dir.checkpoint(step))


def test_ctrl_c_during_the_imports_stops_at_once(start: Start, ends: Ends) -> None:
    with start() as run:
        run.wait_for("importing torch")
        os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does: to the group of the launcher
        assert run.wait(within_s=HANG_S) == 128 + signal.SIGINT
        assert run.descendants and all(ends(pid) for pid in run.descendants)
        assert "Traceback" not in run.output


def test_a_killed_launcher_takes_everything_with_it(start: Start, ends: Ends) -> None:
    with start("--parallel.num-ranks", "2") as run:
        run.wait_for("step       1/")
        assert len(run.ranks()) == 2
        run.process.kill()
        assert all(ends(pid, within_s=HANG_S) for pid in run.descendants)


def test_a_killed_rank_ends_the_run_and_is_named(start: Start, ends: Ends) -> None:
    with start("--parallel.num-ranks", "2") as run:
        run.wait_for("step       1/")
        run.ranks()[1].kill()
        assert run.wait(within_s=HANG_S) == 1
        assert "killed by signal 9" in run.output and "log: " in run.output
        assert "finished step" not in run.output
        assert all(ends(pid) for pid in run.descendants)


def test_a_trainer_that_is_told_to_stop_by_others_has_not_finished(start: Start, ends: Ends) -> None:
    with start() as run:
        run.wait_for("step       1/")
        os.kill(run.descendants[0], signal.SIGTERM)
        assert run.wait(within_s=HANG_S) == 1
        assert "finished step" not in run.output and "error: trainer" in run.output
        assert all(ends(pid) for pid in run.descendants)
