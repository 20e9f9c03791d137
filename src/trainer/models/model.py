"""The policy: a transformers causal LM whose forward gives log-probabilities, sharded by FSDP2.

How any transformers model gets its weights and shards is here too; `scalar_model` uses it.

Order of the wrappers: activation checkpointing, compile, FSDP.

Shape legend: B rows, L tokens of a row, N predicted tokens, H hidden size.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from trainer.models import attention as _registers_packed_attention  # noqa: F401
from trainer.models.attention import PackedIndex
from trainer.models.logprobs import token_logprobs
from trainer.models.lora import adapter_parameters, base_tensors, initial_tensors, inject_adapters, is_adapted
from trainer.parallel import Parallel
from triad.config.trainer import TrainedModelConfig
from triad.errors import DataError

_log = logging.getLogger("trainer")


class Trained(Protocol):
    """A module around a transformers model whose parameters and persistent buffers are its state."""

    hf_model: PreTrainedModel


class Policy(nn.Module):
    """A causal LM that returns log-probabilities of chosen tokens instead of logits."""

    def __init__(self, hf_model: PreTrainedModel, *, logits_chunk_tokens: int) -> None:
        super().__init__()
        self.hf_model = hf_model
        self.logits_chunk_tokens = logits_chunk_tokens
        self.softcap = getattr(hf_model.config, "final_logit_softcapping", None)

    def forward(
        self,
        input_ids_BL: Tensor,
        position_ids_BL: Tensor,
        predict_index_N: Tensor,
        target_ids_N: Tensor,
        *,
        packed_index: PackedIndex | None = None,
        temperature: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Return (logprobs_N, entropy_N) of the targets.

        Args:
            predict_index_N: places in the flattened (B * L) rows whose hidden state predicts a target.
            target_ids_N: the tokens that are predicted.
            packed_index: layout of samples when the single row is packed.
        """
        hidden_NH = hidden_states(
            self.hf_model, input_ids_BL, position_ids_BL, predict_index_N, packed_index=packed_index
        )
        head = self.hf_model.get_output_embeddings()
        assert head is not None, "a causal LM has an output embedding"
        return token_logprobs(
            hidden_NH,
            head.weight,
            target_ids_N,
            bias_V=getattr(head, "bias", None),
            temperature=temperature,
            softcap=self.softcap,
            chunk_tokens=self.logits_chunk_tokens,
        )


def hidden_states(
    hf_model: PreTrainedModel,
    input_ids_BL: Tensor,
    position_ids_BL: Tensor,
    index_N: Tensor,
    *,
    packed_index: PackedIndex | None,
) -> Tensor:
    """Return the decoder's hidden states (N, H) at places in the flattened (B * L) rows.

    Args:
        packed_index: layout of samples when the single row is packed.
    """
    kwargs: dict[str, object] = {}
    if packed_index is not None:
        if hf_model.config._attn_implementation == "packed":
            kwargs["packed_index"] = packed_index
        else:
            borders, longest = packed_index.cu_seqlens, packed_index.max_len
            kwargs |= {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders}
            kwargs |= {"max_length_q": longest, "max_length_k": longest}
    output = hf_model.get_decoder()(input_ids=input_ids_BL, position_ids=position_ids_BL, use_cache=False, **kwargs)
    return output.last_hidden_state.flatten(0, 1).index_select(0, index_N)


def load_model_config(name: str) -> PreTrainedConfig:
    """Return the transformers config of a local directory or hub model.

    Raises:
        DataError: there is none, or it is of a kind that cannot be trained here.
    """
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise DataError(f"model.name = '{name}': no model config could be loaded. {_first_line(error)}") from None
    for scale in ("logit_scale", "logits_scaling"):
        if getattr(config, scale, 1.0) not in (None, 1.0):
            raise DataError(f"model.name = '{name}': models that scale their logits ({scale}) are not supported")
    return config


def build_policy(config: TrainedModelConfig, parallel: Parallel, *, seed: int, weights: bool = True) -> Policy:
    """Return the policy, in training mode, sharded over all ranks where there are several.

    Rank 0 reads (or initialises) the weights and broadcasts them, so they depend on the seed alone
    and not on the number of ranks.

    Args:
        weights: whether to fill in weights; without, they must be loaded from a checkpoint.

    Raises:
        DataError: the model directory is missing, incomplete or of an unknown kind.
    """
    model_config = load_model_config(config.name)
    if is_classifier(model_config):
        raise DataError(
            f"model.name = '{config.name}' scores whole sequences, as a reward model does (see architectures in its "
            "config.json), and has no head that predicts tokens: give a language model"
        )
    model_config._attn_implementation = config.attention
    weights = weights or config.lora is not None  # no checkpoint holds the weights that adapters are added to
    source = initial_weights(config, model_config, seed) if weights and parallel.is_main else {}
    with torch.device("meta"):
        causal_lm = AutoModelForCausalLM.from_config(
            model_config, dtype=torch.float32, attn_implementation=config.attention
        )
        if config.lora is not None:
            inject_adapters(causal_lm, config.lora)
    if config.lora is not None and parallel.is_main:
        source = initial_tensors(causal_lm, source, seed=seed)
    policy = Policy(causal_lm, logits_chunk_tokens=config.logits_chunk_tokens)
    materialize(policy, causal_lm, config, parallel, source if weights else None)
    return policy


def is_classifier(model_config: PreTrainedConfig) -> bool:
    """Return whether a directory holds a model with a head that scores sequences instead of predicting tokens."""
    return any(name.endswith("ForSequenceClassification") for name in model_config.architectures or [])


def materialize(
    model: nn.Module,
    hf_model: PreTrainedModel,
    config: TrainedModelConfig,
    parallel: Parallel,
    weights: dict[str, Tensor] | None,
) -> None:
    """Shard `model`, which was built on the meta device, and give it memory; it is in training mode then. Collective.

    Args:
        hf_model: the transformers model in it, which has all its tensors.
        weights: of `hf_model`, in full on rank 0, which broadcasts them; None: they will be loaded from
            a checkpoint.
    """
    _wrap(model, hf_model, config, parallel)
    model.to_empty(device=parallel.device)
    hf_model.tie_weights()
    _reset_buffers(hf_model)
    if weights is not None:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
        set_model_state_dict(hf_model, cast(dict[str, Any], weights), options=options)
    model.train()


def initial_weights(
    config: TrainedModelConfig,
    model_config: PreTrainedConfig,
    seed: int,
    *,
    kind: type[AutoModelForCausalLM | AutoModelForSequenceClassification] = AutoModelForCausalLM,
) -> dict[str, Tensor]:
    """Return the weights that a model starts with by name, as its directory or the seed gives them.

    Args:
        kind: which of the models with this config.

    Raises:
        DataError: the directory has no weights, or not all of them.
    """
    if config.init == "random":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            fresh = kind.from_config(model_config, dtype=torch.float32, attn_implementation="sdpa")
        return trained_tensors(fresh)
    if Path(config.name).is_dir() and not any(Path(config.name).glob("*.safetensors")):
        raise DataError(
            f"model.name = '{config.name}' has no *.safetensors. Set model.init = random to train from scratch."
        )
    try:
        answer = kind.from_pretrained(
            config.name,
            config=model_config,
            dtype=torch.float32,
            attn_implementation="sdpa",
            output_loading_info=True,
        )
        loaded, findings = cast(tuple[PreTrainedModel, dict[str, Any]], answer)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise DataError(
            f"model.name = '{config.name}': the weights could not be loaded. {_first_line(error)}"
        ) from None
    if missing := sorted(findings["missing_keys"]):  # transformers itself fills these with random numbers
        raise DataError(f"model.name = '{config.name}': the weights lack {len(missing)} tensors, such as {missing[0]}")
    return trained_tensors(loaded)


def trained_tensors(hf_model: nn.Module) -> dict[str, Tensor]:
    """Return what checkpoints hold of a model: parameters and persistent buffers by name, tied ones once.

    Of tied names the first wins. Of a model with adapters it is the adapters alone.
    """
    if is_adapted(hf_model):
        return {name: factor.detach() for name, factor in adapter_parameters(hf_model).items()}
    return base_tensors(hf_model)


def trained_parameters(hf_model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that an optimizer changes, by their names in `trained_tensors`."""
    if is_adapted(hf_model):
        return adapter_parameters(hf_model)
    return {name: parameter for name, parameter in hf_model.named_parameters() if parameter.requires_grad}


def _wrap(model: nn.Module, hf_model: PreTrainedModel, config: TrainedModelConfig, parallel: Parallel) -> None:
    layers = decoder_layers(hf_model)
    if config.activation_checkpointing:
        hf_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if config.compile:
        for layer in layers:
            layer.compile()
    if parallel.world_size == 1 and config.dtype == "float32":
        return  # nothing to shard and nothing to cast: FSDP would only copy, for a quarter of a small model's step
    mixed_precision = MixedPrecisionPolicy()
    if config.dtype == "bfloat16":
        mixed_precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # With one rank there is nothing to free by resharding, only copies to repeat.
    reshard = parallel.world_size > 1
    for layer in layers:
        fully_shard(layer, mesh=parallel.mesh, mp_policy=mixed_precision, reshard_after_forward=reshard)
    fully_shard(model, mesh=parallel.mesh, mp_policy=mixed_precision, reshard_after_forward=False)


def reshard(model: nn.Module) -> None:
    """Put all parameters back into shards, as a backward pass does.

    A forward pass without a backward (validation) leaves them whole, and then saving or publishing
    would see tensors that the optimizer does not update.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def decoder_layers(hf_model: PreTrainedModel) -> list[nn.Module]:
    """Return the transformer layers, the units of sharding, compiling and recomputing."""
    decoder = hf_model.get_decoder()
    layers = getattr(decoder, "layers", None) or getattr(decoder, "h", None)
    if not isinstance(layers, nn.ModuleList):
        raise DataError(f"{type(hf_model).__name__} has no list of decoder layers and cannot be sharded")
    return list(layers)


def _reset_buffers(hf_model: PreTrainedModel) -> None:
    """Compute again the buffers that no checkpoint holds (rotary frequencies): to_empty left garbage."""
    for module in hf_model.modules():
        if any(True for _ in module.buffers(recurse=False)):
            hf_model._init_weights(module)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
