"""Scorers that are functions of the user's or libraries, and the generators of reasoning-gym."""

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from examples.environments.generated import seed_of
from holdfast.config.environments import EnvironmentConfig
from holdfast.errors import ConfigError, EnvironmentFailure, ProcessKilled
from holdfast.orchestrator.env.interface import Environment, Message, Score, Task, TaskSeed
from holdfast.orchestrator.env.math_answers import MathAnswers
from holdfast.orchestrator.env.registry import load_environment

GENERATED = "examples.environments.generated:ReasoningGym"


def load(name: str, **args: Any) -> Environment:
    return load_environment(EnvironmentConfig(id=name, args=args), key="environments[0]")


def scores(environment: Environment, task: Task, *answers: str) -> list[Score]:
    sessions: Any = [SimpleNamespace(completion=answer) for answer in answers]
    return asyncio.run(environment.score(task, sessions))


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({"prompt": "Half?", "answer": "\\frac{1}{2}"}) + "\n")
    return path


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's with scorers."""
    name = f"own_scorers_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(
        "def length(completion, answer):\n    return len(completion) / len(answer)\n"
        "async def slowly(completion, answer):\n    return completion == answer\n"
        "def alone(completion):\n    return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_function_of_the_users_scores(questions: Path, own: str) -> None:
    environment = load("jsonl", path=str(questions), scorer=f"{own}:length")
    task = environment.make_task(TaskSeed(0, "env", 0))
    assert scores(environment, task, "x" * 22, "") == [Score(2.0, {"length": 2.0}), Score(0.0, {"length": 0.0})]
    environment = load("jsonl", path=str(questions), scorer=f"{own}:slowly")
    assert [score.reward for score in scores(environment, task, "x", "\\frac{1}{2}")] == [0.0, 1.0]


def test_a_function_that_cannot_score_is_refused(questions: Path, own: str) -> None:
    for scorer, said in (
        (f"{own}:alone", r"cannot be called with a completion and the right answer: too many positional arguments"),
        (f"{own}:lenght", r"has no function 'lenght'. Did you mean 'length'\?"),
    ):
        with pytest.raises(ConfigError, match=said):
            load("jsonl", path=str(questions), scorer=scorer)


def test_mathematics_counts_by_its_value(questions: Path) -> None:
    environment = load("jsonl", path=str(questions), scorer="math_verify")
    task = environment.make_task(TaskSeed(0, "env", 0))
    answers = ("so it is $0.5$", "\\boxed{\\frac{2}{4}}", "1/2", "2", "", "\\frac{" * 500, "\x00")
    assert [score.reward for score in scores(environment, task, *answers)] == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    # By another event loop, and with marks of its own.
    marked = Task(prompt="", answer="The answer is \\boxed{1,234}")
    expected = [Score(1.0, {"math_verify": 1.0}), Score(0.0, {"math_verify": 0.0})]
    assert scores(environment, marked, "1234", "34") == expected
    with pytest.raises(EnvironmentFailure, match="the right answer '!' is not a formula or number"):
        scores(environment, Task(prompt="", answer="!"), "1")


def test_a_process_that_ends_by_itself_costs_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def judge() -> list[float]:
        scorer = MathAnswers()
        rewards = [await scorer("1", "1")]
        assert scorer._process is not None
        scorer._process.kill()
        scorer._process.wait()
        rewards.append(await scorer("1", "1"))  # by another one, as nothing was asked
        scorer.close()
        scorer.close()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "/bin/false")
            rewards.append(await scorer("1", "1"))
        return rewards

    assert asyncio.run(judge()) == [1.0, 1.0, 0.0]


@pytest.mark.clock
def test_an_answer_may_cost_so_much_of_memory_and_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else the machine does meanwhile: the clock on the wall decides no reward."""
    program = tmp_path / "python"
    program.write_text(f"""#!{sys.executable}
import itertools, json, signal, sys, time
sys.modules["math_verify"] = json  # takes no second
from holdfast.orchestrator.env import math_answers
kept = []

def compare(completion, _):
    if completion == "memory":
        bytes(math_answers._MEMORY_BYTES * 2)  # which nobody touches
    elif completion == "keeps memory":
        kept.append(bytes(math_answers._MEMORY_BYTES // 16 * 3))
    elif completion == "much memory":
        bytes(math_answers._MEMORY_BYTES // 16 * 15)
    elif completion == "processor":
        for _ in itertools.repeat(0): pass
    elif completion == "alarm":
        signal.alarm(5)
        return {{"equal": signal.getitimer(signal.ITIMER_REAL)[0] == 0 < signal.getitimer(signal.ITIMER_PROF)[0]}}
    elif completion == "stands still":
        time.sleep(600)
    return {{"equal": True}}

math_answers._compare = compare
math_answers._main()
""")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))

    async def judge() -> list[float]:
        scorer = MathAnswers(cpu_s=0.2)
        rewards = [await scorer(asked, "1") for asked in ("cheap", "alarm", "memory", "cheap", "processor", "cheap")]
        # What an answer leaves behind is not held against the next one, and goes when it is too much.
        for is_full, asked in [(False, "keeps memory"), (False, "much memory"), (True, "keeps memory")]:
            assert await scorer(asked, "1") == 1 and (scorer._process is None) == is_full
        scorer.close()
        with pytest.raises(ProcessKilled, match=r"gave no answer for 0.01 s, in which it hardly got to work"):
            await MathAnswers(wait_s=0.01)("stands still", "1")
        return rewards

    assert asyncio.run(judge()) == [1.0, 1.0, 0.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("module", "extra", "name", "args"),
    [
        ("reasoning_gym", "reasoning-gym", GENERATED, {"generator": "leg_counting"}),
        ("math_verify", "math-verify", "jsonl", {"scorer": "math_verify"}),
    ],
)
def test_a_missing_extra_says_what_installs_it(
    module: str, extra: str, name: str, args: dict[str, Any], questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    if name == "jsonl":
        args = {**args, "path": str(questions)}
    said = f"needs the extra '{extra}', which is not installed: `uv sync --inexact --extra {extra}`"
    with pytest.raises(ConfigError, match=said):
        load(name, **args)


def test_what_an_extra_lacks_itself_is_not_taken_for_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.process.imports import import_extra

    (tmp_path / "half_an_extra.py").write_text("import no_such_library")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        import_extra("half_an_extra", extra="half", needed_by="nobody")


class TestReasoningGym:
    """The generators; `uv sync --inexact --extra reasoning-gym` installs them."""

    @pytest.fixture(autouse=True, scope="class")
    def _is_installed(self) -> None:
        pytest.importorskip("reasoning_gym", reason="`uv sync --inexact --extra reasoning-gym` installs it")

    # Numbers; a list that is made at once; indices below a size; seeds of NumPy.
    @pytest.mark.parametrize("name", ["leg_counting", "acre", "word_ladder", "pool_matrix"])
    def test_tasks_are_a_pure_function_of_their_seed(self, name: str) -> None:
        environment, again = load(GENERATED, generator=name), load(GENERATED, generator=name)
        seeds = [TaskSeed(0, "env", index) for index in range(5)]
        tasks = [environment.make_task(seed) for seed in seeds]
        assert repr(tasks) == repr([again.make_task(seed) for seed in reversed(seeds)][::-1])
        assert len({task.answer for task in tasks}) > 1
        for task in tasks:
            said = f"I think\n<answer>{task.answer}</answer>!"
            right, tagged, wrong = scores(environment, task, task.answer, said, "no idea")
            assert right.reward == tagged.reward == 1.0 > wrong.reward
            assert (right.metrics["exact"], wrong.metrics["exact"]) == (1.0, 0.0)

    def test_held_out_tasks_have_seeds_that_training_never_has(self) -> None:
        seeds = [TaskSeed(0, "env", index, held_out=held_out) for held_out in (False, True) for index in range(200)]
        drawn, held_out = [seed_of(seed) for seed in seeds[:200]], [seed_of(seed) for seed in seeds[200:]]
        assert max(drawn) < 2**31 <= min(held_out) and max(held_out) < 2**32
        assert len({*drawn, *held_out}) == 400

    def test_settings_reach_the_generator_and_the_prompt(self) -> None:
        settings = {"min_animals": 2, "max_animals": 2}
        environment = load(GENERATED, generator="leg_counting", settings=settings, system_prompt="Be short.")
        task = environment.make_task(TaskSeed(0, "env", 0))
        system, question = task.prompt
        assert system == Message("system", "Be short.")
        assert isinstance(question, Message) and question.content.count(",") == 2

    def test_an_answer_that_breaks_its_scorer_earns_nothing(self) -> None:
        environment = load(GENERATED, generator="prime_factorization")
        task = environment.make_task(TaskSeed(0, "env", 0))
        assert scores(environment, task, "no idea") == [Score(0.0, {"exact": 0.0, "unreadable": 1.0})]

    def test_a_task_with_many_right_answers_has_none_of_its_own(self) -> None:
        assert load(GENERATED, generator="graph_color").make_task(TaskSeed(0, "env", 0)).answer == ""

    @pytest.mark.parametrize(
        ("generator", "settings"),
        [("leg_countin", {}), ("leg_counting", {"max_animal": 3}), ("leg_counting", {"min_animals": 0})],
    )
    def test_what_does_not_load_says_why(self, generator: str, settings: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=f"reasoning-gym refuses {generator} with "):
            load(GENERATED, generator=generator, settings=settings)
