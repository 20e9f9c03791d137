"""The table for those who come from other programs: the options that it names exist, with the defaults that it says."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from holdfast.config.rl import RlConfig
from tests.conftest import ROOT

OPTION = re.compile(r"`([\w.]+)`(?: \(`?([\w.-]+)`?\))?")


def rows() -> list[dict[str, str]]:
    section = (ROOT / "docs" / "coming_from.md").read_text().split("\n## RL\n")[1].split("\n## ")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def options(cell: str) -> list[tuple[str, str]]:
    """Names and the defaults in brackets behind them; empty where there are none."""
    return [(name, default) for name, default in OPTION.findall(cell)]


def found(config: type[BaseModel], key: str) -> Any:
    """The default of a dotted key, also below sections that are unset."""
    name, _, rest = key.partition(".")
    assert name in config.model_fields, f"{key}: {config.__name__} has no {name}"
    field = config.model_fields[name]
    if not rest:
        return field.default
    kinds = [field.annotation, *get_args(field.annotation)]
    return found(next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), rest)


def equal(value: Any, text: str) -> bool:
    return str(value) == text or (isinstance(value, float) and float(text) == value)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[""])
def test_what_the_table_calls_ours_is_there_and_has_that_default(row: dict[str, str]) -> None:
    assert options(row["here"])
    for name, default in options(row["here"]):
        value = found(RlConfig, name if name.startswith("orchestrator.") else f"trainer.{name}")
        assert not default or equal(value, default), f"{name} is {value}"


@pytest.mark.trl
def test_what_the_table_says_of_trl_is_there_and_has_that_default() -> None:
    from trl import GRPOConfig

    known = {field.name: field.default for field in fields(GRPOConfig)}
    for row in rows():
        for name, default in options(row["TRL"]):
            if name[0].isupper() or "." in name:
                continue  # a trainer of its own
            assert name in known, name
            assert not default or equal(known[name], default), f"{name} is {known[name]}"
