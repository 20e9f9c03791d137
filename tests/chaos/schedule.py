"""Which process is hit, when and how, and when the disk fills up: drawn from a seed, so that it can be repeated."""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["SIGKILL", "SIGSTOP", "full", "freeze", "away", "evict", "EIO"]
DISK, RUN, STORE, MACHINE = "disk", "run", "store", "machine"
# This share of the hits does not wait for the run to go on after the hit before.
_DURING_RECOVERY_SHARE = 0.25
STEPS_PER_HIT = 4
_LONGEST_DELAY_S = 0.3
_LONGEST_RECOVERY_S = 8.0


@dataclass(frozen=True)
class Hit:
    """One blow. `kind`: `SIGKILL`, `SIGSTOP` for a hang, `full` for a disk that is full until the run says that it
    waits, `EIO` for files that cannot be read, `freeze` for all processes at once for a while, `away` for a store
    without connections, `evict` for a SIGTERM after which the run goes on in an empty directory from the store. `step`:
    not before this step is trained; unset: some time after the hit before, at the latest when the run goes on.
    """

    victim: str  # a name of `shares`; `disk`, the whole `run`, the object `store` or the `machine`
    kind: Kind
    step: int | None
    delay_s: float  # seconds to wait then


def shares(*, ranks: int = 1, engines: int = 1, others: Iterable[str] = ()) -> dict[str, float]:
    """Return the share of every victim in the kills: what takes longest to come back is hit least. They are
    `orchestrator`, `rank_K` of the trainer, `trainer` (the process that starts the ranks), `launcher`, `inference` and
    `engine` (its child), or `inference_K` and `engine_K` of several. `engines`: inference servers of the run's own;
    others are nobody's victims. `others`: further victims, which cost little.
    """
    share = {"orchestrator": 8.0, "trainer": 3.0, "launcher": 2.0}
    share |= {f"rank_{rank}": 6 / ranks for rank in range(ranks)} | dict.fromkeys(others, 3.0)
    ends = [""] if engines == 1 else [f"_{number}" for number in range(engines)]
    return share | {f"{name}{end}": 1.0 for end in ends for name in ("inference", "engine")}


def draw(
    kills: int,
    seed: int,
    shares: Mapping[str, float],
    *,
    stops: int = 0,
    full_disks: int = 0,
    freezes: int = 0,
    outages: int = 0,
    evictions: int = 0,
    read_errors: int = 0,
    steps_per_hit: int = STEPS_PER_HIT,
) -> list[Hit]:
    """Return that many hits of each kind, in a random order, `steps_per_hit` steps apart. Every victim in `shares` is
    killed at least once, where the kills suffice. The launcher is never stopped: nobody would notice.
    """
    rng = random.Random(seed)
    victims = list(shares)
    killed = [*victims[:kills], *rng.choices(victims, list(shares.values()), k=max(0, kills - len(victims)))]
    stoppable = [victim for victim in victims if victim != "launcher"]
    stopped = rng.choices(stoppable, [shares[victim] for victim in stoppable], k=stops)
    blows: list[tuple[str, Kind]] = [
        *((victim, "SIGKILL") for victim in killed),
        *((victim, "SIGSTOP") for victim in stopped),
        *((DISK, "full") for _ in range(full_disks)),
        *((RUN, "freeze") for _ in range(freezes)),
        *((STORE, "away") for _ in range(outages)),
        *((MACHINE, "evict") for _ in range(evictions)),
        *((DISK, "EIO") for _ in range(read_errors)),
    ]
    rng.shuffle(blows)
    hits = []
    for position, (victim, kind) in enumerate(blows):
        again = position > 0 and rng.random() < _DURING_RECOVERY_SHARE
        step = None if again else 1 + steps_per_hit * position
        delay_s = rng.uniform(0, _LONGEST_RECOVERY_S if again else _LONGEST_DELAY_S)
        hits.append(Hit(victim, kind, step, delay_s))
    return hits


def steps_of(count: int) -> int:
    """Return the length in steps of a run that `count` hits fit into."""
    return STEPS_PER_HIT * (count + 2)
