"""The advantages that reach the journal, through a whole run of the orchestrator."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from orchestrator_fakes import FakeEngine, FakeTrainer, make_config, serving

from orchestrator.advantage import choose_advantage
from orchestrator.environment import Environment, Message, Score, Session, Task, TaskSeed
from orchestrator.main import orchestrate
from triad import journal
from triad.run_dir import RunDir


class Ranked(Environment):
    """Rewards the rollouts of task k with k, k + 1, k + 2, ..."""

    def make_task(self, seed: TaskSeed) -> Task:
        return Task(prompt=[Message("user", f"task {seed.index}")], answer=str(seed.index))

    async def run(self, session: Session, task: Task) -> None:
        await session.sample()

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        return [Score(float(int(task.answer) + index)) for index, _ in enumerate(sessions)]


def reward_itself(rewards_PG: list[list[float]]) -> list[list[float]]:
    return rewards_PG


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_pp", f"{__name__}:reward_itself"])
def test_the_journal_holds_the_advantages_of_the_setting(tmp_path: Path, name: str) -> None:
    engine = FakeEngine()
    with serving(engine):
        config = make_config(tmp_path, engine, max_steps=1, environments=[{"id": f"{__name__}:Ranked"}], advantage=name)
        with FakeTrainer(RunDir(tmp_path), start=0, max_steps=1):
            asyncio.run(orchestrate(config))
    rollouts = journal.read_batch(RunDir(tmp_path), 1).rollouts
    size = config.group_size
    rewards = [[float(problem + index) for index in range(size)] for problem in range(config.problems_per_step)]
    assert [rollout.reward for rollout in rollouts] == [reward for group in rewards for reward in group]
    expected = [advantage for group in choose_advantage(name)(rewards) for advantage in group]
    assert [rollout.advantage for rollout in rollouts] == expected
    assert len(set(expected)) > 1
