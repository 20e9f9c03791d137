"""The policy: a transformers causal LM whose forward gives log-probabilities, sharded by FSDP2.

How any transformers model gets its weights and shards is here too; `scalar_model` uses it.

Order of the wrappers: activation checkpointing, compile, FSDP.

Shape legend: B rows, L tokens of a row, N predicted tokens, H hidden size.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedModel,
)

from holdfast.shared.config.trainer import TrainedModelConfig
from holdfast.shared.errors import DataError, HoldfastError
from holdfast.shared.process.heartbeat import moved
from holdfast.trainer.data.packing import MicroBatch
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.models.attention import PackedIndex
from holdfast.trainer.models.head import compute_in_float32, has_plain_head, own_logits
from holdfast.trainer.models.layout import PACKED, Layout, find_layout
from holdfast.trainer.models.loading import build_hf_model, initial_weights, is_classifier, load_model_config, one_line
from holdfast.trainer.models.logprobs import PLAIN, Head, Predicted, Reading, Readout, plain_head, token_logprobs
from holdfast.trainer.models.lora import adapter_parameters, initial_tensors, inject_adapters, is_adapted
from holdfast.trainer.models.rotary import rotate_by_sample
from holdfast.trainer.models.structure import decoder_layers, decoder_of, last_position, takes_positions, use_attention

_log = logging.getLogger("trainer")
T = TypeVar("T")


class Trained(Protocol):
    """A module around a transformers model whose parameters and persistent buffers are its state."""

    hf_model: PreTrainedModel


class DecoderModel(nn.Module):
    """A transformers model and how samples lie in its rows: what `Policy` and `ScalarModel` have in common.

    Attributes:
        layout: whether samples can share a row, and the attention to use.
    """

    def __init__(self, hf_model: PreTrainedModel) -> None:
        super().__init__()
        self.hf_model = hf_model
        self.layout = PACKED
        self._needs_positions = rotate_by_sample(hf_model)
        self._last_position = last_position(hf_model)

    def run(self, function: Callable[[], T]) -> T:
        """Return what `function` does with the whole parameters, as `forward` sees them. Collective."""
        return function()

    def prepare(self) -> None:
        """Find out how the model is to be used. Called once, inside `run`, while all weights are 1; collective."""
        if self._needs_positions and not takes_positions(self.hf_model):
            raise DataError(
                f"{type(self.hf_model).__name__} turns its rotary embeddings by the length of a row (rope_type in its "
                "config.json) and takes no positions of tokens, so samples of a row cannot be told apart"
            )
        self.layout = find_layout(self.hf_model, self._all_hidden_states, self.layout.attention)

    def _all_hidden_states(self, input_ids_1L: Tensor) -> Tensor:
        positions_1L = torch.arange(input_ids_1L.shape[1], device=input_ids_1L.device)[None]
        index = PackedIndex.from_lengths([input_ids_1L.shape[1]], device=input_ids_1L.device)
        return self.hidden_states(
            input_ids_1L, positions_1L, positions_1L[0], packed_index=index if self.layout.packs else None
        )

    def hidden_states(
        self, input_ids_BL: Tensor, position_ids_BL: Tensor, index_N: Tensor, *, packed_index: PackedIndex | None
    ) -> Tensor:
        """Return the decoder's hidden states (N, H) at places in the flattened (B * L) rows.

        Args:
            packed_index: layout of samples when the single row is packed.

        Raises:
            DataError: a sample is longer than the model has positions.
        """
        longest = input_ids_BL.shape[1] if packed_index is None else packed_index.max_len
        if self._last_position is not None and longest > self._last_position:
            raise DataError(
                f"a sample has {longest} tokens, and {type(self.hf_model).__name__} has positions for "
                f"{self._last_position} (max_position_embeddings in its config.json): shorten it"
            )
        kwargs: dict[str, object] = {}
        decoder = decoder_of(self.hf_model)
        if self.layout.packs or self._needs_positions:
            kwargs["position_ids"] = position_ids_BL
        if packed_index is not None:
            assert self.layout.packs, f"{type(self.hf_model).__name__} cannot be packed: {self.layout.reason}"
            if self.layout.attention == "packed":
                kwargs["packed_index"] = packed_index
            else:
                borders, longest = packed_index.cu_seqlens, packed_index.max_len
                kwargs |= {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders}
                kwargs |= {"max_length_q": longest, "max_length_k": longest}
        output = decoder(input_ids=input_ids_BL, use_cache=False, **kwargs)
        return output.last_hidden_state.flatten(0, 1).index_select(0, index_N)


class Policy(DecoderModel):
    """A causal LM that returns log-probabilities of chosen tokens instead of logits."""

    def __init__(self, hf_model: PreTrainedModel, *, logits_chunk_tokens: int, fp32_lm_head: bool = False) -> None:
        super().__init__(hf_model)
        self.logits_chunk_tokens = logits_chunk_tokens
        self.fp32_lm_head = fp32_lm_head
        head = hf_model.get_output_embeddings()
        if fp32_lm_head and head is not None:
            compute_in_float32(head)  # for the model's own code; a plain head is computed here
        self.softcap = getattr(hf_model.config.get_text_config(), "final_logit_softcapping", None)
        self.has_plain_head = True

    def prepare(self) -> None:
        """See `DecoderModel.prepare`; the head too."""
        super().prepare()
        with torch.no_grad():
            self.has_plain_head = has_plain_head(self.hf_model, self.softcap)

    def forward(
        self,
        input_ids_BL: Tensor,
        position_ids_BL: Tensor,
        predict_index_N: Tensor,
        target_ids_N: Tensor,
        *,
        packed_index: PackedIndex | None = None,
        reading: Reading = PLAIN,
        teacher: Readout | None = None,
    ) -> Predicted:
        """Return what `reading` asks for at the targets.

        Args:
            predict_index_N: places in the flattened (B * L) rows whose hidden state predicts a target.
            target_ids_N: the tokens that are predicted.
            packed_index: layout of samples when the single row is packed.
            teacher: of another policy at the same targets, to measure the divergence from.
        """
        hidden_NH = self.hidden_states(input_ids_BL, position_ids_BL, predict_index_N, packed_index=packed_index)
        return token_logprobs(
            hidden_NH, self._head(), target_ids_N, reading, chunk_tokens=self.logits_chunk_tokens, teacher=teacher
        )

    @torch.no_grad()
    def readout(
        self,
        input_ids_BL: Tensor,
        position_ids_BL: Tensor,
        predict_index_N: Tensor,
        *,
        packed_index: PackedIndex | None = None,
    ) -> Readout:
        """Return what makes this policy's logits at the targets: hidden states, and the head. Collective.

        The parameters stay whole, and the head usable, until `reshard`.
        """
        return self.run(
            lambda: Readout(
                self.hidden_states(input_ids_BL, position_ids_BL, predict_index_N, packed_index=packed_index),
                self._head(),
            )
        )

    def _head(self) -> Head:
        if not self.has_plain_head:
            return partial(own_logits, self.hf_model)
        head = self.hf_model.get_output_embeddings()
        assert head is not None, "a plain head is an output embedding"
        bias_V = getattr(head, "bias", None)
        return plain_head(head.weight, bias_V=bias_V, softcap=self.softcap, in_float32=self.fp32_lm_head)


def build_policy(config: TrainedModelConfig, mesh: Mesh, *, seed: int, weights: bool = True) -> Policy:
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
    if type(model_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise DataError(
            f"model.name = '{config.name}': transformers has no causal language model of type "
            f"{model_config.model_type}, so it cannot be trained here"
        )
    weights = weights or config.lora is not None  # no checkpoint holds the weights that adapters are added to
    source = initial_weights(config, model_config, seed) if weights and mesh.is_main else {}
    with torch.device("meta"):
        causal_lm = build_hf_model(AutoModelForCausalLM, config, model_config)
        if config.lora is not None:
            inject_adapters(causal_lm, config.lora)
    if config.lora is not None and mesh.is_main:
        source = initial_tensors(causal_lm, source, seed=seed)
    policy = Policy(causal_lm, logits_chunk_tokens=config.logits_chunk_tokens, fp32_lm_head=config.fp32_lm_head)
    materialize(policy, config, mesh, source if weights else None)
    return policy


def materialize(model: DecoderModel, config: TrainedModelConfig, mesh: Mesh, weights: dict[str, Tensor] | None) -> None:
    """Shard `model`, which was built on the meta device, and give it memory; it is in training mode then. Collective.

    Args:
        weights: of the transformers model in it, in full on rank 0, which broadcasts them; None: they will be
            loaded from a checkpoint.

    Raises:
        DataError: the model cannot be used in the configured way.
    """
    hf_model = model.hf_model
    _wrap(model, config, mesh)
    model.to_empty(device=mesh.device)
    hf_model.tie_weights()
    _reset_buffers(hf_model)
    _prepare(model, config, mesh)
    if weights is not None:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
        set_model_state_dict(hf_model, cast(dict[str, Any], weights), options=options)
    model.train()


def _prepare(model: DecoderModel, config: TrainedModelConfig, mesh: Mesh) -> None:
    """Have the model find out how it is to be used, before it has its weights: that must not depend on them."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    model.layout = Layout(packs=takes_positions(model.hf_model), attention=config.attention)
    was_training = model.training
    model.eval()
    devices = [mesh.device] if mesh.device.type == "cuda" else []
    with naming_failures(model, config.name, config.dtype), torch.random.fork_rng(devices=devices):
        model.run(model.prepare)
    reshard(model)
    model.train(was_training)
    use_attention(model.hf_model, model.layout.attention)


@contextmanager
def naming_failures(model: DecoderModel, name: str, dtype: str) -> Iterator[None]:
    """Name the model whose forward pass in the block fails.

    Raises:
        DataError: it failed: the model cannot compute with its config.json in this dtype.
    """
    try:
        yield
    except (HoldfastError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        _log.debug("the forward pass failed", exc_info=True)
        advice = " Try model.dtype = float32." if dtype != "float32" else ""
        raise DataError(
            f"model.name = '{name}': transformers' forward pass of {type(model.hf_model).__name__} fails with this "
            f"config.json in {dtype}. {type(error).__name__}: {one_line(error)}.{advice}"
        ) from error


def trained_parameters(hf_model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that an optimizer changes, by their names in `trained_tensors`."""
    if is_adapted(hf_model):
        return adapter_parameters(hf_model)
    return {name: parameter for name, parameter in hf_model.named_parameters() if parameter.requires_grad}


def _wrap(model: DecoderModel, config: TrainedModelConfig, mesh: Mesh) -> None:
    hf_model = model.hf_model
    layers = decoder_layers(hf_model)
    if config.activation_checkpointing:
        if not hf_model.supports_gradient_checkpointing:
            raise DataError(
                f"model.activation_checkpointing: transformers cannot recompute the layers of {type(hf_model).__name__}"
            )
        hf_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if config.compile:
        for layer in layers:
            layer.compile()
    if mesh.world_size == 1 and config.dtype == "float32":
        return  # nothing to shard and nothing to cast: FSDP would only copy, for a quarter of a small model's step
    mixed_precision = MixedPrecisionPolicy()
    if config.dtype == "bfloat16":
        mixed_precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # With one rank there is nothing to free by resharding, only copies to repeat.
    reshard = mesh.world_size > 1
    for layer in layers:
        fully_shard(layer, mesh=mesh.device_mesh, mp_policy=mixed_precision, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh.device_mesh, mp_policy=mixed_precision, reshard_after_forward=False)
    register_fsdp_forward_method(model, "run")


def predict(policy: Policy, micro: MicroBatch, reading: Reading = PLAIN, *, teacher: Policy | None = None) -> Predicted:
    """Return what `reading` asks for at the micro-batch's targets, each of shape (N,).

    Args:
        teacher: to measure the divergence from; its parameters stay whole until `reshard`.
    """
    moved()  # a step of many micro-batches is no silence
    rows = (micro.input_ids_BL, micro.position_ids_BL, micro.predict_index_N)
    taught = teacher.readout(*rows, packed_index=micro.packed_index) if teacher is not None else None
    return policy(*rows, micro.target_ids_N, packed_index=micro.packed_index, reading=reading, teacher=taught)


def reshard(model: nn.Module) -> None:
    """Put all parameters back into shards, as a backward pass does.

    A forward pass without a backward (validation) leaves them whole, and then saving or publishing
    would see tensors that the optimizer does not update.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _reset_buffers(hf_model: PreTrainedModel) -> None:
    """Compute again the buffers that no checkpoint holds (rotary frequencies): to_empty left garbage.

    Raises:
        DataError: transformers does not say what belongs into one of them.
    """
    for parameter in hf_model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers leaves these as they are
    for module in hf_model.modules():
        module._is_hf_initialized = False  # type: ignore[assignment]
    buffers = {name: buffer for name, buffer in hf_model.named_buffers() if buffer.is_floating_point()}
    for buffer in buffers.values():
        buffer.fill_(math.nan)
    hf_model.initialize_weights()
    persistent = hf_model.state_dict().keys()
    if left := [name for name, buffer in buffers.items() if buffer.isnan().any() and name not in persistent]:
        raise DataError(
            f"{type(hf_model).__name__} does not say how to compute its buffer {left[0]}, so it cannot be trained here"
        )
    for name, buffer in buffers.items():
        if name in persistent and buffer.isnan().any():
            buffer.fill_(1.0)
