"""A few rollouts of an RL run, token by token, from the batches that are still in its journal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.commands.report.run_data import RunData
from holdfast.commands.rollouts.batches import problems_of
from holdfast.commands.rollouts.text import TextOf, text_of
from holdfast.shared.errors import HoldfastError
from holdfast.shared.files.journal import read_batch
from holdfast.shared.wire.rollouts import Batch, Rollout

MAX_BATCHES = 4
_GROUPS_OF_A_BATCH = 2
_MAX_TOKENS = 300
_MAX_CHARACTERS = 200
_CONTEXT_TOKENS = 6


@dataclass(frozen=True)
class Token:
    """One token; `logprob` None where it was not sampled."""

    text: str
    logprob: float | None


@dataclass(frozen=True)
class SampleRollout:
    """One rollout to show.

    Attributes:
        advantage: its reward less the mean of its group.
        tokens: the first of them.
        num_left_out: how many more there are.
    """

    step: int
    environment: str
    task_id: int
    sample_index: int
    reward: float
    advantage: float
    truncated: bool
    tokens: list[Token]
    num_left_out: int

    @property
    def direction(self) -> str:
        """`better`, `worse` or `even`, than the mean of its group."""
        return "even" if abs(self.advantage) < 1e-9 else "better" if self.advantage > 0 else "worse"


def sample_rollouts(run: RunData) -> tuple[list[SampleRollout], list[str]]:
    """Return the best and the worst rollout of the groups that differ most, of a few batches, and what was not read."""
    there = run.run_dir.published_batches()
    if not there:
        return [], []
    last = len(there) - 1
    wanted = sorted({there[round(last * part / max(1, MAX_BATCHES - 1))] for part in range(MAX_BATCHES)})
    text = text_of(run.run_dir)
    notes = [f"texts cannot be shown: {text.reason}"] if text.reason else []
    found: list[SampleRollout] = []
    for step in reversed(wanted):
        try:
            batch = read_batch(run.run_dir, step)
        except (HoldfastError, OSError) as error:  # the trainer of a run that goes on has removed it, or it is damaged
            notes.append(f"batch {step} is left out: {error}")
            continue
        found += _of_batch(batch, text)
    return found, notes


def _of_batch(batch: Batch, text: TextOf) -> list[SampleRollout]:
    groups = sorted(problems_of(batch), key=lambda group: _spread([one.reward for one in group]), reverse=True)
    shown = []
    for group in groups[:_GROUPS_OF_A_BATCH]:
        mean = sum(one.reward for one in group) / len(group)
        ordered = sorted(group, key=lambda one: one.reward)
        chosen = [ordered[-1], ordered[0]] if len(ordered) > 1 else ordered
        shown += [_sample(batch.step, one, one.reward - mean, text) for one in chosen]
    return shown


def _spread(rewards: Sequence[float]) -> float:
    return max(rewards) - min(rewards)


def _sample(step: int, rollout: Rollout, advantage: float, text: TextOf) -> SampleRollout:
    token_ids = list(rollout.token_ids)
    pieces = _pieces(token_ids[:_MAX_TOKENS], text)
    sampled, logprobs = list(rollout.loss_mask), list(rollout.logprobs)
    return SampleRollout(
        step,
        rollout.environment,
        rollout.task_id,
        rollout.sample_index,
        rollout.reward,
        advantage,
        rollout.truncated,
        [Token(piece, logprobs[at] if sampled[at] else None) for at, piece in enumerate(pieces)],
        max(0, len(token_ids) - _MAX_TOKENS),
    )


def _pieces(token_ids: Sequence[int], text: TextOf) -> list[str]:
    """Return what each token adds to the text: many say nothing alone."""
    pieces = []
    for at, token_id in enumerate(token_ids):
        before = token_ids[max(0, at - _CONTEXT_TOKENS) : at]
        head, whole = text.decode(before), text.decode([*before, token_id])
        if head is None or whole is None:
            pieces.append(f"{token_id} ")
            continue
        piece = whole[len(head) :] if whole.startswith(head) else text.decode([token_id]) or ""
        pieces.append(piece if len(piece) <= _MAX_CHARACTERS else f"{piece[:_MAX_CHARACTERS]}…")
    return pieces
