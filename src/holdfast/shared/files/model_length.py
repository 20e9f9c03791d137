"""How many tokens a model has positions for, by its config.json: vLLM serves no longer sessions.

The rule is vLLM's (`_get_and_verify_max_len` in `vllm/config/model.py` of 0.32), read here so that it is known before
vLLM is imported. Where it cannot be told without transformers or vLLM, nothing is refused: vLLM itself looks later.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from holdfast.shared.config.inference import InferenceConfig
from holdfast.shared.errors import ConfigError

_KEYS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length", "max_target_positions",
    "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
_OVERRIDE = "model_max_length"
# Their max_position_embeddings is that of the scaled embedding already.
_SCALED_ALREADY = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
_ALLOWS_LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
_REPLACE_THE_CONFIG = ("hf-", "config-format")  # arguments of vLLM, by their beginning


def check_max_len(config: InferenceConfig, model: str | Path, *, key: str) -> None:
    """Refuse a server for longer sessions than its model has positions for; names of a hub pass.

    Args:
        model: its directory.
        key: of the section of the served model, such as `inference.model`.

    Raises:
        ConfigError: it is.
    """
    if os.environ.get(_ALLOWS_LONGER, "0").strip().lower() in ("1", "true"):
        return
    if any(name.replace("_", "-").startswith(_REPLACE_THE_CONFIG) for name in config.engine.args):
        return
    path = Path(model) / "config.json"
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError):  # whoever checks the model itself says so
        return
    found = positions(fields) if isinstance(fields, dict) else None
    if found is None or config.model.max_len <= found[0]:
        return
    longest, field = found
    raise ConfigError(
        f"{key}.max_len = {config.model.max_len} is more than the {longest} positions that the model has ({field} in "
        f"{path}). Set --{key.replace('_', '-')}.max-len {longest}, or less, and any seq_len to no more than that. "
        f"Where the model is known to take more, set {_ALLOWS_LONGER}=1 in the environment."
    )


def positions(fields: Mapping[str, Any]) -> tuple[int, str] | None:
    """Return for how many tokens a model has positions, and which fields of its config.json say so.

    None: it says nothing, or what it says is for libraries to interpret (models of several parts, Mistral's format).
    """
    if any(isinstance(value, dict) and _lengths(value) for value in fields.values()):
        return None  # in a part: which of them counts depends on the model
    lengths = _lengths(fields)
    if not lengths:
        return None
    field = _OVERRIDE if lengths.get(_OVERRIDE) else min(lengths, key=lengths.__getitem__)
    longest, said = float(lengths[field]), field
    if "gemma3" not in str(fields.get("model_type")):
        factors = [one.get("factor") for one in _rope(fields) if _kind(one) not in _SCALED_ALREADY]
        factor = next((one for one in reversed(factors) if one is not None), 1.0)
        if not isinstance(factor, int | float):
            return None
        if factor != 1:
            longest, said = longest * factor, f"{field}, times {factor:g} for its scaled rotary embedding,"
    return int(max(longest, lengths.get(_OVERRIDE) or 0)), said


def _lengths(fields: Mapping[str, Any]) -> dict[str, int]:
    return {key: fields[key] for key in _KEYS if isinstance(fields.get(key), int) and fields[key] > 0}


def _rope(fields: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield what is said of the rotary embedding: once, or for each kind of layers."""
    said = fields.get("rope_scaling") or fields.get("rope_parameters")
    if not isinstance(said, dict):
        return
    nested = [value for value in said.values() if isinstance(value, dict)]
    yield from nested or [said]


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")
