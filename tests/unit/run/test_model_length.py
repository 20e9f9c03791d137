"""A server for longer sessions than its model has positions is refused, where config.json says their number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.config import InferenceConfig
from holdfast.errors import ConfigError
from holdfast.run.inputs import check_max_len

LINEAR = {"type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    "config",
    [
        [],
        {},
        {"max_position_embeddings": "many"},
        {"max_position_embeddings": 8, "model_max_length": 64},
        {"max_position_embeddings": 8, "rope_scaling": LINEAR},
        {"max_position_embeddings": 8, "rope_parameters": {"full": LINEAR, "sliding": {}}},
        {"max_position_embeddings": 8, "text_config": {"max_position_embeddings": 64}},
    ],
)
def test_what_is_for_vllm_to_interpret_passes(config: object, tmp_path: Path) -> None:
    check_max_len(_config(33), "owner/model", key="model")
    check_max_len(_config(33), tmp_path, key="model")
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_max_len(_config(33), tmp_path, key="model")


def _config(max_len: int, **args: str) -> InferenceConfig:
    return InferenceConfig.model_validate({"model": {"name": "m", "max_len": max_len}, "engine": {"args": args}})


def test_more_positions_than_the_model_has_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"max_position_embeddings": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})
    )
    check_max_len(_config(32), tmp_path, key="model")
    with pytest.raises(ConfigError) as caught:
        check_max_len(_config(33), tmp_path, key="eval.inference.model")
    assert str(caught.value) == (
        "eval.inference.model.max_len = 33 is more than the 32 positions that the model has (max_position_embeddings "
        f"in {tmp_path}/config.json). Set --eval.inference.model.max-len 32, "
        "or less, and any seq_len to no more than that. Where the model is known to take more, set "
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 in the environment."
    )
    check_max_len(_config(33, hf_overrides='{"max_position_embeddings": 64}'), tmp_path, key="model")
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "True")
    check_max_len(_config(33), tmp_path, key="model")
