"""Warm start: filling a model with the weights of a file or directory, and nothing else.

    step_100/ (a checkpoint)        torch.distributed.checkpoint below trainer/, names `model.*`; verified
    a torch.distributed.checkpoint  names as they are, or all behind one prefix such as `app.model.`
    a LoRA adapter                  for a model with adapters: ours, or a directory of peft's
    weights/step_100, a Hugging     *.safetensors, with an index where there are several;
    Face directory                  published weights are verified
    one file                        .safetensors

Tensors may be sharded; each rank reads what it holds. Optimizer and counters are never touched.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from holdfast.shared.errors import CheckpointError
from holdfast.shared.files import manifest
from holdfast.shared.files.adapter import adapted_matrices
from holdfast.shared.files.checkpoints import Kind, require_weights, verify_checkpoint
from holdfast.shared.files.manifest import MANIFEST_NAME, Verification
from holdfast.shared.files.warm_start import WEIGHT_PREFIXES
from holdfast.trainer.checkpoints.index import some
from holdfast.trainer.checkpoints.weight_sources import ConvertedSource, Found, Layout, Source, local_part, open_source
from holdfast.trainer.mesh import RankGroup

_log = logging.getLogger("trainer")

# What older Hugging Face files hold besides weights: computed from the config.
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$|\.masked_bias$")
_OPTIMIZER = re.compile(r"optim(izers?)?\.")
# Output and input embeddings, by the ends of their names; tied models keep one of them.
_HEADS = ("lm_head.weight", "embed_out.weight")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")


def load_weights_only(
    tensors: Mapping[str, Tensor], path: Path, *, how: Verification = "full", layout: Layout | None = None
) -> None:
    """Fill `tensors` in place with the weights at `path`. Collective.

    Other dtypes are cast, and the log says so. Where input and output embeddings are one tensor, the
    file may have either name, or both with equal values.

    Checkpoints and published weights are verified first. Nothing runs code of the source: the index of a
    torch.distributed.checkpoint directory may name parts of an index alone.

    Args:
        tensors: the live tensors of a model by their Hugging Face names; plain, or sharded over all ranks.
        path: a checkpoint, a torch.distributed.checkpoint directory, a Hugging Face directory, or one file.
        how: how checkpoints and published weights are verified, see `manifest.verify`.
        layout: of files that hold other tensors than memory; unset: files have the same.

    Raises:
        CheckpointError: there are no weights, they are damaged, or not of this model: missing, surplus
            or differently shaped tensors.
    """
    kind = require_weights(path)
    with RankGroup() as ranks:  # one rank reads every byte; what it finds is raised on all
        ranks.on_main(lambda: _verify(path, kind, how), error=CheckpointError)
    source = open_source(path, kind)
    prefixes = ("model.",) if kind is Kind.CHECKPOINT else WEIGHT_PREFIXES
    is_as_in_memory = any(all(f"{prefix}{name}" in source.found for name in tensors) for prefix in prefixes)
    if layout is not None and kind is not Kind.CHECKPOINT and not is_as_in_memory and not adapted_matrices(tensors):
        source = ConvertedSource(source, layout)
    names = _match(tensors, source, prefixes, f"{path} ({kind})")
    cast = {(source.found[name].dtype, tensors[own].dtype) for own, name in names.items()}
    for there, here in sorted(cast, key=str):
        if there != here:
            _log.info("%s: weights are cast from %s to %s", path, there, here)
    source.fill({name: tensors[own] for own, name in names.items()})
    _log.info("took the weights of %s, %d tensors; optimizer and counters start afresh", path, len(names))


def _verify(path: Path, kind: Kind, how: Verification) -> None:
    """Verify what has a manifest."""
    if kind is Kind.CHECKPOINT:
        verify_checkpoint(path, how=how)
    elif kind in (Kind.WEIGHTS, Kind.ADAPTER) and (path / MANIFEST_NAME).exists():
        manifest.verify(path, how=how)


def _match(tensors: Mapping[str, Tensor], source: Source, prefixes: tuple[str, ...], what: str) -> dict[str, str]:
    """Return own name -> name in the source, for exactly the tensors of the model.

    Raises:
        CheckpointError: the source is of another model.
    """
    prefix = max(prefixes, key=lambda prefix: sum(f"{prefix}{name}" in source.found for name in tensors))
    there = {
        name.removeprefix(prefix): found
        for name, found in source.found.items()
        if name.startswith(prefix) and not _COMPUTED.search(name) and not _OPTIMIZER.match(name)
    }
    names = {name: f"{prefix}{name}" for name in tensors if name in there}
    missing, surplus = sorted(tensors.keys() - there.keys()), sorted(there.keys() - tensors.keys())
    head = next((name for name in surplus if name.endswith(_HEADS)), None)
    embedding = next((name for name in tensors if name.endswith(_EMBEDDINGS)), None)
    if head is not None and embedding is not None and there[head].shape == tuple(tensors[embedding].shape):
        surplus.remove(head)
        if embedding in missing:
            missing.remove(embedding)
            names[embedding] = f"{prefix}{head}"
        elif not _are_equal(source, f"{prefix}{embedding}", f"{prefix}{head}", tensors[embedding]):
            raise CheckpointError(
                f"{what} does not fit this model: {head} differs from {embedding} there, and this model has one "
                "tensor for both. Set tie_word_embeddings to false in the config.json of --model.name."
            )
    _refuse_adapter_for_weights(tensors, there, what)
    if missing or surplus:
        raise CheckpointError(
            f"{what} does not fit this model: it lacks {some(missing)} and has besides {some(surplus)}. "
            f"Needed: {len(tensors)} tensors such as {next(iter(tensors))}, found {len(there)}. The model is built "
            "as the config.json of --model.name says."
        )
    _check_shapes(tensors, {own: source.found[name] for own, name in names.items()}, what)
    return names


def _refuse_adapter_for_weights(tensors: Mapping[str, Tensor], there: Mapping[str, Found], what: str) -> None:
    """Refuse an adapter where weights are needed, and the reverse."""
    if adapted_matrices(there) and not adapted_matrices(tensors):
        raise CheckpointError(
            f"{what} holds a LoRA adapter and no weights. Train it on with --model.lora and the model that it belongs "
            "to as --model.name, or merge it: ckpt export STEP --to DIR --base NAME."
        )
    if adapted_matrices(tensors) and not adapted_matrices(there):
        raise CheckpointError(
            f"{what} holds no LoRA adapter, and with model.lora nothing else is loaded. Weights to start from are "
            "given as --model.name (of a checkpoint: ckpt export STEP --to DIR)."
        )


def _check_shapes(tensors: Mapping[str, Tensor], there: Mapping[str, Found], what: str) -> None:
    wrong = [
        f"{name} is {there[name].shape} {there[name].dtype} there, {tuple(tensor.shape)} {tensor.dtype} here"
        for name, tensor in tensors.items()
        if there[name].shape != tuple(tensor.shape)
        or there[name].dtype.is_floating_point != tensor.dtype.is_floating_point
    ]
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(f"{what} does not fit this model: {'; '.join(wrong[:3])}{more}")


def _are_equal(source: Source, first: str, second: str, like: Tensor) -> bool:
    """Whether two tensors of the source are equal, in the part of them that this rank would hold."""
    if source.found[first] != source.found[second]:
        return False
    buffers = {name: torch.empty_like(like, dtype=source.found[name].dtype) for name in (first, second)}
    source.fill(buffers)
    one, other = (local_part(buffer)[0] for buffer in buffers.values())
    return torch.equal(one, other)
