"""Two ranks read tokenised data from one cache, or from one for each machine, and get what one rank gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.config.training import SftDataConfig
from holdfast.trainer.data.samples import fingerprint_samples, load_samples, load_tokenizer
from tests.forking.commands import shared_commands

pytestmark = pytest.mark.ranks


def test_ranks_of_one_machine_and_of_two_read_the_same(tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": "ab" * (1 + k % 5), "completion": "c" * (1 + k % 7)}) for k in range(1200)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "other.jsonl").write_text("\n".join(rows[1:]))
    (tmp_path / "bad.jsonl").write_text("\n".join([*rows[:900], '{"prompt": "ab"}', *rows[900:]]))
    plain = SftDataConfig(name=str(tmp_path / "rows.jsonl"), cache_dir="")
    expected = fingerprint_samples(load_samples(plain, load_tokenizer("examples/reverse_text/base"), seed=0)[0])
    shared_commands().two_ranks("tests.ranks.cached_samples", tmp_path)
    for rank in (0, 1):
        found = json.loads((tmp_path / f"rank_{rank}.json").read_text())
        assert "are not the same on all machines" in found.pop("others")  # what rank 1 made of its own is right there
        assert "bad.jsonl, row 901: " in found.pop("error")
        assert found == dict.fromkeys(
            ("one, first", "one, second", "two, first", "two, second", "kept by none", "kept by one of two"), expected
        )
    assert len(list((tmp_path / "cache_one" / "shared").iterdir())) == 1
    assert [len(list((tmp_path / "cache_two" / str(rank)).iterdir())) for rank in (0, 1)] == [1, 2]
