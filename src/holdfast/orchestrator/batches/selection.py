"""Which of the groups that were drawn for a batch go into it, and what becomes of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.orchestrator.batches.state import OrchestratorState
from holdfast.orchestrator.rollouts.group import Outcome
from holdfast.shared.files.journal import Counts, dropped_by_reason
from holdfast.shared.wire.rollouts import Dropped, Rollout


def has_signal(outcome: Outcome) -> bool:
    """Whether a group has unequal rewards. Equal ones say nothing about which of its rollouts is better.

    Those of turns and tokens say something if they differ within a rollout, too.
    """
    if isinstance(outcome, Dropped):
        return False
    rewards = [rollout.reward for rollout in outcome]
    steps = [reward for rollout in outcome if rollout.step_rewards for reward in rollout.step_rewards.rewards]
    return any(len(values) > 0 and min(values) != max(values) for values in (rewards, steps))


@dataclass(frozen=True)
class Selection:
    """The groups of a batch, and what was drawn besides.

    Attributes:
        groups: those of the batch, in the order of the draw.
        unused: groups without signal that are not in the batch.
        dropped: one entry per problem that is not in the batch, in the order of the draw.
    """

    groups: list[list[Rollout]]
    unused: list[list[Rollout]]
    dropped: list[Dropped]

    @property
    def rollouts(self) -> list[Rollout]:
        """The rollouts of the batch, problem by problem."""
        return [rollout for group in self.groups for rollout in group]


def select(outcomes: Sequence[Outcome], *, num_groups: int) -> Selection:
    """Return at most `num_groups` groups: those with signal first, then the earliest of the others."""
    candidates = [place for place, outcome in enumerate(outcomes) if not isinstance(outcome, Dropped)]
    # sorted is stable: among equals the order of the draw stays.
    chosen = set(sorted(candidates, key=lambda place: not has_signal(outcomes[place]))[:num_groups])
    groups: list[list[Rollout]] = []
    unused: list[list[Rollout]] = []
    dropped: list[Dropped] = []
    for place, outcome in enumerate(outcomes):
        if isinstance(outcome, Dropped):
            dropped.append(outcome)
        elif place in chosen:
            groups.append(outcome)
        else:
            unused.append(outcome)
            dropped.append(_without_signal(outcome))
    return Selection(groups, unused, dropped)


def _without_signal(group: Sequence[Rollout]) -> Dropped:
    return Dropped(
        environment=group[0].environment,
        task_id=group[0].task_id,
        reason="zero_signal",
        rollouts=len(group),
        tokens=sum(len(rollout.token_ids) for rollout in group),
    )


def count(state: OrchestratorState, step: int, selection: Selection) -> None:
    """Move the counters of `state` on to batch `step`."""
    rollouts, dropped = selection.rollouts, selection.dropped
    state.step = step
    state.problems += len(selection.groups) + len(dropped)
    state.rollouts += len(rollouts) + sum(one.rollouts for one in dropped)
    state.tokens += sum(len(one.token_ids) for one in rollouts) + sum(one.tokens for one in dropped)
    state.sampled_tokens += sum(one.loss_mask.num_sampled for one in rollouts)
    for reason, counts in dropped_by_reason(dropped).items():
        state.dropped[reason] = state.dropped.get(reason, Counts()) + counts
