"""The needs of a step on each rank, as `holdfast.trainer.forecast` finds them. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

GIB = 1 << 30
_DRIVEN = (4, 6)
"""Layers of the two models that are driven. From about four layers on, every layer adds the same bytes."""
_LONGEST_PERIOD = 8
_SAME_BYTES = 1 << 20
RUNNING_BYTES = GIB
"""An engine takes this beside weights and cache. An assumption."""


class Peak(msgspec.Struct, frozen=True):
    """The bytes alive at once, by their purpose."""

    parts: dict[str, int] = {}

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.parts.values())


class Collectives(msgspec.Struct):
    """Calls and bytes of collectives by kind. A whole tensor counts, on one rank."""

    kinds: dict[str, tuple[int, int]] = {}

    def add(self, kind: str, calls: int, num_bytes: int) -> None:
        """Count some more."""
        before = self.kinds.get(kind, (0, 0))
        self.kinds = self.kinds | {kind: (before[0] + calls, before[1] + num_bytes)}

    def plus(self, others: Collectives, *, times: int = 1) -> Collectives:
        """Return these and `times` the others."""
        found = Collectives(dict(self.kinds))
        for kind, (calls, num_bytes) in others.kinds.items() if times else ():
            found.add(kind, times * calls, times * num_bytes)
        return found


class Step(msgspec.Struct):
    """One driven step of a model, of all or of some of its layers, on one rank.

    Attributes:
        peaks: of each part of the work.
        first_row, last_row: what a micro-batch sends; the gradients may be summed with the last one only.
        rest: what an update sends beside its micro-batches.
        once: what a step sends beside its updates.
        parameters, trained: numbers of the whole model, on all ranks.
        published_bytes: of the weights that engines get after a step; 0: none.
        kv_bytes: of the engine's cache, of one token, in bfloat16; None: not known for this kind of attention.
        heads: of attention, and of its keys; None: not known.
    """

    peaks: dict[str, Peak]
    first_row: Collectives
    last_row: Collectives
    rest: Collectives
    parameters: int
    trained: int
    published_bytes: int = 0
    kv_bytes: int | None = None
    heads: tuple[int, int] | None = None
    once: Collectives = msgspec.field(default_factory=Collectives)


class EngineSize(msgspec.Struct, frozen=True):
    """The size of an engine.

    Attributes:
        width: bytes of a weight.
        ranks: GPUs over which its model is split.
        max_len: tokens of its longest session.
    """

    width: int
    ranks: int
    max_len: int

    def needs(self, step: Step) -> tuple[float, float]:
        """Return the bytes of weights, and of the longest session, on each GPU."""
        session = (step.kv_bytes or 0) * (self.width / 2) * self.max_len
        parts = min(self.ranks, step.heads[1]) if step.heads else self.ranks  # more GPUs hold copies of key heads
        return step.parameters * self.width / self.ranks, session / parts


class Room(msgspec.Struct, frozen=True):
    """The memory of a GPU.

    Attributes:
        card: all bytes; 0: not known, and everything fits.
        taken: bytes that nobody else may take.
        engine: an engine that gets what the trainer leaves; None: it does not share the GPU, or `taken` counts it.
        open: settings of the trainer that may change so that both fit.
    """

    card: int = 0
    taken: int = 0
    engine: EngineSize | None = None
    open: tuple[str, ...] = ()

    def least(self, step: Step) -> int:
        """Return the percent of the GPU that the engine needs: for weights, one session, and to run."""
        return math.ceil(100 * (sum(self.engine.needs(step)) + RUNNING_BYTES) / self.card) if self.engine else 0

    def left(self, step: Step) -> int:
        """Return the bytes that a rank may take."""
        return max(1, self.card - self.taken + -self.least(step) * self.card // 100)

    def fits(self, found: Forecast) -> bool:
        """Whether a rank has room."""
        return not self.card or found.peak[1].total <= self.left(found.step)


class Load(msgspec.Struct, frozen=True):
    """The most that the orchestrator hands the trainer of `rl` in a step.

    Attributes:
        rollouts: of a step; 0: not known.
        group_size: of one problem.
        seq_len, max_tokens: of one rollout, and of its answer.
        distribution: how its tokens are sampled.
    """

    rollouts: int = 0
    group_size: int = 1
    seq_len: int = 0
    max_tokens: int = 0
    distribution: dict[str, float] = {}


class NoForecast(msgspec.Struct, tag=True):
    """Why no step could be driven."""

    reason: str


class Forecast(msgspec.Struct, tag=True):
    """The needs of a step on each rank.

    Attributes:
        model: class of the model.
        rows, row_tokens: micro-batches of a rank in one update, and tokens of each.
        updates: of a step.
        ways: changes of settings with which it fits, and their peaks, if it does not fit what was given.
        picked: values of open settings with which it fits, by dotted key.
        unpicked_bytes: peak without them.
    """

    model: str
    ranks: int
    rows: int
    row_tokens: int
    updates: int
    step: Step
    ways: dict[str, int] = {}
    picked: dict[str, Any] = {}
    unpicked_bytes: int = 0

    @property
    def peak(self) -> tuple[str, Peak]:
        """The part of the work that needs most, and what it needs."""
        name = max(self.step.peaks, key=lambda name: self.step.peaks[name].total)
        return name, self.step.peaks[name]

    @property
    def of_step(self) -> Collectives:
        """All micro-batches and updates of a step together."""
        update = self.step.last_row.plus(self.step.first_row, times=self.rows - 1).plus(self.step.rest)
        return Collectives().plus(update, times=self.updates).plus(self.step.once)


def depths(kinds: Sequence[object]) -> tuple[int, int] | None:
    """Return two numbers of layers, from which all layers follow on a line; None: the model must be driven whole.
    `kinds`: of the layers, in their order: a beginning of any kinds, and a pattern that repeats."""
    count = len(kinds)
    for first in range(_DRIVEN[0]):
        for period in range(1, _LONGEST_PERIOD + 1):
            if any(kinds[place] != kinds[place + period] for place in range(first, count - period)):
                continue
            fewer = max(_DRIVEN[0], first + period)
            fewer += (count - fewer) % period
            more = fewer + period * -(-(_DRIVEN[1] - _DRIVEN[0]) // period)
            return (fewer, more) if more < count else None
    return None


def crosses(fewer: Step, more: Step) -> bool:
    """Whether the deeper model has a peak at another moment: a part of the peak shrinks, so no line goes through."""
    parts = ((peak.parts, more.peaks[name].parts) for name, peak in fewer.peaks.items() if name in more.peaks)
    return any(low[tag] - high.get(tag, 0) > _SAME_BYTES for low, high in parts for tag in low)


def extended(fewer: Step, more: Step, layers: tuple[int, int], count: int) -> Step:
    """Return the step of a model with `count` layers, on the line through two models with fewer `layers`."""
    begin, end = layers

    def at(low: float, high: float) -> int:
        return round(low + (high - low) * (count - begin) / (end - begin))

    def peak(low: Peak, high: Peak) -> Peak:
        tags = {**low.parts, **high.parts}
        return Peak({tag: max(0, at(low.parts.get(tag, 0), high.parts.get(tag, 0))) for tag in tags})

    def sent(low: Collectives, high: Collectives) -> Collectives:
        kinds = {**low.kinds, **high.kinds}
        pairs = {kind: (low.kinds.get(kind, (0, 0)), high.kinds.get(kind, (0, 0))) for kind in kinds}
        return Collectives({kind: (at(a[0], b[0]), at(a[1], b[1])) for kind, (a, b) in pairs.items()})

    return Step(
        peaks={name: peak(fewer.peaks[name], more.peaks[name]) for name in more.peaks},
        first_row=sent(fewer.first_row, more.first_row),
        last_row=sent(fewer.last_row, more.last_row),
        rest=sent(fewer.rest, more.rest),
        once=sent(fewer.once, more.once),
        parameters=at(fewer.parameters, more.parameters),
        trained=at(fewer.trained, more.trained),
        published_bytes=at(fewer.published_bytes, more.published_bytes),
        kv_bytes=None if fewer.kv_bytes is None or more.kv_bytes is None else at(fewer.kv_bytes, more.kv_bytes),
        heads=fewer.heads,
    )
