"""The tables of what is built in."""

from __future__ import annotations

import subprocess
import sys

import pytest

from holdfast.config import DpoConfig


def test_an_unknown_preference_loss_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="there is no 'simpoo'. Did you mean 'simpo'.*Allowed: dpo, ipo"):
        DpoConfig.model_validate({"loss": {"type": "simpoo"}})


def test_the_tables_are_read_without_the_libraries_that_compute() -> None:
    program = "import sys, holdfast.config.base; print({'torch', 'transformers', 'vllm'} & {*sys.modules})"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"
