"""How many positions a model has, by its config.json: vLLM's own rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import InferenceConfig
from holdfast.errors import ConfigError
from holdfast.run.inputs import check_max_len, positions

LLAMA3 = {"rope_type": "llama3", "factor": 8.0}
LINEAR = {"type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 4096, "seq_length": 512}, 512),
        ({"max_position_embeddings": 8192, "model_max_length": 131072}, 131072),
        ({"max_position_embeddings": 1000, "rope_scaling": LINEAR}, 4000),
        ({"max_position_embeddings": 1000, "rope_parameters": {"full": LINEAR, "sliding": {}}}, 4000),
        ({"max_position_embeddings": 1000, "rope_scaling": LINEAR | {"factor": None}}, 1000),
        ({"max_position_embeddings": 131072, "rope_scaling": LLAMA3}, 131072),
        ({"max_position_embeddings": 1000, "model_type": "gemma3_text", "rope_scaling": LINEAR}, 1000),
        ({}, None),
        ({"max_position_embeddings": "many"}, None),
        ({"max_position_embeddings": 1000, "rope_scaling": LINEAR | {"factor": "4"}}, None),
        ({"max_position_embeddings": 64, "text_config": {"max_position_embeddings": 2048}}, None),
    ],
)
def test_the_positions_of_a_model(fields: dict[str, Any], expected: int | None) -> None:
    found = positions(fields)
    assert (found and found[0]) == expected


def _config(max_len: int, **args: str) -> InferenceConfig:
    return InferenceConfig.model_validate({"model": {"name": "m", "max_len": max_len}, "engine": {"args": args}})


def test_what_is_said_and_what_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_max_len(_config(99), "owner/model", key="model")
    (tmp_path / "config.json").write_text("[]")
    check_max_len(_config(99), tmp_path, key="model")
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 8, "rope_scaling": LINEAR}))
    check_max_len(_config(32), tmp_path, key="model")
    with pytest.raises(ConfigError) as caught:
        check_max_len(_config(33), tmp_path, key="eval.inference.model")
    assert str(caught.value) == (
        "eval.inference.model.max_len = 33 is more than the 32 positions that the model has (max_position_embeddings, "
        f"times 4 for its scaled rotary embedding, in {tmp_path}/config.json). Set --eval.inference.model.max-len 32, "
        "or less, and any seq_len to no more than that. Where the model is known to take more, set "
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 in the environment."
    )
    check_max_len(_config(33, hf_overrides='{"max_position_embeddings": 64}'), tmp_path, key="model")
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "True")
    check_max_len(_config(33), tmp_path, key="model")
