"""The distribution that tokens are sampled from: what engine, batches and trainer must agree on."""

from __future__ import annotations

import msgspec


class Sampling(msgspec.Struct, frozen=True):
    """softmax(logits / temperature), cut to its likelier tokens and normalised again.

    The cuts follow one another in this order, each on what the one before has left. None cuts the likeliest token.

    Attributes:
        temperature: softmax temperature.
        min_p: tokens less likely than this times the likeliest are cut; 0: none.
        top_k: all but the k likeliest are cut; 0: none.
        top_p: all are cut but the fewest likeliest whose probabilities sum to this; 1: none.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def is_truncated(self) -> bool:
        """Whether anything can be cut."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def whole(self) -> Sampling:
        """Return the same without cuts."""
        return Sampling(self.temperature)

    def __str__(self) -> str:
        """Return how people write it, such as `temperature 0.7, top_p 0.9`."""
        cuts = [f"{name} {value:g}" for name, value, none in (
            ("top_p", self.top_p, 1), ("top_k", self.top_k, 0), ("min_p", self.min_p, 0)
        ) if value != none]  # fmt: skip
        return ", ".join([f"temperature {self.temperature:g}", *cuts])


PLAIN_SAMPLING = Sampling()
"""At temperature 1, from all tokens."""
