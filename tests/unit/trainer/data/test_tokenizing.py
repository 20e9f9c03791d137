"""Chunks of rows that several processes make: in order, each of them once, and only a few ahead of the slowest."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from holdfast.trainer.data import tokenizing
from holdfast.trainer.data.tokenizing import Chunk


def test_chunks_come_in_order_and_only_a_few_are_made_ahead_of_a_slow_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizing, "_CHUNKS_UNDER_WAY", 3)
    made = tmp_path / "made"
    made.touch()

    def make(index: int) -> Chunk:
        # The first comes after all others that are under way. Were it fewer, this would not end.
        while index == 10 and made.stat().st_size < 5:
            os.sched_yield()
        with made.open("ab") as file:
            file.write(b".")
        return Chunk(index, num_rows=1, values=np.array([index]))

    mine = range(10, 90, 2)
    chunks = tokenizing._encoded_by_workers(make, mine, 2, name="data")
    first = next(chunks)
    assert first.index == 10 and made.stat().st_size == 6, "two processes of three chunks each"
    assert [first.index, *(chunk.index for chunk in chunks)] == list(mine)
    assert made.stat().st_size == len(mine)


def test_fewer_chunks_than_processes() -> None:
    chunks = tokenizing._encoded_by_workers(Chunk, range(2), 5, name="data")
    assert [chunk.index for chunk in chunks] == [0, 1]
