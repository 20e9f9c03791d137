"""LoRA adapters: reading one, and the model that it makes of the engine's own weights.

Place in the flow: of a run with LoRA the trainer publishes the adapter alone, a small part of the
model. The worker adds it to the weights of the engine's model directory with the same sums as the
trainer, and then swaps in the result as it does with whole weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from holdfast.inference.weights.files import OUTPUT_LAYER, Architecture, checked, read_files
from holdfast.inference.weights.transport import CheckedWeights
from holdfast.shared.errors import CheckpointError, DataError
from holdfast.shared.files.adapter import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_NAME,
    PEFT_PREFIX,
    adapted_matrices,
    read_base,
    read_scaling,
    tensors_digest,
)
from holdfast.shared.files.manifest import MANIFEST_NAME, verify
from holdfast.shared.files.weights_digest import weights_files


class BaseWeights:
    """The weights that adapters are added to: those of the engine's model directory, whatever is served now.

    The files are mapped into memory, so they take no more of it than the system has to spare.

    Attributes:
        directory: where they lie.
        digest: `holdfast.shared.files.adapter.tensors_digest` of them in float32.
    """

    def __init__(self, directory: Path, architecture: Architecture) -> None:
        """Read all of them once.

        Raises:
            DataError: there are none, or not all that the architecture has.
        """
        self.directory = directory
        self.architecture = architecture
        files = weights_files(directory)
        if not files:
            raise DataError(
                f"{directory} holds no *.safetensors file, and an adapter is added to what lies there. "
                "Start the server with the model directory that the trainer has."
            )
        self.tensors: dict[str, torch.Tensor] = {}
        for file in files:
            self.tensors |= load_file(file)
        if architecture.tied:
            self.tensors.pop(OUTPUT_LAYER, None)
        for name in architecture.ignored:  # the trainer has none of these
            self.tensors.pop(name, None)
        self.digest = tensors_digest(self._in_float32())

    def _in_float32(self) -> Iterator[tuple[str, tuple[int, ...], memoryview]]:
        for name, tensor in self.tensors.items():
            # In float32: the trainer digests its own in that, whatever dtype its files have.
            tensor = tensor.float() if tensor.is_floating_point() else tensor
            yield name, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def read_adapter(
    directory: Path, base: BaseWeights, *, dtype: torch.dtype, version: int | None = None
) -> CheckedWeights:
    """Return the model that `base` and the adapter in `directory` make, checked as whole weights are.

    The digest is that of the adapter's file and of how often it counts.

    Raises:
        DataError: the adapter is damaged, or belongs to other weights.
    """
    tensors, digest = read_files(directory, base.architecture, version=version)
    if (directory / MANIFEST_NAME).exists():
        try:
            verify(directory)  # the settings beside the tensors
        except CheckpointError as error:
            raise DataError(str(error)) from None
    wanted = read_base(directory)
    if wanted.digest != base.digest:
        raise DataError(
            f"{directory} is an adapter for the weights of '{wanted.name}' (digest {wanted.digest}), and this server "
            f"has those of {base.directory} ({base.digest}). Start it with the weights that the trainer has."
        )
    adapted = _adapted(directory, tensors, base, renamed=wanted.renamed)
    # A copy: the next adapter is added to the same base.
    merged = dict(base.tensors) | adapted
    return CheckedWeights(
        tensors={name: checked(directory, name, tensor, base.architecture, dtype) for name, tensor in merged.items()},
        digest=digest,
    )


def _adapted(
    directory: Path, tensors: dict[str, torch.Tensor], base: BaseWeights, *, renamed: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    """Return the matrices that the factors in `tensors` change, in float32, by their names in `base`.

    Args:
        renamed: names in `base` of matrices that the adapter calls otherwise.

    Shape legend: O outputs and I inputs of a linear layer, R rank.
    """
    scaling = read_scaling(directory)
    factors = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in tensors.items()}
    matrices = adapted_matrices(factors)
    if not matrices:
        raise DataError(f"{directory} adapts nothing: {ADAPTER_NAME} holds no factors")
    known = {name for pair in matrices.values() for name in pair}
    if surplus := sorted(factors.keys() - known):
        raise DataError(f"{directory}: tensor '{surplus[0]}' is no factor of an adapter")
    adapted = {}
    for matrix, names in matrices.items():
        if missing := [name for name in names if name not in factors]:
            raise DataError(f"{directory}: tensor '{missing[0]}' is missing")
        matrix = renamed.get(matrix, matrix)
        if matrix not in base.tensors:
            raise DataError(f"{directory}: '{matrix}', which it adapts, is not part of the model")
        weight_OI, a_RI, b_OR = base.tensors[matrix], factors[names.a], factors[names.b]
        _check_factors(directory, matrix, a_RI, b_OR, outputs_and_inputs=tuple(weight_OI.shape), rank=scaling.r)
        # The same sums as `holdfast.trainer.models.lora.merged`, for the same bits.
        adapted[matrix] = weight_OI.float() + (b_OR.float() @ a_RI.float()) * scaling.scale
    return adapted


def _check_factors(
    directory: Path,
    matrix: str,
    a_RI: torch.Tensor,
    b_OR: torch.Tensor,
    *,
    outputs_and_inputs: tuple[int, ...],
    rank: int,
) -> None:
    for factor in (a_RI, b_OR):
        if not factor.dtype.is_floating_point:
            raise DataError(f"{directory}: a factor of '{matrix}' has dtype {factor.dtype}, which is no float")
    shapes = tuple(a_RI.shape), tuple(b_OR.shape)
    if len(outputs_and_inputs) != 2 or shapes != ((rank, outputs_and_inputs[1]), (outputs_and_inputs[0], rank)):
        raise DataError(
            f"{directory}: the factors of '{matrix}' have the shapes {list(a_RI.shape)} and {list(b_OR.shape)}, which "
            f"do not fit {list(outputs_and_inputs)} and the rank r = {rank} of {ADAPTER_CONFIG_NAME}"
        )
