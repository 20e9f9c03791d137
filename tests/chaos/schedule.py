"""Which process is hit, when and how: drawn from a seed, so that a schedule can be repeated."""

from __future__ import annotations

import random
import signal
from collections.abc import Mapping
from dataclasses import dataclass

# Share of every victim: what takes longest to come back is hit least.
SHARES: Mapping[str, float] = {
    "orchestrator": 8,
    "rank": 6,
    "trainer": 3,
    "inference": 1,
    "engine": 1,
    "launcher": 2,
}
# The inference server of these runs belongs to somebody else.
WITHOUT_SERVER = {victim: share for victim, share in SHARES.items() if victim not in ("inference", "engine")}
STOPPED_SHARE = 0.05
# This share of the hits does not wait for the run to go on after the hit before.
DURING_RECOVERY_SHARE = 0.25
STEPS_PER_HIT = 4
_LONGEST_DELAY_S = 0.3
_LONGEST_RECOVERY_S = 8.0


@dataclass(frozen=True)
class Hit:
    """One blow.

    Attributes:
        victim: `orchestrator`, `rank` (of the trainer), `trainer` (the process that starts the ranks),
            `inference`, `engine` (its child) or `launcher`.
        number: SIGKILL, or SIGSTOP for a hang.
        step: not before this step is trained; unset: some time after the hit before, at the latest when
            the run goes on.
        delay_s: seconds to wait then.
    """

    victim: str
    number: signal.Signals
    step: int | None
    delay_s: float


def draw(
    count: int, seed: int, shares: Mapping[str, float] = SHARES, *, steps_per_hit: int = STEPS_PER_HIT
) -> list[Hit]:
    """Return `count` hits, on every victim in `shares` where they suffice, `steps_per_hit` steps apart."""
    rng = random.Random(seed)
    victims = list(shares)
    # Every victim at least once, where there are enough hits.
    drawn = [*victims[:count], *rng.choices(victims, list(shares.values()), k=max(0, count - len(victims)))]
    rng.shuffle(drawn)
    hits = []
    for position, victim in enumerate(drawn):
        is_stop = victim != "launcher" and rng.random() < STOPPED_SHARE
        again = position > 0 and rng.random() < DURING_RECOVERY_SHARE
        hits.append(
            Hit(
                victim=victim,
                number=signal.SIGSTOP if is_stop else signal.SIGKILL,
                step=None if again else 1 + steps_per_hit * position,
                delay_s=rng.uniform(0, _LONGEST_RECOVERY_S if again else _LONGEST_DELAY_S),
            )
        )
    return hits


def steps_of(count: int) -> int:
    """Return the length in steps of a run that `count` hits fit into."""
    return STEPS_PER_HIT * (count + 2)
