"""Environments by name; their arguments; tasks of `jsonl` and its scorers; the generators of reasoning-gym."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.environments.generated import seed_of
from holdfast.config.environments import EnvironmentConfig
from holdfast.errors import ConfigError, DataError, EnvironmentFailure, HoldfastError, ProcessKilled
from holdfast.launcher.preflight import check_in_child
from holdfast.orchestrator.check import check_environments
from holdfast.orchestrator.env.interface import Environment, Message, Score, Session, Task, TaskSeed
from holdfast.orchestrator.env.jsonl import SCORERS, Jsonl, lcs_length, regex_scorer
from holdfast.orchestrator.env.math_answers import MathAnswers
from holdfast.orchestrator.env.registry import load_environment
from tests.servers.orchestrator_fakes import make_config

if TYPE_CHECKING:
    from decimal import Decimal


class NeedsWord(Environment):
    def __init__(self, word: str, times: int = 1) -> None:
        if word == "bad":
            raise RuntimeError("no such word")
        self.word = word * times

    def make_task(self, seed: TaskSeed) -> Task:
        return Task(prompt=self.word)

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        return [Score(0.0) for _ in sessions]


class Opaque:
    """Pydantic knows nothing of it."""


@dataclass
class HalfOpaque:
    """Has a field of a class that is not there."""

    word: Decimal


class ForCheckers(Environment):
    """Has annotations that are there for type checkers alone."""

    def __init__(self, word: Decimal, frames: Opaque, more: HalfOpaque, times: int = 1) -> None:
        self.word, self.frames, self.more, self.times = word, frames, more, times


def load(name: str, **args: Any) -> Environment:
    return load_environment(EnvironmentConfig(id=name, args=args), key="environments[0]")


def seed(index: int, *, run_seed: int = 0, environment: str = "env") -> TaskSeed:
    return TaskSeed(run_seed=run_seed, environment=environment, index=index)


@pytest.mark.parametrize(("name", "args", "kind", "said"), [
    ("revers_text", {}, ConfigError, "Did you mean 'reverse_text'\\?.*reverse_text, jsonl, .* or 'module:"),
    ("no_such_module:Thing", {}, ConfigError, "there is no module 'no_such_module'"),
    (f"{__name__}:NeedsWords", {}, ConfigError, "Did you mean 'NeedsWord'\\?"),
    (f"{__name__}:NeedsWord", {}, ConfigError, "needs word. Allowed: word, times"),
    ("reverse_text", {"min_lenght": 3}, ConfigError, "args.min_lenght.*Did you mean 'min_length'\\?.*max_length"),
    ("reverse_text", {"min_length": "many"}, ConfigError, "environments\\[0\\].args.min_length: .*got 'many'"),
    ("reverse_text", {"min_length": 9, "max_length": 8}, ConfigError, "1 <= min_length <= max_length"),
    (f"{__name__}:NeedsWord", {"word": "bad"}, EnvironmentFailure, "constructor: RuntimeError: no such word"),
    ("jsonl", {"path": "x.jsonl", "scorer": "exakt"}, ConfigError, "no scorer 'exakt'. Did you mean 'exact'"),
    ("jsonl", {"path": "x.jsonl", "scorer": "regex"}, ConfigError, "`pattern` belongs to scorer 'regex'"),
    ("jsonl", {"path": "x.jsonl", "scorer": "exact", "pattern": "x"}, ConfigError, "`pattern` belongs to scorer"),
    ("jsonl", {"path": "x.jsonl", "scorer": "regex", "pattern": "("}, ConfigError, "not a regular expression"),
])  # fmt: skip
def test_what_does_not_load_says_why(name: str, args: dict[str, Any], kind: type[HoldfastError], said: str) -> None:
    with pytest.raises(kind, match=said):
        load(name, **args)


def test_arguments_are_converted_where_something_is_known_of_their_types() -> None:
    environment = load(f"{__name__}:NeedsWord", word="ab", times="2")
    assert isinstance(environment, sys.modules[__name__].NeedsWord) and vars(environment) == {"word": "abab"}
    assert vars(load(f"{__name__}:Open", word="2", more=[1])) == {"given": {"word": "2", "more": [1]}}
    environment = load(f"{__name__}:ForCheckers", word="ab", times="2", frames=[1], more={"word": 1})
    assert vars(environment) == {"word": "ab", "frames": [1], "more": {"word": 1}, "times": 2}


class Open(Environment):
    def __init__(self, word, **others: Any) -> None:  # type: ignore[no-untyped-def]
        self.given = {"word": word, **others}


def test_a_check_makes_what_is_built_in_and_only_looks_for_the_rest(tmp_path: Path) -> None:
    def check(name: str, **args: Any) -> None:
        sections = [{"id": "reverse_text"}, {"id": name, "args": args}]
        check_environments(make_config(tmp_path, environments=sections, client={}))

    check(f"{__name__}:NeedsWord", word="bad")
    with pytest.raises(ConfigError, match=r"environments\[1\].id: .*no environment 'NeedsWords'"):
        check(f"{__name__}:NeedsWords")
    with pytest.raises(DataError, match="no.jsonl': there is no such file"):
        check("jsonl", path=str(tmp_path / "no.jsonl"))


def test_a_start_says_which_rows_nobody_can_solve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"prompt": "q", "answer": "4"}\n{"prompt": "q", "answer": "B"}\n')
    section = {"id": "jsonl", "args": {"path": str(path), "scorer": "number"}}
    check_in_child(
        "holdfast.orchestrator.check", make_config(tmp_path, environments=[section], client={}), "environments"
    )
    assert "WARNING: environment 'jsonl': 1 of 2 rows cannot be solved" in capsys.readouterr().err
    path.write_text('{"prompt": "q", "answer": " "}\n')
    with pytest.raises(DataError, match="q.jsonl:1: 'answer' is empty"):
        load("jsonl", path=str(path), scorer="contains")


def test_reverse_text_has_the_lengths_that_are_asked_for() -> None:
    environment = load("reverse_text", min_length=3, max_length=5)
    tasks = [environment.make_task(seed(index)) for index in range(200)]
    texts = [task.prompt[0].content for task in tasks if isinstance(task.prompt[0], Message)]
    assert {len(text) for text in texts} == {3, 4, 5}
    assert all(text.isascii() and text.islower() and text.isalpha() for text in texts)
    assert [task.answer for task in tasks] == [text[::-1] for text in texts]


def test_task_seeds_are_stable_63_bit_numbers() -> None:
    assert seed(3).number == 7176022789499974418 and all(0 <= seed(index).number < 2**63 for index in range(1000))
    one = seed(0)
    assert one.fresh().random().random() == one.random().random() != one.random().random()


_ROW = {"prompt": "q", "answer": "a"}


def write_rows(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_jsonl_uses_every_row_once_per_epoch_in_a_new_order(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", *({"prompt": f"q{n}", "answer": n} for n in range(7)))
    environment = load("jsonl", path=str(path))
    epochs = [[environment.make_task(seed(7 * epoch + n)).answer for n in range(7)] for epoch in range(3)]
    assert all(sorted(epoch) == [str(n) for n in range(7)] for epoch in epochs) and epochs[0] != epochs[1]
    again = load("jsonl", path=str(path))
    assert [again.make_task(seed(n)).answer for n in range(13, 6, -1)] == epochs[1][::-1]
    in_order = load("jsonl", path=str(path), shuffle=False)
    assert [in_order.make_task(seed(n)).answer for n in range(8)] == ["0", "1", "2", "3", "4", "5", "6", "0"]


@pytest.mark.parametrize("apart", [{}, {"system": "be brief"}])
@pytest.mark.parametrize("question", ["6 x 7", [{"role": "user", "content": "6 x 7"}]])
def test_jsonl_reads_messages_and_other_columns(question: Any, apart: dict[str, str], tmp_path: Path) -> None:
    if not apart:
        question = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "6 x 7"}]
    path = write_rows(tmp_path / "rows.jsonl", {"question": question, "right": 42, **apart}, "")
    task = Jsonl(path, prompt="question", answer="right").make_task(seed(0))
    assert task.prompt == (Message("system", "be brief"), Message("user", "6 x 7")) and task.answer == "42"


@pytest.mark.parametrize(("rows", "said"), [
    ([_ROW, {"promt": "q", "answer": "a"}], "rows.jsonl:2 has no column 'prompt'.*'promt'"),
    ([{"prompt": "q", "answr": "a", "id": 1}], "Columns there: prompt, answr, id"),
    (["{not json}"], "rows.jsonl:1 is not JSON"),
    ([{"prompt": "a", "answer": "b", "tools": [{"name": "f"}]}], "rows.jsonl:1 has `tools`, which prompts of rl"),
    ([{**_ROW, "prompt": [{"role": "system", "content": "a"}], "system": "b"}], "rows.jsonl:1: the column `system`"),
    ([{**_ROW, "system": 3}], "rows.jsonl:1: the column `system` must be text, got 3"),
    ([{**_ROW, "prompt": [], "system": "a"}], "empty list of messages"),
    ([_ROW, [1, 2]], "rows.jsonl:2 is list, expected an object"),
    ([{"prompt": "q", "answer": [["a"]]}], "an answer in 'answer' is \\['a'\\], expected text or a number"),
    ([{"prompt": "q", "answer": {"truth": 4}}], "is an object.*such as 'answer.truth'"),
    ([{"prompt": [{"role": "user"}], "answer": "a"}], "rows.jsonl:1: 'prompt' is .*expected text or a list"),
    ([{"prompt": [], "answer": "a"}], "empty list of messages"),
    ([], "holds no rows"),
])  # fmt: skip
def test_jsonl_names_file_line_and_what_is_there(tmp_path: Path, rows: list[Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        Jsonl(write_rows(tmp_path / "rows.jsonl", *rows))


def test_jsonl_lines_end_where_those_of_json_do(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a\u2028b\x85", "answer": "c"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert Jsonl(path).make_task(seed(0)).prompt == (Message("user", "a\u2028b\x85"),)
    path.write_bytes(b'{"prompt": "\xff", "answer": "c"}\n')
    with pytest.raises(DataError, match="is not UTF-8"):
        Jsonl(path)
    with pytest.raises(DataError, match=r"there is no such file.*Did you mean 'rows.jsonl'\?"):
        Jsonl(tmp_path / "row.jsonl")
    with pytest.raises(DataError, match="/dev/null' is not a regular file, but a pipe or a device"):
        Jsonl(Path("/dev/null"))


def test_jsonl_reads_what_the_trainers_read_and_takes_nested_and_several_answers(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{n}", "reward_model": {"style": "rule", "truth": [str(n), "x"]}} for n in range(3)]
    (tmp_path / "rows").mkdir()
    write_rows(tmp_path / "rows/a.jsonl", *rows[:2])
    (tmp_path / "rows/b.json").write_text("\ufeff" + json.dumps(rows[2:]))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in rows)))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    for name in ("rows", "rows/*", "a.jsonl.gz", "a.parquet"):
        environment = Jsonl(tmp_path / name, answer="reward_model.truth", shuffle=False)
        tasks = [environment.make_task(seed(n)) for n in range(3)]
        assert [(one.prompt, one.answer) for one in tasks] == [((Message("user", f"q{n}"),), str(n)) for n in range(3)]
        sessions: Any = [SimpleNamespace(completion=text) for text in ("1", "x", "y")]
        assert [score.reward for score in asyncio.run(environment.score(tasks[1], sessions))] == [1, 1, 0]


@pytest.mark.parametrize(("name", "error", "said"), [
    ("broken_games:Knock", EnvironmentFailure, r"RuntimeError: out of order \(.*broken_games.py:1\)"),
    ("nameless_games:Knock", EnvironmentFailure, r"ModuleNotFoundError: gone \(.*nameless_games.py:1\)$"),
    ("games.py:Knock", ConfigError, "A file is named by its module, without .py.*'games:Knock'"),
    ("games:Knok", ConfigError, "games has no environment 'Knok'. Did you mean 'Knock'"),
])  # fmt: skip
def test_a_module_that_cannot_be_used_says_why(
    name: str, error: type[Exception], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_games.py").write_text("raise RuntimeError('out of order')")
    (tmp_path / "nameless_games.py").write_text("raise ModuleNotFoundError('gone')")
    (tmp_path / "games.py").write_text("from holdfast import Environment\n\n\nclass Knock(Environment): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "games", raising=False)
    with pytest.raises(error, match=said):
        load(name)


def slow_lcs_length(first: str, second: str) -> int:
    """The dynamic program of every textbook."""
    lengths = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, a in enumerate(first, start=1):
        for j, b in enumerate(second, start=1):
            lengths[i][j] = lengths[i - 1][j - 1] + 1 if a == b else max(lengths[i - 1][j], lengths[i][j - 1])
    return lengths[-1][-1]


_texts = st.text(alphabet="abcé", max_size=80)


@given(_texts, _texts)
def test_lcs_equals_the_dynamic_program(first: str, second: str) -> None:
    assert lcs_length(first, second) == slow_lcs_length(first, second)


_SCORED = {
    "exact": [(" 42\n", "42", 1.0), ("the 42", "42", 0.0)],
    "contains": [("it is 42.", "42", 1.0), ("it is 43.", "42", 0.0)],
    "lcs": [("ab", "abcd", 0.5), ("", "abcd", 0.0), ("", "", 1.0)],
}


@pytest.mark.parametrize(("scorer", "row"), [(name, row) for name, rows in _SCORED.items() for row in rows])
def test_scorers(scorer: str, row: tuple[str, str, float]) -> None:
    completion, answer, reward = row
    assert SCORERS[scorer](completion, answer) == reward


def test_regex_compares_the_last_match() -> None:
    score = regex_scorer(r"answer: (\w+)")
    assert score("answer: no\nanswer: yes", "yes") == 1.0 and score("answer: yes\nanswer: no", "yes") == 0.0
    assert score("yes", "yes") == 0.0 and regex_scorer(r"\d+")("1 then 22", "22") == 1.0


GENERATED = "examples.environments.generated:ReasoningGym"


def scores(environment: Environment, task: Task, *answers: str) -> list[Score]:
    sessions: Any = [SimpleNamespace(completion=answer, texts=[answer]) for answer in answers]
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
    task = environment.make_task(seed(0))
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
    task = environment.make_task(seed(0))
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


@pytest.mark.parametrize(("module", "extra", "name", "args"), [
    ("reasoning_gym", "reasoning-gym", GENERATED, {"generator": "leg_counting"}),
    ("math_verify", "math-verify", "jsonl", {"scorer": "math_verify"}),
])  # fmt: skip
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
        seeds = [seed(index) for index in range(5)]
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
        system, question = environment.make_task(seed(0)).prompt
        assert system == Message("system", "Be short.")
        assert isinstance(question, Message) and question.content.count(",") == 2

    def test_an_answer_that_breaks_its_scorer_earns_nothing(self) -> None:
        environment = load(GENERATED, generator="prime_factorization")
        task = environment.make_task(seed(0))
        assert scores(environment, task, "no idea") == [Score(0.0, {"exact": 0.0, "unreadable": 1.0})]

    def test_a_task_with_many_right_answers_has_none_of_its_own(self) -> None:
        assert load(GENERATED, generator="graph_color").make_task(seed(0)).answer == ""

    @pytest.mark.parametrize(("generator", "settings"), [
        ("leg_countin", {}), ("leg_counting", {"max_animal": 3}), ("leg_counting", {"min_animals": 0}),
    ])  # fmt: skip
    def test_what_does_not_load_says_why(self, generator: str, settings: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=f"reasoning-gym refuses {generator} with "):
            load(GENERATED, generator=generator, settings=settings)
