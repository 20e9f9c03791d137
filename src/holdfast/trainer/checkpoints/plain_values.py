"""Plain Python values as JSON and back, exactly: tuples, infinities, bytes and keys that are numbers included.

JSON knows fewer things than a training loop keeps. What it lacks becomes an object with one key:
`{"$tuple": [..]}`, `{"$float": "inf"}`, `{"$bytes": "base64"}`, `{"$dict": [[key, value], ..]}`.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

from holdfast.shared.errors import CheckpointError


def encode(value: Any, where: str) -> Any:
    """Return `value` as something that JSON holds and `decode` brings back.

    Subclasses of dict (Counter, OrderedDict) come back as dicts.

    Args:
        where: its place in the state, for the error.

    Raises:
        CheckpointError: it is, or holds, something that is not plain; its place is named.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{where}[{number}]") for number, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
        return {"$dict": [[encode(key, where), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]}
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot keep among its values: these are numbers, "
        "texts, bytes, None, and lists, tuples and dicts of them. Convert it (int(), .item(), .tolist()); tensors "
        "belong into a module, as buffers"
    )


def decode(value: Any) -> Any:
    """Return what `encode` was given."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (tag, content), *_ = value.items()
        if tag == "$float":
            return float(content)
        if tag == "$bytes":
            return base64.b64decode(content)
        if tag == "$tuple":
            return tuple(decode(item) for item in content)
        if tag == "$dict":
            return {decode(key): decode(item) for key, item in content}
    return {key: decode(item) for key, item in value.items()}
