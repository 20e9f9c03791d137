"""Runs whose chat template forgets: sessions split, and batches hold the branches, whoever plays, judges and dies."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from holdfast.chat.tokenizer import load_tokenizer
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.protocol.rollouts import Rollout
from holdfast.run import journal
from holdfast.run.journal import Accepted
from holdfast.run.run_dir import RunDir
from holdfast.trainer.rl.accounting import check_tasks
from tests.conftest import BASE
from tests.models.chat_templates import FORGETFUL
from tests.servers.orchestrator_fakes import FakeEngine, make_config, read_rollouts, run, run_until, serving
from tests.unit.orchestrator.client.test_teacher import FakeTeacher, expected_logprob

STEPS = 3
TURNS = 3
GROUP, PROBLEMS = 4, 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's tokenizer with a template that forgets what thoughts there were in earlier turns."""
    directory = tmp_path_factory.mktemp("forgetful")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BASE / name, directory)
    (directory / "chat_template.jinja").write_text(FORGETFUL)
    return directory


def configured(output_dir: Path, model: Path, engine: FakeEngine, **more: Any) -> OrchestratorConfig:
    engine.model = str(model)
    section = {
        "id": "examples.environments.guess_number:GuessNumber",
        "name": "guess_number",
        "args": {"turns": TURNS, "high": 9},
    }
    return make_config(output_dir, engine, max_steps=STEPS, model={"name": str(model)}, environments=[section], **more)


def seen_by_turns(rollout: Rollout) -> list[list[int]]:
    """What the policy saw before each turn: its branch up to there."""
    mask = rollout.loss_mask.tolist()
    starts = [place for place in range(1, len(mask)) if mask[place] and not mask[place - 1]]
    return [
        rollout.token_ids[max(start for start in rollout.branch_starts if start < place) : place].tolist()
        for place in starts
    ]


def test_batches_hold_every_branch_and_every_sampled_token_once(tmp_path: Path, model: Path) -> None:
    engine = FakeEngine()
    with serving(engine):
        batches = run(configured(tmp_path, model, engine))
    rollouts = [rollout for batch in batches for rollout in batch.rollouts]
    assert {len(rollout.branch_starts) for rollout in rollouts} == {1, 2, 3}, "some split, and some do not"
    # The policy was asked for exactly these turns, by what the template writes.
    asked = sorted(request["token_ids"] for request in engine.requests for _ in request["seeds"])
    assert asked == sorted(seen for rollout in rollouts for seen in seen_by_turns(rollout))
    tokenizer = load_tokenizer(str(model))
    for rollout in rollouts:
        assert len(seen_by_turns(rollout)) == rollout.metrics["guesses"], "one turn for each guess"
        for branch in rollout.branches[1:]:
            prompt = rollout.token_ids[branch][: rollout.loss_mask[branch].index(1)].tolist()
            text = tokenizer.decode(prompt, skip_special_tokens=False)
            first = text.split("<|assistant|>")[1].split("<|end|>")[0]
            assert "e" not in first, "a branch begins without the thoughts of the first turn"
    metrics = [batch.metrics for batch in batches]
    for batch, found in zip(batches, metrics, strict=True):
        numbers = [len(rollout.branch_starts) for rollout in batch.rollouts]
        assert found["rollout/branches"] == sum(numbers) / len(numbers)
        assert found["rollout/split"] == sum(number > 1 for number in numbers) / len(numbers)
    # The ledger counts rollouts, not branches, and every token.
    before = Accepted()
    for batch in batches:
        after = journal.read_accepted(RunDir(tmp_path).batch(batch.step) / journal.STATE_NAME, step=batch.step)
        check_tasks(batch, before=before, after=after)
        before = after


def test_a_killed_batch_asks_neither_policy_nor_teacher_twice(tmp_path: Path, model: Path) -> None:
    """The teacher judges each branch by itself."""
    engine, teacher = FakeEngine(), FakeTeacher(model="the/teacher", version=0, digest="fixed")

    with serving(engine, teacher):
        section = {"urls": [teacher.url], "model": "the/teacher", "mode": "logprobs", "max_concurrency": 1}
        straight = configured(tmp_path / "straight", model, engine, teacher=section)
        run(straight)
        num_asked = sum(len(request["seeds"]) for request in engine.requests)
        num_judged = len(teacher.requests)
        engine.requests.clear(), teacher.requests.clear()
        killed = configured(tmp_path / "killed", model, engine, teacher=section)
        run_until(25, teacher, killed)
        run(killed)
    straight_run, killed_run = RunDir(straight.output_dir), RunDir(killed.output_dir)
    assert read_rollouts(straight_run, range(1, STEPS + 1)) == read_rollouts(killed_run, range(1, STEPS + 1))
    rollouts = [one for _, batch in read_rollouts(killed_run, range(1, STEPS + 1)) for one in batch]
    assert num_judged == sum(len(rollout.branch_starts) for rollout in rollouts) > len(rollouts)
    # What was in flight comes again, and nothing else: at most one judgement, and turns of a batch in progress.
    assert 0 <= len(teacher.requests) - num_judged <= 1
    asked = [(tuple(one["token_ids"]), seed) for one in engine.requests for seed in one["seeds"]]
    assert len(set(asked)) == num_asked and len(asked) - num_asked <= PROBLEMS * GROUP
    for rollout in rollouts:
        assert rollout.reference_logprobs is not None
        for branch in rollout.branches:
            ids, mask = rollout.token_ids[branch].tolist(), rollout.loss_mask[branch]
            assert rollout.reference_logprobs[branch].tolist() == [
                expected_logprob(ids, place) if mask[place] else 0.0 for place in range(len(ids))
            ]
