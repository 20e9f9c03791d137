"""What a model is without its weights: names and shapes of tensors, config and tokenizer files."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)

from holdfast.shared.errors import CheckpointError
from holdfast.trainer.models.pretrained import is_classifier, load_model_config, trained_tensors


def meta_model(name: str) -> PreTrainedModel:
    """Return a model without memory, for the names and shapes of its tensors.

    Raises:
        DataError: there is no such model config.
    """
    config = load_model_config(name)
    kind = AutoModelForSequenceClassification if is_classifier(config) else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(config, dtype=torch.float32)
    model.tie_weights()
    return model


def check_shapes(found: Mapping[str, torch.Size], model: PreTrainedModel, what: str) -> None:
    """Compare names and shapes with those of `model`, tied tensors once.

    Raises:
        CheckpointError: beginning with `what`, naming missing, surplus and differing tensors.
    """
    expected = trained_tensors(model)
    missing, surplus = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    reshaped = [
        f"{name} {tuple(found[name])} instead of {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in found and found[name] != tensor.shape
    ]
    reasons = [f"missing: {_some(missing)}"] if missing else []
    reasons += [f"surplus: {_some(surplus)}"] if surplus else []
    reasons += [f"of another shape: {_some(reshaped)}"] if reshaped else []
    if reasons:
        raise CheckpointError(f"{what}: {'; '.join(reasons)}")


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"


def describe_model(directory: Path, name: str, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Write config.json, generation_config.json and the tokenizer of the model `name`; say if there is none."""
    config = AutoConfig.from_pretrained(name)
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    for what, source in (("generation config", GenerationConfig), ("tokenizer", AutoTokenizer)):
        try:
            found: Any = source.from_pretrained(name)
        except (OSError, ValueError):
            print(f"note: '{name}' has no {what}; none is written", file=sys.stderr)
            continue
        found.save_pretrained(directory)
