"""LoRA: adapters in a transformers model, and the merged model.

peft puts factors A and B beside each chosen linear layer, which then computes W x + alpha / rank * B A x (Hu et al.
2021, https://arxiv.org/abs/2106.09685, section 4.1; with `use_rslora` alpha / sqrt(rank), Kalajdzievski 2023,
https://arxiv.org/abs/2312.03732). W stays as it is. In memory the tensors are called
`q_proj.base_layer.weight` and `q_proj.lora_A.default.weight`; in files `q_proj.weight` and `q_proj.lora_A.weight`.

Shape legend: O outputs and I inputs of a linear layer, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from holdfast.config.training import LoraConfig
from holdfast.errors import CheckpointError, DataError, nearest
from holdfast.run import weights
from holdfast.trainer.checkpoint.state import State
from holdfast.trainer.model.safetensors_files import SafetensorsFile
from holdfast.trainer.model.structure import BASE_LAYER, FACTOR, base_tensors
from holdfast.trainer.model.tensor_names import TensorLayout

HEAD = "score.weight"
"""The head of a model that scores sequences: trained whole beside the adapters, since no file has it."""

_ADAPTER_INFIX = ".default."  # peft's name of the one adapter that we make


def inject_adapters(hf_model: PreTrainedModel, config: LoraConfig) -> None:
    """Put adapters beside the chosen linear layers, and freeze all other tensors except a scoring head."""
    import peft  # takes a second

    scores = _scores(hf_model)
    peft_config = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # fractions work
        lora_dropout=config.dropout,
        use_rslora=config.use_rslora,
        target_modules=_target_modules(hf_model, config),
        task_type="SEQ_CLS" if scores else "CAUSAL_LM",
    )
    peft.inject_adapter_in_model(peft_config, hf_model)
    if scores:
        hf_model.get_parameter(HEAD).requires_grad_(True)
        peft_config.modules_to_save = [HEAD.partition(".")[0]]


def _target_modules(hf_model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Return the last parts of the names of the layers to adapt, or whole names if other layers have the same ends."""
    heads = (hf_model.get_output_embeddings(), getattr(hf_model, "score", None))
    linear = [
        name
        for name, module in hf_model.named_modules()
        if type(module) is nn.Linear and not any(module is head for head in heads)
    ]
    chosen = linear
    if config.target_modules != "all-linear":
        for wanted in config.target_modules:
            if not any(_ends_like(name, wanted) for name in linear):
                known = sorted({name.rpartition(".")[2] for name in linear})
                raise DataError(
                    f"model.lora.target_modules: no linear layer of {type(hf_model).__name__} ends like '{wanted}'."
                    f"{nearest(wanted, known)} Its layers: {', '.join(known)}."
                )
        chosen = [name for name in linear if any(_ends_like(name, wanted) for wanted in config.target_modules)]
    ends = sorted({name.rpartition(".")[2] for name in chosen})
    meant = {name for name, _ in hf_model.named_modules() if name.rpartition(".")[2] in ends}
    return ends if meant == set(chosen) else sorted(chosen)


def _ends_like(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _scores(hf_model: nn.Module) -> bool:
    return isinstance(getattr(hf_model, "score", None), nn.Linear)


def is_adapted(hf_model: nn.Module) -> bool:
    """Whether `hf_model` has adapters."""
    return hasattr(hf_model, "peft_config")


def adapter_parameters(hf_model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the factors and a scoring head by their names in checkpoints; nothing for a plain model."""
    if not is_adapted(hf_model):
        return {}
    return {
        name.replace(_ADAPTER_INFIX, "."): parameter
        for name, parameter in hf_model.named_parameters()
        if FACTOR in name or name == HEAD
    }


def initial_tensors(hf_model: nn.Module, base: Mapping[str, Tensor], *, seed: int) -> dict[str, Tensor]:
    """Return the first tensors of an adapted model by their names in memory: `base`, and factors that add nothing yet.

    A is uniform as in peft and in the authors' program, drawn on the CPU from `seed`; B is zero."""
    # Its own generator: rank 0 may be the only rank that draws.
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, tensor in hf_model.state_dict(keep_vars=True).items():
        if FACTOR not in name:
            plain = name.replace(BASE_LAYER, ".")
            tensors |= {name: base[plain]} if plain in base else {}  # `base` has one of tied names
            continue
        tensors[name] = torch.zeros(tensor.shape)
        if ".lora_A." in name:
            # a = sqrt(5) makes the bound 1 / sqrt(I).
            nn.init.kaiming_uniform_(tensors[name], a=math.sqrt(5), generator=generator)
    return tensors


def merged(weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, *, scale: float) -> Tensor:
    """Return W + scale * B A in float32, with the same bits as `inference.weight_files`."""
    return weight_OI.float() + (b_OR.float() @ a_RI.float()) * scale


def whole_tensors(
    hf_model: nn.Module, *, keep: bool, dtype: torch.dtype | None = None, copy: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a model by name, whole, merged and on the CPU, if this rank shall `keep` it. Collective.

    Args:
        dtype: of floating-point parameters; None: as they are. Buffers always are: no pass rounds them, and routers
            compare the correction bias of experts in float32.
        copy: none shares memory with the model.
    """
    factors, buffers = adapter_parameters(hf_model), dict(hf_model.named_buffers())
    matrices = weights.adapted_matrices(factors)
    found = _peft_config_of(hf_model) if factors else None
    scale = weights.Scaling(found.r, found.lora_alpha, found.use_rslora).scale if found is not None else 0.0
    for name, tensor in base_tensors(hf_model).items():
        pair = [_whole(factors[factor].detach()) for factor in matrices.get(name, ())]
        wanted = tensor.dtype if dtype is None or name in buffers else dtype
        # Before it is gathered and copied, which may then be half the bytes. A matrix is merged in float32 first.
        value = _whole(tensor if pair else tensor.to(wanted))
        if not keep:
            continue
        value = value.cpu()
        if pair:
            a_RI, b_OR = pair
            value = merged(value, a_RI.cpu(), b_OR.cpu(), scale=scale).to(wanted)
        elif copy and _storage(value) == _storage(tensor):
            value = value.clone()
        yield name, value


def _storage(tensor: Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage().data_ptr()


def _whole(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    placements = list(tensor.placements)
    for dimension in range(len(placements)):  # one by one, since torch warns if several need a gather
        placements[dimension] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def digest_of(tensors: Mapping[str, Tensor], layout: TensorLayout | None = None) -> str:
    """Return `tensors_digest` of tensors in float32, in the `layout` of files, if any. Collective."""

    def values() -> Iterator[tuple[str, tuple[int, ...], memoryview]]:
        wholes = ((name, _whole(tensor)) for name, tensor in tensors.items())
        for name, whole in layout.to_files(wholes) if layout is not None else wholes:
            whole = whole.float() if whole.is_floating_point() else whole
            yield name, tuple(whole.shape), whole.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data

    return weights.tensors_digest(values())


class Adapters(State):
    """The adapters of a run as files, and `base`, the weights that they belong to. Collective."""

    def __init__(self, hf_model: PreTrainedModel, layout: TensorLayout, *, base_name: str) -> None:
        places = {name: layout.name_in_files(name) for name in weights.adapted_matrices(adapter_parameters(hf_model))}
        self.base = weights.Base(
            base_name,
            digest_of({name: tensor for name, tensor in base_tensors(hf_model).items() if name != HEAD}, layout),
            renamed={name: place for name, place in places.items() if place is not None and place != name},
            regrouped=[name for name, place in places.items() if place is None],
        )
        self._hf_model = hf_model

    def settings(self) -> dict[str, bytes]:
        """Return the files beside the factors by name."""
        found = _peft_config_of(self._hf_model)
        settings = found.to_dict() | {
            "target_modules": sorted(found.target_modules),
            "base_model_name_or_path": self.base.name,
            "inference_mode": True,
        }
        return {
            weights.ADAPTER_CONFIG_NAME: msgspec.json.format(msgspec.json.encode(settings, order="sorted"), indent=2)
            + b"\n",
            weights.BASE_NAME: msgspec.json.format(msgspec.json.encode(self.base), indent=2) + b"\n",
        }

    def write_factors(self, directory: Path, *, keep: bool) -> None:
        """Write the factors as peft does, in float32, if this rank shall `keep` them. Collective."""
        gathered = {name: _whole(factor.detach()) for name, factor in adapter_parameters(self._hf_model).items()}
        if keep:
            save_factors(gathered, directory)

    def values(self) -> dict[str, Any]:
        """Return name and digest of the base weights."""
        return msgspec.to_builtins(self.base)

    def restore(self, values: dict[str, Any]) -> None:
        """Raise CheckpointError if the checkpoint's adapters were trained on other weights."""
        saved = msgspec.convert(values, weights.Base)
        if saved.digest != self.base.digest:
            raise CheckpointError(
                f"the checkpoint's adapters were trained on other weights: those of model.name = '{saved.name}' "
                f"(digest {saved.digest}), and model.name = '{self.base.name}' has other values ({self.base.digest}). "
                "A run continues with the weights that it began with: give them as --model.name. To train these "
                "adapters on from other weights, start a new run with another --output-dir and --ckpt.init-from."
            )


def save_factors(factors: Mapping[str, Tensor], directory: Path) -> None:
    """Write factors and head, by their names in checkpoints, as `adapter_model.safetensors`."""
    directory.mkdir(exist_ok=True)
    tensors = {f"{weights.PEFT_PREFIX}{name}": factor.float().cpu().contiguous() for name, factor in factors.items()}
    SafetensorsFile.of(tensors).write(directory / weights.ADAPTER_NAME)


def _peft_config_of(hf_model: nn.Module) -> Any:
    return cast(Any, hf_model).peft_config["default"]
