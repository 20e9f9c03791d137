"""Tasks as digests of their parts that are the same in every process, so that two of them can be compared."""

from __future__ import annotations

import dataclasses
import enum
import random
from collections.abc import Mapping, Sequence, Set
from typing import Any

import xxhash

from holdfast.orchestrator.environments.interface import Task
from holdfast.orchestrator.environments.session import as_messages
from holdfast.shared.chat.messages import as_dict
from holdfast.shared.printable import text_of

_DEEPEST = 50


def parts_of(task: Any) -> dict[str, str]:
    """Return a digest of each part of a task, by name: `prompt`, `answer`, and what a subclass has besides."""
    if not isinstance(task, Task):
        return {"task": digest_of(task)}
    names = dict.fromkeys([field.name for field in dataclasses.fields(task)] + list(getattr(task, "__dict__", {})))
    return {name: digest_of(_prompt_of(task) if name == "prompt" else getattr(task, name)) for name in names}


def _prompt_of(task: Task) -> Any:
    """Return the prompt with its messages as dicts: one form is as good as the other."""
    if isinstance(task.prompt, str):
        return task.prompt
    try:
        return [as_dict(message) for message in as_messages(task.prompt)]
    except TypeError:
        return task.prompt  # no messages: the check of the prompts says so


def digest_of(value: Any) -> str:
    """Return a digest that is equal for equal values."""
    return xxhash.xxh3_128_hexdigest(canonical(value).encode("utf-8", "backslashreplace"))


def canonical(value: Any, *, depth: int = 0) -> str:
    """Return text that is equal for equal values, in whichever order sets and mappings are, and wherever they lie."""
    if depth > _DEEPEST:
        return "..."
    kind = type(value).__qualname__
    if value is None or (isinstance(value, str | bytes | int | float | complex) and not isinstance(value, enum.Enum)):
        return f"{kind}:{value!r}"
    if isinstance(value, enum.Enum):
        return f"{kind}.{value.name}"
    if isinstance(value, Mapping):
        pairs = [f"{canonical(key, depth=depth + 1)}={canonical(item, depth=depth + 1)}" for key, item in value.items()]
        return f"{{{','.join(sorted(pairs))}}}"
    if isinstance(value, Set):
        return f"<{','.join(sorted(canonical(item, depth=depth + 1) for item in value))}>"
    if isinstance(value, Sequence):
        return f"[{','.join(canonical(item, depth=depth + 1) for item in value)}]"
    if callable(getattr(value, "tolist", None)):  # arrays and scalars of NumPy and torch
        return f"{kind}:{getattr(value, 'dtype', '')}{canonical(value.tolist(), depth=depth + 1)}"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, random.Random):
        return f"{kind}:{canonical(value.getstate(), depth=depth + 1)}"
    held = {name: getattr(value, name) for name in getattr(type(value), "__slots__", ()) if hasattr(value, name)}
    held |= getattr(value, "__dict__", {})
    if held:
        return f"{kind}{canonical(held, depth=depth + 1)}"
    # What `object` writes is a place in memory, which says nothing.
    return kind if type(value).__repr__ is object.__repr__ else f"{kind}:{text_of(value)}"
