"""What inference servers answer and their clients go by, defined once for both sides."""

from __future__ import annotations

from holdfast.shared.wire.rollouts import VersionSpan

OTHER_WEIGHTS = "other_weights"
"""Code of the answer 409 to a request that is for other weights than those that the server serves."""

UNREADABLE = "unreadable"
"""Code of the answer 507 to a push of weights that the storage does not give: they may be right."""


class SampledSpan(VersionSpan, frozen=True):
    """Tokens [start, end) of a choice were sampled by the weights of `version` with this digest."""

    digest: str
