"""Tiny model directories without torch: configuration, tokenizer and random weights as Qwen 3 names them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BASE = Path(__file__).resolve().parents[2] / "examples" / "reverse_text" / "base"
_TINY = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 128, "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}  # fmt: skip


def write_plain_model(directory: Path, *, weights: bool = True, seed: int = 0, **fields: Any) -> Path:
    config = json.loads((BASE / "config.json").read_text()) | _TINY | fields
    config.pop("layer_types", None)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(BASE / name, directory)
    if weights:
        random = np.random.default_rng(seed)
        tensors = {name: random.normal(0, 0.1, shape).astype(np.float32) for name, shape in _shapes(config).items()}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def copy_with_other_tokens(model: Path, target: Path) -> Path:
    """Copy a model whose tokenizer then has two letters the other way round; return the copy."""
    shutil.copytree(model, target)
    content = json.loads((target / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (target / "tokenizer.json").write_text(json.dumps(content))
    return target


def write_reward_model(directory: Path, source: Path, *, num_labels: int = 1) -> PreTrainedModel:
    """Write a reward model of the shape of `source` with a random head, as transformers does, and return it."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.from_pretrained(source, num_labels=num_labels)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32, attn_implementation="eager")
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, directory)
    return model


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer = {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,), "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    layers = range(config["num_hidden_layers"])
    shapes = {f"model.layers.{one}.{name}.weight": shape for one in layers for name, shape in layer.items()}
    return shapes | {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
