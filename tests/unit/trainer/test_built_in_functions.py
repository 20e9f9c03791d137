"""The tables of what is built in: every name leads to its function, its help and its row in the documentation."""

from __future__ import annotations

from importlib import import_module

import pytest

from docs_tools.listing import texts_of
from holdfast.config import TrainerConfig
from holdfast.config.algorithm import PolicyLossConfig
from holdfast.config.base import ADVANTAGES, POLICY_LOSSES, PREFERENCE_LOSSES
from holdfast.config.preference import PreferenceLossConfig
from tests.conftest import ROOT

TABLES = {
    "losses.md": (POLICY_LOSSES, PolicyLossConfig, "type", "holdfast.trainer.rl.losses"),
    "advantages.md": (ADVANTAGES, TrainerConfig, "advantage", "holdfast.trainer.rl.advantages"),
    "preferences.md": (PREFERENCE_LOSSES, PreferenceLossConfig, "type", "holdfast.trainer.preference.losses"),
}


@pytest.mark.parametrize("page", TABLES)
def test_every_name_has_a_function_help_and_a_row(page: str) -> None:
    table, config, field, module = TABLES[page]
    text, described = (ROOT / "docs" / page).read_text(), texts_of(config)[field]
    for name, built_in in table.items():
        assert f"\n| `{name}` |" in text, f"docs/{page} has no row for {name}"
        assert f"`{name}`" in described
        if built_in.function is not None:
            assert callable(getattr(import_module(module), built_in.function))
