"""Whole runs of the orchestrator against a real HTTP server: schedule, journal, resume, failures, split sessions."""

import asyncio
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w

from holdfast.chat.tokenizer import load_tokenizer
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.errors import STORAGE_FAILED, CheckpointError, ConfigError, InferenceError, is_storage_failure
from holdfast.launcher.resume.resume_step import set_aside_after
from holdfast.orchestrator.env.interface import Message, Score, Session, Task, TaskSeed
from holdfast.orchestrator.main import orchestrate
from holdfast.orchestrator.state import OrchestratorState, read_state
from holdfast.orchestrator.weight_sync import describe_weights
from holdfast.process import heartbeat
from holdfast.protocol.rollouts import Batch, Rollout, Sampling
from holdfast.run import journal
from holdfast.run.run_dir import RunDir
from tests.conftest import BASE
from tests.models.chat_templates import FORGETFUL
from tests.runs.environments import TwoTurns
from tests.runs.processes import HANG_S
from tests.servers import orchestrator_fakes as fakes
from tests.servers.orchestrator_fakes import FakeEngine, make_config, read_rollouts, rollouts_of, run, serving
from tests.unit.orchestrator.client.test_teacher import FakeTeacher, expected_logprob
from tests.unit.orchestrator.test_dynamic_sampling import checked_batches

TWO_TURNS = "tests.runs.environments:TwoTurns"
_MIX = [{"id": "reverse_text", "weight": 2}, {"id": "reverse_text", "name": "short", "args": {"max_length": 9}}]


class Clock(TwoTurns):
    def make_task(self, seed: TaskSeed) -> Task:
        return Task(prompt=[Message("user", f"task {seed.index} at {time.monotonic_ns()}")])


class Bounds(TwoTurns):
    def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        return [Score(0.0, {"bound_s": heartbeat._own.beat.bound_s or 0.0}) for _ in sessions]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.mark.parametrize("async_level", [0, 1, 2])
def test_a_schedule_decides_which_version_makes_a_batch(tmp_path: Path, engine: FakeEngine, async_level: int) -> None:
    made = rollouts_of(tmp_path, engine, async_level=async_level, max_steps=6)
    for step, (version, rollouts) in enumerate(made, start=1):
        assert version == max(0, step - 1 - async_level)
        assert {span.version for rollout in rollouts for span in rollout.versions} == {version}
    assert engine.pushed == list(range(6 - async_level))


def test_a_group_is_one_request_and_a_batch_is_whole_and_ordered(tmp_path: Path, engine: FakeEngine) -> None:
    with serving(engine):
        run(make_config(tmp_path, engine, max_steps=2, environments=_MIX))
    assert [len(request["seeds"]) for request in engine.requests] == [4] * 6
    seeds = [seed for request in engine.requests for seed in request["seeds"]]
    assert len(set(seeds)) == 24 and all(0 <= seed < 2**63 for seed in seeds)
    batch = journal.read_batch(RunDir(tmp_path), 2)
    keys = [(rollout.environment, rollout.task_id, rollout.sample_index) for rollout in batch.rollouts]
    expected = [("reverse_text", 2), ("short", 1), ("reverse_text", 3)]
    assert keys == [(name, task, sample) for name, task in expected for sample in range(4)]
    for rollout in batch.rollouts:
        assert len(rollout.token_ids) == len(rollout.loss_mask) == len(rollout.logprobs)
        prompt_tokens = rollout.loss_mask.index(True)
        assert rollout.token_ids[prompt_tokens - 1] == 2 and all(rollout.loss_mask[prompt_tokens:])
        assert not any(rollout.logprobs[:prompt_tokens])
        assert [(span.start, span.end) for span in rollout.versions] == [(prompt_tokens, len(rollout.token_ids))]
    for name in ("reward/mean", "reward/short/mean", "reverse_text/exact", "engine/idle_share", "time/generate"):
        assert name in batch.metrics
    state = read_state(RunDir(tmp_path).batch(2) / journal.STATE_NAME, step=2)
    assert (state.problems, state.rollouts) == (6, 24)
    assert {name: one.next_task for name, one in state.environments.items()} == {"reverse_text": 4, "short": 2}


def test_every_environment_makes_its_rollouts_by_its_own_settings(tmp_path: Path, engine: FakeEngine) -> None:
    """Also with little room, and with other settings on resume."""
    sampling = {"temperature": 0.5, "max_tokens": 5}
    short = {"id": "reverse_text", "name": "short", "group_size": 2, "seq_len": 40, "sampling": sampling}
    mix: list[dict[str, Any]] = [{"id": "reverse_text"}, short]
    common = {"problems_per_step": 6, "sampling": {"max_tokens": 24, "min_p": 0.1}}
    found = []
    with serving(engine):
        for room in (256, 3):
            config = make_config(tmp_path / str(room), engine, environments=mix, max_steps=2, **common)
            config.client.max_concurrency = room
            found.append([batch.rollouts for batch in run(config)])
        fakes.commit_checkpoint(RunDir(config.output_dir), 2)
        changed = {"environments": [mix[0] | {"group_size": 1}, short | {"group_size": 3}], "ckpt": {"resume_step": 2}}
        later = run(make_config(config.output_dir, engine, max_steps=3, **changed, **common), start=2)[2]
    assert found[0] == found[1]
    rollouts = [rollout for batch in found[0] for rollout in batch]
    distributions = {"reverse_text": Sampling(min_p=0.1), "short": Sampling(0.5, min_p=0.1)}
    assert {(one.environment, one.sampling) for one in rollouts} == set(distributions.items())
    assert Counter(one.environment for one in rollouts) == {"reverse_text": 6 * 4, "short": 6 * 2}
    asked = {(len(body["seeds"]), body["temperature"], body["min_p"], body["max_tokens"]) for body in engine.requests}
    assert asked == {(4, 1.0, 0.1, 24), (2, 0.5, 0.1, 5), (1, 1.0, 0.1, 24), (3, 0.5, 0.1, 5)}
    assert Counter(one.environment for one in later.rollouts) == {"reverse_text": 3 * 1, "short": 3 * 3}


def test_batches_after_the_checkpoint_are_not_made_again(tmp_path: Path, engine: FakeEngine) -> None:
    straight = rollouts_of(tmp_path / "straight", engine, max_steps=8)
    assert fakes.resumed_of(tmp_path / "resumed", engine, at=3, stopped=5) == straight
    assert len(engine.requests) == 3 * 3


def test_batches_of_an_environment_that_asks_a_clock_are_others_each_time(tmp_path: Path, engine: FakeEngine) -> None:
    clock = [{"id": f"{__name__}:Clock"}]
    one, two = (rollouts_of(tmp_path / name, engine, max_steps=1, environments=clock) for name in ("one", "two"))
    assert one != two


def test_the_event_loop_may_be_blocked_for_as_long_as_is_set(tmp_path: Path, engine: FakeEngine) -> None:
    environments = [{"id": f"{__name__}:Bounds"}]
    with serving(engine):
        run(make_config(tmp_path / "set", engine, max_steps=1, environments=environments, hang_timeout_s=77))
        run(make_config(tmp_path / "unset", engine, max_steps=1, environments=environments))
    for name, bound_s in (("set", 77.0), ("unset", 900.0)):
        (rollout, *_) = journal.read_batch(RunDir(tmp_path / name), 1).rollouts
        assert rollout.metrics["bound_s"] == bound_s


def test_without_the_older_weights_the_resumed_version_is_used_and_said(
    tmp_path: Path, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = RunDir(tmp_path)
    with serving(engine):
        run(make_config(tmp_path, engine, max_steps=5, async_level=2))
        fakes.commit_checkpoint(run_dir, 3)
        set_aside_after(run_dir, 3, attempt=1)
        (run_dir.weights_of(1) / "manifest.json").unlink()
        run(make_config(tmp_path, engine, async_level=2, ckpt={"resume_step": 3}), start=3)
    assert [version for version, _ in read_rollouts(run_dir, range(4, 9))] == [3, 2, 3, 4, 5]
    assert "policy version 1 is no longer in" in caplog.text


def test_a_killed_batch_reuses_what_was_sampled(tmp_path: Path, engine: FakeEngine) -> None:
    settings = {"max_steps": 3, "environments": [{"id": TWO_TURNS}]}
    straight, killed = RunDir(tmp_path / "straight"), RunDir(tmp_path / "killed")
    with serving(engine):
        run(make_config(straight.path, engine, **settings))
        engine.requests.clear()
        fakes.run_until(23, engine, make_config(killed.path, engine, **settings))
        before = killed.published_batches()
        run(make_config(killed.path, engine, **settings))
    assert before == [1] and read_rollouts(straight, range(1, 4)) == read_rollouts(killed, range(1, 4))
    assert journal.read_batch(killed, 2).metrics["rollout/reused_turns"] > 0
    assert not list(killed.rollouts.glob("generations_*"))


@pytest.mark.parametrize(("lie", "said"), [
    ({"lie_version": 1}, "given policy version 0 and reports version 1"),
    ({"lie_digest": "0" * 32}, "was published with digest"),
    ({"refuse": "tensor lm_head.weight is missing"}, "409: tensor lm_head.weight is missing"),
    ({"model": "another/model"}, "serves the model 'another/model'"),
    ({"token": "secret"}, "Set HOLDFAST_ADMIN_TOKEN"),
])  # fmt: skip
def test_an_engine_that_serves_something_else_is_refused(tmp_path: Path, lie: dict[str, object], said: str) -> None:
    engine = FakeEngine(**lie)  # type: ignore[arg-type]
    with serving(engine), pytest.raises(InferenceError, match=said):
        run(make_config(tmp_path, engine, max_steps=1))
    assert RunDir(tmp_path).published_batches() == []


def test_weights_that_an_engine_cannot_read_are_a_failure_of_the_storage(tmp_path: Path) -> None:
    """Which is waited for; the engine serves what it served."""
    engine = FakeEngine(cannot_read=True)
    with serving(engine), pytest.raises(InferenceError, match="answered 507: the storage failed") as caught:
        run(make_config(tmp_path, engine, max_steps=1))
    assert caught.value.exit_code == STORAGE_FAILED and is_storage_failure(caught.value)


@pytest.mark.parametrize("forget", [False, True])
def test_an_engine_that_comes_back_gets_its_weights_again(tmp_path: Path, engine: FakeEngine, forget: bool) -> None:
    straight = rollouts_of(tmp_path / "straight", engine, max_steps=2)
    engine.fail_requests, engine.forget_weights = 2, forget
    assert rollouts_of(tmp_path / "lost", engine, max_steps=2) == straight


def test_an_aborted_answer_is_asked_again_and_spans_of_one_version_are_one(tmp_path: Path, engine: FakeEngine) -> None:
    def abort_once(answer: dict[str, Any]) -> None:
        if len(engine.requests) == 2:
            answer["choices"][1]["finish_reason"] = "abort"
        for choice in answer["choices"]:
            (span,) = choice["versions"]
            if span["end"] > 1:
                choice["versions"] = [span | {"end": 1}, span | {"start": 1}]

    straight = rollouts_of(tmp_path / "straight", engine, max_steps=2)
    engine.requests.clear()
    engine.alter = abort_once
    assert rollouts_of(tmp_path / "aborted", engine, max_steps=2) == straight and len(engine.requests) == 2 * 3 + 1


def test_weights_that_are_published_again_while_an_engine_loads_them_are_loaded_again(
    tmp_path: Path, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = RunDir(tmp_path)
    contents = [b"once more", b"and again", b"and for ever", b"again"]
    fakes.publish_weights(run_dir, 0, b"zero")
    engine.before_update = lambda: fakes.publish_weights(run_dir, 0, contents.pop())
    engine.lie_digest = "0" * 32
    with serving(engine):
        with pytest.raises(InferenceError, match=r"step_0 was published again 3 times while it was loaded"):
            asyncio.run(orchestrate(make_config(tmp_path, engine, max_steps=1)))
        assert contents == [b"once more"] and run_dir.published_batches() == []
        engine.before_update = lambda: fakes.publish_weights(run_dir, 0, contents.pop()) if contents else None
        engine.lie_digest = None
        asyncio.run(orchestrate(make_config(tmp_path, engine, max_steps=1)))
    assert caplog.text.count("was published again while it was loaded; loading it again") == 3 + 1
    assert journal.read_batch(run_dir, 1).weights_digest == engine.digest == describe_weights(run_dir, 0).digest


def test_an_attempt_that_finds_all_made_gives_the_servers_back(tmp_path: Path, engine: FakeEngine) -> None:
    with serving(engine):
        config = make_config(tmp_path, engine, max_steps=2)
        run(config)
        requests = len(engine.requests)
        engine.owner = RunDir(tmp_path).run_id()  # as where the attempt before died at its end
        asyncio.run(orchestrate(config))
    assert engine.owner is None and len(engine.requests) == requests


def test_a_resume_step_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ckpt\.resume_step = latest: .*needs the number that the launcher resolved"):
        asyncio.run(orchestrate(make_config(tmp_path, ckpt={"resume_step": "latest"}, client={})))


def test_weights_of_another_version_are_refused(tmp_path: Path, engine: FakeEngine) -> None:
    run_dir = RunDir(tmp_path)
    fakes.publish_weights(run_dir, 7, b"seven")
    run_dir.weights_of(7).rename(run_dir.weights_of(0))
    with serving(engine), pytest.raises(CheckpointError, match="holds weights of version 7, expected"):
        asyncio.run(orchestrate(make_config(tmp_path, engine)))


def test_generation_goes_no_further_ahead_than_the_schedule(tmp_path: Path, engine: FakeEngine) -> None:
    run_dir = RunDir(tmp_path)
    fakes.publish_weights(run_dir, 0, b"zero")
    with serving(engine), pytest.raises(InferenceError, match=r"published no .*step_1 within"):
        asyncio.run(orchestrate(make_config(tmp_path, engine, weights_timeout_s=0.1)))
    assert run_dir.published_batches() == [1, 2] and len(engine.requests) == 2 * 3


def test_batches_are_published_in_the_next(tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    next_has_begun = threading.Event()
    engine.on_generate = lambda count: next_has_begun.set() if count > 3 else None
    publish = journal.publish_batch

    def slow_publish(run_dir: RunDir, batch: Batch, state: bytes) -> Path:
        assert next_has_begun.wait(timeout=HANG_S), "generation waits for publishing"
        return publish(run_dir, batch, state)

    monkeypatch.setattr(journal, "publish_batch", slow_publish)
    with serving(engine):
        run(make_config(tmp_path, engine, max_steps=3))
    assert RunDir(tmp_path).published_batches() == [1, 2, 3]


def test_damaged_state_is_a_checkpoint_error(tmp_path: Path) -> None:
    path = tmp_path / "orchestrator.json"
    for content, said in (
        (None, "is missing"),
        (b'{"format": 1, "step": "three"}', "is damaged"),
        (msgspec.json.encode(OrchestratorState(step=2)), "after step 2, expected step 3"),
        (msgspec.json.encode(OrchestratorState(format=9, step=3)), "format 9"),
    ):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(CheckpointError, match=said):
            read_state(path, step=3)


def _start_process(config: OrchestratorConfig) -> subprocess.Popen[str]:
    path = config.output_dir / "resolved.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)))
    ignoring = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"]
    command = [*ignoring, sys.executable, "-m", "holdfast.orchestrator.main", str(path)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_sigterm_stops_the_process_cleanly(tmp_path: Path, engine: FakeEngine) -> None:
    """And an interrupt does not, where whoever started the process has it ignored, as `nohup` and `&` do."""
    with serving(engine), _start_process(make_config(tmp_path, engine)) as process:
        assert process.stderr is not None
        seen = ""
        while "waiting for weights" not in seen:
            seen = process.stderr.readline()
            assert seen, "the process ended before it waited for weights"
        process.send_signal(signal.SIGINT)
        fakes.publish_weights(RunDir(tmp_path), 0, b"zero")
        while not engine.requests:
            time.sleep(0.01)
            assert process.poll() is None, "the interrupt ended it"
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
    assert process.returncode == 0
    assert "stopped" in rest and "Traceback" not in rest


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
    game, args = "examples.environments.guess_number:GuessNumber", {"turns": TURNS, "high": 9}
    section = {"id": game, "name": "guess_number", "args": args}
    return make_config(output_dir, engine, max_steps=STEPS, model={"name": str(model)}, environments=[section], **more)


def seen_by_turns(rollout: Rollout) -> list[list[int]]:
    """What the policy saw before each turn: its branch up to there."""
    mask = rollout.loss_mask.tolist()
    starts = [place for place in range(1, len(mask)) if mask[place] and not mask[place - 1]]
    begins = [max(start for start in rollout.branch_starts if start < place) for place in starts]
    return [rollout.token_ids[begin:place].tolist() for begin, place in zip(begins, starts, strict=True)]


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
            first = tokenizer.decode(prompt, skip_special_tokens=False).split("<|assistant|>")[1].split("<|end|>")[0]
            assert "e" not in first, "a branch begins without the thoughts of the first turn"
    for batch, found in zip(batches, [batch.metrics for batch in batches], strict=True):
        numbers = [len(rollout.branch_starts) for rollout in batch.rollouts]
        assert found["rollout/branches"] == sum(numbers) / len(numbers)
        assert found["rollout/split"] == sum(number > 1 for number in numbers) / len(numbers)
    assert len(checked_batches(RunDir(tmp_path))) == STEPS, "the ledger counts rollouts, not branches, and every token"


def test_a_killed_batch_asks_neither_policy_nor_teacher_twice(tmp_path: Path, model: Path) -> None:
    """The teacher judges each branch by itself."""
    engine, teacher = FakeEngine(), FakeTeacher(model="the/teacher", version=0, digest="fixed")
    with serving(engine, teacher):
        section = {"urls": [teacher.url], "model": "the/teacher", "mode": "logprobs", "max_concurrency": 1}
        straight = configured(tmp_path / "straight", model, engine, teacher=section)
        run(straight)
        num_asked, num_judged = len(engine.asked), len(teacher.requests)
        engine.requests.clear(), teacher.requests.clear()
        killed = configured(tmp_path / "killed", model, engine, teacher=section)
        fakes.run_until(25, teacher, killed)
        run(killed)
    straight_run, killed_run = RunDir(straight.output_dir), RunDir(killed.output_dir)
    assert read_rollouts(straight_run, range(1, STEPS + 1)) == read_rollouts(killed_run, range(1, STEPS + 1))
    rollouts = [one for _, batch in read_rollouts(killed_run, range(1, STEPS + 1)) for one in batch]
    assert num_judged == sum(len(rollout.branch_starts) for rollout in rollouts) > len(rollouts)
    # What was in flight comes again, and nothing else: at most one judgement, and turns of a batch in progress.
    assert 0 <= len(teacher.requests) - num_judged <= 1
    assert len(set(engine.asked)) == num_asked and len(engine.asked) - num_asked <= PROBLEMS * GROUP
    for rollout in rollouts:
        assert rollout.reference_logprobs is not None
        for branch in rollout.branches:
            ids, mask = rollout.token_ids[branch].tolist(), rollout.loss_mask[branch]
            judged = [expected_logprob(ids, place) if mask[place] else 0.0 for place in range(len(ids))]
            assert rollout.reference_logprobs[branch].tolist() == judged
