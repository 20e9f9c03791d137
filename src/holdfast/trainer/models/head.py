"""The head of a causal LM: from hidden states to logits.

Most heads are a matrix, perhaps with a bias and a soft cap, and `token_logprobs` computes them. Others scale
or cap what goes in or comes out, under names of their own. So the model's own forward is the judge: it is
given hidden states in the place of its decoder's, and where `token_logprobs` would get other logits, the
model's own are taken, a chunk at a time as well.

Shape legend: C tokens of a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from holdfast.trainer.models.structure import decoder_of

_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8}  # relative; half a unit in the last place is 2^-9


class _Given:
    """The output of a decoder that was given: hidden states, and None for all else."""

    def __init__(self, hidden_BLH: Tensor) -> None:
        self.last_hidden_state = hidden_BLH

    def __getitem__(self, place: int | slice) -> Any:
        return (self.last_hidden_state,)[place]

    def __getattr__(self, name: str) -> None:
        return None


def own_logits(hf_model: PreTrainedModel, hidden_CH: Tensor) -> Tensor:
    """Return the logits (C, V) that the model's own forward makes of hidden states."""
    decoders = list({id(module): module for module in (hf_model.base_model, decoder_of(hf_model))}.values())
    decoders = [module for module in decoders if module is not hf_model]
    ids_1C = torch.zeros(1, hidden_CH.shape[0], dtype=torch.long, device=hidden_CH.device)
    with _giving(decoders, _Given(hidden_CH[None])):
        return hf_model(input_ids=ids_1C, use_cache=False).logits[0]


def compute_in_float32(head: nn.Module) -> None:
    """Have an output embedding multiply in float32, whatever the dtype of its weights and of hidden states.

    Scaling and caps of the model's own, which come behind it, are in float32 then, too.
    """

    def forward(hidden: Tensor) -> Tensor:
        weight, bias = head.get_parameter("weight").float(), getattr(head, "bias", None)
        return nn.functional.linear(hidden.float(), weight, None if bias is None else bias.float())

    head.forward = forward


@contextmanager
def _giving(modules: list[nn.Module], output: _Given) -> Iterator[None]:
    """Have the modules return `output`, whatever they are called with."""
    for module in modules:
        module.forward = lambda *_args, **_kwargs: output
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def has_plain_head(hf_model: PreTrainedModel, softcap: float | None) -> bool:
    """Whether the logits are the output embedding times the hidden states, capped by `softcap`, and nothing else.

    The weights of the head must all be 1, so that they cannot hide a difference.
    """
    head = hf_model.get_output_embeddings()
    if head is None or not isinstance(getattr(head, "weight", None), Tensor):
        return False
    weight_VH = head.weight
    values_C = torch.tensor([0.0, 1.0, -3.0, 8.0, 40.0], device=weight_VH.device, dtype=weight_VH.dtype)
    hidden_CH = torch.zeros(len(values_C), weight_VH.shape[1], device=weight_VH.device, dtype=weight_VH.dtype)
    hidden_CH[:, 0] = values_C
    logits_CV = nn.functional.linear(hidden_CH, weight_VH, getattr(head, "bias", None)).float()
    if softcap is not None:
        logits_CV = softcap * torch.tanh(logits_CV / softcap)
    own_CV = own_logits(hf_model, hidden_CH).float()
    rounding = _ROUNDING[weight_VH.dtype]
    return own_CV.shape == logits_CV.shape and torch.allclose(own_CV, logits_CV, rtol=rounding, atol=rounding)
