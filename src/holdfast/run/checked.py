"""Small files with a checksum of their content in them: a flipped bit is damage, and not another number.

Files without a checksum are taken as they are: people write such files by hand.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import xxhash

_CHECK = "check"
_FIRST_LINE = re.compile(rb"# check ([0-9a-f]{16})\n")


def encode(values: Mapping[str, Any]) -> bytes:
    """Return a JSON object of `values`, and of a checksum."""
    return json.dumps({**values, _CHECK: _digest(values)}, indent=1).encode()


def decode(data: bytes) -> dict[str, Any]:
    """Return what `encode` was given. Raise ValueError if it is damaged."""
    found = json.loads(data)
    if not isinstance(found, dict):
        raise ValueError("it is not an object")
    check = found.pop(_CHECK, None)
    if check is not None and check != _digest(found):
        raise ValueError("its checksum is wrong")
    return found


def _digest(values: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(dict(values), sort_keys=True).encode())


def with_first_line(text: str) -> bytes:
    """Return lines of TOML, after a comment with their checksum, which survives if the end is cut off."""
    data = text.encode()
    return b"# check %s\n" % xxhash.xxh3_64_hexdigest(data).encode() + data


def check_toml(data: bytes) -> None:
    """Compare lines of TOML with the checksum before them. Raise ValueError if they are damaged."""
    if not data.startswith(b"# check "):
        return
    found = _FIRST_LINE.match(data)
    if found is None or xxhash.xxh3_64_hexdigest(data[found.end() :]).encode() != found[1]:
        raise ValueError("its checksum is wrong")
