"""The states whose saves are planned: a dense 70B model and a mixture of experts of 1T parameters, with Adam.

Names and shapes are those of transformers' own classes, built on the meta device, under the names
that the trainer gives them (`holdfast.trainer.state.TrainState.tensors`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from holdfast.trainer.model.build import trained_tensors

CONFIGS: dict[str, dict[str, Any]] = {
    # Llama 3 70B, table 3 of arXiv:2407.21783.
    "70b": {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    # Kimi K2, table 2 of arXiv:2507.20534, in the architecture of DeepSeek-V3 (arXiv:2412.19437).
    "1t": {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "vocab_size": 163840,
    },
}


def model_tensors(fields: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return parameters and persistent buffers by name, on the meta device, in float32 as the trainer keeps them.

    Args:
        fields: of the model's configuration; `CONFIGS` has those of the large ones.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**fields, tie_word_embeddings=False), dtype=torch.float32
        )
    parameters = {name for name, _ in model.named_parameters()}
    tensors = trained_tensors(model)
    return (
        {name: tensor for name, tensor in tensors.items() if name in parameters},
        {name: tensor for name, tensor in tensors.items() if name not in parameters},
    )
