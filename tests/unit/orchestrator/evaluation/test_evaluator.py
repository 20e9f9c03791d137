"""Evaluations against a server, also during training: what is asked and kept, and that nothing is asked twice."""

import asyncio
import json
import os
import re
import resource
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import Environment, Message, Score, Session, Task, TaskSeed
from holdfast.config.environments import CurriculumConfig, EnvironmentConfig, EnvironmentSamplingConfig
from holdfast.config.evaluation import EvaluateConfig
from holdfast.config.load import to_toml
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.errors import ConfigError, DataError, EnvironmentFailure, RunDirError
from holdfast.launcher.resume.resume_step import set_aside_after
from holdfast.orchestrator.check import check_environments
from holdfast.orchestrator.env.jsonl import Jsonl
from holdfast.orchestrator.evaluation import evaluator, main
from holdfast.orchestrator.evaluation import evaluator as evaluation_evaluator
from holdfast.orchestrator.evaluation.evaluator import (
    TURN_ENDS,
    count_tasks,
    held_out_sections,
    refuse_training_tasks,
    sizes_of,
)
from holdfast.orchestrator.evaluation.results import EvaluatedRollout, ResultsFile, line_of, read_identity, read_tasks
from holdfast.orchestrator.evaluation.statistics import Summary, compare, read_evaluation, summary_in
from holdfast.orchestrator.tasks import FreezeTolerantLoop
from holdfast.process.child import DATE_ENV
from holdfast.run import journal
from holdfast.run.manifest import library_versions
from holdfast.run.run_dir import RunDir
from tests.runs.processes import in_a_child
from tests.servers.orchestrator_fakes import MODEL, FakeEngine, cancel_at, make_config, read_rollouts, run, serving


class Letters(Environment):
    """Two turns; the reward is the share of letters a to m. Task `broken` raises, the others say what they are."""

    broken: int | None = None

    def make_task(self, seed: TaskSeed) -> Task:
        assert seed.held_out and seed.number >= 2**63
        return Task(prompt=[Message("user", "".join(seed.random().choices("abcdef", k=4)))], answer=str(seed.index))

    async def run(self, session: Session, task: Task) -> None:
        await session.sample()
        session.append_messages([Message("user", "more")])
        await session.sample()

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        if task.answer == str(Letters.broken):
            raise ValueError("it is broken")
        shares = [sum(letter in "abcdefghijklm" for letter in session.completion) for session in sessions]
        return [Score(share / 24, {"exact": float(share > 4)}) for share in shares]


LETTERS = {"id": f"{__name__}:Letters", "name": "letters"}


def config_of(directory: Path, engine: FakeEngine, **changes: Any) -> EvaluateConfig:
    """Return a small evaluation of what `engine` serves."""
    sizes = {"num_tasks": 6, "samples_per_task": 4, "sampling": {"max_tokens": 24}, "seq_len": 128}
    policy = {"output_dir": directory, "model": {"name": MODEL}}
    environments = {"environments": [LETTERS, {"id": "reverse_text"}]}
    config = EvaluateConfig.model_validate(policy | environments | sizes | changes)
    config.inference.model.name = MODEL
    config.inference.server.port = int(engine.url.rsplit(":", 1)[1])
    return config


def evaluated(config: EvaluateConfig) -> Summary:
    asyncio.run(main.run(config))
    return summary_in(config.output_dir)


def engine_with_weights(digest: str = "weights") -> FakeEngine:
    return FakeEngine(version=0, digest=digest)


def test_every_rollout_is_kept_and_counted(tmp_path: Path) -> None:
    engine = engine_with_weights()
    with serving(engine):
        config = config_of(tmp_path, engine)
        summary, again = evaluated(config), evaluated(config)
    assert len(engine.asked) == len(set(engine.asked)) == 6 * 4 * 2 + 6 * 4, "what is done is not asked again"
    assert again == summary
    lines = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_bytes().splitlines()]
    keys = [(line["environment"], line["task"], line.get("sample", 0)) for line in lines]
    names = ("letters", "reverse_text")
    assert sorted(keys) == [(name, task, sample) for name in names for task in range(6) for sample in range(4)]
    letters = [line for line in lines if line["environment"] == "letters"]
    assert all([turn["sampled"] for turn in line["turns"]] == [False, True, False, True] for line in letters)
    found = summary.environments["letters"]
    assert found.estimates["avg@4"].value == pytest.approx(sum(line["reward"] for line in letters) / 24)
    assert found.estimates["pass@1"].value == pytest.approx(sum(line["solved"] for line in letters) / 24)
    assert list(found.estimates) == ["avg@4", "pass@1", "pass@2", "pass@4"]
    assert found.num_tasks == 6 and found.sampled_tokens and not found.dropped
    assert summary.policy.pop("tokenizer") and summary.policy.pop("config")
    assert summary.policy == {"kind": "weights", "digest": "weights", "dtype": None}
    assert summary.metrics()["eval/letters/avg@4"] == found.estimates["avg@4"].value
    assert not (tmp_path / "rollouts").exists(), "what was sampled is in the lines"


def test_an_evaluation_that_was_cut_off_goes_on_and_asks_nothing_twice(tmp_path: Path) -> None:
    straight = engine_with_weights()
    with serving(straight):
        expected = evaluated(config_of(tmp_path / "straight", straight))
    engine = engine_with_weights()
    directory = tmp_path / "cut"
    with serving(engine):
        config = config_of(directory, engine, max_concurrency=8)
        cancel_at(12, engine, lambda: main.run(config))
        lines = directory / "rollouts.jsonl"
        before = len(read_tasks(lines, samples_per_task=config.samples_per_task)[0])
        assert 0 < before < 12
        whole = lines.read_bytes()
        lines.write_bytes(whole + whole.splitlines(keepends=True)[0][:40])  # what a power cut leaves of a task
        with pytest.raises(DataError, match=f"has {before} of its 12 tasks"):
            read_evaluation(directory)
        found = evaluated(config)
    assert found == expected
    again = engine.asked
    # The answer in flight was not kept: nobody had seen it.
    assert set(again) == set(straight.asked) and len(again) - len(set(again)) <= 8
    assert lines.read_bytes().startswith(whole)


def test_of_damage_the_task_alone_is_played_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_with_weights()
    with serving(engine):
        config = config_of(tmp_path, engine)
        expected = evaluated(config)
        path = tmp_path / "rollouts.jsonl"
        whole = path.read_bytes()
        lines = whole.splitlines(keepends=True)
        number = len(engine.asked)
        reward = re.compile(rb'"reward":([0-9])')
        for damaged in (
            reward.sub(b'"reward":9', lines[5], count=1),  # one flipped bit of 1.0
            lines[5].replace(b'"task"', b'"t\xffsk"'),
            lines[5].replace(b" ", b"\r", 1).replace(b'"sample"', b'"s\nmple"'),
            b"{rubbish\n",
        ):
            path.write_bytes(b"".join([*lines[:5], damaged, *lines[6:]]))
            with pytest.raises(DataError, match=r"rollouts.jsonl, line 6, is damaged: .*plays that task again alone"):
                read_evaluation(tmp_path)
            of_run = tmp_path / "run" / "evaluations" / "step_4"
            shutil.copytree(tmp_path, of_run, ignore=shutil.ignore_patterns("run"))
            (tmp_path / "run" / "run.json").write_text("{}")
            with pytest.raises(
                DataError, match=r"`uv run evaluate --run \S+ --step 4 --output-dir DIRECTORY` evaluates"
            ):
                read_evaluation(of_run)
            shutil.rmtree(tmp_path / "run")
            assert evaluated(config) == expected
            assert "line 6, is damaged: " in caplog.text and "its task is played again" in caplog.text
            assert sorted(path.read_bytes().splitlines()) == sorted(whole.splitlines())
            lines = path.read_bytes().splitlines(keepends=True)
            assert number < len(engine.asked) <= number + 8, "one task of four samples and two turns"
            number = len(engine.asked)
        path.write_bytes(b"".join([*lines[:4], *lines[:4]]))
        with pytest.raises(DataError, match=r"line 5: sample 0 of task \d+ of '.*' is not what follows there"):
            asyncio.run(main.run(config))


def test_another_policy_and_other_tasks_get_no_line_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_with_weights()

    def refused(said: str, config: EvaluateConfig) -> None:
        with pytest.raises(ConfigError, match=rf"holds another evaluation \({said}"):
            asyncio.run(main.run(config))

    with serving(engine):
        evaluated(config_of(tmp_path, engine))
        refused(r"samples_per_task: 4 there, 2 here\)", config_of(tmp_path, engine, samples_per_task=2))
        changed = config_of(tmp_path, engine, environments=[LETTERS | {"max_turns": 3}, {"id": "reverse_text"}])
        refused(r"environments.letters.max_turns: 8 there, 3 here\)", changed)
        other = tmp_path / "tokenizer"
        shutil.copytree(MODEL, other)
        (other / "chat_template.jinja").write_text("{{ messages[0].content }}")
        changed = config_of(tmp_path, engine)
        changed.inference.model.tokenizer = str(other)
        refused(r"policy.tokenizer: \"\w+\" there, \"\w+\" he", changed)
        changed = config_of(tmp_path, engine)
        changed.inference.model.fp32_lm_head = True
        refused("policy.fp32_lm_head: unset there, tru", changed)
        own = (Path(MODEL) / "chat_template.jinja").read_text()
        (other / "chat_template.jinja").write_text("{{ strftime_now('%j') }}" + own)
        dated = config_of(tmp_path / "dated", engine)
        dated.inference.model.tokenizer = str(other)
        monkeypatch.setenv(DATE_ENV, "0")
        asyncio.run(main.run(dated))
        monkeypatch.setenv(DATE_ENV, "86400")
        refused("policy.tokenizer", dated)
        config_file = other / "config.json"
        config_file.write_text(config_file.read_text().replace("10000.0", "500.0"))  # rope_theta
        changed = config_of(tmp_path, engine)
        changed.inference.model.name, changed.inference.model.tokenizer = str(other), MODEL
        engine.model = str(other)
        refused(r"policy.config: \"\w+\" there, \"\w+\" here", changed)
        engine.model = MODEL
        changed = config_of(tmp_path, engine)
        changed.inference.engine.args = {"quantization": "fp8"}
        refused(r"policy.engine.quantization: unset there, \"fp8\" h", changed)
        with monkeypatch.context() as patched:
            patched.setattr(evaluator, "library_versions", lambda: library_versions() | {"torch": "another"})
            refused(r"libraries.torch: \".+\" there, \"another\"", config_of(tmp_path, engine))
        engine.digest = "others"
        refused(r"policy.digest: \"\w+\" there, \"others\" here\)", config_of(tmp_path, engine))


def test_two_evaluations_are_compared_task_by_task(tmp_path: Path) -> None:
    first, second = engine_with_weights("one"), engine_with_weights("two")
    with serving(first, second):
        evaluated(config_of(tmp_path / "a", first))
        evaluated(config_of(tmp_path / "b", second, samples_per_task=2))
        evaluated(config_of(tmp_path / "c", second, seed=1))
        evaluated(config_of(tmp_path / "d", second, environments=[LETTERS]))
    found = compare(tmp_path / "a", tmp_path / "b")
    assert [(line.environment, line.name) for line in found.lines] == [
        (name, key) for name in ("letters", "reverse_text") for key in ("avg@4 / avg@2", "pass@1", "pass@2")
    ]
    assert found.differing == {"samples_per_task": (4, 2)} and found.skipped == 0
    line = found.lines[0]
    assert line.paired.difference.value == pytest.approx(line.second.value - line.first.value)
    alike = compare(tmp_path / "a", tmp_path / "a")
    assert all(line.paired.p_value == 1.0 and line.first == line.second for line in alike.lines)
    for other, what in (("c", r"seed: 0 and 1\)"), ("d", r'environments.reverse_text.id: "reverse_text" and unset; ')):
        with pytest.raises(ConfigError, match=rf"did not ask the same tasks \({what}"):
            compare(tmp_path / "a", tmp_path / other)
    with pytest.raises(DataError, match="holds no evaluation: it has no evaluation.json"):
        compare(tmp_path / "a", tmp_path)
    lines = Path(shutil.copytree(tmp_path / "a", tmp_path / "changed")) / "rollouts.jsonl"
    prompt = json.loads(lines.read_bytes().splitlines()[0])["prompt"]
    found = read_tasks(lines, samples_per_task=4)[0].values()
    there = (one for group in found for one in group)
    changed = [msgspec.structs.replace(one, prompt=one.prompt.replace(prompt, "0" * 32)) for one in there]
    lines.write_bytes(b"".join(map(line_of, changed)))
    with pytest.raises(ConfigError, match=r"task \d of '.*' has another prompt in .* than in"):
        compare(tmp_path / "a", tmp_path / "changed")


def test_tasks_that_are_dropped_are_named_and_count_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Letters, "broken", 2)
    engine = engine_with_weights()
    with serving(engine):
        with pytest.raises(EnvironmentFailure, match="it is broken"):
            asyncio.run(main.run(config_of(tmp_path / "stop", engine)))
        sections = [LETTERS | {"on_error": "drop"}]
        evaluated(config_of(tmp_path / "a", engine, environments=sections))
        found = evaluated(config_of(tmp_path / "a", engine, environments=sections))
        monkeypatch.setattr(Letters, "broken", 3)
        evaluated(config_of(tmp_path / "b", engine, environments=sections))
        one = [LETTERS | {"on_error": "drop", "name": "alone"}]
        monkeypatch.setattr(Letters, "broken", 0)
        none = evaluated(config_of(tmp_path / "c", engine, environments=one, num_tasks=1))
        nothing = compare(tmp_path / "c", tmp_path / "c")
    letters = found.environments["letters"]
    assert (letters.num_tasks, letters.dropped) == (5, {"environment_error": 1})
    assert found.metrics()["eval/letters/dropped"] == 1
    both = compare(tmp_path / "a", tmp_path / "b")
    assert both.skipped == 2 and all(line.num_tasks == 4 for line in both.lines)
    assert none.environments["alone"].estimates == {} and nothing.lines == [] and nothing.skipped == 1


def test_no_deadline_of_an_evaluation_passes_while_it_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look(_: object) -> None:
        assert isinstance(asyncio.get_running_loop(), FreezeTolerantLoop)

    for name, value in (("run", look), ("read_toml", lambda *_: None), ("child.set_up_logging", lambda _: None)):
        monkeypatch.setattr(f"holdfast.orchestrator.evaluation.main.{name}", value)
    with pytest.raises(SystemExit, match="0"):
        main.main(["resolved.toml"])


def test_no_held_out_seed_is_one_of_training() -> None:
    training = [TaskSeed(seed, "a", index) for seed in range(3) for index in range(100)]
    held_out = [TaskSeed(seed.run_seed, "a", seed.index, held_out=True) for seed in training]
    assert all(seed.number < 2**63 and seed.shared("epoch", 0) < 2**63 for seed in training)
    assert all(2**63 <= seed.number < 2**64 and seed.shared("epoch", 0) >= 2**63 for seed in held_out)
    assert len({seed.number for seed in held_out}) == 300 and held_out[0].fresh().number == held_out[0].number
    assert held_out[0].random().random() != training[0].random().random()


def test_an_environment_with_an_end_is_asked_once_and_not_where_training_asks(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 3)
    rows = Jsonl(tmp_path / "rows.jsonl")
    section = EnvironmentConfig(id="jsonl", args={"path": str(tmp_path / "rows.jsonl")})
    endless = Letters()
    sizes = sizes_of({"rows": rows, "endless": endless}, {})
    assert count_tasks(sizes, None, key="num_tasks") == {"rows": 3, "endless": 128}
    assert count_tasks(sizes, 2, key="num_tasks") == {"rows": 2, "endless": 2}
    environments = sizes_of({"jsonl": rows, "letters": endless}, {})
    sections = [section, EnvironmentConfig(id="letters")]
    refuse_training_tasks(environments, sections, [EnvironmentConfig(id="letters")], key="environments")
    # The same file by another name, and with another scorer.
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "rows.jsonl")
    spelled = EnvironmentConfig(id="jsonl", args={"path": str(tmp_path / "link.jsonl"), "scorer": "lcs"})
    with pytest.raises(ConfigError, match=r"environments: 'jsonl' has 3 tasks, and training draws them all"):
        refuse_training_tasks(environments, sections, [spelled], key="environments")
    (tmp_path / "others.jsonl").write_text('{"prompt": "c", "answer": "d"}\n')
    others = EnvironmentConfig(id="jsonl", args={"path": str(tmp_path / "others.jsonl")})
    refuse_training_tasks(environments, sections, [others], key="environments")
    pools = CurriculumConfig(levels=[{}, section.args], advance_reward=0.5)
    with pytest.raises(ConfigError, match="none is held out"):
        leveled = others.model_copy(update={"curriculum": pools})
        refuse_training_tasks(environments, sections, [leveled], key="environments")
    run_dir = RunDir(tmp_path / "run")
    assert evaluation_evaluator.settings_of_run(run_dir.path) is None
    run_dir.configs(1).mkdir(parents=True)
    (run_dir.configs(1) / "orchestrator.toml").write_text(to_toml(OrchestratorConfig(environments=[section])))
    config = EvaluateConfig(run=run_dir.path, environments=[section], output_dir=tmp_path / "evaluation")
    with pytest.raises(ConfigError, match="none is held out"):
        main.load_tasks(config, {})


@pytest.mark.parametrize(("changes", "said"), [
    ({"run": "a"}, "evaluate takes one policy: set model.name, or run"),
    ({"step": 3}, "step = 3 must be a step of a run"),
    ({"model": None, "run": "a", "step": -1}, "step = -1 must be a step of a run, counted from 0"),
    ({"sampling": {"temperature": 0}, "samples_per_task": 2}, "are 2 times the same answer"),
    ({"sampling": {"temperature": 0.001}}, "0, or 0.01"),
    ({"environments": [{"id": "a"}, {"id": "a"}]}, "environments need distinct names"),
])  # fmt: skip
def test_what_cannot_be_evaluated_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EvaluateConfig.model_validate({"model": {"name": "a"}} | changes)


def test_an_environment_of_an_evaluation_is_sampled_as_it_says(tmp_path: Path) -> None:
    engine = engine_with_weights()
    own = {"id": "reverse_text", "name": "own", "sampling": {"temperature": 0.5, "max_tokens": 3}, "seq_len": 50}
    with serving(engine):
        evaluated(config_of(tmp_path, engine, environments=[{"id": "reverse_text"}, own], num_tasks=2))
    assert {(body["temperature"], body["max_tokens"]) for body in engine.requests} == {(1.0, 24), (0.5, 3)}


def test_of_the_environments_of_training_an_evaluation_takes_what_says_how_long_answers_may_be() -> None:
    pools = CurriculumConfig(levels=[{}, {}], advance_reward=1.0)
    sampling = EnvironmentSamplingConfig(temperature=0.5)
    plain = EnvironmentConfig(id="a", curriculum=pools, group_size=3, seq_len=90, sampling=sampling)
    short = EnvironmentConfig(id="b", sampling=EnvironmentSamplingConfig(temperature=0.5, max_tokens=7, stop=[]))
    found = held_out_sections([plain, short], seq_len=80, takes=TURN_ENDS)
    own = EnvironmentSamplingConfig(max_tokens=7, stop=[])
    assert found == [EnvironmentConfig(id="a", seq_len=80), EnvironmentConfig(id="b", sampling=own)]
    assert held_out_sections([short], seq_len=80, takes=set()) == [EnvironmentConfig(id="b")]


def test_a_task_that_found_no_room_leaves_nothing_for_others_to_follow(tmp_path: Path) -> None:
    def check() -> None:
        results = ResultsFile(tmp_path, {"kind": "test"}, samples_per_task=1)
        path = tmp_path / "rollouts.jsonl"

        def append(task: int, detail: str = "") -> None:
            asyncio.run(results.append([EvaluatedRollout(environment="e", task=task, detail=detail)]))

        append(0)
        size = path.stat().st_size
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 60, size + 60))
        with pytest.raises(RunDirError, match=r"cannot be written.* continues after the finished tasks"):
            append(1, "long" * 100)
        assert path.stat().st_size == size
        append(2)  # for whose fewer bytes there is room
        assert list(read_tasks(path, samples_per_task=1)[0]) == [("e", 0), ("e", 2)]

    assert os.waitstatus_to_exitcode(os.waitpid(in_a_child(check), 0)[1]) == 0


EVAL = {"interval": 2, "num_tasks": 5, "samples_per_task": 2}
STEPS = range(1, 9)
NAME = "eval/reverse_text/avg@2"


def metrics_of(run_dir: RunDir) -> dict[int, dict[str, float]]:
    """The numbers of evaluations, by the batch that they came with."""
    found = {}
    for step in STEPS:
        metrics = journal.read_batch(run_dir, step).metrics.items()
        if chosen := {name: value for name, value in metrics if name.startswith("eval/")}:
            found[step] = chosen
    return found


def held_out(engine: FakeEngine, config: OrchestratorConfig) -> list[tuple[tuple[int, ...], int]]:
    """Every prompt with a seed that was asked for a group of the size of an evaluation's."""
    bodies = [body for body in engine.requests if len(body["seeds"]) != config.group_size]
    return [(tuple(body["token_ids"]), seed) for body in bodies for seed in body["seeds"]]


def test_every_other_version_is_evaluated_once_and_training_is_as_without(tmp_path: Path) -> None:
    plain, engine = FakeEngine(), FakeEngine()
    with serving(plain, engine):
        run(make_config(tmp_path / "plain", plain))
        config = make_config(tmp_path / "run", engine, eval=EVAL)
        run(config)
    run_dir = RunDir(tmp_path / "run")
    assert read_rollouts(run_dir, STEPS) == read_rollouts(RunDir(tmp_path / "plain"), STEPS)
    found = metrics_of(run_dir)
    assert {step: metrics["eval/version"] for step, metrics in found.items()} == {1: 0, 4: 2, 6: 4, 8: 6}
    for step, version in ((1, 0), (4, 2), (6, 4), (8, 6)):
        directory = run_dir.evaluation(version)
        weights = journal.read_batch(run_dir, step).weights_digest
        assert read_identity(directory)["policy"] == {"kind": "weights", "digest": weights, "version": version}
        assert found[step][NAME] == summary_in(directory).environments["reverse_text"].estimates["avg@2"].value
        assert journal.read_batch(run_dir, step).metrics["time/evaluate"] > 0
    assert len({metrics[NAME] for metrics in found.values()}) > 1, "the versions differ"
    asked = held_out(engine, config)
    assert len(asked) == 4 * 5 * 2 and len(set(asked)) == 5 * 2, "the same tasks and seeds for every version"


def test_what_is_there_of_other_weights_is_evaluated_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    with serving(engine):
        config = make_config(tmp_path / "run", engine, eval=EVAL)
        run_dir = RunDir(config.output_dir)
        directory = run_dir.evaluation(2)
        directory.mkdir(parents=True)
        (directory / "evaluation.json").write_text('{"format": 1, "policy": "another"}')
        (directory / "rollouts.jsonl").write_text("nothing of this policy\n")
        run(config)
    assert "evaluated again" in caplog.text and summary_in(directory).metrics()[NAME] == metrics_of(run_dir)[4][NAME]


def test_evaluations_of_later_versions_are_set_aside_with_their_batches(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for version in (0, 2, 4):
        run_dir.evaluation(version).mkdir(parents=True)
    assert set_aside_after(run_dir, 1, 1, last_batch=3) == [run_dir.discarded(1) / "evaluations" / "step_4"]
    assert set_aside_after(run_dir, 1, 2) == [run_dir.discarded(2) / "evaluations" / "step_2"]
    assert run_dir.evaluation(0).exists()
    run_dir.remove_run()
    assert not run_dir.evaluations.exists()


def test_what_cannot_be_evaluated_is_refused_before_anything_starts(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": "b"}\n' * 3)
    section = {"id": "jsonl", "args": {"path": str(rows)}}

    def check(**changes: Any) -> None:
        check_environments(OrchestratorConfig.model_validate({"eval": EVAL} | changes))

    check()
    check(eval=EVAL | {"environments": [section], "num_tasks": 3})
    check(eval=EVAL | {"environments": [{"id": "tests.unit.orchestrator.evaluation.test_evaluator:Letters"}]})
    with pytest.raises(ConfigError, match=r"eval.environments: 'jsonl' has 3 tasks, and training draws them all"):
        check(environments=[section], eval={})
    with pytest.raises(ConfigError, match=r"eval.num_tasks = 5, and environment 'jsonl' has 3 tasks: some would cou"):
        check(eval=EVAL | {"environments": [section]})
    with pytest.raises(ConfigError, match=r"eval.environments\[0\].id: there is no environment 'jsnl'"):
        check(eval={"environments": [{"id": "jsnl"}]})
    teacher = {"urls": ["http://a"], "model": "b", "mode": "samples"}
    with pytest.raises(ValueError, match="leave eval out, and evaluate checkpoints with"):
        check(teacher=teacher)
    with pytest.raises(ConfigError, match="eval.environments: environment 'a': seq_len = 1025 is more than"):
        check(eval={"environments": [{"id": "a", "seq_len": 1025}]})
