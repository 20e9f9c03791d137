"""Reading published weights without torch: codes and digests are those of `holdfast.inference.weights`."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import safetensors.numpy
import xxhash
from safetensors import SafetensorError

from holdfast.errors import CheckpointError, DataError
from holdfast.protocol.transfer import Transfer
from holdfast.run.manifest import MANIFEST_NAME, read_manifest, verify
from holdfast.run.weights import (
    PEFT_PREFIX,
    WeightsFile,
    adapted_matrices,
    combined_digest,
    holds_adapter,
    read_base,
    read_scaling,
    scaling_of,
    tensors_digest,
    weights_files,
)
from tests.servers.stub_model import Floats, Shape

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_INDEX_NAME = "model.safetensors.index.json"


Read = tuple[dict[str, Floats], str]
"""Weights by the names of their tensors, and their digest."""


class Weights:
    """Reads weights for the model in a directory."""

    def __init__(self, model_dir: Path) -> None:
        self.shape = Shape.read(model_dir)  # of that model
        self.model_dir = model_dir
        self._shapes = self._expected_shapes()

    def read(self, directory: Path, version: int | None = None) -> Read:
        """Return whole weights, of an adapter those of the model with it, and the digest of the directory. Raises
        `DataError`: they cannot be used. Raises `OSError`: they cannot be read."""
        if not directory.is_dir():
            raise DataError(f"{directory} is not a directory")
        files = weights_files(directory)
        if not files:
            raise DataError(f"{directory} holds no *.safetensors file")
        self._check_lists(directory, version)
        tensors: dict[str, Floats] = {}
        described = []
        for path in files:
            content = path.read_bytes()
            try:
                tensors |= safetensors.numpy.load(content)
            except (SafetensorError, ValueError, KeyError) as error:
                raise DataError(f"{path} is not a whole safetensors file: {error}") from None
            described.append(WeightsFile(path.name, len(content), xxhash.xxh3_128_hexdigest(content)))
        digest = combined_digest(described + scaling_of(directory, [file.name for file in described]))
        if holds_adapter(directory):
            tensors = self._adapted(directory, tensors)
        return self._checked(directory, tensors), digest

    def join(self, transfer: str) -> Callable[[], Read]:
        """Join a transfer as the workers of vLLM do, and return what receives the weights."""
        import torch  # not where weights come as directories

        from holdfast.inference.transfer import Incoming
        from holdfast.inference.weight_files import read_architecture

        wanted, architecture = msgspec.json.decode(transfer, type=Transfer), read_architecture(self.model_dir)
        incoming = Incoming.join(wanted, rank=0, architecture=architecture, device=torch.device("cpu"))

        def receive() -> Read:
            tensors = incoming.receive(architecture, torch.float32)
            found = {name: tensor.numpy() for name, tensor in tensors}
            return self._checked(Path(transfer), found), incoming.digest

        return receive

    def _expected_shapes(self) -> dict[str, tuple[int, ...]]:
        files = weights_files(self.model_dir)
        if not files:
            return {}
        tensors = {name: tensor for path in files for name, tensor in safetensors.numpy.load_file(path).items()}
        return {name: tensor.shape for name, tensor in tensors.items() if not self.shape.tied or name != _HEAD}

    def _check_lists(self, directory: Path, version: int | None) -> None:
        """Check what manifest and index say."""
        present = {path.name for path in weights_files(directory)}
        if (directory / _INDEX_NAME).exists():
            named = set(json.loads((directory / _INDEX_NAME).read_text())["weight_map"].values())
            if missing := named - present:
                raise DataError(f"{directory}: file '{min(missing)}', which {_INDEX_NAME} names, is missing")
        if not (directory / MANIFEST_NAME).exists():
            return
        try:
            manifest = read_manifest(directory)
            if version is not None and manifest.kind == "weights" and manifest.policy_version != version:
                raise DataError(f"{directory} holds policy version {manifest.policy_version}, not {version}")
            if unlisted := present - manifest.files.keys():
                raise DataError(f"{directory / min(unlisted)} is not in the {MANIFEST_NAME} beside it")
            verify(directory)
        except CheckpointError as error:
            raise DataError(str(error)) from None

    def _checked(self, directory: Path, tensors: dict[str, Floats]) -> dict[str, Floats]:
        repeated = tensors.pop(_HEAD, None) if self.shape.tied else None
        if repeated is not None and not np.array_equal(repeated, tensors[_EMBEDDING]):
            raise DataError(f"{directory}: '{_HEAD}' differs from '{_EMBEDDING}', but the model's config ties them")
        expected = self._shapes or {name: tensor.shape for name, tensor in tensors.items()}
        if different := sorted(expected.keys() ^ tensors.keys()):
            raise DataError(f"{directory}: tensor '{different[0]}' is missing, or is not part of the model")
        if not self.shape.tied and _HEAD not in tensors:
            raise DataError(f"{directory}: tensor '{_HEAD}' is missing")
        for name, tensor in tensors.items():
            if tensor.shape != expected[name] or tensor.dtype not in (np.float32, np.float16):
                raise DataError(f"{directory}: tensor '{name}' has shape {tensor.shape} and dtype {tensor.dtype}")
            if not np.isfinite(tensor).all():
                raise DataError(f"{directory}: tensor '{name}' holds NaN or infinity")
        return {name: np.ascontiguousarray(tensor, np.float32) for name, tensor in tensors.items()}

    def _adapted(self, directory: Path, factors: dict[str, Floats]) -> dict[str, Floats]:
        base, _ = self.read(self.model_dir)
        wanted, digest = read_base(directory), tensors_digest((n, t.shape, t.data) for n, t in base.items())
        if wanted.digest != digest:
            raise DataError(f"{directory} is an adapter for weights with digest {wanted.digest}, not {digest}")
        factors = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in factors.items()}
        scale = np.float32(read_scaling(directory).scale)
        for matrix, names in adapted_matrices(factors).items():
            matrix = wanted.renamed.get(matrix, matrix)
            if matrix not in base or not set(names) <= factors.keys():
                raise DataError(f"{directory}: '{matrix}', which it adapts, is not part of the model")
            base[matrix] = base[matrix] + (factors[names.b] @ factors[names.a]) * scale
        return base
