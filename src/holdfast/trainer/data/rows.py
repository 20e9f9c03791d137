"""Samples, which are made of rows, and rows that cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import msgspec
import numpy as np

from holdfast.config.data import SftDataConfig
from holdfast.errors import DataError
from holdfast.run.rows import Row as Row

_MOST_NAMED = 10


@dataclass(frozen=True)
class Sample:
    """One sequence to train on; or several, one after the other, which a loss sees as one.

    Attributes:
        token_ids: int32 array of length L.
        loss_mask: bool array of length L: which tokens are trained. The first is never trained,
            since nothing predicts it.
        per_token: further float32 arrays of length L that follow the tokens, such as advantages.
        value: a number that its row says of it, such as the margin of a pair; 0 where it says none.
        row: place of its row in the data.
        starts: where its sequences begin. No token sees tokens of another sequence, and the first token of each is
            never trained.
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    per_token: dict[str, np.ndarray] = field(default_factory=dict)
    value: float = 0.0
    starts: tuple[int, ...] = (0,)
    row: int = 0

    @property
    def lengths(self) -> list[int]:
        """Tokens of each of its sequences."""
        return [end - start for start, end in pairwise([*self.starts, len(self.token_ids)])]

    @property
    def num_tokens(self) -> int:
        """Tokens of all its sequences."""
        return len(self.token_ids)

    @property
    def num_targets(self) -> int:
        """Tokens that are predicted and trained."""
        return int(self.loss_mask[1:].sum())

    @property
    def prompt_length(self) -> int:
        """Tokens before the first target, which other samples may share; 0 if its first sequence has no target."""
        first = self.targets[:1]
        return int(first[0]) if len(first) and first[0] < self.lengths[0] else 0

    @property
    def shared_prompt(self) -> bytes:
        """Those tokens as bytes, to compare with other samples."""
        return self.token_ids[: self.prompt_length].tobytes()

    @cached_property
    def stems(self) -> tuple[int, ...]:
        """For each sequence, the number of first tokens that the sequence before has, too; never all tokens."""
        found = [0]
        for before, tokens in pairwise(np.split(self.token_ids, self.starts[1:])):
            most = min(len(before), len(tokens) - 1)
            differs = np.flatnonzero(before[:most] != tokens[:most])
            found.append(int(differs[0]) if len(differs) else most)
        return tuple(found)

    def cut(self, length: int) -> Sample:
        """Return its first `length` tokens."""
        per_token = {name: values[:length] for name, values in self.per_token.items()}
        starts = tuple(start for start in self.starts if start < max(1, length))
        return Sample(self.token_ids[:length], self.loss_mask[:length], per_token, self.value, starts, self.row)

    @property
    def targets(self) -> np.ndarray:
        """Places of the tokens that are predicted and trained."""
        return np.flatnonzero(self.loss_mask[1:]) + 1


class BadRows(msgspec.Struct, frozen=True):
    """Rows that cannot be used: how many, and what is wrong with the first, each text with the row's number."""

    count: int = 0
    first: tuple[str, ...] = ()

    def __add__(self, other: BadRows) -> BadRows:
        return BadRows(self.count + other.count, (*self.first, *other.first)[:_MOST_NAMED])

    def settle(self, config: SftDataConfig, rows: int) -> list[str]:
        """Return what to say of rows that are left out, of `rows` of the data. Raise DataError if no row is to be left
        out, or nothing else is there."""
        if not self.count:
            return []
        if config.on_bad_row == "drop" and self.count < rows:
            return [f"{self.count:,} of {rows:,} rows cannot be used and are left out. The first: {self.first[0]}"]
        named = self.first[0]
        if self.count > 1:
            left = [f"and {self.count - len(self.first):,} more"] if self.count > len(self.first) else []
            named = "\n         ".join([f"{self.count:,} of {rows:,} rows cannot be used:", *self._lines(), *left])
        raise DataError(f"{config.name}, {named}\n       data.on_bad_row = 'drop' leaves such rows out.")

    def _lines(self) -> Iterator[str]:
        """Yield what is wrong with each of the first rows, the same reason only once."""
        told: dict[str, str] = {}
        for text in self.first:
            row, _, reason = text.partition(": ")
            first = told.setdefault(reason, row)
            yield text if first == row else f"{row}: as {first}"
