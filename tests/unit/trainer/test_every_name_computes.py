"""Every name in the tables of algorithms computes its formula: against a slow reference in float64, in random cases.

The names are those of the tables of `holdfast.config.base`; one without a reference fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, get_args

import pytest

from holdfast.config.base import ADVANTAGES, POLICY_LOSSES, PREFERENCE_LOSSES, KlEstimator
from tests.builders.slow_advantages import check_advantage
from tests.builders.slow_losses import check_policy_loss
from tests.builders.slow_preferences import check_kl_estimate, check_preference_loss

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
