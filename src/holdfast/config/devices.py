"""Defaults of settings that depend on the hardware, for each kind of device.

On CUDA, float32 means float32. TensorFloat-32 (products with ten bits of mantissa) stays off in trainer and engine;
otherwise the two would disagree by more than `trainer.mismatch_limit` allows for float32. The fast dtype is bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.config.base import DType

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
