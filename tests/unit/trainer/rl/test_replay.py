"""The replay buffer: which groups it keeps, which it samples, and that a checkpoint changes neither."""

import math
from collections import Counter

import msgspec
import pytest

from holdfast.errors import CheckpointError
from holdfast.protocol.rollouts import (
    Logprobs,
    LossMask,
    Rewards,
    Rollout,
    Sampling,
    StepRewards,
    TokenIds,
    VersionSpan,
)
from holdfast.trainer.rl.replay import ReplayBuffer


def group(task_id: int, *, size: int = 2) -> list[Rollout]:
    return [
        Rollout(
            environment="e",
            task_id=task_id,
            sample_index=index,
            token_ids=TokenIds([5, 6, 7 + task_id]),
            loss_mask=LossMask([False, True, True]),
            logprobs=Logprobs([0.0, -1 / 3 - task_id, -1e-30]),
            versions=[VersionSpan(0, 1, 3)],
            reward=0.1 * task_id,
            metrics={"exact": math.pi},
            step_rewards=StepRewards(TokenIds([1, 2]), Rewards([math.e, -1 / 3])) if index else None,
        )
        for index in range(size)
    ]


def buffer_of(*steps: list[int], capacity: int = 100, max_age: int = 10, seed: int = 7) -> ReplayBuffer:
    """Return a buffer that got the problems of these steps, from step 1 on."""
    buffer = ReplayBuffer(capacity, max_age=max_age, seed=seed)
    for step, tasks in enumerate(steps, start=1):
        buffer.add(step, [group(task) for task in tasks])
    return buffer


def sampled(buffer: ReplayBuffer, step: int, num_groups: int = 100) -> list[int]:
    return [rollouts[0].task_id for rollouts in buffer.sample(step, num_groups)]


def test_groups_come_back_whole_and_at_most_once() -> None:
    buffer = buffer_of([0, 1, 2], [3, 4])
    got = buffer.sample(3, 4)
    assert len(got) == 4 and len({rollouts[0].task_id for rollouts in got}) == 4
    assert all(rollouts == group(rollouts[0].task_id) for rollouts in got)


def test_fewer_groups_than_asked_for_are_all_returned_and_over_capacity_the_oldest_go_first() -> None:
    assert sorted(sampled(buffer_of([0, 1]), 2, 5)) == [0, 1]
    assert sampled(ReplayBuffer(3, max_age=1, seed=0), 1, 5) == []
    assert sampled(buffer_of([0, 1]), 2, 0) == []
    # Over capacity the oldest go first.
    buffer = buffer_of([0, 1], [2, 3], [4], capacity=3)
    assert len(buffer) == 3 and sorted(sampled(buffer, 4)) == [2, 3, 4]
    assert len(buffer_of([0, 1, 2], capacity=0)) == 0
    # A smaller capacity keeps the newest of a checkpoint.
    resumed = ReplayBuffer(2, max_age=10, seed=7)
    resumed.decode(buffer_of([0, 1], [2, 3]).encode())
    assert sorted(sampled(resumed, 3)) == [2, 3]


def test_only_groups_of_one_to_max_age_steps_are_sampled_and_older_ones_forgotten() -> None:
    buffer = buffer_of([1], [2], [3], [4], max_age=2)
    assert sorted(sampled(buffer, 4)) == [2, 3]  # those of step 4 itself are no replay, those of step 1 too old
    assert sorted(sampled(buffer, 5)) == [3, 4]
    assert sampled(buffer, 6) == [4]
    assert sampled(buffer, 7) == []
    # What is too old is forgotten.
    buffer = buffer_of([1], [2], [3], max_age=2)
    buffer.add(5, [group(5)])
    assert len(buffer) == 2 and sampled(buffer, 5) == [3] and sampled(buffer, 6) == [5]


def test_a_step_samples_the_same_before_and_after_its_own_batch_is_added() -> None:
    before, after = (buffer_of([1, 2], [3, 4], max_age=2) for _ in range(2))
    after.add(3, [group(5)])
    assert sampled(before, 3, 3) == sampled(after, 3, 3)


def test_the_choice_depends_on_seed_and_step_and_not_on_earlier_choices() -> None:
    tasks = list(range(20))
    buffer = buffer_of(tasks)
    first = sampled(buffer, 3, 5)
    sampled(buffer, 4, 5)
    assert sampled(buffer, 3, 5) == first == sampled(buffer_of(tasks), 3, 5)
    assert sampled(buffer, 4, 5) != first != sampled(buffer_of(tasks, seed=8), 3, 5)
    assert sampled(buffer, 3, 8)[:5] == first


def test_the_choice_is_pinned() -> None:
    """A new numpy, Python or hash seed must not change what a resumed run trains on."""
    assert sampled(buffer_of(list(range(10))), 2, 4) == [7, 6, 1, 3]


def test_every_group_is_as_likely_as_any_other() -> None:
    buffer = buffer_of(list(range(10)), max_age=5000)
    counts = Counter(task for step in range(2, 4002) for task in sampled(buffer, step, 3))
    # 4000 draws of 3 of 10: 1200 each, standard deviation sqrt(4000 * .3 * .7) = 29.
    assert len(counts) == 10 and all(abs(count - 1200) < 5 * 29 for count in counts.values())


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode([{"step": "x", "rollouts": []}])])
def test_damaged_bytes_are_refused_and_change_nothing(data: bytes) -> None:
    buffer = buffer_of([0, 1])
    with pytest.raises(CheckpointError, match="replay buffer of the checkpoint"):
        buffer.decode(data)
    assert len(buffer) == 2


def test_a_buffer_that_does_not_say_how_it_was_sampled_is_refused() -> None:
    """A default would be trained on as if it were true."""
    buffer, other = buffer_of([0]), buffer_of([1])
    kept = buffer.sample(2, 1)[0]
    for rollout in kept:
        rollout.sampling = Sampling(0.7, 0.9, 5, 0.1)
    other.decode(buffer.encode())
    assert other.sample(2, 1)[0] == kept
    groups = msgspec.msgpack.decode(buffer.encode())
    del groups[0]["rollouts"][1]["sampling"]
    with pytest.raises(CheckpointError, match="sampling.*without trainer.replay"):
        other.decode(msgspec.msgpack.encode(groups))
    assert other.sample(2, 1)[0] == kept
