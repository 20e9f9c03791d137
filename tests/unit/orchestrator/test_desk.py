"""Judges that answer, are slow, busy, away, wrong or hostile, in whole runs too; the log that asks nobody twice."""

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fastapi import Response
from fastapi.responses import JSONResponse

from holdfast import Judge, JudgeConfig, Judgement
from holdfast.errors import RunDirError
from holdfast.orchestrator.client.http import Unavailable
from holdfast.orchestrator.env.judge import JudgeFailure
from holdfast.orchestrator.judge_client import JudgeClient, JudgeDenied, ReplyLog, ask_once, judging, new_client
from holdfast.protocol.inference import ChatReply
from holdfast.protocol.rollouts import Batch
from holdfast.run import record_log
from holdfast.run.run_dir import RunDir
from tests.runs.processes import HANG_S
from tests.servers.judge import Body, FakeJudge, completion, judge_serving
from tests.servers.orchestrator_fakes import played, serving
from tests.unit.orchestrator.evaluation.test_evaluator import config_of, engine_with_weights, evaluated

KEY = "sk-very-secret"


@pytest.fixture
def fake() -> Iterator[FakeJudge]:
    with judge_serving(FakeJudge()) as judge:
        yield judge


def judge_at(url: str, **settings: Any) -> Judge:
    return Judge(JudgeConfig(**{"url": url, "model": "m", "prompt": "{x}", "max_score": 1000.0, **settings}))


def ask(judge: Judge, *texts: str, log: Path | None = None) -> list[Judgement]:
    """Return what a judges of its own makes of the texts, all asked at once."""

    async def ask_all() -> list[Judgement]:
        async with judging(log) as judges:
            return await judges.failure.guard(judge.ask_all([{"x": text} for text in texts]))

    return asyncio.run(ask_all())


def always(answer: Callable[[], Response]) -> Callable[[Body], Awaitable[Response]]:
    async def give(body: Body) -> Response:
        return answer()

    return give


def test_a_reply_is_asked_for_once_and_found_again(fake: FakeJudge, tmp_path: Path) -> None:
    log = tmp_path / "run" / "judgements.log"
    first = ask(judge_at(fake.url), "a", "b", "a", log=log)
    assert first[0] == first[2] != first[1] and sorted(fake.questions) == ["a", "b"]
    again = ask(judge_at(fake.url, timeout_s=HANG_S), "b", "a", "c", log=log)
    assert [again[1], again[0]] == first[:2] and fake.questions[2:] == ["c"]
    # Read otherwise, nothing is asked.
    assert ask(judge_at(fake.url, max_score=2000.0), "a", log=log)[0].score == first[0].score / 2
    assert ask(judge_at(fake.url), "a")[0].text == "Score: 4", "in memory alone nothing is left"


def test_whoever_asked_may_go_and_the_reply_is_kept(fake: FakeJudge, tmp_path: Path) -> None:
    """As a worker that is killed while the judge thinks."""

    async def leave() -> ChatReply:
        arrived, goes_on = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        async def wait(body: Body) -> Response:
            loop.call_soon_threadsafe(arrived.set)
            while not goes_on.is_set():
                await asyncio.sleep(0.01)
            return completion("7")

        fake.answer = wait
        async with judging(tmp_path / "judgements.log") as judges:
            request = judge_at(fake.url).request({"x": "a"})
            asking = asyncio.create_task(judges.ask(request))
            await arrived.wait()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            goes_on.set()
            return await judges.ask(request)

    assert asyncio.run(leave()) == ChatReply("7", "stop") and len(fake.asked) == 1


def test_a_torn_log_loses_its_end_only(fake: FakeJudge, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = tmp_path / "judgements.log"
    ask(judge_at(fake.url), "a", log=log)
    ask(judge_at(fake.url), "b", log=log)
    log.write_bytes(log.read_bytes()[:-3])
    ask(judge_at(fake.url), "a", "b", log=log)
    assert fake.questions == ["a", "b", "b"] and "the torn end is cut" in caplog.text
    # What is damaged in the middle costs itself; so does what another version has written.
    payloads, _ = record_log.read_records(log)
    records = record_log.RecordLog(log, valid_bytes=log.stat().st_size)
    records.append(msgspec.msgpack.encode({"other": 1}))
    records.close(wait=True)
    data = bytearray(log.read_bytes())
    data[data.index(payloads[0])] ^= 1
    log.write_bytes(data)
    ask(judge_at(fake.url), "a", "b", log=log)
    assert fake.questions[3:] == ["a"] and "1 records are not replies" in caplog.text
    log.write_bytes(b"torn")
    ask(judge_at(fake.url), "d", log=log)
    assert ask(judge_at(fake.url), "d", log=log)[0].is_readable and fake.questions[4:] == ["d"]


def test_an_unwritable_log_ends_the_scoring(fake: FakeJudge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunDirError, match="replies cannot be kept in .*: File exists"):
        ask(judge_at(fake.url), "a", log=tmp_path / "file" / "judgements.log")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    async def write() -> None:
        judges = JudgeClient(tmp_path / "judgements.log")
        monkeypatch.setattr(record_log.os, "write", full)
        request = judge_at(fake.url).request({"x": "a"})
        try:
            with pytest.raises(RunDirError, match="No space left on device"):
                await judges.failure.guard(judges.ask(request))
            with pytest.raises(RunDirError, match="No space left on device"):
                await judges.ask(request)
        finally:
            await judges.close()

    asyncio.run(write())
    assert not (tmp_path / "none.log").exists()
    ReplyLog(tmp_path / "none.log").close()
    assert not (tmp_path / "none.log").exists(), "who asks no judge keeps nothing"


def test_no_more_are_asked_at_once_and_no_faster_than_allowed(fake: FakeJudge) -> None:
    times: list[float] = []

    async def slowly(body: Body) -> Response:
        times.append(time.monotonic())
        await asyncio.sleep(0.05)
        return completion("1")

    fake.answer = slowly
    ask(judge_at(fake.url, max_concurrency=2), *"abcdef")
    assert len(times) == 6 and fake.most_at_once == 2
    times.clear()
    began = time.monotonic()
    ask(judge_at(fake.url, requests_per_minute=600), *"abcde")
    assert len(times) == 5 and times[-1] - began >= 0.4


def test_who_waits_behind_a_judge_that_is_away_need_not_try_as_long_again(fake: FakeJudge) -> None:
    fake.answer = always(lambda: Response("down", 503))
    with pytest.raises(JudgeFailure, match=r"was lost 5 times in a row .*retry_for_s.* answered 503: down") as caught:
        ask(judge_at(fake.url, max_concurrency=1, retry_for_s=0.1), *"abcdefgh")
    assert caught.value.reason == "judge_away" and fake.questions == ["a"] * 5


def test_one_request_that_always_fails_stops_no_other(fake: FakeJudge) -> None:
    async def fail_at_a(body: Body) -> Response:
        asked = body["messages"][0]["content"]
        while asked == "c" and fake.questions.count("a") < 5:  # the last one comes when the first is given up
            await asyncio.sleep(0.01)
        if asked == "a":
            return Response("no", 500)
        return completion("1")

    async def ask_each() -> list[Judgement | BaseException]:
        judge = judge_at(fake.url, max_concurrency=2, retry_for_s=0.1)
        async with judging():
            return await asyncio.gather(*(judge.ask({"x": text}) for text in "abcd"), return_exceptions=True)

    fake.answer = fail_at_a
    [failure, *others] = asyncio.run(ask_each())
    assert isinstance(failure, JudgeFailure) and failure.reason == "judge_away"
    assert all(isinstance(one, Judgement) for one in others) and fake.questions.count("a") == 5


def test_a_request_that_was_refused_is_not_asked_again(fake: FakeJudge) -> None:
    fake.answer = always(lambda: JSONResponse({"error": "too long"}, 400))
    with pytest.raises(JudgeFailure, match="was answered 400: .*too long") as caught:
        ask(judge_at(fake.url), "a")
    assert caught.value.reason == "judge_refused" and len(fake.asked) == 1


@pytest.mark.parametrize(("status", "with_key", "said"), [
    (401, True, "Is the key in JUDGE_KEY right"), (403, False, "Name its key with api_key_env"),
    (404, False, "Check `model`, and that `url`"),
])  # fmt: skip
def test_a_judge_that_lets_nobody_in_ends_what_is_scored(
    fake: FakeJudge, status: int, with_key: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    fake.answer = always(lambda: JSONResponse({"error": f"no such key: {KEY}"}, status))
    with pytest.raises(JudgeDenied, match=f"was answered {status}: .*{said}") as caught:
        ask(judge_at(fake.url, api_key_env="JUDGE_KEY" if with_key else None), "a")
    assert (KEY in str(caught.value)) == (not with_key), "a server may say what it likes, but not our key"
    assert fake.headers[0].get("authorization") == (f"Bearer {KEY}" if with_key else None)


def test_a_desk_that_closes_asks_no_more(fake: FakeJudge) -> None:
    async def close() -> None:
        arrived = asyncio.Event()
        loop = asyncio.get_running_loop()

        async def hang(body: Body) -> Response:
            loop.call_soon_threadsafe(arrived.set)
            await asyncio.Event().wait()
            raise AssertionError

        fake.answer = hang
        async with judging():
            asking = asyncio.create_task(judge_at(fake.url).ask({"x": "a"}))
            await arrived.wait()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(close())


@pytest.fixture(scope="module")
def server() -> Iterator[FakeJudge]:
    with judge_serving(FakeJudge()) as server:
        yield server


def answered(server: FakeJudge, answer: Response, *, timeout_s: float = 60.0) -> ChatReply:
    async def once() -> ChatReply:
        judge = judge_at(server.url, api_key_env="JUDGE_KEY", timeout_s=timeout_s)
        async with new_client() as client:
            return await ask_once(client, judge.request({"x": ""}))

    server.answer = always(lambda: answer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUDGE_KEY", KEY)
        return asyncio.run(once())


def test_text_and_ending_of_an_answer_are_taken(server: FakeJudge) -> None:
    assert answered(server, completion("yes", "length")) == ChatReply("yes", "length")
    choice = {"message": {"content": None, "tool_calls": []}}
    assert answered(server, JSONResponse({"choices": [choice]})) == ChatReply("", "stop")
    assert server.headers[-1]["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize(("answer", "error", "said"), [
    (JSONResponse({"error": f"wait, {KEY}"}, 429, {"Retry-After": "7"}), Unavailable, "429: .*wait, \\.\\.\\."),
    (Response("down", 503), Unavailable, "answered 503: down"),
    (Response("late", 408), Unavailable, "answered 408"),
    (JSONResponse({"error": f"no {KEY}"}, 401), JudgeDenied, "answered 401: .*no \\.\\.\\."),
    (Response(status_code=302, headers={"location": "http://x"}), JudgeFailure, "answered 302"),
    (Response("x" * 9999, 400), JudgeFailure, "answered 400: x{500}$"),
    (Response("hello"), JudgeFailure, "what is not a chat completion"),
    (Response("[" * 100_000), JudgeFailure, "what is not a chat completion"),
    (JSONResponse({"choices": []}), JudgeFailure, "with 0 choices, asked for was one"),
    (Response(b"x" * (17 << 20)), JudgeFailure, "more than 16777216 bytes; the rest is not read"),
    (Response(b"no gzip", headers={"content-encoding": "gzip"}), JudgeFailure, "DecodingError"),
])  # fmt: skip
def test_bad_answers_are_told_not_keys(server: FakeJudge, answer: Response, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said) as caught:
        answered(server, answer)
    assert KEY not in str(caught.value)
    if isinstance(caught.value, Unavailable):
        assert caught.value.retry_after_s == (7.0 if answer.status_code == 429 else 0.0)


def test_an_answer_that_does_not_come_in_time_may_come_the_next_time(server: FakeJudge) -> None:
    class Never(Response):
        async def __call__(self, scope: object, receive: object, send: object) -> None:
            await asyncio.Event().wait()

    with pytest.raises(Unavailable, match="had no answer within 0.2 s"):
        answered(server, Never(), timeout_s=0.2)
    server.url, url = "http://127.0.0.1:9/v1", server.url
    with pytest.raises(Unavailable, match="ConnectError"):
        answered(server, completion("nobody hears it"))
    server.url = url


STEPS = 3


def run(directory: Path, judge: FakeJudge, *, max_steps: int = STEPS, **settings: Any) -> list[Batch]:
    """Return the batches of a run whose every rollout is judged."""
    asks = {"url": judge.url, "model": "m", "prompt": "{first} then {second}", "max_score": 1000.0, "retry_for_s": 0.1}
    section = {"id": "tests.runs.environments:Judged", "args": {"judge": asks}, **settings}
    return played(directory, section, max_steps=max_steps)


def test_what_nobody_expects_at_the_desk_ends_the_run_and_leaves_no_worker_waiting(
    tmp_path: Path, fake: FakeJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise ValueError("of a library")

    monkeypatch.setattr(JudgeClient, "ask", fail)
    with pytest.raises(ValueError, match="of a library"):
        run(tmp_path, fake, workers=1)


def test_what_is_made_again_is_scored_as_before_though_the_judge_has_changed(tmp_path: Path, fake: FakeJudge) -> None:
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
def test_a_failing_judge_costs_groups_by_reason_only(tmp_path: Path, fake: FakeJudge, second: Response) -> None:
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
    assert 1 <= len(dropped) <= 2
    assert {one.reason for one in dropped} <= {"judge_away", "judge_refused", "judge_unreadable"}
    for one in dropped:
        assert one.detail.startswith(f"environment 'tests.runs.environments:Judged' failed on task {one.task_id} ")
        assert batches[0].metrics[f"groups/dropped/{one.reason}"] >= 1.0
    assert len(batches[3].rollouts) == 12


@pytest.mark.parametrize("workers", [0, 1])
def test_a_wrong_key_ends_the_run_whatever_may_be_dropped(tmp_path: Path, fake: FakeJudge, workers: int) -> None:
    fake.answer = always(lambda: JSONResponse({"error": "who are you"}, 401))
    with pytest.raises(JudgeDenied, match="was answered 401: .*who are you.*Name its key with api_key_env"):
        run(tmp_path, fake, on_error="drop", workers=workers)


def test_an_evaluation_that_is_made_again_asks_nobody_again(tmp_path: Path, fake: FakeJudge) -> None:
    (tmp_path / "q.jsonl").write_text("".join(json.dumps({"prompt": f"{n}?"}) + "\n" for n in range(3)))
    judge = {"url": fake.url, "model": "m", "prompt": "{prompt} {completion}", "max_score": 1000.0}
    section = {"id": "jsonl", "args": {"path": str(tmp_path / "q.jsonl"), "scorer": "judge", "judge": judge}}

    def evaluate() -> list[float]:
        engine = engine_with_weights()
        with serving(engine):
            evaluated(config_of(tmp_path / "eval", engine, environments=[section], num_tasks=3, samples_per_task=1))
        lines = (tmp_path / "eval" / "rollouts.jsonl").read_text().splitlines()
        return [json.loads(line)["reward"] for line in sorted(lines)]

    first = evaluate()
    assert len(set(first)) == 3 and len(fake.asked) == 3
    for name in ("rollouts.jsonl", "evaluation.json"):
        (tmp_path / "eval" / name).unlink()
    assert sorted(evaluate()) == sorted(first) and len(fake.asked) == 3
