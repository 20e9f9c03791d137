"""The tables of what is built in: every name leads to its function, its help and its row in the documentation."""

from __future__ import annotations

import pytest

from docs_tools.listing import texts_of
from holdfast.config import TrainerConfig
from holdfast.config.algorithm import PolicyLossConfig
from holdfast.config.base import ADVANTAGES, POLICY_LOSSES, PREFERENCE_LOSSES
from holdfast.config.preference import PreferenceLossConfig
from holdfast.trainer.preference import losses as preference_losses
from holdfast.trainer.rl import losses as policy_losses
from holdfast.trainer.rl.advantages import built_in_function
from tests.conftest import ROOT

TABLES = {
    "losses.md": (POLICY_LOSSES, PolicyLossConfig, "type", policy_losses.__dict__.get),
    "advantages.md": (ADVANTAGES, TrainerConfig, "advantage", built_in_function),
    "preferences.md": (PREFERENCE_LOSSES, PreferenceLossConfig, "type", preference_losses.__dict__.get),
}


@pytest.mark.parametrize("page", TABLES)
def test_every_name_has_a_function_help_and_a_row(page: str) -> None:
    table, config, field, find = TABLES[page]
    text, described = (ROOT / "docs" / page).read_text(), texts_of(config)[field]
    for name, built_in in table.items():
        assert f"\n| `{name}` |" in text, f"docs/{page} has no row for {name}"
        assert f"`{name}`" in described
        if built_in.function is not None:
            assert callable(find(built_in.function))
