"""A model that returns one number per chosen token: the reward model, and the critic of `rl`.

It is the architecture's `*ForSequenceClassification` with one label, a decoder with a linear head without bias.
Published weights load with `AutoModelForSequenceClassification.from_pretrained`.

Shape legend: B rows, L tokens of a row, N chosen tokens, S samples, H hidden size.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModelForSequenceClassification
from transformers.configuration_utils import PreTrainedConfig

from holdfast.config.training import TrainedModelConfig
from holdfast.errors import DataError
from holdfast.process.heartbeat import moved
from holdfast.trainer.data.packing import MicroBatch, PackedIndex, Sample, build_micro_batch, to_device
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.build import build_hf_model, filler, materialize, trained_tensors
from holdfast.trainer.model.decoder import DecoderModel
from holdfast.trainer.model.lora import HEAD, inject_adapters
from holdfast.trainer.model.model_config import is_classifier, load_model_config


class ScalarModel(DecoderModel):
    """A decoder and a head that maps the hidden state of a token to a number."""

    def forward(
        self, input_ids_BL: Tensor, position_ids_BL: Tensor, index_N: Tensor, *, packed_index: PackedIndex | None = None
    ) -> Tensor:
        """Return the values (N,) in float32 of the tokens at `index_N`, places in the flattened (B * L) rows."""
        hidden_NH = self.hidden_states(input_ids_BL, position_ids_BL, index_N, packed_index=packed_index)
        head_1H = self.hf_model.get_parameter(HEAD)
        values_N = hidden_NH.float() @ head_1H[0].float()
        row = self.row_slice(input_ids_BL)
        return values_N if row is None else row.whole(values_N, index_N)


def build_scalar_model(
    config: TrainedModelConfig,
    mesh: Mesh,
    *,
    seed: int,
    weights: bool = True,
    head: Literal["random", "zero"] = "random",
) -> ScalarModel:
    """Return the model, in training mode, sharded over all ranks. Collective.

    `config.name` is a reward model, or a causal LM, whose decoder gets a new head. Random weights do not depend on the
    ranks. With `config.lora` adapters and head are trained.

    Args:
        weights: whether to fill in weights; if False, load them from a checkpoint.
        head: values of a new head. `random`, for a reward model, is normal with standard deviation 1 / sqrt(H + 1)
            (Stiennon et al. 2020, "Learning to summarize from human feedback"); `zero` is for a critic.

    Raise DataError if the model directory is missing, incomplete, of an unknown kind, or has several labels.
    """
    model_config = load_model_config(config.name)
    if is_classifier(model_config) and model_config.num_labels != 1:
        raise DataError(
            f"model.name = '{config.name}' scores {model_config.num_labels} labels (num_labels in its config.json); "
            "a reward model scores 1"
        )
    model_config.num_labels = 1
    model_config.problem_type = "regression"
    if type(model_config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise DataError(
            f"model.name = '{config.name}': transformers has no sequence classification for {model_config.model_type}, "
            "so there is no format for a reward model of this kind"
        )
    with torch.device("meta"):
        hf_model = build_hf_model(AutoModelForSequenceClassification, config, model_config)
    if HEAD not in trained_tensors(hf_model):
        raise DataError(f"model.name = '{config.name}': {type(hf_model).__name__} has no linear head named {HEAD}")
    if config.lora is not None:
        inject_adapters(hf_model, config.lora)
        weights = True  # checkpoints hold adapters only
    fill = None
    if weights:
        has_head = is_classifier(model_config) and config.init == "pretrained"
        drawn = {} if has_head else {HEAD: _new_head(model_config, seed, head)}
        fill = filler(hf_model, config, seed=seed, drawn=drawn)
    model = ScalarModel(hf_model)
    materialize(model, config, mesh, fill)
    return model


def _new_head(model_config: PreTrainedConfig, seed: int, head: Literal["random", "zero"]) -> Tensor:
    """Return a new head, (1, H)."""
    width = model_config.get_text_config().hidden_size
    # torch's generator fills a random decoder from this seed.
    drawn_H = np.random.default_rng(seed).normal(0.0, (width + 1) ** -0.5, width)
    return torch.from_numpy(drawn_H).float()[None] * (head == "random")


def predict_values(model: ScalarModel, micro: MicroBatch, index_N: Tensor | None = None) -> Tensor:
    """Return the values (N,) of the micro-batch at `index_N`; unset: at the tokens that predict the targets."""
    moved()
    model.check_ids(micro)
    index_N = micro.predict_index_N if index_N is None else index_N
    return model(micro.input_ids_BL, micro.position_ids_BL, index_N, packed_index=micro.packed_index)


def score_samples(
    model: ScalarModel, samples: Sequence[Sample], indices: list[int], *, pack: bool, device: torch.device
) -> Tensor:
    """Return the values (S,) of `samples[indices]`, each read at its last token, in one forward pass.

    Without indices this rank takes part in the collectives, and the empty result has a gradient."""
    pack = pack and model.layout.packs
    micro = build_micro_batch(samples, indices, pack=pack, device=device)
    lengths_S = torch.tensor([len(samples[index].token_ids) for index in indices], dtype=torch.long)
    row_length = micro.input_ids_BL.shape[1]
    starts_S = lengths_S.cumsum(0) - lengths_S if pack else torch.arange(len(indices)) * row_length
    return predict_values(model, micro, to_device(starts_S + lengths_S - 1, device))
