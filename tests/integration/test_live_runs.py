"""A real run in a terminal, and `monitor` in another one, through Ctrl-C and a resume."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.runs.terminal import Terminal

pytestmark = pytest.mark.launch
_SMALL = ("--data.batch-size", "8", "--parallel.threads", "1")


def test_a_run_is_followed_from_elsewhere(command: Callable[[str], str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    sft = [command("sft"), "@", "configs/reverse_text/sft.toml", "--output-dir", str(run), *_SMALL]
    sft += ["--ckpt.interval", "20"]
    begun = [*sft, "--max-steps", "100000", "--optim.schedule-steps", "100"]
    watching = [command("monitor"), str(run), "--wait", "--interval", "0.1"]
    with ExitStack() as stack:
        monitor = stack.enter_context(Terminal(watching))
        monitor.wait_for("waiting")
        launcher = stack.enter_context(Terminal(begun, cwd=ROOT, columns=100, lines=30))
        launcher.wait_for("importing torch (0:")
        monitor.wait_for(lambda screen: "running" in screen[0])
        monitor.wait_for(lambda screen: any(re.match(r"checkpoint  step \d+ committed", line) for line in screen))
        assert any(re.match(r"step +\d+/100000  loss", line) for line in launcher.screen)
        launcher.type("\x03")
        assert launcher.end() == 128 + signal.SIGINT
        assert launcher.has_cursor and launcher.modes_now == launcher.modes
        said = "\n".join(launcher.screen)
        stopped = re.search(r"stopped at step (\d+) of 100000, which is saved", said)
        assert stopped and f"last checkpoint: step {stopped[1]} in " in said, said
        screen = monitor.wait_for(lambda screen: "stopped" in screen[0])
        last = int(stopped[1]) + 3
        resumed = subprocess.run(
            [*sft, "--max-steps", str(last), "--optim.schedule-steps", "100", "--ckpt.resume-step", "latest",
             "--log-format", "json"],
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        assert resumed.returncode == 0, resumed.stderr
        told = [json.loads(line) for line in resumed.stdout.splitlines()]
        assert [one["step"] for one in told if one["type"] == "step"] == [last - 2, last - 1, last]
        assert told[-1]["type"] == "end" and told[-1]["checkpoint"]["step"] == last
        screen = monitor.wait_for(lambda screen: "finished" in screen[0] and f"step {last}/{last}" in screen[1])
        assert "attempt 2" in screen[0]
        monitor.type("\x03")
        assert monitor.end() == 0
