"""What is left of PYTHONPATH for a process whose children import nothing of the user."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from triad.import_path import leave_out_working_directory


@pytest.mark.parametrize(
    ("given", "left"),
    [(".", None), ("", None), ("{here}:/cluster/packages", "/cluster/packages"), ("/a::else:{here}/", "/a:else")],
)
def test_the_working_directory_leaves_and_what_a_cluster_provides_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str, left: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", given.format(here=tmp_path))
    leave_out_working_directory()
    assert os.environ.get("PYTHONPATH") == left
