"""The rule of how long sessions a model takes is vLLM's: it takes what passes, and refuses one token more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.run.inputs import positions

pytestmark = pytest.mark.engine

_MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "qwen2": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    "mistral": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        "sliding_window": 8,
    },
    "phi3": {
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8},
        "original_max_position_embeddings": 64,
    },
    "gemma3_text": {"sliding_window": 8, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "gpt2": {"n_positions": 128, "n_embd": 64, "n_head": 4, "n_layer": 2},
    "cohere": {"model_max_length": 512},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
}
_CLASSES = {
    "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "mistral": "MistralForCausalLM", "phi3": "Phi3ForCausalLM", "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel", "cohere": "CohereForCausalLM", "opt": "OPTForCausalLM",
}  # fmt: skip
_COMMON = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "dtype": "float32", "pad_token_id": 0,
}  # fmt: skip
_ASKS = """
import json, sys
from vllm.config import ModelConfig

for line in sys.stdin:
    directory, length = json.loads(line)
    try:
        ModelConfig(model=directory, tokenizer=directory, max_model_len=length, skip_tokenizer_init=True)
    except ValueError as error:
        said = str(error)
        assert "is greater than the derived max_model_len" in said, said
        print("told:", json.dumps([directory, length, False]))
    else:
        print("told:", json.dumps([directory, length, True]))
"""


def test_vllm_takes_what_passes_and_no_token_more(tmp_path: Path) -> None:
    asked = []
    for kind, fields in _MODELS.items():
        told = _COMMON | {"model_type": kind, "architectures": [_CLASSES[kind]]} | fields
        if kind == "gpt2":
            del told["max_position_embeddings"]
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_text(json.dumps(told))
        found = positions(told)
        assert found is not None
        asked += [(str(tmp_path / kind), found[0]), (str(tmp_path / kind), found[0] + 1)]
    answer = subprocess.run(
        [sys.executable, "-c", _ASKS],
        input="\n".join(map(json.dumps, asked)),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    told = [json.loads(line[6:]) for line in answer.stdout.splitlines() if line.startswith("told: ")]
    expected = [[directory, length, number % 2 == 0] for number, (directory, length) in enumerate(asked)]
    assert told == expected, answer.stderr[-3000:]
