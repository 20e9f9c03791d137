"""The benchmark of many sessions runs, loses none of them, and prints what it measured."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.launch

COMMAND = (
    "-m", "benchmarks.sessions", "--sessions", "64", "--batches", "2", "--tokens", "120", "--rounds", "1", "--folder",
)  # fmt: skip


def test_no_session_is_lost(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, *COMMAND, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^ *(\w+): 128 rollouts, none lost: [\d,]+/s by the clock.* KiB a session", done.stdout, re.M)
    assert found == ["single", "tool"], done.stdout
    assert list(tmp_path.iterdir()) == [], "nothing is left"
