"""The policy: a transformers causal LM whose forward gives log-probabilities, sharded by FSDP2.

Shape legend: B rows, L tokens of a row, N predicted tokens, H hidden size.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedModel,
)

from holdfast.config.training import TrainedModelConfig
from holdfast.errors import DataError
from holdfast.process.heartbeat import moved
from holdfast.trainer.data.packing import MicroBatch, PackedIndex
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.build import (
    build_hf_model,
    filler,
    is_classifier,
    load_model_config,
    materialize,
)
from holdfast.trainer.model.decoder import DecoderModel
from holdfast.trainer.model.logprobs import PLAIN, Head, Predicted, Reading, Readout, plain_head, token_logprobs
from holdfast.trainer.model.lora import inject_adapters
from holdfast.trainer.model.structure import compute_in_float32, has_plain_head, own_logits


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
        row = self.row_slice(input_ids_BL)
        if row is not None:
            own = row.own(predict_index_N)
            target_ids_N, reading = target_ids_N[own], reading.of(own)
        predicted = token_logprobs(
            hidden_NH, self._head(), target_ids_N, reading, chunk_tokens=self.logits_chunk_tokens, teacher=teacher
        )
        if row is None:
            return predicted
        found = {name: row.whole(column, predict_index_N) for name, column in predicted.columns().items()}
        return Predicted(**found)

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

    Its weights are those of the directory, or depend on the seed alone, and not on the number of ranks.

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
    # Without memory: a rank gets its shards and nothing more.
    with torch.device("meta"):
        causal_lm = build_hf_model(AutoModelForCausalLM, config, model_config)
        if config.lora is not None:
            inject_adapters(causal_lm, config.lora)
    fill = filler(causal_lm, config, seed=seed) if weights else None
    policy = Policy(causal_lm, logits_chunk_tokens=config.head_chunk_tokens, fp32_lm_head=config.fp32_lm_head)
    materialize(policy, config, mesh, fill)
    return policy


def predict(policy: Policy, micro: MicroBatch, reading: Reading = PLAIN, *, teacher: Policy | None = None) -> Predicted:
    """Return what `reading` asks for at the micro-batch's targets, each of shape (N,).

    Args:
        teacher: to measure the divergence from; its parameters stay whole until `reshard`.
    """
    moved()  # a step of many micro-batches is no silence
    rows = (micro.input_ids_BL, micro.position_ids_BL, micro.predict_index_N)
    taught = teacher.readout(*rows, packed_index=micro.packed_index) if teacher is not None else None
    return policy(*rows, micro.target_ids_N, packed_index=micro.packed_index, reading=reading, teacher=taught)
