"""Runs whose rewards are a judge's: with workers, killed ones, again, and with a judge that fails."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import Response
from fastapi.responses import JSONResponse

from holdfast.config.evaluation import EvaluateConfig
from holdfast.orchestrator.evaluation import main
from holdfast.orchestrator.judge_client import JudgeClient, JudgeDenied
from holdfast.protocol.rollouts import Batch
from holdfast.run.run_dir import RunDir
from tests.servers.judge import Body, FakeJudge, completion, judge_serving
from tests.servers.orchestrator_fakes import MODEL, FakeEngine, played, serving

STEPS = 3


@pytest.fixture
def fake() -> Iterator[FakeJudge]:
    with judge_serving(FakeJudge()) as judge:
        yield judge


def run(directory: Path, judge: FakeJudge, *, max_steps: int = STEPS, **settings: Any) -> list[Batch]:
    """Return the batches of a run whose every rollout is judged."""
    asks = {"url": judge.url, "model": "m", "prompt": "{first} then {second}", "max_score": 1000.0, "retry_for_s": 0.1}
    section = {"id": "tests.runs.judged_environment:Judged", "args": {"judge": asks}, **settings}
    return played(directory, section, max_steps=max_steps)


def test_what_nobody_expects_at_the_desk_ends_the_run_and_leaves_no_worker_waiting(
    tmp_path: Path, fake: FakeJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise ValueError("of a library")

    monkeypatch.setattr(JudgeClient, "ask", fail)
    with pytest.raises(ValueError, match="of a library"):
        run(tmp_path, fake, workers=1)


def test_what_is_made_again_is_scored_as_before_though_the_judge_says_other_things_now(
    tmp_path: Path, fake: FakeJudge
) -> None:
    first = run(tmp_path, fake)
    num_asked = len(fake.asked)
    run_dir = RunDir(tmp_path / "run")
    for step in range(1, STEPS + 1):
        batch = run_dir.batch(step)
        for path in batch.iterdir():
            path.unlink()
        batch.rmdir()
    again = run(tmp_path, fake)
    assert [batch.rollouts for batch in again] == [batch.rollouts for batch in first]
    assert len(fake.asked) == num_asked
    run_dir.remove_run()
    assert [batch.rollouts for batch in run(tmp_path, fake)] != [batch.rollouts for batch in first]
    # How many: two that say the same at the same time ask once, and other rewards make other policies and answers.
    assert set(fake.questions[:num_asked]) & set(fake.questions[num_asked:]), "--clean removes what it said"


@pytest.mark.parametrize("second", [JSONResponse({}, 400), completion("I cannot say")])
def test_a_judge_that_fails_costs_its_groups_by_reason_and_training_goes_on(
    tmp_path: Path, fake: FakeJudge, second: Response
) -> None:
    failing: dict[str, Response] = {}
    lock = threading.Lock()

    async def fail_at_some(body: Body) -> Response:
        question = body["messages"][0]["content"]
        with lock:  # the first two questions of the run: of a batch of three groups one is left
            if len(failing) < 2 and question not in failing:
                failing[question] = (Response("down", 503), second)[len(failing)]
        return failing.get(question) or completion("1")

    fake.answer = fail_at_some
    batches = run(tmp_path, fake, on_error="drop", workers=1, max_steps=4)
    dropped = [one for batch in batches for one in batch.dropped]
    assert 1 <= len(dropped) <= 2 and {one.reason for one in dropped} <= {
        "judge_away", "judge_refused", "judge_unreadable"
    }  # fmt: skip
    for one in dropped:
        assert one.detail.startswith(
            f"environment 'tests.runs.judged_environment:Judged' failed on task {one.task_id} "
        )
        assert batches[0].metrics[f"groups/dropped/{one.reason}"] >= 1.0
    assert len(batches[3].rollouts) == 12


@pytest.mark.parametrize("workers", [0, 1])
def test_a_wrong_key_ends_the_run_whatever_may_be_dropped(tmp_path: Path, fake: FakeJudge, workers: int) -> None:
    async def deny(body: Body) -> Response:
        return JSONResponse({"error": "who are you"}, 401)

    fake.answer = deny
    with pytest.raises(JudgeDenied, match="was answered 401: .*who are you.*Name its key with api_key_env"):
        run(tmp_path, fake, on_error="drop", workers=workers)


def test_an_evaluation_that_is_made_again_asks_nobody_again(tmp_path: Path, fake: FakeJudge) -> None:
    (tmp_path / "q.jsonl").write_text("".join(json.dumps({"prompt": f"{n}?"}) + "\n" for n in range(3)))
    judge = {"url": fake.url, "model": "m", "prompt": "{prompt} {completion}", "max_score": 1000.0}
    section = {"id": "jsonl", "args": {"path": str(tmp_path / "q.jsonl"), "scorer": "judge", "judge": judge}}

    def evaluate() -> list[float]:
        engine = FakeEngine(version=0, digest="weights")
        settings = {"output_dir": tmp_path / "eval", "model": {"name": MODEL}, "seq_len": 128}
        config = EvaluateConfig.model_validate({**settings, "environments": [section], "sampling": {"max_tokens": 24}})
        config.inference.model.name = MODEL
        with serving(engine):
            config.inference.server.port = int(engine.url.rsplit(":", 1)[1])
            asyncio.run(main.run(config))
        lines = (tmp_path / "eval" / "rollouts.jsonl").read_text().splitlines()
        return [json.loads(line)["reward"] for line in sorted(lines)]

    first = evaluate()
    assert len(set(first)) == 3 and len(fake.asked) == 3
    for name in ("rollouts.jsonl", "evaluation.json"):
        (tmp_path / "eval" / name).unlink()
    assert sorted(evaluate()) == sorted(first) and len(fake.asked) == 3
