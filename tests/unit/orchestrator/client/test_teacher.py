"""Runs with a teacher: what it is asked for, what a kill loses, and which teachers are refused."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.errors import CheckpointError, ConfigError, InferenceError
from holdfast.orchestrator.main import orchestrate
from holdfast.orchestrator.state import read_state
from holdfast.run import journal
from holdfast.run.run_dir import RunDir
from tests.runs.processes import HANG_S
from tests.servers.orchestrator_fakes import FakeEngine, make_config, run, serving

STEPS = 3


class FakeTeacher(FakeEngine):
    """Its log-probability of a prompt's token is a function of the token and its place."""

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = super()._answer(body)
        ids = body["token_ids"]
        for choice in answer["choices"]:
            if body["prompt_logprobs"]:
                choice["prompt_logprobs"] = [expected_logprob(ids, place) for place in range(1, len(ids))]
        return answer


def expected_logprob(token_ids: list[int], place: int) -> float:
    return -(token_ids[place] + place) / 8  # exact in float32


@pytest.fixture
def policy() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def teacher() -> FakeTeacher:
    return FakeTeacher(model="the/teacher", version=0, digest="fixed")


def configure(
    output_dir: Path, policy: FakeEngine, *teachers: FakeEngine, mode: str, **changes: Any
) -> OrchestratorConfig:
    section = {"urls": [one.url for one in teachers], "model": "the/teacher", "mode": mode, "ready_timeout_s": HANG_S}
    return make_config(output_dir, policy, max_steps=STEPS, teacher=section, **changes)


def test_a_teacher_judges_every_sampled_token(tmp_path: Path, policy: FakeEngine, teacher: FakeTeacher) -> None:
    with serving(policy, teacher):
        run(configure(tmp_path / "judged", policy, teacher, mode="logprobs"))
        run(make_config(tmp_path / "plain", policy, max_steps=1))
    judged = journal.read_batch(RunDir(tmp_path / "judged"), 1).rollouts
    for rollout in judged:
        ids, found = rollout.token_ids.tolist(), rollout.reference_logprobs
        assert found is not None
        judged_at = [expected_logprob(ids, place) if used else 0.0 for place, used in enumerate(rollout.loss_mask)]
        assert found.tolist() == judged_at
    # What is sampled is what is sampled without a teacher.
    plain = journal.read_batch(RunDir(tmp_path / "plain"), 1).rollouts
    assert [rollout.token_ids for rollout in plain] == [rollout.token_ids for rollout in judged]
    assert all(rollout.reference_logprobs is None for rollout in plain)
    assert teacher.pushed == [] and all(request["max_tokens"] == 1 for request in teacher.requests)
    assert teacher.owner is None and teacher.released == [], "other runs may learn from it, too"
    assert read_state(RunDir(tmp_path / "judged").batch(1) / journal.STATE_NAME, step=1).teacher_digest == "fixed"


def test_a_teacher_samples_in_place_of_the_policy(tmp_path: Path, policy: FakeEngine, teacher: FakeTeacher) -> None:
    with serving(teacher):
        policy.url = "http://127.0.0.1:9"  # nobody answers there, and nobody may be asked
        run(configure(tmp_path, policy, teacher, mode="samples"))
        asyncio.run(orchestrate(configure(tmp_path, policy, teacher, mode="samples")))  # it had made all
        assert teacher.released == [], "nothing is given back that was never claimed"
        other = FakeTeacher(model="the/teacher", version=0, digest="other")
        with serving(other):
            run(configure(tmp_path / "other", policy, other, mode="samples"))
    batches = [journal.read_batch(RunDir(tmp_path), step) for step in range(1, STEPS + 1)]
    assert [batch.policy_version for batch in batches] == [0, 0, 1]
    rollouts = [rollout for batch in batches for rollout in batch.rollouts]
    assert all(rollout.versions == [] and rollout.reference_logprobs is None for rollout in rollouts)
    assert all(any(rollout.loss_mask) and min(rollout.logprobs) < 0 for rollout in rollouts)
    assert teacher.pushed == [] and not policy.requests
    assert not any(name.startswith("staleness") for name in batches[0].metrics)
    others = journal.read_batch(RunDir(tmp_path / "other"), 1).rollouts
    assert [one.token_ids for one in others] != [one.token_ids for one in batches[0].rollouts]


def test_another_teacher_is_refused_on_resume(tmp_path: Path, policy: FakeEngine, teacher: FakeTeacher) -> None:
    with serving(policy, teacher):
        run(configure(tmp_path, policy, teacher, mode="logprobs"))
        teacher.digest = "retrained"
        longer = configure(tmp_path, policy, teacher, mode="logprobs").model_copy(update={"max_steps": STEPS + 1})
        with pytest.raises(CheckpointError, match=r"digest retrained; the batches so far were made with digest fixed"):
            asyncio.run(orchestrate(longer))


def test_teachers_that_cannot_be_used_are_refused(tmp_path: Path, policy: FakeEngine, teacher: FakeTeacher) -> None:
    def refused(kind: type[Exception], message: str, *teachers: FakeEngine, mode: str = "logprobs") -> None:
        with pytest.raises(kind, match=message):
            asyncio.run(orchestrate(configure(tmp_path, policy, *teachers, mode=mode)))

    other = FakeTeacher(model="the/teacher", version=0, digest="other")
    empty = FakeTeacher(model="the/teacher")
    wrong = FakeTeacher(model="another/model", version=0, digest="x")
    short = FakeTeacher(model="the/teacher", version=0, digest="fixed", max_model_len=1024)
    with serving(policy, teacher, other, empty, wrong, short):
        refused(InferenceError, r"all servers of teacher\.urls must serve the same", teacher, other)
        refused(InferenceError, r"has no weights\. Start it with --model\.load auto", empty)
        refused(InferenceError, r"this run needs 'the/teacher'.*teacher\.urls", wrong)
        refused(ConfigError, r"sessions of 1025 tokens are more than", short)
    assert RunDir(tmp_path).published_batches() == []


@pytest.mark.parametrize("is_lost", [True, False], ids=["restarted", "trained meanwhile"])
@pytest.mark.parametrize("mode", ["logprobs", "samples"])
def test_a_teacher_that_comes_back_with_other_weights_ends_the_run(
    tmp_path: Path, policy: FakeEngine, teacher: FakeTeacher, mode: str, is_lost: bool
) -> None:
    def replace(count: int) -> None:
        if count == 2:
            teacher.digest, teacher.fail_requests = "other", int(is_lost)

    teacher.on_generate = replace
    with serving(policy, teacher), pytest.raises(InferenceError, match="came back with other weights: digest other"):
        run(configure(tmp_path, policy, teacher, mode=mode))


def test_a_teacher_must_judge_every_token(tmp_path: Path, policy: FakeEngine) -> None:
    teacher = FakeEngine(model="the/teacher", version=0, digest="fixed")
    teacher.alter = lambda answer: answer["choices"][0]["prompt_logprobs"].pop()
    with serving(policy, teacher), pytest.raises(InferenceError, match=r"gave \d+ log-probabilities for \d+ tokens"):
        run(configure(tmp_path, policy, teacher, mode="logprobs"))
