"""Every name in the tables of algorithms computes its formula: against a slow reference in float64, in random cases. A
name without a reference fails, and each leads to its function, its help and its row in the documentation.
"""

from collections.abc import Callable, Iterable
from typing import Any, get_args

import pytest

from docs_tools.listing import texts_of
from holdfast.config import TrainerConfig
from holdfast.config.algorithm import PolicyLossConfig
from holdfast.config.base import ADVANTAGES, POLICY_LOSSES, PREFERENCE_LOSSES, KlEstimator
from holdfast.config.preference import PreferenceLossConfig
from holdfast.trainer.preference import losses as preference_losses
from holdfast.trainer.rl import losses as policy_losses
from holdfast.trainer.rl.advantages import built_in_function
from tests.builders.slow_advantages import check_advantage
from tests.builders.slow_losses import check_policy_loss
from tests.builders.slow_preferences import check_kl_estimate, check_preference_loss
from tests.conftest import ROOT

TABLES: dict[str, tuple[Iterable[str], Callable[[Any, int], None]]] = {
    "policy losses": (POLICY_LOSSES, check_policy_loss),
    "advantages": (ADVANTAGES, check_advantage),
    "preference losses": (PREFERENCE_LOSSES, check_preference_loss),
    "KL estimators": (get_args(KlEstimator), check_kl_estimate),
}
FEW, MANY = 25, 10_000


@pytest.mark.parametrize("table", TABLES)
def test_every_name_computes_its_formula(table: str) -> None:
    names, check = TABLES[table]
    for name in names:
        for seed in range(FEW):
            check(name, seed)


@pytest.mark.clock
@pytest.mark.parametrize("table", TABLES)
def test_every_table_computes_its_formulas_in_ten_thousand_cases(table: str) -> None:
    names, check = TABLES[table]
    for name in names:
        for seed in range(FEW, FEW + MANY // len(list(names))):
            check(name, seed)


PAGES = {
    "policy losses": ("losses.md", POLICY_LOSSES, PolicyLossConfig, "type", policy_losses.__dict__.get),
    "advantages": ("losses.md", ADVANTAGES, TrainerConfig, "advantage", built_in_function),
    "preferences": ("preferences.md", PREFERENCE_LOSSES, PreferenceLossConfig, "type", preference_losses.__dict__.get),
}


@pytest.mark.parametrize("names", PAGES)
def test_every_name_has_a_function_help_and_a_row(names: str) -> None:
    page, table, config, field, find = PAGES[names]
    text, described = (ROOT / "docs" / page).read_text(), texts_of(config)[field]
    for name, built_in in table.items():
        assert f"\n| `{name}` |" in text, f"docs/{page} has no row for {name}"
        assert f"`{name}`" in described
        if built_in.function is not None:
            assert callable(find(built_in.function))
