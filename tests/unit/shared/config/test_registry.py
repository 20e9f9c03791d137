"""The tables of what is built in: every name leads to its function, its help and its row in the documentation."""

from __future__ import annotations

import subprocess
import sys

import pytest

from holdfast.shared.config import DpoConfig, TrainerConfig
from holdfast.shared.config.dpo import PreferenceLossConfig
from holdfast.shared.config.losses import PolicyLossConfig
from holdfast.shared.config.registry import ADVANTAGES, POLICY_LOSSES, PREFERENCE_LOSSES
from holdfast.shared.user_functions import load_built_in
from tests.conftest import ROOT

TABLES = {
    "losses.md": (POLICY_LOSSES, PolicyLossConfig, "type", "holdfast.trainer.rl.losses"),
    "advantages.md": (ADVANTAGES, TrainerConfig, "advantage", "holdfast.trainer.rl.advantages"),
    "preferences.md": (PREFERENCE_LOSSES, PreferenceLossConfig, "type", "holdfast.trainer.preferences"),
}


@pytest.mark.parametrize("page", TABLES)
def test_every_name_has_a_function_help_and_a_row(page: str) -> None:
    table, config, field, package = TABLES[page]
    text, described = (ROOT / "docs" / page).read_text(), config.model_fields[field].description
    for name, built_in in table.items():
        assert f"\n| `{name}` |" in text, f"docs/{page} has no row for {name}"
        assert described is not None and f"`{name}`" in described
        if built_in.function is not None:
            assert callable(load_built_in(built_in.function, package=package))


def test_an_unknown_preference_loss_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="there is no 'simpoo'. Did you mean 'simpo'.*Allowed: dpo, ipo"):
        DpoConfig.model_validate({"loss": {"type": "simpoo"}})


def test_the_tables_are_read_without_the_libraries_that_compute() -> None:
    program = "import sys, holdfast.shared.config.registry; print({'torch', 'transformers', 'vllm'} & {*sys.modules})"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"
