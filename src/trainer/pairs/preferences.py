"""Preference pairs: reading, tokenising, holding out, and how a step's pairs become micro-batches.

Both answers of a pair follow the same prompt, tokenised by the rules of `sft`. They are always in
the same micro-batch, since the loss compares them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainer.data import fingerprint_samples, hold_out, read_rows, tokenize_row
from trainer.packing import Sample, plan_rows
from triad.config.dpo import PreferenceDataConfig
from triad.errors import DataError

_log = logging.getLogger("trainer")
_SHAPES = "`prompt`, `chosen` and `rejected` (all text or all lists of messages), or `chosen` and `rejected` as chats"
Fault = Literal["too long", "untrained", "equal"]


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt, each with the prompt.

    Attributes:
        chosen, rejected: the better and the worse.
        number: place among all pairs of the data that are used, from 0; those held out count too.
    """

    chosen: Sample
    rejected: Sample
    number: int

    @property
    def sides(self) -> tuple[Sample, Sample]:
        """Chosen, rejected."""
        return self.chosen, self.rejected

    @property
    def num_tokens(self) -> int:
        """Tokens of both sides; the prompt counts twice."""
        return len(self.chosen.token_ids) + len(self.rejected.token_ids)


def load_pairs(config: PreferenceDataConfig, tokenizer: PreTrainedTokenizerBase) -> list[Pair]:
    """Return all pairs, tokenised, in the order of the file.

    Raises:
        DataError: the dataset is missing, lacks columns, or has a pair that is too long.
    """
    rows = read_rows(config, fits=lambda columns: {"chosen", "rejected"} <= columns, shapes=_SHAPES)
    pairs: list[Pair] = []
    faults: dict[Fault, int] = {"too long": 0, "untrained": 0, "equal": 0}
    for number, row in enumerate(rows):
        where = f"{config.name}, row {number}"
        sides = _tokenize(row, tokenizer, where)
        longest = max(len(side.token_ids) for side in sides)
        if longest > config.seq_len:
            faults["too long"] += 1
            if config.too_long == "error":
                raise DataError(
                    f"{where}: a side of the pair has {longest} tokens, data.seq_len is {config.seq_len}. "
                    "Raise data.seq_len, or set data.too_long to drop or truncate."
                )
            if config.too_long == "drop":
                continue
            cut = slice(config.seq_len)
            sides = (
                Sample(sides[0].token_ids[cut], sides[0].loss_mask[cut]),
                Sample(sides[1].token_ids[cut], sides[1].loss_mask[cut]),
            )
        if not all(side.num_targets for side in sides):
            faults["untrained"] += 1
        elif np.array_equal(sides[0].token_ids, sides[1].token_ids):
            faults["equal"] += 1
        else:
            pairs.append(Pair(*sides, number=len(pairs)))
    _report(config, faults)
    if not pairs:
        raise DataError(f"{config.name}: no pairs to train on are left")
    return pairs


def split_pairs(pairs: list[Pair], fraction: float, *, seed: int) -> tuple[list[Pair], list[Pair]]:
    """Return (training pairs, validation pairs).

    Raises:
        DataError: nothing is left to train on.
    """
    held_out = hold_out(len(pairs), fraction, seed=seed)
    training = [pair for pair in pairs if pair.number not in held_out]
    if not training:
        raise DataError(f"no pairs to train on are left of {len(pairs)}: lower data.validation_fraction")
    return training, [pairs[number] for number in sorted(held_out)]


def fingerprint_pairs(pairs: Sequence[Pair]) -> str:
    """Return the xxh3-128 of the tokens and masks of both sides of all pairs, in order."""
    return fingerprint_samples([side for pair in pairs for side in pair.sides])


def plan_pairs(pairs: Sequence[Pair], config: PreferenceDataConfig, *, rank: int, world_size: int) -> list[list[int]]:
    """Return the micro-batches of `rank` as lists of indices of pairs; every rank gets the same number of them."""
    plan = plan_rows(
        [pair.num_tokens for pair in pairs],
        pack=config.pack,
        budget=2 * config.seq_len * config.micro_batch_size,
        rows_per_micro_batch=config.micro_batch_size,
        world_size=world_size,
    )
    return plan[rank]


def _report(config: PreferenceDataConfig, faults: Mapping[Fault, int]) -> None:
    done = "dropped" if config.too_long == "drop" else "cut"
    texts: dict[Fault, str] = {
        "too long": f"with a side of more than {config.seq_len} tokens were {done}",
        "untrained": "have a side with nothing to train on and are left out",
        "equal": "have the same tokens on both sides and are left out",
    }
    for fault, text in texts.items():
        if faults[fault]:
            _log.warning("%s: %d pairs %s", config.name, faults[fault], text)


def _tokenize(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, where: str) -> tuple[Sample, Sample]:
    prompt, chosen, rejected = row.get("prompt"), row.get("chosen"), row.get("rejected")
    if isinstance(chosen, list) and isinstance(rejected, list) and not isinstance(prompt, list):
        shared = _common_beginning(chosen, rejected)
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    kinds = {type(value) for value in (prompt, chosen, rejected)}
    if kinds not in ({str}, {list}):
        raise DataError(f"{where}: rows need {_SHAPES}")

    def side(answer: object) -> Sample:
        return tokenize_row({"prompt": prompt, "completion": answer}, tokenizer, where=where)

    return side(chosen), side(rejected)


def _common_beginning(chosen: list[Any], rejected: list[Any]) -> int:
    """Return how many messages two conversations share; the last of either is an answer and never shared."""
    most = min(len(chosen), len(rejected)) - 1
    return next((place for place in range(most) if chosen[place] != rejected[place]), max(0, most))
