"""Numbers per token, packed: they travel and are kept as bytes, not as lists of Python numbers.

    TokenIds    int32
    Logprobs    float32, the precision that engines compute them in and trainers read them in
    LossMask    uint8, 0 or 1
    Rewards     float64, so that what an environment gave stays exact

On the wire and on the disk each is the bytes of its items, little-endian, as a msgpack `bin`. In memory each is an
`array.array`, which numpy and torch read without copying.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from typing import Any, ClassVar, Self

if sys.byteorder != "little":  # untested: needs a big-endian machine
    raise ImportError("holdfast runs on little-endian machines only: its files hold numbers in that order")


class _Packed(array):
    """An array of one item type."""

    item: ClassVar[str]

    def __new__(cls, values: bytes | Sequence[float] = b"") -> Self:
        """Return an array of numbers, or of the bytes of their items.

        Raises:
            ValueError: a value does not fit the item type, or the bytes are no whole number of items.
        """
        if not isinstance(values, bytes):
            try:
                values = struct.pack(f"{len(values)}{cls.item}", *values)  # half the time of array(item, values)
            except (struct.error, OverflowError) as error:
                raise ValueError(f"not {cls.__name__}: {error}") from None
        return super().__new__(cls, cls.item, values)


class TokenIds(_Packed):
    """Ids of tokens, int32."""

    item = "i"


class Logprobs(_Packed):
    """Log-probabilities, float32."""

    item = "f"


class LossMask(_Packed):
    """Whether the policy sampled a token, uint8: 0 or 1."""

    item = "B"

    @property
    def num_sampled(self) -> int:
        """How many tokens the policy sampled."""
        return self.tobytes().count(1)

    @property
    def num_stretches(self) -> int:
        """How many stretches of tokens the policy sampled without a break."""
        return (b"\0" + self.tobytes()).count(b"\0\1")


class Rewards(_Packed):
    """Rewards of tokens, float64."""

    item = "d"


def encode_packed(value: Any) -> memoryview:
    """Return the bytes of a packed array: what msgspec's msgpack encoders need as `enc_hook`."""
    if isinstance(value, _Packed):
        return memoryview(value)
    raise NotImplementedError(f"a {type(value).__name__} cannot be encoded")


def decode_packed(kind: type[Any], value: Any) -> Any:
    """Return a packed array from its bytes, or from the list of numbers that JSON has: `dec_hook` for msgspec.

    Raises:
        ValueError: `value` is neither, or does not fit.
    """
    if issubclass(kind, _Packed) and isinstance(value, bytes | list):
        return kind(value)
    raise ValueError(f"expected {kind.__name__}, got {type(value).__name__}")


def list_packed(value: _Packed) -> list[int] | list[float] | list[bool]:
    """Return the numbers of a packed array, those of a mask as booleans: `enc_hook` for text formats."""
    return [bool(item) for item in value] if isinstance(value, LossMask) else value.tolist()
