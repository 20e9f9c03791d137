"""Bases of all configuration models, and the sections that several processes share."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

DType = Literal["float32", "bfloat16"]
LogFormat = Literal["text", "json"]


def _check_plain(cls: type[BaseModel], value: Any, info: ValidationInfo) -> Any:
    """Refuse what pydantic would take for something else, and text that no file of ours can hold."""
    assert info.field_name is not None
    kinds = _kinds(cls.model_fields[info.field_name].annotation)
    if isinstance(value, bool) and bool not in kinds and kinds & {int, float}:
        raise ValueError("should be a number, not true or false")
    if any(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in kinds):
        return value  # a section looks at its own
    for text in _texts(value):
        if "\0" in text:
            raise ValueError("must not hold the character NUL")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(
                "must be text in UTF-8: rename what it names, or set LC_ALL=C.UTF-8 if the name is right"
            ) from None
    return value


def _kinds(annotation: Any) -> set[Any]:
    parts = typing.get_args(annotation)
    return set().union(*map(_kinds, parts)) if parts else {annotation}


def _texts(value: Any) -> Iterator[str]:
    """Yield all text in a value, however deep."""
    waiting = [value]
    while waiting:
        match waiting.pop():
            case str() as text:
                yield text
            case Path() as path:
                yield str(path)
            case list() as items:
                waiting += items
            case dict() as entries:
                waiting += [*entries.keys(), *entries.values()]


class Section(BaseModel):
    """A part of a configuration. A docstring beneath a field is its ``--help`` text."""

    model_config = ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        ser_json_inf_nan="constants",
        allow_inf_nan=False,
    )

    _plain = field_validator("*", mode="before")(classmethod(_check_plain))


class Command(BaseSettings):
    """The whole configuration of one command: what every command has."""

    model_config = SettingsConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        ser_json_inf_nan="constants",
        allow_inf_nan=False,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
    )

    _plain = field_validator("*", mode="before")(classmethod(_check_plain))

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
    """Make the checks that a real run makes before it starts anything, write the resolved TOML, print the plan, start
    nothing. Checked are all settings, local paths, environments and functions of your own (they are imported; the
    constructor of an environment of your own is not called), and every byte of the checkpoint or weights to start
    from. Not checked are names on a hub and the rows of the data."""


class CkptConfig(Section):
    """Checkpoints. A bare ``--ckpt`` writes the final step only."""

    interval: int | None = Field(default=None, ge=1)
    """Save after every this many steps; unset: after the final step only."""

    every_minutes: float | None = Field(default=None, gt=0)
    """Save when this many minutes have passed since the last save; goes together with `interval`."""

    save_async: bool = True
    """Copy the state and write it behind the training; off: training waits until it is committed."""

    when_busy: Literal["wait", "skip"] = "wait"
    """What a save does when the one before it is still being written: wait for it, or be left out.
    The final step and the save on a signal always wait."""

    on_failure: Literal["stop", "warn"] = "stop"
    """What follows a save that failed (disk full, I/O error): end the run, or say so and train on."""

    keep: int | None = Field(default=None, ge=1)
    """Keep this many of the newest checkpoints; unset: all stay, whatever the next two say."""

    keep_interval: int | None = Field(default=None, ge=1)
    """Keep the checkpoints of every this many steps for good, besides the newest `keep`."""

    keep_best: str | None = None
    """Keep the checkpoint with the best value of this metric besides the newest `keep`, such as `min:val/loss` or
    `max:reward/mean`. Without `min:` or `max:`: lower is better for losses, errors and divergences."""

    dir: str | None = None
    """Copy every committed checkpoint there as well, in the background: `s3://bucket/prefix` or any
    other URL of fsspec. A resume finds there what this machine does not have."""

    resume_step: int | Literal["latest", "auto"] | None = None
    """Continue from this step: a number, `latest` (-1 is the same; an error if there is none),
    or `auto` (the newest, or a fresh start if there is none)."""

    resume_dir: Path | None = None
    """Fork another run: start this one from OTHER/checkpoints/step_N with everything that it holds.
    Together with `resume_step = auto`, this run's own checkpoints come first."""

    weights_only: Path | None = None
    """Warm start: take the weights of a checkpoint or a Hugging Face directory and nothing else;
    optimizer, counters and data start afresh."""

    verify: Literal["full", "size"] = "full"
    """What is checked before a checkpoint is used: every byte, or sizes only (for very large ones)."""

    grace_s: float = Field(default=60.0, gt=0)
    """On SIGTERM, SIGUSR1, SIGHUP or Ctrl-C: the time to save the current step before everything is stopped."""

    @model_validator(mode="after")
    def _fits_together(self) -> CkptConfig:
        if self.keep_best is not None and not self.keep_best.removeprefix("min:").removeprefix("max:"):
            raise ValueError(f"keep_best = '{self.keep_best}' names no metric; write it as `max:reward/mean`")
        if self.weights_only is not None and self.resume_dir is not None:
            raise ValueError("weights_only takes the weights alone and resume_dir everything: give one of them")
        return self


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
