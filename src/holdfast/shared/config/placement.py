"""Which GPUs of a machine the processes of `rl` get."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator
from pydantic_settings import NoDecode

from holdfast.shared.config.base import Section


def _parse(given: Any) -> Any:
    """Return what the text of a flag means: a number of GPUs, or a list of their numbers."""
    if not isinstance(given, str):
        return given
    text = given.strip()
    try:
        return json.loads(f"[{text}]" if "," in text and not text.startswith("[") else text)
    except ValueError:
        return given  # which pydantic refuses


# NoDecode: else a flag with one number would be taken for a list of one.
Devices = Annotated[
    Annotated[int, Field(ge=1)] | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None,
    NoDecode,
    BeforeValidator(_parse),
]


class PlacementConfig(Section):
    """GPUs of the trainer and of the engines. Numbers count what CUDA_VISIBLE_DEVICES leaves, from 0."""

    trainer: Devices = None
    """GPUs of the trainer: how many, or which, such as `[0,1]`. Unset: those that the engines leave."""

    inference: Devices = None
    """GPUs of the engines: how many, or which. An engine gets neighbours, as many as it is split over. Unset: as many
    as `inference.engines` need, or half of all where that is unset, too."""

    @field_validator("trainer", "inference")
    @classmethod
    def _names_none_twice(cls, devices: int | list[int] | None) -> int | list[int] | None:
        if isinstance(devices, list) and len(set(devices)) < len(devices):
            raise ValueError("must name each GPU once")
        return devices
