"""`benchmarks.balance` prints how busy ranks are, and at the defaults eight of them are."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.launch
def test_eight_ranks_are_busy_whatever_the_lengths() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.balance", "--batches", "5"], check=True, capture_output=True, text=True
    )
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    assert len(rows) == 4 * 3 * 3
    for samples, lengths, ranks, dealt, balanced, most, _ in rows:
        assert float(dealt) <= float(balanced) <= float(most), (samples, lengths, ranks)
        assert int(ranks) == 64 or float(balanced) >= 0.95, (samples, lengths, ranks)
