"""LoRA: adapters in a transformers model, and the model that they amount to.

peft puts a pair of factors A and B beside each chosen linear layer, so that it computes
W x + alpha / rank * B A x (Hu et al. 2021, https://arxiv.org/abs/2106.09685, section 4.1). W stays as it
is. In memory a layer's tensors are called `q_proj.base_layer.weight` and `q_proj.lora_A.default.weight`;
everywhere else they have the names of the plain model, `q_proj.weight`, and of the factors,
`q_proj.lora_A.weight`.

Shape legend: O outputs and I inputs of a linear layer, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from triad.adapter import Base, adapted_matrices, tensors_digest
from triad.config.lora import LoraConfig
from triad.errors import CheckpointError, DataError, nearest

_BASE_LAYER = ".base_layer."
_ADAPTER_INFIX = ".default."  # peft's name of the one adapter that we make
_FACTOR = ".lora_"


def inject_adapters(hf_model: PreTrainedModel, config: LoraConfig) -> None:
    """Put adapters beside the linear layers that `config` chooses, and freeze all else.

    Raises:
        DataError: `config.target_modules` names a layer that is not there.
    """
    from peft import inject_adapter_in_model  # a second that only runs with adapters pay

    inject_adapter_in_model(_peft_config(config, _target_modules(hf_model, config)), hf_model)


def _peft_config(config: LoraConfig, target_modules: list[str]) -> Any:
    from peft import LoraConfig as PeftConfig

    return PeftConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # fractions work
        lora_dropout=config.dropout,
        target_modules=target_modules,
        task_type="CAUSAL_LM",
    )


def _target_modules(hf_model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Return the last parts of the names of the layers to adapt, or whole names where those would fit others too."""
    head = hf_model.get_output_embeddings()
    linear = [name for name, module in hf_model.named_modules() if type(module) is nn.Linear and module is not head]
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


def adapter_settings(config: LoraConfig, hf_model: PreTrainedModel, *, base_name: str) -> bytes:
    """Return `adapter_config.json` for the adapters in `hf_model`, the same bytes every time."""
    injected: Any = hf_model.peft_config
    peft_config = _peft_config(config, sorted(injected["default"].target_modules))
    peft_config.base_model_name_or_path = base_name
    peft_config.inference_mode = True
    settings = peft_config.to_dict() | {"target_modules": sorted(peft_config.target_modules)}
    return msgspec.json.format(msgspec.json.encode(settings, order="sorted"), indent=2) + b"\n"


def is_adapted(hf_model: nn.Module) -> bool:
    """Whether `hf_model` has adapters."""
    return hasattr(hf_model, "peft_config")


def adapter_parameters(hf_model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the factors by their names in checkpoints; empty for a plain model."""
    return {
        name.replace(_ADAPTER_INFIX, "."): parameter
        for name, parameter in hf_model.named_parameters()
        if _FACTOR in name
    }


def base_tensors(hf_model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers of the plain model by name, without adapters, tied ones once."""
    persistent = hf_model.state_dict().keys()
    named: dict[str, Tensor] = dict(hf_model.named_parameters())
    named |= {name: buffer for name, buffer in hf_model.named_buffers() if name in persistent}
    return {name.replace(_BASE_LAYER, "."): tensor.detach() for name, tensor in named.items() if _FACTOR not in name}


def initial_tensors(hf_model: nn.Module, base: Mapping[str, Tensor], *, seed: int) -> dict[str, Tensor]:
    """Return what an adapted model starts with, by its names in memory: `base`, and factors that add nothing yet.

    A is uniform as in peft and in the authors' program, drawn on the CPU from `seed` alone; B is zero.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, tensor in hf_model.state_dict(keep_vars=True).items():
        if _FACTOR not in name:
            plain = name.replace(_BASE_LAYER, ".")
            tensors |= {name: base[plain]} if plain in base else {}  # the second of tied names is not
            continue
        tensors[name] = torch.zeros(tensor.shape)
        if ".lora_A." in name:
            nn.init.kaiming_uniform_(tensors[name], a=math.sqrt(5), generator=generator)
    return tensors


def merged(weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, *, scale: float) -> Tensor:
    """Return W + scale * B A in float32. `inference.adapters` does the same sums, for the same bits."""
    return weight_OI.float() + (b_OR.float() @ a_RI.float()) * scale


def whole_tensors(hf_model: nn.Module, config: LoraConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the merged model, whole and on the CPU, by the names of the plain model. Collective."""
    factors = adapter_parameters(hf_model)
    matrices = adapted_matrices(factors)
    for name, tensor in base_tensors(hf_model).items():
        value = _whole(tensor).cpu()
        if name in matrices:
            a_RI, b_OR = (_whole(factors[factor].detach()).cpu() for factor in matrices[name])
            value = merged(value, a_RI, b_OR, scale=config.alpha / config.rank)
        yield name, value


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Return `triad.adapter.tensors_digest` of tensors, sharded or not, in float32. Collective."""

    def values() -> Iterator[tuple[str, tuple[int, ...], memoryview]]:
        for name in sorted(tensors):
            whole = _whole(tensors[name])
            whole = whole.float() if whole.is_floating_point() else whole
            yield name, tuple(whole.shape), memoryview(whole.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())

    return tensors_digest(values())


class FrozenBase:
    """The part of a run's state that says which weights its adapters belong to: a checkpoint does not hold them."""

    def __init__(self, hf_model: nn.Module, *, name: str) -> None:
        """Read all weights once, tensor by tensor. Collective."""
        self.base = Base(name, digest_of(base_tensors(hf_model)))

    def tensors(self) -> dict[str, Tensor]:
        """Return nothing: the weights are an input of the run."""
        return {}

    def values(self) -> dict[str, Any]:
        """Return name and digest of the weights."""
        return msgspec.to_builtins(self.base)

    def restore(self, values: dict[str, Any]) -> None:
        """Check that the checkpoint's adapters were trained on these weights.

        Raises:
            CheckpointError: they were trained on others.
        """
        saved = msgspec.convert(values, Base)
        if saved.digest != self.base.digest:
            raise CheckpointError(
                f"the checkpoint's adapters were trained on other weights: those of model.name = '{saved.name}' "
                f"(digest {saved.digest}), and model.name = '{self.base.name}' has other values ({self.base.digest}). "
                "A run goes on with the weights that it began with: give them as --model.name. To train these "
                "adapters on from other weights, start a new run with --ckpt.weights-only."
            )
