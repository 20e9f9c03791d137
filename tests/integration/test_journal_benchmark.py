"""The benchmark of the journal runs, makes what it says, and prints its ratios."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.launch

COMMAND = (
    "-m", "benchmarks.journal", "--rollouts", "32", "--batch", "16", "--tokens", "20", "--rounds", "1",
    "--engine-rate", "500", "--folder",
)  # fmt: skip


def test_the_benchmark_prints_rates_and_ratios(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, *COMMAND, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("server:")] == [
        "server: at once; 32 rollouts of 20 tokens",
        "server: paced, 500 rollouts/s; 32 rollouts of 20 tokens",
    ]
    appends = [float(found) for found in re.findall(r"journal: .* longest append (\S+) ms", done.stdout)]
    assert len(appends) == 4 and appends[1] == appends[3] == 0.0, "two rounds each, and without means without"
    assert len(re.findall(r"^rollouts/s with / without: \d+\.\d{3} by the clock", done.stdout, re.MULTILINE)) == 2
    assert list(tmp_path.iterdir()) == [], "nothing is left"
