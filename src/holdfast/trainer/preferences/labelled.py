"""Answers that people called good or bad one by one, without a better or worse one beside them: the data of KTO.

KTO compares what the policy says of an answer with its divergence from the reference, which is estimated on
prompts with answers to other prompts. Which answer goes with which prompt is a function of the data alone, so
the reference's log-probabilities of both are computed once, as those of a pair.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from holdfast.shared.config.dpo import PreferenceDataConfig
from holdfast.shared.errors import DataError
from holdfast.trainer.data.packing import Sample
from holdfast.trainer.data.row_formats import ANSWER_FORMATS, ANSWER_SHAPES, PAIR_FORMATS
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.preferences.pairs import read_sides, usable_pairs

_log = logging.getLogger("trainer")


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
    """Return all answers, tokenised, in the order of the file; of a pair first the chosen, then the rejected one.

    Args:
        mesh: the ranks, if there are several: all get all answers. Collective then.

    Raises:
        ConfigError, DataError: the dataset is missing, lacks columns, has a row that cannot be used, or has one prompt
            only.
    """
    samples, form = read_sides(config, tokenizer, ANSWER_FORMATS, shapes=ANSWER_SHAPES, mesh=mesh)
    if form in PAIR_FORMATS:
        pairs = usable_pairs(config, samples)
        answers = [replace(side, value=value) for pair in pairs for side, value in zip(pair.sides, (1, 0), strict=True)]
        rows = [pair.row for pair in pairs for _ in pair.sides]
    else:
        answers = _usable(config, samples)
        rows = list(range(len(answers)))
    others = following_others([_prompt(answer).tobytes() for answer in answers])
    if not others:
        raise DataError(
            f"{config.name}: all answers have the same prompt, and KTO needs at least two: it compares with answers "
            "to another prompt. Use a loss of pairs."
        )
    return [
        LabelledAnswer(answer, _mismatched(answer, answers[other]).cut(config.seq_len), number, row)
        for number, (answer, other, row) in enumerate(zip(answers, others, rows, strict=True))
    ]


def following_others(prompts: Sequence[bytes]) -> list[int]:
    """Return, for each prompt, the place of the next that differs, going round; nothing where all are the same."""
    count = len(prompts)
    if len(set(prompts)) < 2:
        return []
    others = [0] * count
    for place in reversed(range(2 * count - 1)):  # twice round: the last ones find those at the beginning
        here, after = place % count, (place + 1) % count
        others[here] = after if prompts[after] != prompts[here] else others[after]
    return others


def _usable(config: PreferenceDataConfig, samples: Sequence[Sample]) -> list[Sample]:
    """Return the answers that can be trained, as `config` says."""
    fitting = [sample for sample in samples if len(sample.token_ids) <= config.seq_len or config.too_long != "drop"]
    answers = [answer for sample in fitting if (answer := sample.cut(config.seq_len)).num_targets]
    if too_long := sum(len(sample.token_ids) > config.seq_len for sample in samples):
        done = "dropped" if config.too_long == "drop" else "cut"
        _log.warning("%s: %d answers of more than %d tokens were %s", config.name, too_long, config.seq_len, done)
    if untrained := len(fitting) - len(answers):
        _log.warning("%s: %d answers have nothing to train on and are left out", config.name, untrained)
    if not answers:
        raise DataError(f"{config.name}: no answers to train on are left")
    return answers


def _prompt(answer: Sample) -> np.ndarray:
    """Return the tokens before the first that is trained."""
    return answer.token_ids[: answer.targets[0]]


def _mismatched(answer: Sample, other: Sample) -> Sample:
    """Return the prompt of `answer` with the answer of `other`."""
    prompt, begin = _prompt(answer), other.targets[0]
    mask = np.concatenate([np.zeros(len(prompt), dtype=bool), other.loss_mask[begin:]])
    return Sample(np.concatenate([prompt, other.token_ids[begin:]]), mask)
