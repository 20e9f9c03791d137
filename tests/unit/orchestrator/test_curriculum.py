"""Curricula: which level a task is drawn from follows from whole batches, and survives whatever befalls the run."""

from pathlib import Path
from typing import Any

import pytest

from holdfast import TaskSeed
from holdfast.config.orchestrator import EvalConfig, OrchestratorConfig
from holdfast.errors import ConfigError
from holdfast.orchestrator.batch_maker import adopt_curricula, adopt_mix, advance, curriculum_metrics
from holdfast.orchestrator.check import check_environments
from holdfast.orchestrator.episodes import Outcome
from holdfast.orchestrator.state import CurriculumState, OrchestratorState, read_state, request_seed
from holdfast.protocol.rollouts import Dropped
from holdfast.run import journal
from holdfast.run.run_dir import RunDir
from tests.builders.sampled_rollouts import sampled_rollout
from tests.servers.orchestrator_fakes import FakeEngine, make_config, read_rollouts, resumed_of, run, serving

GRADED = "tests.runs.environments:Graded"
LEVELS = [{"modulus": 1}, {"modulus": 2}, {"modulus": 3}]


def config_of(curriculum: dict[str, Any] | None, **changes: Any) -> OrchestratorConfig:
    section = {"id": GRADED, "name": "graded", "curriculum": curriculum}
    return OrchestratorConfig.model_validate({"environments": [section], "group_size": 2} | changes)


def begun(config: OrchestratorConfig, state: OrchestratorState | None = None) -> OrchestratorState:
    state = state or OrchestratorState()
    adopt_mix(state, config)
    adopt_curricula(state, config)
    return state


def curriculum_of(state: OrchestratorState) -> CurriculumState:
    found = state.environments["graded"].curriculum
    assert found is not None
    return found


def group(level: int | None, *rewards: float, name: str = "graded") -> Outcome:
    return [sampled_rollout(reward, environment=name, level=level) for reward in rewards]


FAILED = Dropped(environment="graded", task_id=0, reason="environment_error", rollouts=2, tokens=9)


def test_a_gate_opens_when_the_window_is_full_and_good_enough() -> None:
    config = config_of({"levels": LEVELS, "window": 3, "advance_reward": 0.75})
    state = begun(config)
    advance(state, config, [group(0, 1, 1), FAILED, group(0, 1, 1), group(None, 1, 1, name="other")])
    assert curriculum_of(state).level == 0, "two groups are no window of three"
    advance(state, config, [group(0, 0, 1)])
    assert curriculum_of(state).level == 1
    # What is judged next is the groups of the next level alone, the latest of them.
    advance(state, config, [group(1, 1, 1), group(1, 0, 0), group(1, 1, 1), group(1, 1, 0)])
    assert curriculum_of(state).level == 1
    metrics = curriculum_metrics(state, config, [group(1, 1, 0), group(None, 3, 3, name="other")])
    assert metrics == {"curriculum/graded/level": 1.0, "curriculum/graded/reward": 0.5}
    advance(state, config, [group(1, 1, 1), group(1, 1, 1)])
    advance(state, config, [group(2, 1, 1)] * 9)
    assert curriculum_of(state).level == 2, "there is none behind the last"
    assert curriculum_of(state).levels[1].rewards == [0.5, 1.0, 1.0] and curriculum_metrics(state, config, []) == {}


def test_settings_that_change_on_resume(caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {"levels": LEVELS, "window": 2, "advance_reward": 0.5}
    state = begun(config_of(settings))
    for level in (0, 1):
        advance(state, config_of(settings), [group(level, 1, 1)] * 2)
    found = curriculum_of(state)
    found.levels[2].next_task = 5
    assert found.level == 2
    # Other gates judge what is known.
    same = begun(config_of(settings | {"window": 1, "advance_reward": 0.9}), state.copy())
    assert same.environments == state.environments and not caplog.records
    # Other levels are judged anew; a level that is gone keeps its place in its tasks.
    shorter = begun(config_of(settings | {"levels": LEVELS[:2]}), state.copy())
    assert "the levels of environment 'graded' changed since the checkpoint: it continues at level 1" in caplog.text
    found = curriculum_of(shorter)
    assert found.level == 1 and not any(level.rewards for level in found.levels)
    longer = curriculum_of(begun(config_of(settings | {"levels": [*LEVELS, {"modulus": 4}]}), shorter))
    assert [level.next_task for level in longer.levels] == [0, 0, 5, 0] and longer.level == 1
    caplog.clear()
    # Without a curriculum for a while: it comes back as it was.
    before = state.encode()
    advance(begun(config_of(None), state), config_of(None), [group(None, 0, 1)])
    assert begun(config_of(settings), state).encode() == before and not caplog.records
    other = config_of(settings)
    other.environments[0].args = {"fails_at": 3}
    assert not curriculum_of(begun(other, state)).levels[0].rewards
    assert "it continues at level 2, judged from scratch" in caplog.text


def test_every_level_has_a_sequence_of_tasks_of_its_own() -> None:
    seeds = [TaskSeed(0, "graded", 4, level=level) for level in (None, 0, 1)]
    for number in (
        {seed.number for seed in seeds},
        {seed.shared("epoch", 1) for seed in seeds},
        {request_seed(seed, step=1, sample_index=0, turn=0) for seed in seeds},
    ):
        assert len(number) == 3


def test_a_curriculum_that_never_moves_is_refused() -> None:
    for says, curriculum in (
        ("at least 2 items", {"levels": LEVELS[:1], "advance_reward": 1}),
        ("advance_reward\n *Field required", {"levels": LEVELS}),
    ):
        with pytest.raises(ValueError, match=says):
            config_of(curriculum)


def test_arguments_of_a_level_are_checked_before_anything_starts_and_evaluations_have_none() -> None:
    for name, section in (("Graded", {"id": GRADED}), ("Addition", {"id": "examples.environments.addition:Addition"})):
        levels = {"levels": [{}, {"digit": 2}], "advance_reward": 1}
        with pytest.raises(ConfigError, match=rf"^environments\[0\]\.curriculum\.levels\[1\]\.args\.digit: {name} has"):
            check_environments(OrchestratorConfig.model_validate({"environments": [section | {"curriculum": levels}]}))
    graded = {"id": "graded", "curriculum": {"levels": LEVELS, "advance_reward": 1}}
    with pytest.raises(ValueError, match="an evaluation asks the same tasks each time, and curriculum chooses"):
        EvalConfig.model_validate({"environments": [graded]})


GATES = {"levels": LEVELS, "window": 4, "advance_reward": 0.4}


def sections(**changes: Any) -> list[dict[str, Any]]:
    graded = {"id": GRADED, "name": "graded", "curriculum": GATES, "on_error": "drop"}
    return [graded | {"args": {"fails_at": 2}} | changes, {"id": "reverse_text"}]


@pytest.mark.launch
def test_levels_are_the_same_in_workers_in_little_room_and_resumed(tmp_path: Path) -> None:
    """The rollouts and the state, byte for byte; no level repeats or skips a task of its own."""
    common: dict[str, Any] = {"problems_per_step": 6, "max_steps": 8, "async_level": 1}
    outcomes: dict[str, Any] = {}
    with serving(engine := FakeEngine()):
        for name, workers, room in (("here", 0, 256), ("workers", 1, 256), ("narrow", 0, 4)):
            config = make_config(tmp_path / name, engine, environments=sections(workers=workers), **common)
            config.client.max_concurrency = room
            run(config)
            outcomes[name] = read_rollouts(RunDir(tmp_path / name), range(1, 9)), states_of(tmp_path / name)
    again = resumed_of(tmp_path / "again", engine, at=3, stopped=3, environments=sections(), **common)
    outcomes["again"] = again, states_of(tmp_path / "again")
    for name in ("workers", "narrow", "again"):
        assert outcomes[name] == outcomes["here"], name
    batches = [journal.read_batch(RunDir(tmp_path / "here"), step) for step in range(1, 9)]
    graded = [[one for one in batch.rollouts if one.environment == "graded"] for batch in batches]
    levels = [{one.level or 0 for one in own} for own in graded]
    state = read_state(RunDir(tmp_path / "here").batch(8) / journal.STATE_NAME, step=8)
    found = curriculum_of(state)
    assert sum(level.next_task for level in found.levels) == state.environments["graded"].next_task
    assert all(len(own) == 1 for own in levels), "a level changes between batches alone"
    reached = [level for own in levels for level in own]
    assert reached == sorted(reached) and len(set(reached)) > 1 and reached[0] == 0
    for batch, own in zip(batches, graded, strict=True):
        expected = sum(one.level or 0 for one in own) / len(own)
        assert batch.metrics["curriculum/graded/level"] == pytest.approx(expected)
    assert all(one.level is None for batch in batches for one in batch.rollouts if one.environment == "reverse_text")
    assert sum(one.reason == "environment_error" for batch in batches for one in batch.dropped) >= 1


def states_of(path: Path) -> list[bytes]:
    return [(RunDir(path).batch(step) / journal.STATE_NAME).read_bytes() for step in range(1, 9)]
