"""The policy: a transformers causal LM whose forward returns log-probabilities, sharded by FSDP2; its cross-entropy.

Shape legend: B rows, L tokens of a row, N predicted tokens, H hidden size.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel

from holdfast.config.data import SftDataConfig
from holdfast.config.training import TrainedModelConfig
from holdfast.errors import DataError
from holdfast.process.heartbeat import moved
from holdfast.trainer.data.packing import MicroBatch, PackedIndex, Sample, build_micro_batch, plan_rows
from holdfast.trainer.mesh import Mesh, Sums
from holdfast.trainer.model.build import build_hf_model, filler, materialize
from holdfast.trainer.model.decoder import DecoderModel, rows_of_update
from holdfast.trainer.model.logprobs import PLAIN, Head, Predicted, Reading, Readout, plain_head, token_logprobs
from holdfast.trainer.model.lora import inject_adapters
from holdfast.trainer.model.model_config import is_classifier, load_model_config
from holdfast.trainer.model.packing_check import Layout
from holdfast.trainer.model.structure import compute_in_float32, has_plain_head, own_logits


class Policy(DecoderModel):
    """A causal LM that returns log-probabilities of chosen tokens instead of logits."""

    def __init__(self, hf_model: PreTrainedModel, *, logits_chunk_tokens: int, fp32_lm_head: bool = False) -> None:
        super().__init__(hf_model)
        self.logits_chunk_tokens = logits_chunk_tokens
        self.fp32_lm_head = fp32_lm_head
        head = hf_model.get_output_embeddings()
        if fp32_lm_head and head is not None:
            compute_in_float32(head)  # for the model's own code; `token_logprobs` computes a plain head
        self.softcap = getattr(hf_model.config.get_text_config(), "final_logit_softcapping", None)
        self.has_plain_head = True

    def prepare(self) -> None:
        """Find out the layout, and whether the head is plain."""
        super().prepare()
        with torch.no_grad():
            self.has_plain_head = has_plain_head(self.hf_model, self.softcap)

    def take_over(self, other: DecoderModel) -> None:
        """Take over what `prepare` found out with another policy of the same kind."""
        super().take_over(other)
        assert isinstance(other, Policy)
        self.has_plain_head = other.has_plain_head

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
            target_ids_N: the predicted tokens.
            packed_index: layout of samples if the single row is packed.
            teacher: another policy at the same targets, to measure the divergence from.
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
        """Return hidden states at the targets, and the head. Collective.

        The parameters stay whole, and the head usable, until `reshard`."""
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


def build_policy(
    config: TrainedModelConfig, mesh: Mesh, *, seed: int, weights: bool = True, like: Policy | None = None
) -> Policy:
    """Return the policy, in training mode, sharded over all ranks. Random weights do not depend on the ranks.

    Args:
        weights: whether to fill in weights; if False, load them from a checkpoint.
        like: another policy of the same kind, whose layout is taken over; no weights are filled in then.

    Raise DataError if the model directory is missing, incomplete or of an unknown kind.
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
    weights = weights or config.lora is not None  # checkpoints hold adapters only
    with torch.device("meta"):
        causal_lm = build_hf_model(AutoModelForCausalLM, config, model_config)
        if config.lora is not None:
            inject_adapters(causal_lm, config.lora)
    fill = filler(causal_lm, config, seed=seed) if weights and like is None else None
    policy = Policy(causal_lm, logits_chunk_tokens=config.head_chunk_tokens, fp32_lm_head=config.fp32_lm_head)
    materialize(policy, config, mesh, fill, like=like)
    return policy


def predict(policy: Policy, micro: MicroBatch, reading: Reading = PLAIN, *, teacher: Policy | None = None) -> Predicted:
    """Return what `reading` asks for at the micro-batch's targets, each of shape (N,). `teacher`: to measure the
    divergence from; its parameters stay whole until `reshard`."""
    moved()
    policy.check_ids(micro)
    rows = (micro.input_ids_BL, micro.position_ids_BL, micro.predict_index_N)
    taught = teacher.readout(*rows, packed_index=micro.packed_index) if teacher is not None else None
    return policy(*rows, micro.target_ids_N, packed_index=micro.packed_index, reading=reading, teacher=taught)


def cross_entropy(logprobs_N: Tensor, weights_N: Tensor) -> Tensor:
    """Return the negative log-likelihood, in nats. Denominator: all trained tokens of the step."""
    return -(weights_N * logprobs_N).sum()


WATCHED = Reading(entropy=True, accuracy=True)
"""The numbers that supervised training and validation show of each target."""


def supervised_step(
    policy: Policy, batch: Sequence[Sample], config: SftDataConfig, mesh: Mesh, *, coef: float = 1.0
) -> dict[str, float]:
    """Accumulate `coef` times the gradients of the mean cross-entropy over all targets; return the means over the
    targets: `loss`, `entropy` and `token_accuracy`. Collective."""
    total_targets = sum(sample.num_targets for sample in batch)
    totals = Sums("loss", "entropy", "token_accuracy")
    pack = policy.layout.arrangement(pack=config.pack) == "packed"
    for indices in rows_of_update(policy, plan_samples(batch, policy.layout, config, mesh)):
        micro = build_micro_batch(batch, indices, pack=pack, device=mesh.device)
        predicted = predict(policy, micro, WATCHED)
        weights_N = torch.full_like(predicted.logprobs_N, 1 / total_targets)
        loss = cross_entropy(predicted.logprobs_N, weights_N)
        # FSDP averages gradients over ranks; the weights above sum to one over all of them.
        (loss * (coef * mesh.world_size)).backward()
        totals.add({"loss": loss, **watched(predicted, total_targets)})
    return mesh.sum(totals.read())


def watched(predicted: Predicted, num_targets: int) -> dict[str, Tensor]:
    """Return the sums of entropy and accuracy, as parts of means over `num_targets`."""
    assert predicted.entropy_N is not None and predicted.accuracy_N is not None  # WATCHED asks for both
    return {
        "entropy": predicted.entropy_N.detach().double().sum() / num_targets,
        "token_accuracy": predicted.accuracy_N.double().sum() / num_targets,
    }


def plan_samples(batch: Sequence[Sample], layout: Layout, config: SftDataConfig, mesh: Mesh) -> list[list[int]]:
    """Return this rank's micro-batches of supervised samples, as indices into `batch`."""
    lengths = [len(sample.token_ids) for sample in batch]
    plan = plan_rows(
        lengths,
        costs=[layout.cost(length) for length in lengths],
        arrangement=layout.arrangement(pack=config.pack),
        budget=config.seq_len * config.micro_batch_size,
        rows_per_micro_batch=config.micro_batch_size,
        world_size=mesh.data_size,
    )
    return plan[mesh.data_rank]
