"""The command `environments`: what it lists, writes, finds wrong and plays."""

import datetime
import enum
import json
import random
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy
import pytest

from holdfast.commands import environments_check
from holdfast.commands.environments_probe import canonical
from holdfast.config import RlConfig
from holdfast.config.load import parse_command_line
from holdfast.orchestrator.env.registry import BUILT_IN
from tests.conftest import BASE, ROOT
from tests.models.chat_templates import QWEN_3, write_tokenizer
from tests.unit.conftest import Command, Refused

FAULTS = '''
"""Environments with one fault each."""

import itertools
import math
import random
import re

from holdfast import Environment, Message, Score, Task

WORDS = {"red", "green", "blue", "white", "black", "brown", "grey", "pink", "orange", "violet"}

class Sound(Environment):
    """Nothing is wrong with it."""

    def make_task(self, seed):
        word = seed.random().choice(sorted(WORDS))
        return Task(prompt=[Message("user", word)], answer=word)

    def score(self, task, sessions):
        return [Score(float(session.completion == task.answer)) for session in sessions]

class Unordered(Sound):
    def make_task(self, seed):
        return Task(prompt=[Message("user", "which?")], answer=seed.random().choice(list(WORDS)))

class Counting(Sound):
    def __init__(self):
        self._count = itertools.count()

    def make_task(self, seed):
        return Task(prompt=[Message("user", "next")], answer=str(next(self._count)))

class Dice(Sound):
    def score(self, task, sessions):
        return [Score(random.random()) for _ in sessions]

class Chatty(Sound):
    async def run(self, session, task):
        await session.sample()
        session.append_messages([Message("user", random.choice("abcdefgh") * 3)])
        await session.sample()

class Strict(Sound):
    def score(self, task, sessions):
        print("scoring", len(sessions))
        return [Score(1 / len(session.completion)) for session in sessions]

class NotANumber(Sound):
    def score(self, task, sessions):
        return [Score(math.nan if "\\u202e" in session.completion else 0.0) for session in sessions]

class Mute(Sound):
    async def run(self, session, task):
        pass

class NoTask(Sound):
    def make_task(self, seed):
        if seed.index == 2:
            raise ValueError("no third task")
        return super().make_task(seed)

class NoTasks(Sound):
    def make_task(self, seed):
        raise ValueError("no task at all")

class Tasteless(Sound):
    def make_task(self, seed):
        return task.answer if (task := super().make_task(seed)) and seed.index == 1 else task

class Long(Sound):
    def make_task(self, seed):
        return Task(prompt=[Message("user", "long " * 400)], answer="")

class Asking(Sound):
    async def run(self, session, task):
        await session.sample()
        session.append_messages([Message("user", "Sure?")])
        await session.sample()

class AskingInText(Asking):
    def make_task(self, seed):
        return Task(prompt="which?", answer="red")

class Tooled(Sound):
    def look_up(self, word: str) -> str:
        """Look a word up.

        Args:
            word: it.
        """
        return word

    tools = (look_up,)

class OnlyHere(Sound):
    def __init__(self):
        import os
        import signal

        if os.environ.get("PYTHONHASHSEED") in ("2", "3"):
            os.kill(os.getpid(), signal.SIGKILL)
'''


@pytest.fixture
def environments(run_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command, in a directory with the module `faults`."""
    (tmp_path / "faults.py").write_text(FAULTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "faults", raising=False)
    monkeypatch.setenv("PYTHONHASHSEED", "1")  # of other processes: this one's is what it is
    return partial(run_command, "environments")


@pytest.fixture
def here_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `check` ask in this process alone, which finds most."""
    monkeypatch.setattr(environments_check, "_HASH_SEEDS", ())


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with the template of Qwen 3, which drops thoughts behind a new question."""
    return write_tokenizer(tmp_path_factory.mktemp("thinking"), QWEN_3)


def checked(environments: Command, name: str, *flags: object) -> tuple[int, dict[str, tuple[str, list[str]]]]:
    code, out, _ = environments("check", f"faults:{name}", "--num-tasks", "4", "--json", *flags)
    return code, {one["check"]: (one["state"], one["problems"]) for one in json.loads(out)["checks"]}


@pytest.mark.launch
def test_what_init_writes_passes_its_test_and_its_check(environments: Command, tmp_path: Path) -> None:
    code, out, _ = environments("init", "word_game")
    assert code == 0 and f"\n  uv run --project {ROOT} environments check word_game:WordGame\n" in out
    made = {"word_game.py", "test_word_game.py", "word_game.toml"}
    assert {path.name for path in tmp_path.glob("*word_game*")} == made
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_word_game.py"]
    passed = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert passed.returncode == 0 and "2 passed" in passed.stdout, passed.stdout + passed.stderr
    code, out, err = environments("check", "word_game:WordGame", "--num-tasks", "4")
    assert code == 0, out + err
    config = parse_command_line(RlConfig, ["@", "word_game.toml"])
    assert [one.id for one in config.orchestrator.environments] == ["word_game:WordGame"]
    before = (tmp_path / "word_game.py").read_bytes()
    (tmp_path / "word_game.toml").unlink()
    code, _, err = environments("init", "word_game")
    assert code == 2 and "word_game.py, test_word_game.py: there already" in err
    assert (tmp_path / "word_game.py").read_bytes() == before and not (tmp_path / "word_game.toml").exists()


_NO_MODULES = dict.fromkeys(("word-game", "class", "__main__", "../up"), "cannot be the name of a module")


@pytest.mark.parametrize(
    ("name", "says"), [*_NO_MODULES.items(), *((name, "belongs to") for name in ("random", "holdfast"))]
)
@pytest.mark.usefixtures("environments")
def test_init_refuses_names_of_no_module(name: str, says: str, refused: Refused, tmp_path: Path) -> None:
    there = sorted(tmp_path.iterdir())
    assert f"'{name}' {says}" in refused("environments", "init", name) and sorted(tmp_path.iterdir()) == there


@pytest.mark.usefixtures("environments")
def test_init_says_where_it_cannot_write(refused: Refused) -> None:
    assert "File name too long" in refused("environments", "init", "w" * 300)


@pytest.mark.launch
def test_an_environment_without_a_fault_is_passed(environments: Command) -> None:
    code, out, err = environments("check", "faults:Sound", "--model.name", BASE, "--num-tasks", "4")
    assert (code, err) == (0, "") and [line.split()[1] for line in out.splitlines()[1:6]] == ["OK"] * 5
    assert " of 1024 tokens" in out and "20 with scripted answers" in out


@pytest.mark.launch
@pytest.mark.parametrize(
    ("name", "message"),
    [("Unordered", "another process (PYTHONHASHSEED="), ("OnlyHere", "was killed by SIGKILL twice: it said nothing")],
)
def test_a_fault_in_other_processes_is_found_there(name: str, message: str, environments: Command) -> None:
    code, checks = checked(environments, name)
    assert code == 1 and checks["tasks"][0] == "FAILED"
    assert any(message in line for line in checks["tasks"][1]), checks


@pytest.mark.usefixtures("here_alone")
@pytest.mark.parametrize(("name", "part", "message"), [
    ("Counting", "tasks", "task 0 is another when it is made again: answer"),
    ("NoTask", "tasks", "make_task() raised ValueError: no third task"),
    ("Tasteless", "prompts", "make_task() must return a Task, got 'b"),
    ("Mute", "sessions", "run() ended without a sampled turn"),
    ("Chatty", "sessions", "the session of the right answer is another when it is made"),
    ("Dice", "scores", "the score of an empty answer is another when the same sessions are scored again"),
    ("Strict", "scores", "an empty answer, alone in its group: environment 'faults:Strict' failed on task 0"),
    ("NotANumber", "scores", "a non-ASCII answer, alone in its group"),
])  # fmt: skip
def test_a_fault_is_found_and_told_by_its_check(name: str, part: str, message: str, environments: Command) -> None:
    code, checks = checked(environments, name)
    assert code == 1
    state, problems = checks[part]
    assert state == "FAILED" and any(message in line for line in problems), problems


@pytest.mark.usefixtures("here_alone")
@pytest.mark.parametrize(("args", "state", "told"), [
    (
        {"scorer": "number"},
        "FAILED",
        "1 of 3 rows cannot be solved: .* First: .*q.jsonl:2, 'B', which has no number",
    ),
    ({"scorer": "lcs"}, "OK", "of 3 rows: each earns the full reward"),
    ({"scorer": f"{__name__}:generous"}, "FAILED", "3 of 3 rows give the full reward to an empty or arbitrary"),
    ({"scorer": "regex", "pattern": "#### (.*)"}, "not checked", "no task's `answer` earns a reward as the whole"),
])  # fmt: skip
def test_rows_that_nobody_or_everybody_solves_are_told(
    args: dict[str, str], state: str, told: str, environments: Command, tmp_path: Path
) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text("".join(f'{{"prompt": "q", "answer": "{answer}"}}\n' for answer in ("1,000", "B", "3")))
    _, out, err = environments("check", "jsonl", "--args", json.dumps({"path": str(path), **args}))
    assert f"answers   {state}" in out and re.search(told, out + err)


def generous(completion: str, answer: str) -> float:
    return 1.0


@pytest.mark.usefixtures("here_alone")
def test_what_no_task_came_to_is_not_checked(environments: Command) -> None:
    code, out, _ = environments("check", "faults:NoTasks", "--num-tasks", "4", "--model.name", BASE)
    states = {line.split()[0]: line.split(maxsplit=1)[1].split("  ")[0] for line in out.splitlines()[1:7]}
    assert code == 1 and states == {"tasks": "FAILED", **dict.fromkeys(environments_check.CHECKS[1:], "not checked")}
    assert "scores    not checked  no task got this far\n" in out


@pytest.mark.usefixtures("here_alone")
def test_templates_that_rewrite_turns_are_told(environments: Command, thinking: Path) -> None:
    words = ("check", "faults:Asking", "--num-tasks", "4", "--model.name", thinking)
    code, out, _ = environments(*words)
    # Of each task the session with thoughts.
    assert code == 0 and "template  OK     rewrites earlier turns: 4 sessions split into branches" in out
    code, out, _ = environments(*words, "--history", "keep")
    assert code == 0 and "template  OK     writes all that was said" in out
    code, checks = checked(environments, "AskingInText", "--model.name", thinking)
    assert code == 1 and checks["sessions"] == ("OK", [])
    assert checks["template"][0] == "FAILED" and "an answer behind thoughts" in checks["template"][1][0]


@pytest.mark.usefixtures("here_alone")
def test_templates_without_tools_and_prompts_that_do_not_fit_are_told(
    environments: Command, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, checks = checked(environments, "Tooled", "--model.name", BASE)
    assert code == 1 and checks["template"][0] == "FAILED" and checks["sessions"][0] == "OK"
    assert checked(environments, "Tooled")[0] == 0
    code, out, _ = environments("check", "faults:Long", "--model.name", BASE, "--num-tasks", "6")
    assert code == 1 and "prompts   FAILED" in out and "prompts: and 2 more" in out
    Path("run.toml").write_text(
        f"model.name = '{BASE}'\n[orchestrator]\n"
        "environments = [{id = 'faults:Sound'}, {id = 'faults:Tooled', name = 'two'}, {id = 'faults:Tooled', name = "
        "'tooled'}, {id = 'faults:Long'}]\n"
    )
    code, out, _ = environments("check", "tooled", "--num-tasks", "4", "@", "run.toml")
    assert code == 1 and "template  FAILED" in out, "the model of the run"
    monkeypatch.setenv("HOLDFAST_ORCHESTRATOR__SEQ_LEN", "2048")
    code, out, _ = environments("check", "faults:Long", "@", "run.toml", "--num-tasks", "4")
    assert code == 0 and " of 2048 tokens" in out and re.search("tasks +OK +4, ", out), "the length of the run"
    assert out.startswith("from the environment variable HOLDFAST_ORCHESTRATOR__SEQ_LEN: orchestrator.seq_len = 2048\n")
    code, out, err = environments("check", "@", "run.toml", "--json")
    assert code == 2 and "the run has several environments: give a name, of faults:Sound, two, " in err and not out
    monkeypatch.delenv("HOLDFAST_ORCHESTRATOR__SEQ_LEN")
    for words, message in (
        (["tooled", "--seed", "1"], "--seed and `@`"),
        (["toled"], "Did you mean 'tooled'"),
        (["faults:Tooled"], "is the id of several environments: give a name, of "),
    ):
        assert message in refused("environments", "check", *words, "@", "run.toml")
    Path("none.toml").write_text("[orchestrator]\nenvironments = []\n")
    assert "the run has no environment" in refused("environments", "check", "@", "none.toml")


@pytest.mark.parametrize(("words", "message"), [
    (["check", "faults:Sound", "--num-tasks", "0"], "must be a number from 1 on, got '0'"),
    (["check", "faults:Sound", "--num-tasks", "-1"], "must be a number from 0 on, got '-1'"),
    (["check", "reverse_text", "--args", "{digits}"], "is not JSON"),
    (["check", "reverse_text", "--args", "[1]"], 'must be an object such as {"max_length": 6}'),
    (["check", "reverse_text", "--args", r'{"a": "\u0000"}'], "args must not hold the character NUL"),
    (["check", "\udcff"], "id must be text in UTF-8"),
    (["check", "reverse_text", "--args", '{"max_lenght": 1}'], "Did you mean 'max_length'?"),
    (["check", "revers_text"], "Did you mean 'reverse_text'?"),
    (["check", "reverse_text", "--model.name", "no/such/place/at all"], "'no/such/place/at all'"),
    (["show"], "unknown subcommand 'show'"),
])  # fmt: skip
@pytest.mark.usefixtures("environments")
def test_mistakes_are_told_before_anything_is_asked(words: list[str], message: str, refused: Refused) -> None:
    assert message in refused("environments", *words)


def test_the_list_has_every_built_in_environment(environments: Command) -> None:
    code, out, _ = environments("list", "--json")
    assert code == 0 and [*json.loads(out)["environments"]] == [*BUILT_IN]
    assert environments("list")[1].count("\n") == len(BUILT_IN) + 2


def test_equal_values_have_one_text_wherever_they_lie() -> None:
    class Colour(enum.Enum):
        RED = 1

    class Held:
        __slots__ = ("word",)

        def __init__(self, word: str) -> None:
            self.word = word

    class Plain:
        pass

    def values(word: str) -> list[object]:
        return [
            *[{"a": {word, "y"}, "b": frozenset({1, 2})}, Held(word), Colour.RED, numpy.array([1.0, len(word)]), len],
            *[random.Random(word), datetime.date(2020, 1, 2), Plain(), None, b"", 1.5],
        ]

    assert [canonical(value) for value in values("x")] == [canonical(value) for value in values("x")]
    differ = [canonical(one) != canonical(other) for one, other in zip(values("x"), values("zz"), strict=True)]
    assert differ == [True, True, False, True, False, True, False, False, False, False, False]
    assert canonical(1) != canonical("1") != canonical(b"1")
    loop: list[object] = []
    loop.append(loop)
    assert "..." in canonical(loop)
