"""Answers that no engine can have sampled: refused by name, and nothing of them is kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from orchestrator_fakes import MODEL, STOP_TOKEN, FakeEngine, FakeTrainer, make_config, serving

from orchestrator.answers import load_vocab_size
from orchestrator.main import orchestrate
from triad.errors import ConfigError, DataError, InferenceError
from triad.record_log import read_records
from triad.run_dir import RunDir

VOCAB_SIZE = json.loads((Path(MODEL) / "config.json").read_text())["vocab_size"]
Alter = Callable[[dict[str, Any]], None]


def one(field: str, value: Any, place: int = 0) -> Alter:
    """Put `value` at a place of a list of one choice."""

    def alter(answer: dict[str, Any]) -> None:
        answer["choices"][0][field][place] = value

    return alter


def whole(field: str, make: Callable[[dict[str, Any]], Any]) -> Alter:
    """Replace a field of one choice by what `make` makes of the choice."""

    def alter(answer: dict[str, Any]) -> None:
        answer["choices"][0][field] = make(answer["choices"][0])

    return alter


def spans(*borders: tuple[int, int]) -> Alter:
    """Give spans with these borders; negative ends count from the number of tokens."""

    def make(choice: dict[str, Any]) -> list[dict[str, Any]]:
        count = len(choice["token_ids"])
        span = choice["versions"][0]
        return [span | {"start": start, "end": end if end > 0 else count + end} for start, end in borders]

    return whole("versions", make)


def stop_inside(answer: dict[str, Any]) -> None:
    choice = max(answer["choices"], key=lambda one: len(one["token_ids"]))
    assert len(choice["token_ids"]) > 1
    choice["token_ids"][0] = STOP_TOKEN


def outer_version(answer: dict[str, Any]) -> None:
    answer["version"] = 99


@pytest.mark.parametrize(
    ("alter", "said"),
    [
        (one("logprobs", 3.5), "logprobs holds 3.5, allowed are numbers from -1000 up to 0"),
        (one("logprobs", 1e39), "(logprobs holds inf|not Logprobs)"),
        (one("logprobs", True), "logprobs holds 1, allowed"),
        (one("logprobs", -1e38), "logprobs holds -1e[+]38, allowed"),
        (one("token_ids", VOCAB_SIZE), f"token_ids holds {VOCAB_SIZE}, the model has {VOCAB_SIZE} tokens"),
        (one("token_ids", -1), "token_ids holds -1, allowed are 0 and above"),
        (one("token_ids", 2**31), "not TokenIds"),
        (spans((0, 1), (3, 0)), "(made them; every token needs one|versions holds)"),
        (spans((0, 0), (-3, 0)), "versions holds {version: 0, start: -3, end: "),
        (whole("versions", lambda one: [one["versions"][0] | {"end": len(one["token_ids"]) + 5}]), "end: "),
        (whole("versions", lambda one: [one["versions"][0] | {"version": -1}]), "version: -1"),
        (outer_version, "says that version 99 answered, and its choices are of version 0"),
        (whole("finish_reason", lambda one: "banana"), "finish_reason is 'banana', allowed are stop and length"),
        (
            whole("finish_reason", lambda one: {"stop": "length", "length": "stop"}[one["finish_reason"]]),
            "finish_reason is '(stop|length)' a",
        ),
        (stop_inside, "stop tokens (are )?at [[]0"),
    ],
)
def test_what_cannot_have_been_sampled_is_refused_and_not_kept(tmp_path: Path, alter: Alter, said: str) -> None:
    engine, run_dir = FakeEngine(alter=alter), RunDir(tmp_path)
    with serving(engine):
        config = make_config(tmp_path, engine, max_steps=1)
        with FakeTrainer(run_dir, start=0, max_steps=1), pytest.raises(InferenceError, match=said):
            asyncio.run(orchestrate(config))
    assert run_dir.published_batches() == []
    assert len(read_records(run_dir.generations(1))[0]) <= 1, "the header alone"
    engine.alter = None
    with serving(engine), FakeTrainer(run_dir, start=0, max_steps=1):
        asyncio.run(orchestrate(make_config(tmp_path, engine, max_steps=1)))
    assert run_dir.published_batches() == [1], "with a sound engine the run goes on"


def test_the_size_of_the_vocabulary_comes_from_the_model(tmp_path: Path) -> None:
    assert load_vocab_size(MODEL) == VOCAB_SIZE
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 77}}))
    assert load_vocab_size(str(tmp_path)) == 77
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match="has no vocab_size"):
        load_vocab_size(str(tmp_path))
    with pytest.raises(ConfigError, match="is no directory and no model on the hub"):
        load_vocab_size(str(tmp_path / "nothing" / "there"))
