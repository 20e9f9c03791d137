"""Small files with a checksum of their content in them: a flipped bit is damage, and not another number.

Files without a checksum are taken as they are: older versions wrote none, and people write such files by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import xxhash

_CHECK = "check"
_LAST_LINE = re.compile(rb"^# check ([0-9a-f]{16})\n\Z", re.MULTILINE)


def encode(values: Mapping[str, Any]) -> bytes:
    """Return a JSON object of `values`, and of a checksum."""
    return json.dumps({**values, _CHECK: _digest(values)}, indent=1).encode()


def decode(data: bytes) -> dict[str, Any]:
    """Return what `encode` was given.

    Raises:
        ValueError: it is damaged.
    """
    found = json.loads(data)
    if not isinstance(found, dict):
        raise ValueError("it is no object")
    check = found.pop(_CHECK, None)
    if check is not None and check != _digest(found):
        raise ValueError("its checksum is wrong")
    return found


def _digest(values: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(dict(values), sort_keys=True).encode())


def with_last_line(text: str) -> bytes:
    """Return lines of TOML, behind which a comment has their checksum."""
    data = text.encode()
    return data + b"# check %s\n" % xxhash.xxh3_64_hexdigest(data).encode()


def check_last_line(data: bytes) -> None:
    """Compare lines of TOML with their checksum.

    Raises:
        ValueError: they are damaged.
    """
    found = _LAST_LINE.search(data)
    if found is not None and xxhash.xxh3_64_hexdigest(data[: found.start()]).encode() != found[1]:
        raise ValueError("its checksum is wrong")
