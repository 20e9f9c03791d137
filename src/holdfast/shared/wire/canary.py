"""The canary: log-probabilities of a fixed text, by which trainer and engine show that they hold the same policy.

A digest proves that an engine read the right bytes; the canary proves that it computes the right
thing from them: another architecture detail, a stale cache or a wrong dtype would show here.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

CANARY_NAME = "canary.json"
TEXT = "One two three four five six seven eight nine ten. The quick brown fox jumps over the lazy dog."
MAX_TOKENS = 32


class Canary(msgspec.Struct):
    """What the trainer computed.

    Attributes:
        token_ids: the text, at most `MAX_TOKENS` tokens.
        logprobs: of every token but the first given those before it, in nats, at temperature 1.
        allowed_nats: mean absolute difference that counts as rounding; None: any.
    """

    token_ids: list[int]
    logprobs: list[float]
    allowed_nats: float | None

    def head(self, num_tokens: int) -> Canary:
        """Return the canary of the first tokens alone, for engines that take no more."""
        return Canary(self.token_ids[:num_tokens], self.logprobs[: max(0, num_tokens - 1)], self.allowed_nats)


def deviation(canary: Canary, logprobs: Sequence[float]) -> float:
    """Return the mean absolute difference of an engine's `logprobs`, in nats.

    Infinite where their number differs; 0 of a single token, before which there is none.
    """
    if len(logprobs) != len(canary.logprobs):
        return float("inf")
    differences = [abs(ours - theirs) for ours, theirs in zip(canary.logprobs, logprobs, strict=True)]
    return sum(differences) / max(1, len(differences))
