"""Configuration of experiment trackers, which get what `metrics.jsonl` says."""

from __future__ import annotations

from pydantic import Field, field_validator

from holdfast.shared.config.base import Section
from holdfast.shared.user_functions import check_name

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")


class TrackingConfig(Section):
    """Which trackers get the metrics, and what the run is called there. Where they are, and keys, is said by the
    environment variables of each (docs/tracking.md)."""

    backends: list[str] = Field(default=["tensorboard"], min_length=1)
    """Of `tensorboard`, `wandb`, `mlflow`, `trackio`, and `module:Class` for one of your own."""

    project: str = Field(default="holdfast", min_length=1)
    """The project, or experiment, that the run belongs to."""

    name: str | None = Field(default=None, min_length=1)
    """What the run is called; unset: the name of its directory."""

    tags: list[str] = []
    """Tags of the run."""

    finish_timeout_s: float = Field(default=60.0, gt=0)
    """How long the end of the run waits for a tracker that has not taken everything yet."""

    @field_validator("backends")
    @classmethod
    def _known_once(cls, names: list[str]) -> list[str]:
        for name in names:
            check_name(name, TRACKERS)
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"names '{twice}' twice")
        return names
