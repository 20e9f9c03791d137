"""Rotary frequencies that depend on how long a sample is, for rows that hold several.

Two kinds of rotary embeddings turn faster or slower once a sample is longer than the model was trained on: `longrope`
(Ding et al. 2024, https://arxiv.org/abs/2402.13753) and `dynamic` NTK scaling. transformers goes by the largest
position of a whole batch, and `dynamic` by the batches before as well. So a sample would be computed otherwise for
what else is in its row, and after a resume otherwise than before. Here each sample gets the frequencies that it has
alone in a fresh model.

Shape legend: B rows, L tokens of a row, D rotated numbers of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig


def rotate_by_sample(hf_model: nn.Module) -> bool:
    """Have rotary embeddings go by the length of each sample; return whether any of the model depends on it."""
    found = [module for module in hf_model.modules() if _kinds_by_length(module)]
    for module in found:
        module.forward = partial(_by_sample, module, module.forward)
    return bool(found)


def original_lengths(config: PreTrainedConfig) -> list[int]:
    """Return how long samples may be before a config's rotary frequencies change, where it says so."""
    parameters = getattr(config, "rope_parameters", None) or {}
    found = [
        one.get("original_max_position_embeddings")
        for one in (parameters, *parameters.values())
        if isinstance(one, dict)
    ]
    return [length for length in found if isinstance(length, int)]


def _kinds_by_length(module: nn.Module) -> dict[str | None, str]:
    """Return the kinds of frequencies that depend on the length, by type of layer; None where all have one kind."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds if isinstance(kinds, dict) else {None: kinds}
    return {
        layer: kind
        for layer, kind in kinds.items()
        if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")
    }


def _by_sample(
    module: Any, forward: Callable[..., Any], x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Return what `forward` gives for each sample alone; transformers' interface of rotary embeddings.

    Args:
        position_ids: (B, L) within each sample.
    """
    lengths_BL = _sample_lengths(position_ids)
    first = torch.zeros_like(position_ids[:1, :1])
    made: list[Tensor] = []
    is_tuple = True
    for longest in _classes(module, lengths_BL):
        forward(x, first, *args, **kwargs)  # one token: forgets what longer samples before set
        found = forward(x, position_ids.clamp(max=longest - 1), *args, **kwargs)
        is_tuple = isinstance(found, tuple)
        parts = found if is_tuple else (found,)
        chosen_BL1 = (lengths_BL <= longest)[..., None]
        made = [torch.where(chosen_BL1, *pair) for pair in zip(parts, made, strict=True)] if made else list(parts)
    return tuple(made) if is_tuple else made[0]


def _sample_lengths(position_ids_BL: Tensor) -> Tensor:
    """Return for each token how long its sample is: each begins at position 0, and so does each token of padding."""
    positions = position_ids_BL.flatten()
    sample = (positions == 0).cumsum(0)
    lengths = positions.new_zeros(positions.numel() + 1)
    return lengths.scatter_reduce(0, sample, positions + 1, "amax")[sample].view_as(position_ids_BL)


def _classes(module: Any, lengths_BL: Tensor) -> list[int]:
    """Return the longest of each class of samples that have the same frequencies, from long to short."""
    kinds = _kinds_by_length(module)
    original = min(_original_length(module, layer, kind) for layer, kind in kinds.items())
    lengths = lengths_BL.unique().tolist()  # ascending
    short, long = [n for n in lengths if n <= original], [n for n in lengths if n > original]
    if all(kind == "longrope" for kind in kinds.values()):
        long = long[-1:]
    return [*reversed(long), *short[-1:]]


def _original_length(module: Any, layer: str | None, kind: str) -> int:
    """Return how long a sample may be before the frequencies change."""
    if kind != "longrope":
        return module.original_max_seq_len
    parameters = module.config.rope_parameters
    return (parameters if layer is None else parameters[layer])["original_max_position_embeddings"]
