"""What the trainer will train on, counted before a start, without torch."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from holdfast.config import DpoConfig, RewardTrainingConfig, SftConfig
from holdfast.config.training import SupervisedCommand
from holdfast.run.inputs import Survey
from holdfast.trainer.survey import take_survey, tell_data
from tests.builders.toy import DATA, MODEL, PAIRS


@pytest.mark.parametrize(
    ("config", "kind", "samples"),
    [(DpoConfig, "pairs", 4), (RewardTrainingConfig, "pairs", 4), (DpoConfig, "answers", 8), (SftConfig, "samples", 4)],
)
def test_what_there_is_to_train_on_is_counted_as_the_trainer_counts_it(
    config: type[SupervisedCommand], kind: str, samples: int, tmp_path: Path
) -> None:
    lines = Path(DATA if kind == "samples" else PAIRS).read_text().splitlines()[:5]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([*lines[:3], "{", *lines[3:]]) + "\n")
    settings = {
        "model": {"name": MODEL},
        "data": {"name": str(path), "validation_fraction": 0.2, "on_bad_row": "drop"},
        "loss": {"type": "kto"} if kind == "answers" else {},
    }
    if config is SftConfig:
        settings.pop("loss")
    survey = take_survey(config.model_validate(settings))
    assert (survey.kind, survey.samples) == (kind, samples) and survey.held_out == samples // 4
    assert survey.tokens > 10 and all("<|assistant|>[[" in text for text in survey.first.values())
    assert any("row 4 is not JSON" in note for note in survey.notes), json.dumps(survey.notes)


def test_a_run_tells_that_a_step_takes_more_than_all_samples(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = SftConfig.model_validate({"model": {"name": MODEL}, "data": {"name": DATA, "batch_size": 64}})
    for samples, is_told in ((64, False), (50, True)):
        caplog.clear()
        tell_data(config, Survey("samples", samples, 0, 900, {}), is_main=True)
        assert ("data.batch_size = 64 exceeds the 50 samples: " in caplog.text) is is_told
