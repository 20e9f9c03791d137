"""Numbers of the training data, for the first lines of a run, `--dry-run`, and the steps of `epochs`.

    python -m holdfast.trainer.survey PROGRAM FILE < config.json

reads the data as the trainer does, without torch, and writes a `Survey` to FILE. The trainer uses the same token cache.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.process.imports import hide_package

if __name__ == "__main__":
    hide_package("torch")  # transformers and datasets start sooner without torch

from transformers import PreTrainedTokenizerBase

from holdfast.config import program_config
from holdfast.config.preference import DpoConfig, DpoLoss, RewardTrainingConfig
from holdfast.config.rl_trainer import TrainerConfig
from holdfast.config.training import SupervisedCommand
from holdfast.errors import printable
from holdfast.process.child import die_with_launcher, run_reporting_errors
from holdfast.process.events import report
from holdfast.run.inputs import Survey, epochs_of, in_short, steps_per_epoch, too_few_for_a_step
from holdfast.trainer.data.formats import PAIR_FORMATS, RATED_PAIR_FORMATS
from holdfast.trainer.data.rows import Sample
from holdfast.trainer.data.samples import check_same_tokens, fingerprint_samples, load_samples, load_tokenizer
from holdfast.trainer.data.tokenizing import ChosenSamples
from holdfast.trainer.positions import check_lengths
from holdfast.trainer.preference.pairs import (
    Pair,
    Preference,
    fingerprint_preferences,
    load_answers,
    load_pairs,
    split_preferences,
)

if TYPE_CHECKING:
    from holdfast.trainer.mesh import Mesh

_MOST_OF_A_PART = 120
_MOST_PARTS = 4


def load_preferences(
    config: DpoConfig | RewardTrainingConfig, tokenizer: PreTrainedTokenizerBase, *, mesh: Mesh | None = None
) -> Sequence[Preference]:
    """Return the pairs, or for `kto` the answers, in the order of the file. Raise DataError if they cannot be used."""
    if isinstance(config, RewardTrainingConfig):
        return load_pairs(config.data, tokenizer, formats=(*RATED_PAIR_FORMATS, *PAIR_FORMATS), mesh=mesh)
    if config.loss.type == "kto":
        return load_answers(config.data, tokenizer, mesh=mesh)
    formats = RATED_PAIR_FORMATS if isinstance(config.loss, DpoLoss) and config.loss.odpo_alpha else PAIR_FORMATS
    return load_pairs(config.data, tokenizer, formats=formats, mesh=mesh)


def survey_of(
    training: Sequence[Sample] | Sequence[Preference], held_out: int, tokenizer: PreTrainedTokenizerBase
) -> Survey:
    """Count the training data; `held_out` is the number of samples for validation."""
    first = training[0]
    if isinstance(training, ChosenSamples):
        return Survey("samples", len(training), held_out, training.num_tokens, {"sample": _shown(first, tokenizer)})  # type: ignore[arg-type]
    tokens = sum(one.num_tokens for one in training)  # type: ignore[union-attr]
    if isinstance(first, Pair):
        shown = {"chosen": _shown(first.chosen, tokenizer), "rejected": _shown(first.rejected, tokenizer)}
        return Survey("pairs", len(training), held_out, tokens, shown)
    return Survey("answers", len(training), held_out, tokens, {"answer": _shown(first.sides[0], tokenizer)})  # type: ignore[union-attr]


def tell_data(config: SupervisedCommand, survey: Survey, *, is_main: bool) -> None:
    """Print the numbers of the training data, on the main rank."""
    if not is_main:
        return
    steps = steps_per_epoch(config, survey)
    numbers = {survey.kind: f"{survey.samples:,}", "held_out": f"{survey.held_out:,}" if survey.held_out else None}
    report(
        "data",
        name=config.data.name,
        **{name: value for name, value in numbers.items() if value},
        tokens=in_short(survey.tokens),
        steps_per_epoch=f"{steps:,.4g}",
        epochs=epochs_of(config, survey),
    )
    if told := too_few_for_a_step(config, survey):
        report(told)
    for side, text in survey.first.items():
        report(f"first {side}", text=text)


def _shown(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of a sample in one line, with special tokens, and trained parts between `[[` and `]]`."""
    places = groupby(range(len(sample.token_ids)), key=lambda place: bool(place and sample.loss_mask[place]))
    parts = []
    for is_trained, own in places:
        text = tokenizer.decode(sample.token_ids[list(own)].tolist(), skip_special_tokens=False)
        text = printable(text, most=_MOST_OF_A_PART)
        parts.append(f"[[{text}]]" if is_trained else text)
    rest = ["…"] if len(parts) > _MOST_PARTS else []
    return f"({len(sample.token_ids)} tokens, [[trained]]): " + "".join([*parts[:_MOST_PARTS], *rest])


def take_survey(config: SupervisedCommand) -> Survey:
    """Read and count the data of a program. Warnings become notes of the survey."""
    notes: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: notes.append(record.getMessage().removeprefix("WARNING: "))  # type: ignore[method-assign]
    logging.getLogger("holdfast").addHandler(handler)
    tokenizer = load_tokenizer(config.model.tokenizer_name)
    fingerprint = ""  # takes a pass over all tokens
    if isinstance(config, DpoConfig | RewardTrainingConfig):
        preferences = list(load_preferences(config, tokenizer))
        training, held_out = split_preferences(preferences, config.data.validation_fraction, seed=config.seed)
        fingerprint = fingerprint_preferences(training) if config.dry_run else ""
    else:
        training, held_out = load_samples(config.data, tokenizer, seed=config.seed)
        fingerprint = fingerprint_samples(training) if config.dry_run else ""
    check_lengths(config, training, held_out)
    found = survey_of(training, len(held_out), tokenizer)
    return msgspec.structs.replace(found, notes=notes, fingerprint=fingerprint)


def main(program: str, path: str) -> None:
    """Write the survey of the configuration on stdin to a file. For `trainer`, check only the tokenizer."""
    config = program_config(program).model_validate_json(sys.stdin.buffer.read())
    if isinstance(config, TrainerConfig):
        name = config.model.tokenizer_name
        check_same_tokens(load_tokenizer(name), name)
        return
    assert isinstance(config, SupervisedCommand)
    Path(path).write_bytes(msgspec.json.encode(take_survey(config)))


if __name__ == "__main__":
    die_with_launcher()
    run_reporting_errors(lambda: main(*sys.argv[1:]))
