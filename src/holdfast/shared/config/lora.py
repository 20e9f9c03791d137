"""Configuration of LoRA adapters."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from holdfast.shared.config.base import Section


class LoraConfig(Section):
    """Low-rank adapters: the model stays as it is, and A and B of W + alpha / rank * B A are trained."""

    rank: int = Field(default=16, ge=1)
    """Rows of A and columns of B."""

    alpha: float = Field(default=32.0, gt=0)
    """The product of B and A counts alpha / rank times."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of what goes into the adapters. Not with `rl`, whose engines have none."""

    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Which linear layers get an adapter: all of the decoder, or those whose names end like one of
    these, such as ["q_proj", "v_proj"]."""

    @field_validator("target_modules")
    @classmethod
    def _some(cls, names: str | list[str]) -> str | list[str]:
        if not names:
            raise ValueError("must name at least one layer, or be 'all-linear'")
        return sorted(set(names)) if isinstance(names, list) else names
