"""The state with which the orchestrator resumes after a kill: counters, and seeds that are hashes of counters.

Each random choice of a run has its own seed: the xxh3-64 of the identity of the choice, cut to 63 bits. No choice
depends on timing, and no state of a random generator is saved.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import xxhash

from holdfast.errors import CheckpointError, ConfigError
from holdfast.protocol.rollouts import Dropped
from holdfast.run.journal import Counts

if TYPE_CHECKING:
    from holdfast.config.orchestrator import OrchestratorConfig

STATE_FORMAT = 2


class LevelState(msgspec.Struct, kw_only=True):
    """One level of a curriculum, with the mean rewards of its latest groups."""

    next_task: int = 0
    rewards: list[float] = []


class CurriculumState(msgspec.Struct, kw_only=True):
    """The position in a curriculum; `digest` is of the arguments of the environment and its levels."""

    digest: str
    level: int = 0
    levels: list[LevelState] = []


class EnvironmentState(msgspec.Struct, kw_only=True):
    """Position in one environment.

    Attributes:
        weight: integer share of the mix.
        credit: what the mix owes this environment, in units of one over the sum of weights.
        group_size: rollouts of each problem of the last batch.
        curriculum: None if it never had one.
        open: tasks that are drawn and in no batch yet, in order.
    """

    next_task: int = 0
    weight: int = 0
    credit: int = 0
    group_size: int = 0
    curriculum: CurriculumState | None = None
    open: list[int] = []


class OpenGroup(msgspec.Struct, kw_only=True):
    """A group that is drawn and in no batch yet; see `orchestrator.rounds`.

    Attributes:
        index: of the task in the sequence of its level.
        task_id: of the task among all tasks of the environment.
        step: the batch that was being made when it was drawn, which seeds its samples.
        version: the policy version at that time.
        first_rounds: the first round of each session; -1: it waits for a slot.
        dropped: why its sessions did not come to their end, as when its worker crashed; None if they may.
    """

    environment: str
    index: int
    level: int | None = None
    task_id: int
    step: int
    version: int
    first_rounds: list[int]
    dropped: Dropped | None = None


class RoundsState(msgspec.Struct, kw_only=True):
    """The state of `schedule = "rounds"` between two rounds.

    Attributes:
        round: the last round that was played; -1 before the first.
        open: in the order of the draw.
        parts: what the open groups have sampled, `list[generation_log.Answer]` as msgpack.
        digests: of the weights of each policy version that sampled a part.
    """

    round: int = -1
    open: list[OpenGroup] = []
    parts: bytes = b""
    digests: dict[int, str] = {}


class OrchestratorState(msgspec.Struct, kw_only=True):
    """The state after batch `step` (0 before the first); counters are since the start of the run.

    Attributes:
        problems: drawn problems, with their `rollouts` and `tokens`, dropped groups included.
        sampled_tokens: tokens in batches that the policy sampled.
        teacher_digest: of the teacher's weights; empty without a teacher.
        dropped: problems, rollouts and tokens that are in no batch, by reason.
        evaluated_version: the last evaluated policy version; -1: none.
        rounds: None unless the batch was made in rounds.
    """

    format: int = STATE_FORMAT
    step: int = 0
    problems: int = 0
    rollouts: int = 0
    tokens: int = 0
    sampled_tokens: int = 0
    teacher_digest: str = ""
    dropped: dict[str, Counts] = {}
    environments: dict[str, EnvironmentState] = {}
    evaluated_version: int = -1
    rounds: RoundsState | None = None

    def encode(self) -> bytes:
        """Return the state as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    def copy(self) -> OrchestratorState:
        """Return a copy that shares nothing with this one."""
        return msgspec.convert(msgspec.to_builtins(self), OrchestratorState)


def read_state(path: Path, *, step: int) -> OrchestratorState:
    """Return the state after batch `step` from `path`. Raises CheckpointError if it is another state, or damaged."""
    try:
        state = msgspec.json.decode(path.read_bytes(), type=OrchestratorState)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the checkpoint of step {step} has no orchestrator state") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if state.format != STATE_FORMAT:
        raise CheckpointError(f"{path} has format {state.format}; this version reads format {STATE_FORMAT}")
    if state.step != step:
        raise CheckpointError(f"{path} is the state after step {state.step}, expected step {step}")
    return state


def refuse_open_groups(state: OrchestratorState, config: OrchestratorConfig) -> None:
    """Raise ConfigError if the settings no longer fit the groups that rounds left open."""
    is_open = state.rounds.open if state.rounds is not None else []
    if config.schedule == "strict" and is_open:
        raise ConfigError(
            f"{len(is_open)} groups are open after batch {state.step}, which was made in rounds, and the strict "
            "schedule would lose them. Continue with orchestrator.schedule = 'rounds', or start a new run from the "
            "weights of the checkpoint (ckpt.init_from)"
        )
    sections = {section.label: section for section in config.environments}
    for group in is_open:
        settings, size = sections.get(group.environment), len(group.first_rounds)
        levels = settings.curriculum.levels if settings and settings.curriculum else [None]
        fits = settings is not None and config.rollouts_of(settings).group_size == size
        if not fits or (group.level or 0) >= len(levels):
            level = "" if group.level is None else f" at level {group.level}"
            raise ConfigError(
                f"task {group.task_id} of environment '{group.environment}' is open: it was drawn in rounds for a "
                f"group of {size}{level}, which the settings have no more. Set the environment, its group_size and its "
                "levels as they were, or start a new run from the weights of the checkpoint (ckpt.init_from)"
            )


_MASK = 2**63 - 1  # engines keep seeds as non-negative int64
_HELD_OUT = 2**63
# The unit separator: ("a", "bc") and ("ab", "c") must differ.
_SEPARATOR = "\x1f"


def stable_seed(*parts: int | str) -> int:
    """Return 63 bits that depend only on `parts`, equal in every process and version of Python."""
    return xxhash.xxh3_64_intdigest(_SEPARATOR.join(map(str, parts)).encode()) & _MASK


@dataclass(frozen=True)
class TaskSeed:
    """Names one task of an environment's endless sequence, and seeds it.

    Attributes:
        run_seed: `seed` of the run.
        environment: its name, so that two environments of one class differ.
        index: position in the sequence, from 0.
        held_out: a task of an evaluation; training never has its seeds.
        level: of the curriculum; each level has its own sequence. None without a curriculum.
    """

    run_seed: int
    environment: str
    index: int
    held_out: bool = False
    level: int | None = None

    @property
    def number(self) -> int:
        """The seed of this task: below 2**63 in training, from 2**63 to 2**64 if held out."""
        return self._number("task", self.index)

    def random(self) -> random.Random:
        """Return the generator of this seed, the same at every call: draws continue after the last draw."""
        return self._generator

    @cached_property
    def _generator(self) -> random.Random:
        return random.Random(self.number)

    def fresh(self) -> TaskSeed:
        """Return this seed with a new generator, as every call of `make_task` gets it."""
        return replace(self)  # without the cached generator

    def shared(self, *parts: int | str) -> int:
        """Return a seed that all training tasks of an environment, or of a level, share, such as one for each epoch."""
        return self._number("shared", *parts)

    def row(self, num_rows: int) -> int:
        """Return which of `num_rows` rows this task is: each row comes once per epoch, in a new order each time."""
        epoch, position = divmod(self.index, num_rows)
        return _order_of_rows(self.shared("epoch", epoch), num_rows)[position]

    def _number(self, kind: str, *parts: int | str) -> int:
        if self.level is not None:
            parts = ("level", self.level, *parts)
        if self.held_out:
            return _HELD_OUT + stable_seed(f"held-out {kind}", self.run_seed, self.environment, *parts)
        return stable_seed(kind, self.run_seed, self.environment, *parts)


@lru_cache(maxsize=16)
def _order_of_rows(seed: int, num_rows: int) -> list[int]:
    order = list(range(num_rows))
    random.Random(seed).shuffle(order)
    return order


def request_seed(task: TaskSeed, *, step: int, sample_index: int, turn: int) -> int:
    """Return the sampling seed of one turn of one rollout."""
    kind = "held-out sample" if task.held_out else "sample"
    level = () if task.level is None else ("level", task.level)
    return stable_seed(kind, task.run_seed, step, task.environment, *level, task.index, sample_index, turn)
