"""Preference pairs and labelled answers: reading, holding out, and how the pairs of a step become micro-batches.

Both answers of a pair follow the same prompt, tokenised by the rules of `sft`. They are always in
the same micro-batch, since the loss compares them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from holdfast.config.preference import PreferenceDataConfig
from holdfast.errors import DataError
from holdfast.trainer.data.formats import ANSWER_FORMATS, PAIR_FORMATS, Format
from holdfast.trainer.data.remarks import tell_samples
from holdfast.trainer.data.rows import Sample
from holdfast.trainer.data.samples import chat_tokenizer, fingerprint_samples, hold_out, read_samples, reasons

if TYPE_CHECKING:
    from holdfast.trainer.mesh import Mesh
    from holdfast.trainer.model.packing_check import Layout

Fault = Literal["too long", "untrained", "equal"]


class Preference(Protocol):
    """A preference of people about answers to a prompt: a `Pair`, or a `LabelledAnswer`.

    Attributes:
        number: place among all of the data that are used, from 0; those held out count too.
        row: place among the rows that are used.
        sides: two sequences whose log-probabilities it needs.
        num_tokens: tokens of both.
    """

    @property
    def number(self) -> int: ...
    @property
    def row(self) -> int: ...
    @property
    def sides(self) -> tuple[Sample, Sample]: ...
    @property
    def num_tokens(self) -> int: ...


P = TypeVar("P", bound=Preference)


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
    def margin(self) -> float:
        """By how much the chosen side is better, as its row says; 0 where the rows say nothing."""
        return self.chosen.value

    @property
    def row(self) -> int:
        """Its number."""
        return self.number

    @property
    def sides(self) -> tuple[Sample, Sample]:
        """Chosen, rejected."""
        return self.chosen, self.rejected

    @property
    def num_tokens(self) -> int:
        """Tokens of both sides; the prompt counts twice."""
        return len(self.chosen.token_ids) + len(self.rejected.token_ids)


def load_pairs(
    config: PreferenceDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    formats: tuple[Format, ...] = PAIR_FORMATS,
    mesh: Mesh | None = None,
) -> list[Pair]:
    """Return all pairs, tokenised, in the order of the file; see `read_samples`. `formats`: of rows, the first that
    fits the first row."""
    sides, _ = read_samples(config, chat_tokenizer(tokenizer), formats, mesh=mesh)
    return usable_pairs(config, sides, is_told=mesh is None or mesh.is_main)


def usable_pairs(config: PreferenceDataConfig, sides: Sequence[Sample], *, is_told: bool = True) -> list[Pair]:
    """Return the pairs of the given sides (chosen, rejected, chosen, ...) that can be trained, as `config` says.
    `is_told`: whether warnings are reported. Raise DataError if there is none, or `config` refuses data with warnings.
    """
    pairs: list[Pair] = []
    faults: dict[Fault, list[int]] = {"too long": [], "untrained": [], "equal": []}
    for place in range(0, len(sides), 2):
        chosen, rejected = pair = sides[place], sides[place + 1]
        if max(len(side.token_ids) for side in pair) > config.seq_len:
            faults["too long"].append(chosen.row)
            if config.too_long == "drop":
                continue
            pair = chosen.cut(config.seq_len), rejected.cut(config.seq_len)
        if not all(side.num_targets for side in pair):
            faults["untrained"].append(chosen.row)
        elif np.array_equal(pair[0].token_ids, pair[1].token_ids):
            faults["equal"].append(chosen.row)
        else:
            pairs.append(Pair(*pair, number=len(pairs)))
    done = "dropped" if config.too_long == "drop" else "cut"
    if not pairs:
        found = [
            (len(faults["too long"]), f"have a side of more than {config.seq_len} tokens and were {done}"),
            (len(faults["untrained"]), "have a side with nothing to train on"),
            (len(faults["equal"]), "have the same tokens on both sides"),
        ]
        total = len(sides) // 2
        raise DataError(f"{config.name}: no pairs to train on are left of {total:,}: {reasons(found, total)}")
    texts: dict[Fault, str] = {
        "too long": f"pairs with a side of more than {config.seq_len:,} tokens are {done}",
        "untrained": "pairs have a side with nothing to train on and are left out",
        "equal": "pairs have the same tokens on both sides and are left out",
    }
    _tell(config, [(text, faults[fault]) for fault, text in texts.items()], is_told=is_told)
    return pairs


def _tell(config: PreferenceDataConfig, found: Iterable[tuple[str, Sequence[int]]], *, is_told: bool) -> None:
    """Report warnings, each with the places of its rows. Raise DataError if the data are refused for them."""
    tell_samples([(text, len(rows), min(rows, default=0)) for text, rows in found], config, is_told=is_told)


@dataclass(frozen=True)
class LabelledAnswer:
    """An answer that is good or bad, and one to another prompt.

    Attributes:
        answer: with its prompt; its `value` is 1 for a good one, 0 for a bad one.
        mismatched: the prompt with the answer to another one.
        number: place among all answers of the data that are used, from 0; those held out count too.
        row: of the data; both answers of a pair have the same.
    """

    answer: Sample
    mismatched: Sample
    number: int
    row: int

    @property
    def is_desirable(self) -> bool:
        """Whether it is a good one."""
        return self.answer.value > 0

    @property
    def sides(self) -> tuple[Sample, Sample]:
        """Answer, mismatched."""
        return self.answer, self.mismatched

    @property
    def num_tokens(self) -> int:
        """Tokens of both, each with the prompt."""
        return len(self.answer.token_ids) + len(self.mismatched.token_ids)


def load_answers(
    config: PreferenceDataConfig, tokenizer: PreTrainedTokenizerBase, *, mesh: Mesh | None = None
) -> list[LabelledAnswer]:
    """Return all answers, tokenised, in the order of the file; of a pair first the chosen, then the rejected one. See
    `read_samples`. Raise DataError also if the data have one prompt only."""
    samples, form = read_samples(config, chat_tokenizer(tokenizer), ANSWER_FORMATS, mesh=mesh)
    is_told = mesh is None or mesh.is_main
    if form in PAIR_FORMATS:
        pairs = usable_pairs(config, samples, is_told=is_told)
        answers = [replace(side, value=value) for pair in pairs for side, value in zip(pair.sides, (1, 0), strict=True)]
        rows = [pair.row for pair in pairs for _ in pair.sides]
    else:
        answers = _usable(config, samples, is_told=is_told)
        rows = list(range(len(answers)))
    others = mismatched_places([_prompt(answer).tobytes() for answer in answers])
    if not others:
        raise DataError(
            f"{config.name}: all answers have the same prompt, and KTO needs at least two: it compares with answers "
            "to another prompt. Use a loss of pairs."
        )
    return [
        LabelledAnswer(answer, _mismatched(answer, answers[other]).cut(config.seq_len), number, row)
        for number, (answer, other, row) in enumerate(zip(answers, others, rows, strict=True))
    ]


def mismatched_places(prompts: Sequence[bytes]) -> list[int]:
    """Return, for each prompt, the place of an answer to another prompt; nothing if all are the same.

    Every answer is taken once. The divergence is then estimated from the trained answers, good and bad, as Ethayarajh
    et al. 2024 and TRL take them within a batch. If more than half of the answers are to one prompt, that is not
    possible: the other ones are then taken in turn."""
    by_prompt: dict[bytes, list[int]] = {}
    for place, prompt in enumerate(prompts):
        by_prompt.setdefault(prompt, []).append(place)
    if len(by_prompt) < 2:
        return []
    largest, count = max(by_prompt.values(), key=len), len(prompts)
    others = [0] * count
    if 2 * len(largest) > count:
        rest = [place for places in by_prompt.values() if places is not largest for place in places]
        for places, taken in ((largest, rest), (rest, largest)):
            for turn, place in enumerate(places):
                others[place] = taken[turn % len(taken)]
        return others
    ordered = [place for places in by_prompt.values() for place in places]
    # No prompt has more answers than the largest, so that many places further there is another one.
    for turn, place in enumerate(ordered):
        others[place] = ordered[(turn + len(largest)) % count]
    return others


def _usable(config: PreferenceDataConfig, samples: Sequence[Sample], *, is_told: bool) -> list[Sample]:
    """Return the answers that can be trained, as `config` says."""
    too_long, untrained, answers = list[int](), list[int](), list[Sample]()
    for sample in samples:
        if len(sample.token_ids) > config.seq_len:
            too_long.append(sample.row)
            if config.too_long == "drop":
                continue
        answer = sample.cut(config.seq_len)
        if answer.num_targets:
            answers.append(answer)
        else:
            untrained.append(sample.row)
    if not answers:
        raise DataError(f"{config.name}: no answers to train on are left")
    done = "dropped" if config.too_long == "drop" else "cut"
    found = [
        (f"answers of more than {config.seq_len:,} tokens are {done}", too_long),
        ("answers have nothing to train on and are left out", untrained),
    ]
    _tell(config, found, is_told=is_told)
    return answers


def _prompt(answer: Sample) -> np.ndarray:
    """Return the tokens before the first that is trained."""
    return answer.token_ids[: answer.targets[0]]


def _mismatched(answer: Sample, other: Sample) -> Sample:
    """Return the prompt of `answer` with the answer of `other`."""
    prompt, begin = _prompt(answer), other.targets[0]
    mask = np.concatenate([np.zeros(len(prompt), dtype=bool), other.loss_mask[begin:]])
    return Sample(np.concatenate([prompt, other.token_ids[begin:]]), mask)


def split_preferences(preferences: list[P], fraction: float, *, seed: int) -> tuple[list[P], list[P]]:
    """Return (training, validation); what is of one row is on one side. Raise DataError if nothing is left."""
    held_out = hold_out(len({preference.row for preference in preferences}), fraction, seed=seed)
    training = [preference for preference in preferences if preference.row not in held_out]
    if not training:
        raise DataError(f"nothing to train on is left of {len(preferences)}: lower data.validation_fraction")
    return training, [preference for preference in preferences if preference.row in held_out]


def fingerprint_preferences(preferences: Sequence[Preference]) -> str:
    """Return the xxh3-128 of tokens, masks and values of both sides of all of them, in order."""
    return fingerprint_samples([side for preference in preferences for side in preference.sides])


def plan_preferences(
    pairs: Sequence[Preference],
    layout: Layout,
    config: PreferenceDataConfig,
    world_size: int,
    *,
    share: bool = False,
    side: int | None = None,
) -> list[list[list[int]]]:
    """Return, for each rank, its micro-batches as lists of indices of pairs; all have the same number of them.

    Args:
        share: whether the two sides of a pair share the tokens of their prompt, if the layout allows it.
        side: for passes with only this side of each pair; twice as many go together.
    """
    from holdfast.trainer.data.packing import plan_rows  # not above: reading pairs needs no torch

    arrangement = layout.arrangement(pack=config.pack)
    rows = config.micro_batch_size
    if side is None:
        both = [[len(one.token_ids) for one in pair.sides] for pair in pairs]
        if arrangement != "packed":
            both = [[max(lengths)] * 2 for lengths in both]  # the shorter one is padded
        shares = share and arrangement == "packed" and layout.shares
        shared = [_shared_tokens(pair) if shares else 0 for pair in pairs]
        lengths = [sum(own) - saved for own, saved in zip(both, shared, strict=True)]
        costs = [sum(map(layout.cost, own)) - layout.cost(saved) for own, saved in zip(both, shared, strict=True)]
    else:
        rows *= 2
        lengths = [len(pair.sides[side].token_ids) for pair in pairs]
        costs = [layout.cost(length) for length in lengths]
    return plan_rows(
        lengths,
        costs=costs,
        arrangement=arrangement,
        budget=2 * config.seq_len * config.micro_batch_size,
        rows_per_micro_batch=rows,
        world_size=world_size,
    )


def _shared_tokens(pair: Preference) -> int:
    one, other = pair.sides
    return one.prompt_length if one.shared_prompt == other.shared_prompt else 0
