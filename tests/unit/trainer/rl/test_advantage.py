"""Advantages by hand, of turns, of the user, and refused; by their formulas: test_every_name_computes."""

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from holdfast.config.advantages import GROUP_ADVANTAGES, MODEL_ADVANTAGES, REWARD_ADVANTAGES, SINGLE_ADVANTAGES
from holdfast.config.rl_trainer import TrainerConfig
from holdfast.errors import ConfigError, TrainingError
from holdfast.trainer.rl.advantages import dr_grpo, grpo, max_rl, online_dpo, opo, pass_at_k, reinforce_pp, rloo
from holdfast.trainer.rl.assign_advantages import assign_advantages, build_advantage, require_siblings
from holdfast.trainer.rl.batch import ADVANTAGE, group_rollouts, to_samples
from holdfast.trainer.rl.token_rewards import ScoredRollout
from tests.builders.advantage_settings import NEEDED
from tests.builders.sampled_rollouts import sampled_rollout
from tests.builders.scored_rollouts import advantage_of, scored_groups, scored_rollout, step_rollout
from tests.builders.slow_advantages import by_token, random_groups
from tests.conftest import ROOT


def test_a_group_of_one_has_no_others_and_is_refused_where_rollouts_are_compared() -> None:
    assert grpo([0.1]) == dr_grpo([0.1]) == rloo([0.1]) == max_rl([0.1]) == [0.0]
    assert opo([1.0, 0.0], [0, 0]) == [0.0, 0.0]
    with pytest.raises(TrainingError, match="at least 0, got -0.5"):
        max_rl([1.0, -0.5])
    with pytest.raises(TrainingError, match="the best of advantage.k = 4 rollouts, and a problem has 3"):
        pass_at_k([0.0, 1.0, 0.0], k=4)
    assert {*GROUP_ADVANTAGES, *SINGLE_ADVANTAGES} == {*REWARD_ADVANTAGES, *MODEL_ADVANTAGES}
    groups = scored_groups([[1.0, 2.0], [3.0]])
    for name in GROUP_ADVANTAGES:
        with pytest.raises(TrainingError, match="task 1 of environment 'e' has a single one.*reinforce_pp, gae"):
            require_siblings(groups, name)
        require_siblings(groups[:1], name)
    for name in (*SINGLE_ADVANTAGES, "own:advantage"):
        require_siblings(groups, name)


@pytest.mark.parametrize("name", REWARD_ADVANTAGES)
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, 1e6])
def test_equal_rewards_and_empty_rollouts_give_exactly_zero(name: str, reward: float) -> None:
    groups = [[scored_rollout(reward, tokens, token_rewards=np.zeros(tokens)) for tokens in (3, 0, 5)] for _ in "ab"]
    assert not any(value for own in by_token(name, groups) for value in own)
    assert by_token(name, [[scored_rollout(reward, 0), scored_rollout(reward + 1, 0)]]) == [[], []]


class Turns:
    """A policy that answers or asks on, up to three turns of a token; the answer earns 1, each turn also `of_turn`."""

    def __init__(self, of_turn: float) -> None:
        self.of_turn = of_turn
        self.logits = np.zeros(2)

    def stops(self) -> np.ndarray:
        """The chances of an answer in the first turn and the second."""
        return 1 / (1 + np.exp(-self.logits))

    def play(self, random: np.random.Generator) -> tuple[ScoredRollout, list[int]]:
        """Return a rollout and what was chosen in its turns: 1 for an answer."""
        chosen: list[int] = []
        while not sum(chosen) and len(chosen) < 2:
            chosen.append(int(random.random() < self.stops()[len(chosen)]))
        turns = len(chosen) + (not sum(chosen))
        old = [math.log(abs(1 - one - stop)) for one, stop in zip(chosen, self.stops(), strict=False)]
        padding = [0.0] * (turns - len(chosen))
        return replace(
            step_rollout(1.0, dict.fromkeys(range(turns), self.of_turn), turns),
            old_logprobs=np.array(old + padding),
            reference_logprobs=np.array([math.log(0.5)] * len(chosen) + padding),
        ), chosen

    def learn(self, name: str, *, steps: int) -> np.ndarray:
        """Take steps of the policy gradient with this advantage, the sum over all tokens; return the chances then."""
        advantage, random = advantage_of(name), np.random.default_rng(0)
        for _ in range(steps):
            played = [[self.play(random) for _ in range(8)] for _ in range(8)]
            given = advantage([[rollout for rollout, _ in group] for group in played])
            gradient = np.zeros(2)
            for group, values in zip(played, given, strict=True):
                for (rollout, chosen), value in zip(group, values, strict=True):
                    of_tokens = np.broadcast_to(value, rollout.num_tokens)
                    for turn, one in enumerate(chosen):
                        gradient[turn] += of_tokens[turn] * (one - self.stops()[turn])
            self.logits += 0.5 * gradient / max(1.0, float(np.linalg.norm(gradient)))
        return self.stops()


@pytest.mark.parametrize("name", [name for name in REWARD_ADVANTAGES if name not in ("grpo_process", "gdpo")])
def test_a_policy_of_turns_finds_the_largest_sum_of_all_rewards(name: str) -> None:
    """A cost of every turn makes it answer at once, a gain makes it go on to the last."""
    assert Turns(-0.25).learn(name, steps=60)[0] > 0.9 and Turns(0.25).learn(name, steps=60).max() < 0.1


def test_process_supervision_sees_no_cost_of_every_turn_and_gdpo_knows_no_steps() -> None:
    policy = Turns(-0.25)
    policy.learn("grpo_process", steps=1)
    assert not policy.logits.any()
    with pytest.raises(TrainingError, match="leave these out, or take an advantage that knows them"):
        advantage_of("gdpo")([[step_rollout(1.0, {0: 1.0}), step_rollout(0.0, {})]])


def test_every_environment_gets_its_own_advantage_and_weight() -> None:
    config = TrainerConfig.model_validate({
        "advantage": "dr_grpo",
        "environments": {"a": {"advantage": "reinforce_pp", "weight": 0.5}, "b": {"weight": 2.0}},
    })  # fmt: skip
    rewards = {"a": [[1.0, 4.0], [2.0]], "b": [[3.0, 5.0]], "c": [[1.0, 2.0]]}
    groups = {
        name: [[scored_rollout(reward, environment=name) for reward in group] for group in own]
        for name, own in rewards.items()
    }
    mixed = [groups["a"][0], groups["b"][0], groups["c"][0], groups["a"][1]]
    a_first, b, c, a_second = build_advantage(config)(mixed)
    expected = [[0.5 * value for value in group] for group in reinforce_pp(groups["a"])]
    for given, own in zip((a_first, a_second), expected, strict=True):
        assert [np.asarray(value).tolist() for value in given] == [value.tolist() for value in own]
    assert (b, c) == ([-2.0, 2.0], [-0.5, 0.5]) and all(isinstance(value, float) for value in b)
    assert build_advantage(config)(groups["a"]) and build_advantage(config)(groups["b"])
    with pytest.raises(TrainingError, match="'dr_grpo' compares.*environment 'b' has a single one"):
        build_advantage(config)([groups["b"][0][:1]])


def test_rollouts_that_are_not_trained_count_in_every_baseline() -> None:
    for name in REWARD_ADVANTAGES:
        groups = random_groups(3)
        masked = [[replace(one, is_trained=number != 1) for number, one in enumerate(group)] for group in groups]
        assert by_token(name, groups) == by_token(name, masked)


def test_advantages_reach_every_token_of_their_rollouts() -> None:
    rollouts = [sampled_rollout(reward, task_id=task, sampled=1) for task, reward in ((0, 1), (0, 3), (1, 5), (1, 4))]
    samples = to_samples(rollouts, trained_version=0)
    rewards_PG = [[one.reward for one in group] for group in group_rollouts(rollouts)]
    assert rewards_PG == [[1.0, 3.0], [5.0, 4.0]]
    assign_advantages(samples, advantage_of("dr_grpo")(scored_groups(rewards_PG)))
    given = [sample.per_token[ADVANTAGE].tolist() for sample in samples]
    assert given == [[-1.0] * 2, [1.0] * 2, [0.5] * 2, [-0.5] * 2]
    assign_advantages(samples, [[np.array([0.25]), [-2.0]], [3.0, np.array([1.0])]])
    given = [sample.per_token[ADVANTAGE].tolist() for sample in samples]
    assert given == [[0.0, 0.25], [0.0, -2.0], [3.0, 3.0], [0.0, 1.0]]


# The example of docs/losses.md.
def shortest_of_the_best(groups: list[list[ScoredRollout]]) -> list[list[float]]:
    """1 for the shortest of the best rollouts of each problem, 0 for the others."""
    best = [max(group, key=lambda one: (one.reward, -one.num_tokens)) for group in groups]
    return [[float(one is chosen) for one in group] for group, chosen in zip(groups, best, strict=True)]


_gives: list[Callable[[list[ScoredRollout]], list[Any]]] = []


def of_the_test(groups: list[list[ScoredRollout]]) -> list[list[Any]]:
    """What the test gives each group."""
    return [_gives[-1](group) for group in groups]


def test_an_advantage_of_the_user_as_the_documentation_shows_it() -> None:
    config = TrainerConfig(advantage=f"{__name__}:shortest_of_the_best")
    groups = [[scored_rollout(1.0, 2), scored_rollout(1.0, 1), scored_rollout(0.0, 1)]]
    assert advantage_of(config.advantage.type)(groups) == [[0.0, 1.0, 0.0]]
    _gives.append(lambda _: [[0, 1], np.arange(1), [0]])  # lists and arrays of how early each token is
    by_place = advantage_of(f"{__name__}:of_the_test")(groups)
    assert [np.asarray(value).tolist() for value in by_place[0]] == [[0.0, 1.0], [0.0], [0.0]]
    assert inspect.getsource(shortest_of_the_best) in (ROOT / "docs" / "losses.md").read_text()


def test_a_wrong_advantage_of_the_user_is_named() -> None:
    with pytest.raises(ValidationError, match="'rlo' found.*'reinforce_pp'.*'module:function'"):
        advantage_of("rlo")
    with pytest.raises(ConfigError, match=r"advantage = '.*:shortest'.*has no function 'shortest'"):
        advantage_of(f"{__name__}:shortest")
    shape = r"an array of shape \(5,\) for a rollout of task 0 of environment 'e' with 3 sampled tokens"
    for gives, message in (
        (lambda _: [0.0], r"groups of \[1\] values for groups of \[2\]"),
        (lambda _: [math.nan, math.nan], "not finite for task 0 of environment 'e': nan"),
        (lambda group: [np.zeros(len(one.token_ids)) for one in group], shape),
        (lambda _: [[1.0, [2.0]]] * 2, "failed: ValueError: "),
        (lambda group: [one.reward / 0 for one in group], "failed: ZeroDivisionError: "),
    ):
        _gives.append(gives)
        with pytest.raises(TrainingError, match=f"of_the_test.*{message}"):
            advantage_of(f"{__name__}:of_the_test")(scored_groups([[1.0, 2.0]]))


@pytest.mark.parametrize("log_ratio", [20.0, 1e4, -1e4])
def test_the_pull_of_online_dpo_does_not_overflow(log_ratio: float) -> None:
    pairs, reference = ((1.0, log_ratio), (0.0, -log_ratio)), {"reference_logprobs": np.zeros(1)}
    group = [scored_rollout(reward, 1, old_logprobs=np.array([ratio]), **reference) for reward, ratio in pairs]
    ((best, worst),) = online_dpo([group], beta=0.1)
    assert best == -worst == pytest.approx(2 * 0.1 / (1 + np.exp(np.float128(0.2 * log_ratio))))


@pytest.mark.parametrize(("settings", "message"), [
    ({"kl": None}, "compares with a reference: set kl"),
    ({"loss": {"type": "policy_gradient"}}, "with this policy loss alone"),
    ({"loss": NEEDED["online_dpo"]["loss"] | {"constant_tokens": 8}}, "with this policy loss alone"),
    ({"updates": {"epochs": 2}}, "does not go with updates of more than one"),
    ({"kl": {"coef": 0.1}}, "does not go with kl.coef above 0"),
    ({"rewards": {"truncated": "mask"}}, "does not go with rewards.truncated"),
])  # fmt: skip
def test_what_would_be_another_gradient_than_that_of_dpo_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainerConfig.model_validate({"advantage": "online_dpo"} | NEEDED["online_dpo"] | settings)


def test_the_beta_of_online_dpo_is_that_of_the_settings() -> None:
    group = [scored_rollout(r, 1, old_logprobs=np.array([r / 2]), reference_logprobs=np.zeros(1)) for r in (1.0, 0.0)]
    settings = {"advantage": {"type": "online_dpo", "beta": 2.0}} | NEEDED["online_dpo"]
    ((best, worst),) = build_advantage(TrainerConfig.model_validate(settings))([group])
    assert best == -worst == pytest.approx(2 * 2.0 / (1 + math.e))
