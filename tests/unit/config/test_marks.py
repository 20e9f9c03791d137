"""Marks of settings: each holds below its section, in subclasses, and for every item of a list."""

from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import BaseModel

from docs_tools.listing import SETTINGS, tables
from holdfast.config import RewardTrainingConfig, RlConfig, TrainerConfig
from holdfast.config.marks import Mark, Picked, has_mark, marked, marks_of
from holdfast.config.resolved import PICKABLE
from holdfast.config.rl import shared
from holdfast.config.training import RATES


class _Inner(BaseModel):
    own: Annotated[int, Picked(1)] = 0
    other: int = 0


class _Outer(BaseModel):
    plain: int = 0
    section: Annotated[_Inner | None, Mark.FREE] = None
    items: list[_Inner] = []
    entries: Annotated[dict[str, _Inner], Mark.DEVICE] = {}


class _Replacing(_Outer):
    plain: Annotated[int, Mark.RATE] = 1
    section: _Inner | None = _Inner()


@pytest.mark.parametrize("model", [_Outer, _Replacing])
def test_a_mark_holds_below_and_in_subclasses(model: type[BaseModel]) -> None:
    marks = marks_of(model)
    assert marks["section"] == marks["section.other"] == {Mark.FREE}
    assert marks["section.own"] == {Mark.FREE, Picked(1)} and marks["items[].own"] == {Picked(1)}
    assert marks["entries.NAME.other"] == {Mark.DEVICE} and marks["items"] == frozenset()
    assert marked(_Replacing, Mark.RATE) == ("plain",) and marked(_Outer, Mark.RATE) == ()


@pytest.mark.parametrize(("key", "mark", "has"), [
    ("section", Mark.FREE, True), ("section.other", Mark.FREE, True), ("sections", Mark.FREE, False),
    ("plain", Mark.FREE, False), ("entries.mine.other", Mark.DEVICE, True), ("items[3].other", Mark.DEVICE, False),
])  # fmt: skip
def test_marks_are_found_by_the_keys_of_a_configuration(key: str, mark: Mark, has: bool) -> None:
    assert has_mark(_Outer, key, mark) == has


@pytest.mark.parametrize("command", SETTINGS)
def test_every_setting_is_reached(command: str) -> None:
    assert {one.key for table in tables(command) for one in table.settings} <= marks_of(SETTINGS[command]).keys()


def test_settings_that_other_parts_ask_for_by_their_marks() -> None:
    assert RATES == ("lr", "schedule", "warmup_steps")
    assert PICKABLE == ("model.activation_checkpointing", "model.logits_chunk_tokens", "row_tokens", "model.lora")
    everywhere = ("trainer", "orchestrator", "inference")
    assert shared()["seed"] == everywhere and shared()["ckpt"] == ("trainer", "orchestrator")
    assert shared().keys() == set(marked(RlConfig, Mark.SHARED))
    assert {key for key, marks in marks_of(RewardTrainingConfig).items() if Mark.PLACE in marks} == {
        "output_dir", "dry_run", "clean", "ckpt.resume_step", "ckpt.resume_dir", "ckpt.init_from",
    }  # fmt: skip
    assert {key for key, marks in marks_of(TrainerConfig).items() if Mark.DEVICE in marks} == {*PICKABLE[:2]}
