"""Settings of rows of data: the source of samples, and how they become batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from holdfast.config.base import Section
from holdfast.config.marks import Mark

LEAST_SHARE = 0.001
"""Shares of a mix are kept in every thousand samples."""


class SftDataConfig(Section):
    """The source of samples, and how they become batches."""

    name: str = ""
    """Needed: a .jsonl, .json, .csv, .parquet or .arrow file (JSON and CSV also as .gz or .zst), a directory of such
    files or of `save_to_disk`, a glob, or a dataset on a hub. Rows have `messages`; or `prompt` and `completion`; or
    `conversations` (ShareGPT); or `instruction`, `input` and `output` (Alpaca); or `text`: see docs/data.md."""

    split: str = "train"
    """Split to read, for directories and hub datasets that have several."""

    validation_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of the samples held out for validation, chosen by `seed`."""

    batch_size: int = Field(default=64, ge=1)
    """Samples of one optimizer step, over all ranks."""

    micro_batch_size: int = Field(default=8, ge=1)
    """Rows of one forward pass on each rank; gradients accumulate until the batch is done."""

    seq_len: int = Field(default=1024, ge=2, lt=2**31)
    """Most tokens of one sample, and with `pack` of one row."""

    on_bad_row: Literal["error", "drop"] = "error"
    """The treatment of unusable rows, such as broken JSON: name the first of them, or leave them out and say how
    many."""

    too_long: Literal["error", "drop", "truncate"] = "error"
    """The treatment of a sample of more than `seq_len` tokens. `drop` and `truncate` say how many."""

    strict: Annotated[bool, Mark.FREE] = False
    """Refuse data of which there would be a warning: rows that are left out or cut, columns and keys in no token."""

    train_on: Literal["all", "last"] = "all"
    """Trained part of a chat: `all` turns of the assistant, or the `last` turn; in rows with a prompt, only turns
    of the completion. Plain `text` is trained whole."""

    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template for all rows, such as `{enable_thinking = false}`; the column of a row wins."""

    pack: bool = True
    """Fill micro-batches up to a budget of tokens, several samples a row, which never see each other. Models whose
    tokens meet outside of attention (docs/models.md) get one sample a row, grouped by length. Off:
    `micro_batch_size` samples at a time, one a row."""

    shuffle: bool = True
    """A new order every epoch, from `seed`; off: file order."""

    num_proc: Annotated[int | None, Mark.FREE] = Field(default=None, ge=1)
    """Processes of each machine that tokenise more than a few thousand rows; unset: one for each core that the trainer
    may run on. The samples are the same with any number."""

    cache_dir: Annotated[str | None, Mark.FREE] = None
    """Directory in which more than a few thousand rows are kept tokenised, for the next start and for rows that do not
    fit into memory; unset: `tokenised` in `$HOLDFAST_CACHE` or else in ~/.cache/holdfast; empty: nowhere. Unused
    directories in it can be deleted."""

    @property
    def label(self) -> str:
        """The name of the data in messages."""
        return self.name

    @property
    def key(self) -> str:
        """The setting that names the data."""
        return "data.name"

    @property
    def sources(self) -> Sequence[Self]:
        """The settings of each source of samples."""
        return [self]


class MixedDataConfig(SftDataConfig):
    """The source of samples, or several sources that are mixed, and how the samples become batches."""

    mix: dict[str, float] = {}
    """Several sources in the place of `name`, each with its weight, such as `{"a.jsonl" = 3, "b.jsonl" = 1}`: each
    thousand samples have 750 of a.jsonl and 250 of b.jsonl. A source that is through begins again."""

    @field_validator("mix")
    @classmethod
    def _shares(cls, mix: dict[str, float]) -> dict[str, float]:
        if any(not weight > 0 for weight in mix.values()):
            raise ValueError("weights should be numbers above 0: leave a source out that is not to be trained")
        if mix and min(mix.values()) < LEAST_SHARE * sum(mix.values()):
            name = min(mix, key=lambda name: mix[name])
            raise ValueError(f"'{name}' has less than {LEAST_SHARE:g} of all samples: raise its weight or leave it out")
        return mix

    @model_validator(mode="after")
    def _one_way_to_name_data(self) -> Self:
        if self.mix and self.name:
            raise ValueError(f"has name = '{self.name}' and mix: put the name into mix, with its weight")
        return self

    @property
    def label(self) -> str:
        return " + ".join(self.mix) or self.name

    @property
    def key(self) -> str:
        return "data.mix" if self.mix else "data.name"

    @property
    def sources(self) -> Sequence[Self]:
        return [self.model_copy(update={"name": name, "mix": {}}) for name in self.mix] or [self]
