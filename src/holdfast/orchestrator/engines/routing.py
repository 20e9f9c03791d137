"""Which engine a request goes to: the one that holds its prefix, unless that has clearly more to do than another."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.orchestrator.engines.engine import Engine

# How much more an engine must have in flight than the idlest one before a prefix is computed anew there. Both must
# hold, as in the router of SGLang: without the first, few sessions would wander; without the second, many would.
_MORE_SEQUENCES = 16
_MORE_TIMES = 1.5


class Affinity:
    """Sessions that begin with the same tokens, and the engine that has them in its cache."""

    def __init__(self) -> None:
        self.engine: Engine | None = None


def choose(engines: Sequence[Engine], affinity: Affinity) -> Engine:
    """Return the one of `engines` to ask, and remember it in `affinity`; of equally busy ones the first."""
    idlest = min(engines, key=lambda engine: engine.in_flight)
    home = affinity.engine
    if home is None or home not in engines or _is_clearly_busier(home, idlest):
        home = idlest
    affinity.engine = home
    return home


def _is_clearly_busier(engine: Engine, other: Engine) -> bool:
    more = engine.in_flight - other.in_flight
    return more > _MORE_SEQUENCES and engine.in_flight > _MORE_TIMES * other.in_flight
