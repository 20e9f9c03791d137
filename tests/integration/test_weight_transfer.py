"""Weights by collective: an engine takes them from the trainer's memory, with the bits of the directory."""

import re
from pathlib import Path

import pytest

from tests.forking.popen import Engine
from tests.runs.ports import free_port
from tests.runs.rl import SMALL_BATCH, assert_same_end, succeeded

STEPS = ("--max-steps", "4", "--ckpt.interval", "4")


@pytest.mark.launch
def test_both_transports_end_with_the_same_bits(engine: Engine, tmp_path: Path) -> None:
    flags = (*SMALL_BATCH, *STEPS, "--async-level", "0", "--inference.server.port", str(free_port()))
    by_directory = succeeded(tmp_path / "directory", *flags, engine=engine)
    by_collective = succeeded(tmp_path / "collective", *flags, "--weights.transport", "collective", engine=engine)
    assert_same_end(by_collective, by_directory, 4)
    log = (by_collective.run_dir.logs(1) / "orchestrator.log").read_text()
    # Version 0 carries the parity prompt, so it comes as a directory.
    assert re.findall(r"version (\d+) went to 1 engines from the trainer's memory", log) == ["1", "2", "3"]
    assert "as a directory" not in log
