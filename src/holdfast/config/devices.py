"""Settings that depend on the hardware: GPUs of trainer and engines, and defaults for each kind of device.

On CUDA, float32 means float32. TensorFloat-32 (products with ten bits of mantissa) stays off in trainer and engine;
otherwise the two would disagree by more than `trainer.mismatch_limit` allows for float32. The fast dtype is bfloat16.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator
from pydantic_settings import NoDecode

from holdfast.config.base import DType, Section


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


DeviceType = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Defaults:
    """The values for one kind of device.

    Attributes:
        dtype: `model.dtype` of trainer and engine.
        activation_checkpointing: `model.activation_checkpointing`. Memory is what GPUs run out of first.
        logits_chunk_tokens: `model.logits_chunk_tokens`. With 150,000 words, 4096 tokens take 10 GiB in float32.
        eager: `engine.eager`. On CPU compiling costs 15-30 s at the start and brings little; without CUDA graphs a GPU
            waits for the launches of its kernels.
    """

    dtype: DType
    activation_checkpointing: bool
    logits_chunk_tokens: int
    eager: bool


BY_DEVICE: dict[DeviceType, Defaults] = {
    "cpu": Defaults(dtype="float32", activation_checkpointing=False, logits_chunk_tokens=4096, eager=True),
    "cuda": Defaults(dtype="bfloat16", activation_checkpointing=True, logits_chunk_tokens=1024, eager=False),
}
