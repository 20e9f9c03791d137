"""Weights and LoRA adapters as files: their names and formats, and one digest that all processes compare.

The digest covers the `*.safetensors` files by name, size and content, in the order of their names, and for an adapter
the scaling of its factors (rank and alpha): not a tokenizer or a manifest in the same directory.

An adapter is a directory that peft loads as well; trainer and inference agree on it:

    adapter_model.safetensors   A and B of every adapted matrix, float32, by peft's names
    adapter_config.json         peft's settings, such as rank and alpha
    base.json                   the weights that the adapter was trained on, and belongs to

An adapted matrix is W + alpha / rank * B A (LoRA, Hu et al. 2021, section 4.1), computed in float32.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import xxhash

from holdfast.errors import DataError
from holdfast.run.manifest import Manifest, file_digest

ADAPTER_NAME = "adapter_model.safetensors"
ADAPTER_CONFIG_NAME = "adapter_config.json"
BASE_NAME = "base.json"
# Directory beside whole weights with the adapter that they are merged from.
ADAPTER_DIR = "adapter"
# Before every name in a file of peft's.
PEFT_PREFIX = "base_model.model."

_NUMBERS = ("r", "lora_alpha", "use_rslora")
_PATTERNS = {"rank_pattern": "r", "alpha_pattern": "lora_alpha"}
# Settings of peft that leave W + scale * B A as it is: where factors are, how training went, and who wrote the file.
_WITHOUT_EFFECT = (
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules", "inference_mode",
    "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core",
    "modules_to_save", "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
)  # fmt: skip
# Values of the settings that have an effect, beside None, False and empty ones. Every other `init_lora_weights` changes
# the base, or the training of the factors.
_PLAIN = {"bias": ["none"], "init_lora_weights": [True, "gaussian", "orthogonal", "eva"], "peft_type": ["LORA"]}

_FACTORS = (".lora_A.weight", ".lora_B.weight")
_MATRIX = ".weight"

S = TypeVar("S")


class Base(msgspec.Struct, frozen=True, omit_defaults=True):
    """The weights that an adapter belongs to.

    Attributes:
        name: the directory or hub id that they were loaded from.
        digest: `tensors_digest` of them in float32, as their files hold them.
        renamed: adapted matrices whose names in those files are others than the adapter's: name -> name there.
        regrouped: adapted matrices that those files do not hold by themselves.
    """

    name: str
    digest: str
    renamed: dict[str, str] = {}
    regrouped: list[str] = []


class Scaling(msgspec.Struct, frozen=True):
    """The part of `adapter_config.json` that a merge needs."""

    r: int
    lora_alpha: float
    use_rslora: bool = False

    def __post_init__(self) -> None:
        """Refuse what no adapter can have, or ours cannot."""
        if self.r < 1 or not math.isfinite(self.lora_alpha):
            raise ValueError(f"r = {self.r} and lora_alpha = {self.lora_alpha}: needed are a rank from 1 and a number")

    @property
    def alpha(self) -> float:
        """The alpha with which an adapter without `use_rslora` has the same scale."""
        return self.lora_alpha * math.sqrt(self.r) if self.use_rslora else self.lora_alpha

    @property
    def scale(self) -> float:
        """How often the product of B and A counts, with the bits of peft."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


class Factors(NamedTuple):
    """Names of the two factors that adapt one matrix."""

    a: str
    b: str


def factor_names(matrix: str) -> Factors:
    """Return what the factors of `matrix`, such as `model.layers.0.mlp.up_proj.weight`, are called in checkpoints."""
    return Factors(*(matrix.removesuffix(_MATRIX) + factor for factor in _FACTORS))


def adapted_matrices(names: Iterable[str]) -> dict[str, Factors]:
    """Return the matrices, in the order of their names, that tensors with these names adapt; others are left out."""
    matrices = {name.removesuffix(factor) + _MATRIX for name in names for factor in _FACTORS if name.endswith(factor)}
    return {matrix: factor_names(matrix) for matrix in sorted(matrices)}


def holds_adapter(directory: Path) -> bool:
    """Whether `directory` holds only an adapter and no whole weights, by the names of its files."""
    return (directory / ADAPTER_NAME).is_file() and (directory / ADAPTER_CONFIG_NAME).is_file()


def read_scaling(directory: Path) -> Scaling:
    """Return the scaling of the adapter in `directory`. Raise DataError if its settings are missing or damaged, or if
    peft would compute other numbers with them than W + scale * B A."""
    path = directory / ADAPTER_CONFIG_NAME
    settings = _read(path, dict[str, Any])
    for key, value in sorted(settings.items(), key=lambda item: item[0] != "peft_type"):  # other kinds lack other keys
        if not value or key in (*_NUMBERS, *_WITHOUT_EFFECT) or value in _PLAIN.get(key, []):
            continue
        of_all = settings.get(_PATTERNS.get(key, ""))
        if of_all is not None and isinstance(value, dict) and all(one == of_all for one in value.values()):
            continue
        raise DataError(f"{path} cannot be used: {key} = {value!r}{_how_to_convert(key, value)}")
    return _read(path, Scaling)


def _how_to_convert(key: str, value: object) -> str:
    """Return why an adapter is refused for its setting `key`, and how the user makes a usable one of it."""
    merge = "peft's merge_and_unload makes whole weights of adapter and model, for --model.name"
    if key == "peft_type":
        return f" is not LORA, the only kind that is read; {merge}."
    if key in _PATTERNS:
        one = "rank" if key == "rank_pattern" else "alpha"
        return f": one {one} is needed for all matrices; {merge}."
    if key != "init_lora_weights":
        return f" is not known to leave W + alpha / rank * B A as it is; {merge}."
    convert = (
        "peft's save_pretrained(DIRECTORY, path_initial_model_for_weight_conversion=INITIAL_ADAPTER) makes a plain "
        "LoRA adapter of it, or "
    )
    is_converted = str(value).startswith(("pissa", "olora", "corda"))
    return (
        " changes the weights of the model before training, so the adapter does not fit the model as it is; "
        f"{convert if is_converted else ''}{merge}."
    )


def read_base(directory: Path) -> Base:
    """Return what the adapter in `directory` belongs to. Raise DataError if the file is missing or damaged."""
    return _read(directory / BASE_NAME, Base)


def _read(path: Path, kind: type[S]) -> S:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        raise DataError(f"{path} is missing: it says what the adapter beside it belongs to") from None
    except (ValueError, RecursionError) as error:  # msgspec's own are ValueErrors, and errors of broken text, too
        raise DataError(f"{path} cannot be used: {error}") from None


def tensors_digest(tensors: Iterable[tuple[str, tuple[int, ...], memoryview]]) -> str:
    r"""Return the xxh3-128 in hexadecimal over `name\0shape\0xxh3_128\n` of every tensor, sorted by name. `tensors`:
    name, shape and little-endian float32 values of each, in any order."""
    lines = [
        f"{name}\0{'x'.join(map(str, shape))}\0{xxhash.xxh3_128_hexdigest(values)}\n" for name, shape, values in tensors
    ]
    return xxhash.xxh3_128_hexdigest("".join(sorted(lines)).encode())


class WeightsFile(NamedTuple):
    """Name, size in bytes and hexadecimal xxh3-128 of one weights file."""

    name: str
    size_bytes: int
    xxh3_128: str


def weights_files(directory: Path) -> list[Path]:
    """Return the weights files of `directory` in the order in which the digest takes them."""
    return sorted(path for path in directory.glob("*.safetensors") if path.is_file())


def combined_digest(files: Iterable[WeightsFile]) -> str:
    r"""Return the xxh3-128 in hexadecimal over `name\0size\0xxh3_128\n` of every file, sorted by name."""
    digest = xxhash.xxh3_128()
    for file in sorted(files):
        digest.update(f"{file.name}\0{file.size_bytes}\0{file.xxh3_128}\n".encode())
    return digest.hexdigest()


def scaling_of(directory: Path, names: Iterable[str]) -> list[WeightsFile]:
    """Return what the digest takes of an adapter's settings: nothing where `names`, its files, are whole weights. Raise
    DataError if the settings are missing or damaged."""
    if ADAPTER_NAME not in names:
        return []
    scaling = read_scaling(directory)
    text = f"{scaling.r} {float(scaling.alpha)!r}".encode()
    return [WeightsFile(ADAPTER_CONFIG_NAME, len(text), xxhash.xxh3_128_hexdigest(text))]


def weights_digest(directory: Path) -> str:
    """Return the digest of the weights in `directory`. Raise DataError if there are no weights files in it, or the
    settings of an adapter are damaged."""
    paths = weights_files(directory)
    if not paths:
        raise DataError(f"{directory} holds no *.safetensors file")
    files = [WeightsFile(path.name, path.stat().st_size, file_digest(path)) for path in paths]
    return combined_digest(files + scaling_of(directory, [file.name for file in files]))


def listed_digest(manifest: Manifest, directory: Path) -> str:
    """Return the digest of the weights in `directory` that its manifest lists; no tensor is read. Empty where it lists
    none. Raise DataError if the settings of an adapter are missing or damaged."""
    files = [
        WeightsFile(name, entry.size_bytes, entry.xxh3_128)
        for name, entry in manifest.files.items()
        if name.endswith(".safetensors") and "/" not in name
    ]
    return combined_digest(files + scaling_of(directory, [file.name for file in files])) if files else ""
