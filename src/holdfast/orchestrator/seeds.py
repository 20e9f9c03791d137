"""Seeds: every random choice of a run is a hash of what it is for, so that none depends on timing.

Each seed is the xxh3-64 of its parts, cut to 63 bits.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cached_property

import xxhash

_MASK = 2**63 - 1  # engines keep seeds as non-negative int64
_HELD_OUT = 2**63
# The unit separator: ("a", "bc") and ("ab", "c") must differ.
_SEPARATOR = "\x1f"


def stable_seed(*parts: int | str) -> int:
    """Return 63 bits that depend on `parts` alone, the same in every process and version of Python."""
    return xxhash.xxh3_64_intdigest(_SEPARATOR.join(map(str, parts)).encode()) & _MASK


@dataclass(frozen=True)
class TaskSeed:
    """Names one task of an environment's endless sequence, and seeds it.

    Attributes:
        run_seed: `seed` of the run.
        environment: name of the environment, so that two of a kind differ.
        index: position in the sequence, from 0.
        held_out: a task of an evaluation. No seed of its tasks is one that training has, whatever the run's seed:
            those of training are below 2**63, these are not.
        level: of the environment's curriculum; each has a sequence of its own. None without one.
    """

    run_seed: int
    environment: str
    index: int
    held_out: bool = False
    level: int | None = None

    @property
    def number(self) -> int:
        """The seed of this task: below 2**63 in training, from there on and below 2**64 where it is held out."""
        return self._number("task", self.index)

    def random(self) -> random.Random:
        """Return the generator of this seed, the same at every call: draws go on where the last one ended."""
        return self._generator

    @cached_property
    def _generator(self) -> random.Random:
        return random.Random(self.number)

    def fresh(self) -> TaskSeed:
        """Return this seed with nothing drawn from it yet; every call of `make_task` gets one."""
        # replace calls the constructor: the cached generator is not taken along.
        return replace(self)

    def shared(self, *parts: int | str) -> int:
        """Return a seed that all tasks of this environment share, such as one for each epoch."""
        return self._number("shared", *parts)

    def _number(self, kind: str, *parts: int | str) -> int:
        if self.level is not None:
            parts = ("level", self.level, *parts)
        if self.held_out:
            return _HELD_OUT + stable_seed(f"held-out {kind}", self.run_seed, self.environment, *parts)
        return stable_seed(kind, self.run_seed, self.environment, *parts)


def request_seed(task: TaskSeed, *, step: int, sample_index: int, turn: int) -> int:
    """Return the sampling seed of one turn of one rollout."""
    kind = "held-out sample" if task.held_out else "sample"
    level = () if task.level is None else ("level", task.level)
    return stable_seed(kind, task.run_seed, step, task.environment, *level, task.index, sample_index, turn)
