"""Making transformers models from a directory or hub name: config, empty model, weights.

What is wrong with them is said in one line: transformers' own errors come from anywhere within its code.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.configuration_utils import PreTrainedConfig

from holdfast.shared.config.trainer import TrainedModelConfig
from holdfast.shared.errors import DataError
from holdfast.shared.files.local_inputs import check_weights_path
from holdfast.trainer.models.lora import adapter_parameters, base_tensors, is_adapted


class Trained(Protocol):
    """A module around a transformers model whose parameters and persistent buffers are its state."""

    hf_model: PreTrainedModel


def trained_parameters(hf_model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that an optimizer changes, by their names in `trained_tensors`."""
    if is_adapted(hf_model):
        return adapter_parameters(hf_model)
    return {name: parameter for name, parameter in hf_model.named_parameters() if parameter.requires_grad}


_log = logging.getLogger("trainer")


_MOST_CHARACTERS = 300  # of another library's message


Kind = type[AutoModelForCausalLM | AutoModelForSequenceClassification]


def load_model_config(name: str) -> PreTrainedConfig:
    """Return the transformers config of a local directory or hub model.

    Raises:
        DataError: there is none, it contradicts itself, or its weights are quantised.
    """
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)  # unset, it would ask at a terminal
    except Exception as error:
        _log.debug("the model config was not loaded", exc_info=True)
        if any(words in str(error) for words in ("trust_remote_code", "does not recognize this architecture")):
            raise DataError(
                f"model.name = '{name}': transformers {transformers.__version__} has no such kind of model (model_type "
                "in its config.json), and code that a model brings along is not run. docs/models.md lists the kinds "
                "that can be trained."
            ) from error
        raise DataError(f"model.name = '{name}': no model config could be loaded. {one_line(error)}") from error
    if quantization := getattr(config, "quantization_config", None):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        raise DataError(
            f"model.name = '{name}': its weights are quantised ({getattr(method, 'value', method)}, see "
            "quantization_config in its config.json), and only weights in float32, bfloat16 or float16 can be trained: "
            "give the model that it was made from"
        )
    return config


def build_hf_model(kind: Kind, config: TrainedModelConfig, model_config: PreTrainedConfig) -> PreTrainedModel:
    """Return the transformers model of a config, with the weights that torch's default device and generator make.

    Some kinds of models choose their attention when they are built. `packed` is not among their choices: it comes
    in afterwards, where the layers can take it.

    Raises:
        DataError: transformers has no such model, or it cannot be built with `model.attention`.
    """
    attention = "eager" if config.attention == "packed" else config.attention
    try:
        return kind.from_config(model_config, dtype=torch.float32, attn_implementation=attention)
    except Exception as error:
        _log.debug("the model was not built", exc_info=True)
        what = "sequence classification" if kind is AutoModelForSequenceClassification else "a causal language model"
        raise DataError(
            f"model.name = '{config.name}': transformers cannot build {what} of type {model_config.model_type} with "
            f"{attention} attention. {type(error).__name__}: {one_line(error)}"
        ) from error


def is_classifier(model_config: PreTrainedConfig) -> bool:
    """Return whether a directory holds a model with a head that scores sequences instead of predicting tokens."""
    return any(name.endswith("ForSequenceClassification") for name in model_config.architectures or [])


def initial_weights(
    config: TrainedModelConfig,
    model_config: PreTrainedConfig,
    seed: int,
    *,
    kind: Kind = AutoModelForCausalLM,
) -> dict[str, Tensor]:
    """Return the weights that a model starts with by name, as its directory or the seed gives them.

    Args:
        kind: which of the models with this config.

    Raises:
        DataError: the directory has no weights, or not all of them.
    """
    if config.init == "random":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            fresh = build_hf_model(kind, config, model_config)
        return trained_tensors(fresh)
    check_weights_path(config.name)
    try:
        answer = kind.from_pretrained(
            config.name,
            config=model_config,
            dtype=torch.float32,
            attn_implementation="eager",  # which every model has; nothing is computed
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, with its name
        )
        loaded, findings = cast(tuple[PreTrainedModel, dict[str, Any]], answer)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        _log.debug("the weights were not loaded", exc_info=True)
        raise DataError(
            f"model.name = '{config.name}': the weights could not be loaded. {type(error).__name__}: {one_line(error)}"
        ) from error
    if mismatched := sorted(findings["mismatched_keys"]):
        tensor, in_files, wanted = mismatched[0]
        raise DataError(
            f"model.name = '{config.name}': the weights could not be loaded. '{tensor}' has shape {list(in_files)} in "
            f"its files and {list(wanted)} by its config.json ({len(mismatched)} such tensors)"
        )
    if missing := sorted(findings["missing_keys"]):  # transformers itself fills these with random numbers
        raise DataError(f"model.name = '{config.name}': the weights lack {len(missing)} tensors, such as {missing[0]}")
    return trained_tensors(loaded)


def trained_tensors(hf_model: nn.Module) -> dict[str, Tensor]:
    """Return what checkpoints hold of a model: parameters and persistent buffers by name, tied ones once.

    Of tied names the first wins. Of a model with adapters it is the adapters alone.
    """
    if is_adapted(hf_model):
        return {name: factor.detach() for name, factor in adapter_parameters(hf_model).items()}
    return base_tensors(hf_model)


def one_line(error: Exception) -> str:
    """Return the message of another library in one line, its beginning where it is long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} ..."
