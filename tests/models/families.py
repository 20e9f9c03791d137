"""Tiny models of many families, and what `transformers` itself makes of them: one sample at a time, eager attention.

Multipliers, caps and windows differ from the values at which they do nothing, so that leaving one out shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from holdfast.trainer.data.packing import Sample, build_micro_batch
from holdfast.trainer.data.row_plan import plan_rows
from holdfast.trainer.models.policy import Policy

VOCABULARY = 97
_BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "n_group": 2,
    "topk_group": 1,
    "decoder_sparse_step": 1,
    "first_k_dense_replace": 1,
}
_MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
_NEXT = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_state": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}


_WITHOUT = {"falcon": ("head_dim",)}  # they compute it


@dataclass(frozen=True)
class Family:
    """A kind of models by its `model_type`, and the fields of its tiny config beside the common ones."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    label: str = ""

    @property
    def name(self) -> str:
        """How the table calls it."""
        return f"{self.kind} ({self.label})" if self.label else self.kind


FAMILIES = [
    Family("llama"),
    Family("qwen2"),
    Family("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}, "sliding window"),
    Family("qwen3"),
    Family("mistral", {"sliding_window": 7}, "sliding window"),
    Family("ministral3"),
    Family("phi3", {"sliding_window": 9}, "sliding window"),
    Family("phi", {"num_key_value_heads": 4}),
    Family(
        "gemma2",
        {
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
            "sliding_window": 8,
            "query_pre_attn_scalar": 32,
        },
    ),
    Family("gemma3_text", {"sliding_window": 8, "query_pre_attn_scalar": 32, "final_logit_softcapping": 2.0}),
    Family(
        "gemma4_text",
        {
            "sliding_window": 8,
            "final_logit_softcapping": 3.0,
            "hidden_size_per_layer_input": 8,
            "global_head_dim": 32,
            "layer_types": ["sliding_attention", "full_attention"],
            "vocab_size_per_layer_input": VOCABULARY,
        },
    ),
    Family("vaultgemma", {"sliding_window": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    Family("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    Family(
        "gpt2",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "scale_attn_by_inverse_layer_idx": True},
        "scaled by layer",
    ),
    Family("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    Family("gpt_neox", {"num_key_value_heads": 4}),
    Family(
        "gpt_neo", {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 7}
    ),
    Family("gptj", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "rotary_dim": 8}),
    Family("codegen", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "rotary_dim": 8}),
    Family("bloom", {"n_layer": 2, "n_head": 4}),
    Family("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256}),
    Family("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    Family("falcon", {"alibi": True, "num_kv_heads": 4}, "alibi"),
    Family("olmo"),
    Family("olmo2"),
    Family("olmo3", {"num_hidden_layers": 4, "sliding_window": 7}),
    Family("olmoe", _MOE),
    Family("starcoder2", {"sliding_window": 7}),
    Family("stablelm", {"num_key_value_heads": 4}),
    Family(
        "granite",
        {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3},
    ),
    Family("granitemoe", _MOE | {"logits_scaling": 3.0, "embedding_multiplier": 2.0}),
    Family("cohere", {"logit_scale": 0.25}),
    Family("cohere2", {"logit_scale": 0.25, "sliding_window": 8, "num_hidden_layers": 4}),
    Family("minicpm3", _MLA | {"dim_model_base": 16, "scale_emb": 3, "scale_depth": 1.1, "num_key_value_heads": 4}),
    Family("smollm3", {"num_hidden_layers": 4}),
    Family("hunyuan_v1_dense"),
    Family("glm"),
    Family("glm4"),
    Family("nemotron", {"num_key_value_heads": 2}),
    Family("exaone4", {"sliding_window": 8, "num_hidden_layers": 4, "sliding_window_pattern": 4}),
    Family("ernie4_5"),
    Family("seed_oss"),
    Family("arcee"),
    Family("apertus"),
    Family("helium"),
    Family("qwen2_moe", _MOE),
    Family("qwen3_moe", _MOE),
    Family("mixtral", {"num_local_experts": 4, "sliding_window": 8}),
    Family("phimoe", {"num_local_experts": 4}),
    Family("deepseek_v3", _MOE | _MLA | {"head_dim": 8, "num_key_value_heads": 4}),
    Family("glm4_moe", _MOE),
    Family("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48}),
    Family("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    Family(
        "llama4_text",
        {
            "num_local_experts": 4,
            "intermediate_size_mlp": 96,
            "attention_chunk_size": 9,
            "num_hidden_layers": 4,
            "interleave_moe_layer_step": 2,
        },
    ),
    Family("qwen3_5_text", _NEXT),
    Family("qwen3_next", _NEXT | _MOE),
    Family("minimax", {"num_hidden_layers": 4, "num_local_experts": 4, "block_size": 8}),
    Family(
        "granitemoehybrid",
        _MAMBA
        | {
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
            "logits_scaling": 3.0,
            "residual_multiplier": 0.5,
        },
    ),
    Family(
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "attention", "mlp"],
            "num_hidden_layers": 3,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 1,
            "chunk_size": 8,
        },
    ),
    Family("bamba", _MAMBA | {"attn_layer_indices": [1]}),
    Family(
        "jamba",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    Family(
        "zamba2",
        _MAMBA
        | {
            "num_hidden_layers": 3,
            "mamba_ngroups": 1,
            "hybrid_layer_ids": [1],
            "mamba_headdim": 16,
            "n_mamba_heads": 8,
            "num_mem_blocks": 1,
            "adapter_rank": 4,
            "num_key_value_heads": 4,
            "use_mamba_kernels": False,
            "chunk_size": 8,
            "layers_block_type": ["mamba", "hybrid", "mamba"],
        },
    ),
    Family("lfm2", {"layer_types": ["conv", "full_attention"], "block_ff_dim": 96, "block_multiple_of": 8}),
    Family(
        "falcon_h1",
        _MAMBA | {"mamba_d_ssm": 128, "lm_head_multiplier": 0.4, "embedding_multiplier": 2.0, "key_multiplier": 0.7},
    ),
    Family(
        "recurrent_gemma",
        {
            "lru_width": 64,
            "attention_window_size": 8,
            "logits_soft_cap": 3.0,
            "block_types": ["recurrent", "attention"],
        },
    ),
    Family("mamba", {"state_size": 8, "time_step_rank": 4}),
    Family("mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8}),
    Family("rwkv", {"attention_hidden_size": 64, "context_length": 256}),
    Family("qwen3_vl_text"),
    Family("nanochat", {"final_logit_softcapping": 3.0}),
    Family("doge"),
    Family("biogpt"),
    Family("persimmon", {"num_key_value_heads": 4}),
    Family("xglm", {"d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4}),
]


def write_model(family: Family, directory: Path, *, seed: int) -> Path:
    """Write a random model of the family, whose vectors (norms, biases, sinks) are no constants."""
    base = {name: value for name, value in _BASE.items() if name not in _WITHOUT.get(family.kind, ())}
    config = AutoConfig.for_model(family.kind, **(base | family.fields))
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        config.save_pretrained(directory)
        return directory
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn_like(parameter)
                parameter.add_(noise * (0.2 if parameter.ndim == 1 else 0.05))
    model.save_pretrained(directory)
    return directory


def random_samples(lengths: Sequence[int], *, seed: int) -> list[Sample]:
    """Return samples of random tokens that are no special ones; a third of the tokens is not trained."""
    generator = np.random.default_rng(seed)
    return [Sample(generator.integers(3, VOCABULARY, n).astype(np.int32), generator.random(n) < 0.7) for n in lengths]


@dataclass(frozen=True)
class Outcome:
    """Mean cross-entropy over all targets, and its gradient by parameter."""

    loss: float
    gradients: dict[str, Tensor]

    def difference(self, other: Outcome) -> tuple[float, float]:
        """Return the differences of the losses, and of the gradients relative to the norm of all of them."""
        assert self.gradients.keys() == other.gradients.keys()
        norm = torch.stack([gradient.norm() for gradient in other.gradients.values()]).norm()
        apart = torch.stack([(self.gradients[name] - other.gradients[name]).norm() for name in other.gradients]).norm()
        return abs(self.loss - other.loss), float(apart / norm)


def reference_outcome(
    directory: Path, samples: Sequence[Sample], weights: Mapping[str, Tensor] | None = None
) -> Outcome:
    """Return what transformers' own forward gives, one sample at a time, with eager attention.

    Args:
        weights: to take instead of the directory's.
    """
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    if weights is not None:
        assert not model.load_state_dict(weights, strict=False).unexpected_keys
    total = sum(sample.num_targets for sample in samples)
    loss = torch.zeros(())
    for sample in samples:
        ids_L = torch.as_tensor(sample.token_ids, dtype=torch.long)
        logprobs_LV = model(input_ids=ids_L[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        targets = torch.as_tensor(sample.targets)
        loss = loss - logprobs_LV[targets - 1, ids_L[targets]].sum() / total
    loss.backward()
    return Outcome(float(loss.detach()), _gradients(model))


def trainer_outcome(policy: Policy, samples: Sequence[Sample], *, pack: bool, budget: int) -> Outcome:
    """Return what the trainer's forward passes give."""
    policy.zero_grad(set_to_none=True)
    arrangement = policy.layout.arrangement(pack=pack)
    total, loss_sum = sum(sample.num_targets for sample in samples), 0.0
    (plan,) = plan_rows(
        [len(sample.token_ids) for sample in samples],
        arrangement=arrangement,
        budget=budget,
        rows_per_micro_batch=3,
        world_size=1,
    )
    for indices in plan:
        device = next(policy.parameters()).device
        micro = build_micro_batch(samples, indices, pack=arrangement == "packed", device=device)
        logprobs_N, *_ = policy(
            micro.input_ids_BL,
            micro.position_ids_BL,
            micro.predict_index_N,
            micro.target_ids_N,
            packed_index=micro.packed_index,
        )
        loss = -logprobs_N.sum() / total
        loss.backward()
        loss_sum += float(loss.detach())
    return Outcome(loss_sum, _gradients(policy.hf_model))


def _gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
