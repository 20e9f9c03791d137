"""What environments do that they should not, and what they may do: one line that names it, and never our traceback."""

import asyncio
import errno
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from fastapi.responses import JSONResponse

from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.errors import STUCK, DataError, EnvironmentFailure, InferenceError, RunDirError, is_storage_failure
from holdfast.orchestrator.env.guard import PromptTooLong, watching_calls
from holdfast.orchestrator.env.interface import Environment, Score, Session, SessionFull, Task, TaskSeed
from holdfast.orchestrator.main import orchestrate
from holdfast.protocol.rollouts import Batch
from holdfast.run.record_log import RecordLog
from holdfast.run.run_dir import RunDir
from tests.conftest import ROOT
from tests.runs.processes import HANG_S
from tests.servers.orchestrator_fakes import FakeEngine, FakeTrainer, make_config, publish_weights, serving
from tests.servers.orchestrator_fakes import run as orchestrated


class Plain(Environment):
    """Right, with neither `async` nor `Message`. Those below do what `what` names."""

    def __init__(self, what: str = "") -> None:
        self.what = what

    def make_task(self, seed: TaskSeed) -> Task:
        a, b = seed.random().randint(0, 10**9), seed.random().randint(0, 10**9)
        return Task(prompt=[{"role": "user", "content": f"{a} and {b}"}], answer=f"{a} {b}")

    async def run(self, session: Session, task: Task) -> None:
        await session.sample()
        session.append_messages([{"role": "user", "content": "again"}])
        await session.sample()
        session.truncated = np.True_  # type: ignore[assignment]

    def score(self, task: Task, sessions: Sequence[Session]) -> Any:  # type: ignore[override]
        numbers = (np.float32(0.5), np.int64(2), np.array(0.25), True)
        return [Score(number, {"np": np.float64(3)}) for number in numbers]  # type: ignore[arg-type]


class Scored(Plain):
    def score(self, task: Task, sessions: Sequence[Session]) -> Any:
        rewards: dict[str, Any] = {"huge": 10**400, "text": "0.5"}
        metrics: dict[str, Any] = {
            "number": {3: 1.0}, "surrogate": {"\ud800": 1.0}, "list": [1.0], "none": {"x": None},
            "unprintable": {"a\nb\x1b" + "x" * 1000: None}, "counted": {"tools/calls": 1.0},
        }  # fmt: skip
        parts: dict[str, dict[str, Any]] = {
            "turns": {"turn_rewards": [1.0, 2.0, 3.0]}, "tokens": {"token_rewards": []},
            "both": {"turn_rewards": [1.0], "token_rewards": [1.0]}, "unlisted": {"turn_rewards": 1.0},
            "endless": {"turn_rewards": [float("inf")]},
        }  # fmt: skip
        match self.what:
            case "nothing":
                return None
            case "numbers":
                return [1.0] * 4
            case "few":
                return [Score(1.0)] * 3
            case _:
                reward, values = rewards.get(self.what, 1.0), metrics.get(self.what, {})
                return [Score(reward, values, **parts.get(self.what, {})) for _ in sessions]


class Tasks(Plain):
    def make_task(self, seed: TaskSeed) -> Any:
        prompts: dict[str, Any] = {
            "key": [{"role": "user", "contents": "x"}], "content": [{"role": "user", "content": 3}],
            "surrogate": "a\ud800", "number": 7, "strings": ["hello"],
            "calls": [{"role": "assistant", "content": "", "tool_calls": [{"function": "f"}]}],
            "unwritten": [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather"}}]}],
        }  # fmt: skip
        if self.what == "answer":
            return Task(prompt="x", answer=3)  # type: ignore[arg-type]
        return {"prompt": "x"} if self.what == "dict" else Task(prompt=prompts[self.what])


class Lacks(Environment):
    """Defines what `what` names alone, and never samples."""

    def __init__(self, what: str) -> None:
        if what != "make_task":
            self.make_task = lambda seed: Task(prompt="x")
        if what != "run":
            self.run = super().run
        if what != "score":
            self.score = lambda task, sessions: [Score(1.0)] * len(sessions)

    async def run(self, session: Session, task: Task) -> None:
        """Sample nothing."""


class Raises(Plain):
    def __init__(self, what: str) -> None:
        self.what, _, self.where = what.partition(" in ")
        self._raise("init")

    def _raise(self, where: str) -> None:
        if where != self.where:
            return
        match self.what:
            case "exit":
                sys.exit(0)
            case "cancelled":
                raise asyncio.CancelledError
            case "interrupt":
                raise KeyboardInterrupt
            case "full":
                raise SessionFull("full")
            case "data":
                raise DataError("bad row")
            case "mute":
                raise MuteError
            case _:
                raise BaseException("\ud800" + "x" * 10_000)

    def make_task(self, seed: TaskSeed) -> Task:
        self._raise("make_task")
        return super().make_task(seed)

    async def run(self, session: Session, task: Task) -> None:
        self._raise("run")
        await session.sample()

    def score(self, task: Task, sessions: Sequence[Session]) -> Any:
        self._raise("score")


class Runs(Plain):
    async def run(self, session: Session, task: Task) -> None:
        match self.what:
            case "gather":
                await asyncio.gather(session.sample(), session.sample())
            case "text" | "messages":
                await asyncio.gather(session.sample(), self.append(session))
            case "leave":
                self.left = asyncio.create_task(session.sample())
                await asyncio.sleep(0)
            case _:
                await session.sample(max_tokens=np.int64(3))  # type: ignore[arg-type]
                await self.change(session)

    async def append(self, session: Session) -> None:
        session.append_text("b") if self.what == "text" else session.append_messages([{"role": "user", "content": "b"}])

    async def change(self, session: Session) -> None:
        match self.what:
            case "copies":
                session.logprobs[-1] = float("nan")
                session.loss_mask[-1] = 200
                session.versions.clear()
                session.texts.clear()
                session.token_ids[-1] = 5 if session.token_ids[-1] != 5 else 6
            case "none":
                await session.sample(max_tokens=0)
            case "half":
                await session.sample(max_tokens=2.5)  # type: ignore[arg-type]
            case "flag":
                session.truncated = 1  # type: ignore[assignment]
            case "list":
                session.token_ids = list(session.token_ids)  # type: ignore[misc,assignment]
            case "unwritten":
                call = {"function": {"name": "f"}}
                session.append_messages([{"role": "user", "content": "x", "tool_calls": [call]}])


class Mute:
    """Shows nothing of itself."""

    def __repr__(self) -> str:
        raise KeyError("repr")

    def __float__(self) -> float:
        raise KeyError("float")


class MuteError(Exception):
    def __str__(self) -> str:
        raise KeyError("str")


class Mutes(Plain):
    """Hands over what cannot be shown, as what `what` names."""

    def make_task(self, seed: TaskSeed) -> Any:
        return Mute() if self.what == "task" else super().make_task(seed)

    def score(self, task: Task, sessions: Sequence[Session]) -> Any:
        mute: Any = Mute()
        return [Score(mute) for _ in sessions]


class Swallows(Plain):
    """Takes whatever the engine fails with for a bad answer."""

    async def run(self, session: Session, task: Task) -> None:
        await session.sample()
        try:
            session.append_messages([{"role": "user", "content": "again"}])
            await session.sample()
        except Exception:  # noqa: BLE001 - the mistake
            session.append_text(" ")


class Persists(Plain):
    """Asks again and again, whatever the engine fails with."""

    async def run(self, session: Session, task: Task) -> None:
        while not session.texts:
            try:
                await session.sample()
            except Exception:  # noqa: BLE001, S112 - the mistake
                continue


class Long(Plain):
    """Appends 50 MB, or asks with it."""

    def make_task(self, seed: TaskSeed) -> Task:
        texts: dict[str, Any] = {"prompt": "ab" * 25_000_000}
        texts["messages"] = [{"role": "user", "content": texts["prompt"]}]
        return Task(prompt=texts.get(self.what, "hello"))

    async def run(self, session: Session, task: Task) -> None:
        await session.sample()
        if self.what == "text":
            session.append_text("ab" * 25_000_000)
        session.append_messages([{"role": "user", "content": "ab" * 25_000_000}])


class BlocksInTurn(Plain):
    """Two calls block in one turn of the event loop: the second one for ever."""

    num_calls = 0

    async def run(self, session: Session, task: Task) -> None:
        await session.sample()
        self.num_calls += 1
        match self.num_calls:
            case 1:
                time.sleep(1.5)
            case 2:
                os.read(os.pipe()[0], 2)


class Apart(Plain):
    """Does it in a task of its own: ends the process, or blocks the event loop for a while."""

    async def run(self, session: Session, task: Task) -> None:
        async def do() -> None:
            sys.exit(0) if self.what == "exit" else time.sleep(0.4)

        doing = asyncio.create_task(do())
        await session.sample()
        await doing


class Reflects(Plain):
    """Lets the policy go on with all sessions at once before it scores."""

    async def run(self, session: Session, task: Task) -> None:
        await session.sample()

    async def score(self, task: Task, sessions: Sequence[Session]) -> Any:
        for session in sessions:
            session.append_messages([{"role": "user", "content": "sure?"}])
        await asyncio.gather(*(session.sample() for session in sessions))
        return [Score(float(len(session.texts))) for session in sessions]


class Waits(Plain):
    """Waits for ever, for something else than the engine."""

    async def run(self, session: Session, task: Task) -> None:
        await session.sample()
        await self.judge()

    async def judge(self) -> None:
        await asyncio.Event().wait()


def section(kind: type[Environment], **settings: Any) -> list[dict[str, Any]]:
    return [{"id": f"{__name__}:{kind.__name__}", "name": "mine", **settings}]


def run(
    directory: Path, kind: type[Environment], *, engine: FakeEngine | None = None, problems: int = 3, **settings: Any
) -> Batch:
    """Return the first batch, if there is one."""
    engine = engine or FakeEngine()
    with serving(engine):
        environments = section(kind, **settings)
        config = make_config(directory, engine, environments=environments, max_steps=1, problems_per_step=problems)
        return orchestrated(config)[0]


def test_messages_as_dicts_methods_without_async_and_numbers_of_numpy(tmp_path: Path) -> None:
    batch = run(tmp_path, Plain)
    assert [rollout.reward for rollout in batch.rollouts[:4]] == [0.5, 2.0, 0.25, 1.0]
    assert batch.rollouts[0].metrics == {"np": 3.0} and batch.rollouts[0].truncated is True
    assert all(type(rollout.reward) is float for rollout in batch.rollouts)


@pytest.mark.parametrize(("kind", "what", "said"), [
    (Scored, "huge", r"score\(\) gave reward = 10{78}.*\(int\), expected a finite number, at most 1e\+30"),
    (Scored, "text", r"reward = '0.5' \(str\)"),
    (Scored, "number", r"gave a metric the name 3 \(int\): expected text"),
    (Scored, "surrogate", "half of a surrogate pair"),
    (Scored, "list", r"metrics = \[1.0\] \(list\), expected names with numbers"),
    (Scored, "none", r"gave x = None \(NoneType\), expected a finite number"),
    (Scored, "unprintable", r"gave a\\nb\\x1bx+ … \(1004 characters\) = None"),
    (Scored, "counted", r"gave a metric the name 'tools/calls' .*; names that begin with pass@, requests/"),
    (Scored, "turns", r"score\(\) gave 3 turn_rewards for \d sampled turns"),
    (Scored, "tokens", r"score\(\) gave 0 token_rewards for \d+ sampled tokens"),
    (Scored, "both", r"score\(\) gave turn_rewards and token_rewards; give one of them"),
    (Scored, "unlisted", r"score\(\) gave turn_rewards = 1.0 \(float\), expected a list of numbers"),
    (Scored, "endless", r"score\(\) gave turn_rewards\[0\] = inf \(float\), expected a finite number"),
    (Scored, "nothing", r"score\(\) must return a list of 4 Score objects, got None"),
    (Scored, "numbers", r"score\(\) must return Score objects, got 1.0 \(float\)"),
    (Tasks, "key", "the prompt of its task: message 1 is .*`contents`"),
    (Tasks, "content", "message 1 is .*Expected `str`, got `int`"),
    (Tasks, "surrogate", "the prompt of its task: character 1 is '.ud800', half of a surrogate pair"),
    (Tasks, "calls", "the prompt of its task: message 1: a tool call needs a function with a `name`"),
    (Tasks, "unwritten", "prompt of its task: message 1 has `tool_calls`, which the chat template .* not write"),
    (Tasks, "answer", r"the answer of its task must be text, got 3 \(int\)"),
    (Tasks, "number", r"expected text or a list of messages, got 7 \(int\)"),
    (Tasks, "strings", r"message 1 is 'hello': expected Message\(role, content\) or a dict"),
    (Tasks, "dict", r"make_task\(\) must return a Task, got \{'prompt': 'x'\}"),
    (Runs, "unwritten", r"run\(\) raised DataError: .*`tool_calls`, which the chat template .* not write"),
    (Runs, "list", r"run\(\) raised AttributeError: property 'token_ids' of 'Session' object has no setter"),
    (Runs, "flag", r"session.truncated = 1 \(int\), expected True or False: convert it by bool\(\)"),
    (Runs, "none", r"ValueError: sample\(max_tokens=0\) leaves no token to sample: allowed are integers from 1"),
    (Runs, "half", r"run\(\) raised TypeError: 'float' object cannot be interpreted as an integer"),
    (Runs, "gather", r"run\(\) raised RuntimeError: sample\(\) while a sample\(\) of the same session goes on"),
    (Runs, "text", r"RuntimeError: append_text\(\) while a sample\(\)"),
    (Runs, "messages", r"RuntimeError: append_messages\(\) while a sample\(\)"),
    (Runs, "leave", r"run\(\) ended while a session.sample\(\) went on: await every sample"),
    (Raises, "full in make_task", rf"make_task\(\) raised SessionFull: full \({re.escape(__file__)}:\d+\)"),
    (Raises, "data in score", rf"score\(\) raised DataError: bad row \({re.escape(__file__)}:\d+\)"),
    (Raises, "mute in score", r"score\(\) raised MuteError: \(its __str__ raised KeyError\)"),
    (Mutes, "task", r"make_task\(\) must return a Task, got \(its __repr__ raised KeyError\) \(Mute\)"),
    (Mutes, "reward", r"score\(\) gave reward = \(its __repr__ raised KeyError\) \(Mute\), expected a finite"),
    (Scored, "few", r"score\(\) returned 3 scores for 4 sessions"),
    (Lacks, "make_task", r"NotImplementedError: Lacks needs a method make_task\(seed\)"),
    (Lacks, "score", r"NotImplementedError: Lacks needs a method score\(task, sessions\)"),
    (Lacks, "run", r"run\(\) ended without a sampled turn; write `await session.sample\(\)`"),
    (Raises, "exit in run", rf"run\(\) raised SystemExit: 0 \({re.escape(__file__)}:\d+\)"),
    (Raises, "exit in score", r"score\(\) raised SystemExit: 0"),
    (Raises, "exit in init", "failed in its constructor: SystemExit: 0"),
    (Raises, "cancelled in run", r"run\(\) raised CancelledError"),
    (Raises, "interrupt in run", r"run\(\) raised KeyboardInterrupt"),
    (Raises, "base in run", r"run\(\) raised BaseException: .ud800x+ … \(10001 characters\)"),
])  # fmt: skip
def test_a_mistake_is_one_line(tmp_path: Path, kind: type[Environment], what: str, said: str) -> None:
    """Where the run ends by it, and where the group is dropped: what was raised is shown in both."""
    is_raised = kind is Raises or r"run\(\) raised" in said
    on_error = "drop" if is_raised or what in ("surrogate", "huge", "leave", "flag") else "stop"
    with pytest.raises(EnvironmentFailure, match=said) as caught:
        run(tmp_path, kind, args={"what": what}, on_error=on_error)
    if what == "exit in init":
        first = r"environment 'mine' \(.*:Raises\) failed in its constructor"
    else:
        first = r"environment 'mine' failed on task \d" if on_error == "stop" else "all 3 groups were dropped"
    assert re.search(first, str(caught.value)) and len(str(caught.value)) < 1200


def test_what_is_left_running_asks_nothing_for_a_failed_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions: list[Session] = []
    monkeypatch.setattr(Raises, "run", lambda self, session, task: sessions.append(session) or session.sample())
    with pytest.raises(EnvironmentFailure, match="all 3 groups were dropped"):
        run(tmp_path, Raises, args={"what": "data in score"}, on_error="drop")
    with pytest.raises(RuntimeError, match=r"sample\(\) after score\(\) has returned, or its group has failed"):
        asyncio.run(sessions[0].sample())


def test_an_environment_changes_only_copies_of_what_is_trained_on(tmp_path: Path) -> None:
    changed, plain = (run(tmp_path / what, Runs, args={"what": what}) for what in ("copies", "nothing"))
    assert changed.rollouts == plain.rollouts and plain.rollouts[0].versions


@pytest.mark.parametrize("on_error", ["stop", "drop"])
@pytest.mark.parametrize(("kind", "answers"), [(Swallows, 3), (Persists, 0)])
def test_an_engine_that_fails_ends_the_run_though_the_environment_takes_it_for_an_answer(
    tmp_path: Path, kind: type[Environment], answers: int, on_error: str
) -> None:
    refusal = {"error": "out of order"}
    engine = FakeEngine(intercept=lambda count: JSONResponse(refusal, 400) if count > answers else None)
    with pytest.raises(InferenceError, match="was answered 400: out of order"):
        run(tmp_path, kind, engine=engine, on_error=on_error, timeout_s=math.inf)
    assert RunDir(tmp_path).published_batches() == []


def test_a_full_disk_is_one_though_an_environment_swallows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append, kept = RecordLog.append, []

    def fill_up(log: RecordLog, payload: bytes) -> None:
        if len(kept) > 3:  # a header, and the first turns of three groups
            raise OSError(errno.ENOSPC, "No space left on device")
        append(log, payload)
        kept.append(payload)

    monkeypatch.setattr(RecordLog, "append", fill_up)
    with pytest.raises(RunDirError, match="generations of batch 1 cannot be kept .* No space left") as caught:
        run(tmp_path, Swallows)
    assert is_storage_failure(caught.value)


@pytest.mark.parametrize("where", ["prompt", "messages", "text", "message"])
def test_what_cannot_fit_is_not_tokenised(tmp_path: Path, where: str) -> None:
    if where in ("text", "message"):
        assert all(rollout.truncated for rollout in run(tmp_path, Long, args={"what": where}).rollouts)
        return
    with pytest.raises(PromptTooLong, match="the prompt has 50000000 characters, more than 1023 tokens can stand for"):
        run(tmp_path, Long, args={"what": where})


def test_a_long_traceback_is_cut_in_the_log_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(EnvironmentFailure):
        run(tmp_path, Raises, args={"what": "base in run"})
    text = caplog.text.replace(str(ROOT), "")  # how long the lines are is not the checkout's place to say
    assert "in _raise" in text and len(text) < 6000 and "x" * 1000 not in text


def line_of(text: str) -> str:
    """Return a pattern for the place of the first line here that holds `text`."""
    lines = Path(__file__).read_text().splitlines()
    return re.escape(f"{__file__}:{next(number for number, line in enumerate(lines, 1) if text in line)}")


def process(config: OrchestratorConfig, prelude: str = "") -> subprocess.CompletedProcess[str]:
    path = config.output_dir / "resolved.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)))
    code = f"{prelude}\nfrom holdfast.orchestrator.main import main\nmain([{str(path)!r}])"
    places = [str(Path(__file__).parent), str(ROOT)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=HANG_S)


@pytest.mark.launch
def test_a_task_of_its_own_cannot_end_the_process_in_silence(tmp_path: Path) -> None:
    engine = FakeEngine()
    publish_weights(RunDir(tmp_path), 0, b"zero")
    with serving(engine):
        ended = process(make_config(tmp_path, engine, environments=section(Apart, args={"what": "exit"}), max_steps=1))
    assert ended.returncode == 3
    assert "error: an environment raised SystemExit(0) in a task or callback of its own" in ended.stderr
    assert "Traceback" not in ended.stderr.partition("error: ")[0]


def test_a_call_that_waits_too_long_is_named_with_its_place(tmp_path: Path) -> None:
    """The time with the engine does not count: the deadline of 1 s."""
    engine = FakeEngine(on_generate=lambda count: time.sleep(1.2) if count == 1 else None)
    said = rf"run\(\) took longer than 1 s \(timeout_s\), at {line_of('Event().wait()')}"
    with pytest.raises(EnvironmentFailure, match=said):
        run(tmp_path, Waits, engine=engine, timeout_s=1)


def test_a_call_is_not_named_for_what_its_own_task_blocks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def watched() -> None:
        engine = FakeEngine()
        with serving(engine), FakeTrainer(RunDir(tmp_path), start=0, max_steps=1), watching_calls(named_after_s=0.2):
            asked = {"environments": section(Apart), "max_steps": 1, "problems_per_step": 1}
            await orchestrate(make_config(tmp_path, engine, **asked))

    asyncio.run(watched())
    assert RunDir(tmp_path).published_batches() == [1] and "blocks all others" not in caplog.text


@pytest.mark.parametrize("timeout_s", [1.0, math.inf])
def test_the_clock_of_a_call_stands_still_until_its_last_session_was_sampled(tmp_path: Path, timeout_s: float) -> None:
    """And an answer that has come already starts it for nobody."""
    engine = FakeEngine(on_generate=lambda count: asyncio.sleep(1.3) if count == 5 else None)
    batch = run(tmp_path, Reflects, engine=engine, problems=1, timeout_s=timeout_s)
    assert len(engine.requests) == 5 and [rollout.reward for rollout in batch.rollouts] == [2.0] * 4


@pytest.mark.launch
def test_a_call_that_blocks_is_named_and_ended(tmp_path: Path) -> None:
    """Nothing else runs in that process: no deadline of asyncio can end it."""
    engine = FakeEngine()
    told = "guard._BENEFIT_OF_DOUBT_S = 0\nguard.watching_calls.__wrapped__.__kwdefaults__['named_after_s'] = 1"
    prelude = f"from holdfast.orchestrator.env import guard\n{told}"
    publish_weights(RunDir(tmp_path), 0, b"zero")
    with serving(engine):
        config = make_config(tmp_path, engine, environments=section(BlocksInTurn, timeout_s=2), max_steps=1)
        ended = process(config, prelude)
    assert ended.returncode == STUCK, "which is started again"
    at = line_of("os.read(os.pipe()[0], 2)")
    assert re.search(rf"environment 'mine', task \d blocks all others for \d+ s in run\(\) at {at}", ended.stderr)
    said = rf"error: environment 'mine' failed on task \d .*run\(\) has blocked .* 2 s \(timeout_s\), at {at}"
    assert re.search(said, ended.stderr), ended.stderr
