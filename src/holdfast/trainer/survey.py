"""Numbers of the training data, for the first lines of a run, `--dry-run`, and the steps of `epochs`.

    python -m holdfast.trainer.survey PROGRAM FILE < config.json

reads the data as the trainer does, without torch, and writes a `Survey` to FILE. The trainer uses the same token cache.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from itertools import chain, groupby
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
from holdfast.errors import DataError, printable
from holdfast.process.child import die_with_launcher, run_reporting_errors
from holdfast.process.events import report
from holdfast.run.inputs import Survey, epochs_of, in_short, steps_per_epoch, too_few_for_a_step
from holdfast.trainer.data.formats import PAIR_FORMATS, RATED_PAIR_FORMATS
from holdfast.trainer.data.rows import Sample
from holdfast.trainer.data.samples import check_same_tokens, fingerprint_samples, load_samples, load_tokenizer
from holdfast.trainer.data.tokenizing import TrainedSamples
from holdfast.trainer.positions import check_lengths
from holdfast.trainer.preference import pairs

if TYPE_CHECKING:
    from holdfast.trainer.mesh import Mesh

_MOST_OF_A_PART = 120
_MOST_PARTS = 4


def load_preferences(
    config: DpoConfig | RewardTrainingConfig, tokenizer: PreTrainedTokenizerBase, *, mesh: Mesh | None = None
) -> Sequence[pairs.Preference]:
    """Return the pairs, or for `kto` the answers, in the order of the file. Raise DataError if they cannot be used."""
    if isinstance(config, RewardTrainingConfig):
        return pairs.load_pairs(config.data, tokenizer, formats=(*RATED_PAIR_FORMATS, *PAIR_FORMATS), mesh=mesh)
    if config.loss.type == "kto":
        return pairs.load_answers(config.data, tokenizer, mesh=mesh)
    formats = RATED_PAIR_FORMATS if isinstance(config.loss, DpoLoss) and config.loss.odpo_alpha else PAIR_FORMATS
    return pairs.load_pairs(config.data, tokenizer, formats=formats, mesh=mesh)


def survey_of(
    training: Sequence[Sample] | Sequence[pairs.Preference], held_out: int, tokenizer: PreTrainedTokenizerBase
) -> Survey:
    """Count the training data; `held_out` is the number of samples for validation."""
    first = training[0]
    shown = {f"first {side}": _shown(sample, tokenizer) for side, sample in _sides(first).items()}
    if isinstance(training, TrainedSamples):
        return Survey("samples", len(training), held_out, training.num_tokens, shown)
    tokens = sum(one.num_tokens for one in training)  # type: ignore[union-attr]
    return Survey("pairs" if isinstance(first, pairs.Pair) else "answers", len(training), held_out, tokens, shown)


def _sides(one: Sample | pairs.Preference) -> dict[str, Sample]:
    if isinstance(one, pairs.Pair):
        return {"chosen": one.chosen, "rejected": one.rejected}
    return {"sample": one} if isinstance(one, Sample) else {"answer": one.sides[0]}


def _row_as_text(
    row: int, parts: Iterable[Sample | pairs.Preference], label: str, tokenizer: PreTrainedTokenizerBase
) -> dict[str, str]:
    """Return the sample, or both sides of the pair, of a row counted from 1. Raise DataError if the row has none."""
    for sides in map(_sides, parts):
        if next(iter(sides.values())).row == row - 1:
            return {f"{side} of row {row}": _shown(one, tokenizer, is_whole=True) for side, one in sides.items()}
    raise DataError(f"sample = {row}: nothing of row {row} of {label} is trained or held out. The first row is 1.")


def tell_data(config: SupervisedCommand, survey: Survey, *, is_main: bool) -> None:
    """Print the numbers of the training data, on the main rank."""
    if not is_main:
        return
    steps = steps_per_epoch(config, survey)
    numbers = {survey.kind: f"{survey.samples:,}", "held_out": f"{survey.held_out:,}" if survey.held_out else None}
    report(
        "data",
        name=config.data.label,
        **{name: value for name, value in numbers.items() if value},
        tokens=in_short(survey.tokens),
        steps_per_epoch=f"{steps:,.4g}",
        epochs=epochs_of(config, survey),
    )
    if told := too_few_for_a_step(config, survey):
        report(told)
    for side, text in survey.first.items():
        report(side, text=text)


def _shown(sample: Sample, tokenizer: PreTrainedTokenizerBase, *, is_whole: bool = False) -> str:
    """Return the text of a sample in one line, with special tokens, and trained parts between `[[` and `]]`."""
    places = groupby(range(len(sample.token_ids)), key=lambda place: bool(place and sample.loss_mask[place]))
    parts = []
    for is_trained, own in places:
        text = tokenizer.decode(sample.token_ids[list(own)].tolist(), skip_special_tokens=False)
        text = printable(text, most=len(text) if is_whole else _MOST_OF_A_PART)
        parts.append(f"[[{text}]]" if is_trained else text)
    most = len(parts) if is_whole else _MOST_PARTS
    rest = ["…"] if len(parts) > most else []
    return f"({len(sample.token_ids)} tokens, [[trained]]): " + "".join([*parts[:most], *rest])


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
        training, held_out = pairs.split_preferences(preferences, config.data.validation_fraction, seed=config.seed)
        fingerprint = pairs.fingerprint_preferences(training) if config.dry_run else ""
    else:
        training, held_out = load_samples(config.data, tokenizer, seed=config.seed)
        fingerprint = fingerprint_samples(training) if config.dry_run else ""
    check_lengths(config, training, held_out)
    found = survey_of(training, len(held_out), tokenizer)
    if config.dry_run and config.sample:
        first = _row_as_text(config.sample, chain(training, held_out), config.data.label, tokenizer)
        found = msgspec.structs.replace(found, first=first)
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
