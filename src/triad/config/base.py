"""Bases of all configuration models, and the sections that several processes share."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

DType = Literal["float32", "bfloat16"]


class Section(BaseModel):
    """A part of a configuration. A docstring beneath a field is its ``--help`` text."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True)


class Command(BaseSettings):
    """The whole configuration of one command: what every command has."""

    model_config = SettingsConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take values from files and flags alone: an environment variable named SEED is not meant for us."""
        return (init_settings,)

    output_dir: Path = Path("outputs")
    """The run directory: checkpoints, rollouts, weights, metrics, logs and resolved configs."""

    seed: int = Field(default=0, ge=0, lt=2**31)
    """The one seed from which data order, initialisation and sampling are derived."""

    dry_run: bool = False
    """Resolve and validate everything, write the resolved TOML, print the plan, start nothing."""


class CkptConfig(Section):
    """Checkpoints. A bare ``--ckpt`` writes the final step only."""

    interval: int | None = Field(default=None, ge=1)
    """Save after every this many steps; unset: after the final step only."""

    keep: int | None = Field(default=None, ge=1)
    """Keep this many of the newest checkpoints; unset: keep all."""

    resume_step: int | Literal["latest", "auto"] | None = None
    """Continue from this step: a number, `latest` (-1 is the same; an error if there is none),
    or `auto` (the newest, or a fresh start if there is none)."""


class ModelConfig(Section):
    """Which model, by the name of a local directory or of a model on a hub."""

    name: str = "examples/reverse_text/model"
    """Directory with config.json, safetensors and tokenizer, or a hub id such as Qwen/Qwen3-0.6B."""

    tokenizer: str | None = None
    """Directory or hub id of the tokenizer; unset: the same as `model.name`."""

    @property
    def tokenizer_name(self) -> str:
        """Where the tokenizer is loaded from."""
        return self.tokenizer or self.name
