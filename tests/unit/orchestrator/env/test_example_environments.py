"""The environments of examples/: tasks are a pure function of their seed, and answers get what the page says."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from examples.environments.addition import right_digits, working_of
from examples.environments.ledger import Books
from examples.smollm2 import make_data
from holdfast.chat.tokenizer import load_tokenizer
from holdfast.errors import ConfigError
from holdfast.orchestrator.env.interface import Environment, Message, Score, Session, Task, TaskSeed
from tests.builders.scripted_sessions import scripted_session
from tests.unit.orchestrator.env.test_environment_loading import load as load_by_name
from tests.unit.orchestrator.env.test_environment_loading import scores
from tests.unit.orchestrator.env.test_environment_tools import called
from tests.unit.orchestrator.env.test_environment_tools import play as play_with_tools

BASE = "examples/reverse_text/base"
TASKS = 200
HOSTILE = ("", " ", "\x00", "é" * 50, "9" * 10_000, "-1", "1e3", "٣", "²", "{letters}", "1\n2", "a" * 10_000)


PLACES = {
    "sort_letters": "environments.sort_letters:SortLetters", "addition": "environments.addition:Addition",
    "guess_number": "environments.guess_number:GuessNumber", "ledger": "environments.ledger:Ledger",
    "sums": "smollm2.tasks:Sums", "boxes": "smollm2.tasks:Boxes", "to_json": "smollm2.tasks:ToJson",
}  # fmt: skip
PYTHON_CODE = "examples.environments.python_code:PythonCode"


def load(name: str, **args: Any) -> Environment:
    return load_by_name(f"examples.{PLACES[name]}" if name in PLACES else name, **args)


def tasks_of(environment: Environment, *, run_seed: int = 0, count: int = TASKS) -> list[Task]:
    return [environment.make_task(TaskSeed(run_seed, "env", index)) for index in range(count)]


def asked(task: Task) -> str:
    (message,) = task.prompt
    assert isinstance(message, Message)
    return message.content


def rewards(environment: Environment, task: Task, *answers: str) -> list[float]:
    return [score.reward for score in scores(environment, task, *answers)]


def play(environment: Environment, task: Task, *turns: str, seq_len: int = 256) -> Session:
    tokenizer = load_tokenizer(BASE)
    assert not isinstance(task.prompt, str)
    said = [tokenizer.encode(turn) for turn in turns]
    session = scripted_session(tokenizer, tokenizer.prompt(task.prompt), said, seq_len=seq_len, max_tokens=32)
    asyncio.run(environment.run(session, task))
    return session


@pytest.mark.parametrize("name", ["reverse_text", *PLACES])
def test_tasks_are_a_pure_function_of_their_seed(name: str) -> None:
    tasks = tasks_of(load(name))
    assert tasks == tasks_of(load(name)), "made again by another object"
    again = load(name)
    assert tasks == [again.make_task(TaskSeed(0, "env", index)) for index in reversed(range(TASKS))][::-1]
    others = tasks_of(load(name), run_seed=1)
    assert len({task.answer for task in tasks}) > 10
    assert sum(one != other for one, other in zip(tasks, others, strict=True)) > TASKS * 0.8


@pytest.mark.parametrize("name", ["reverse_text", *(name for name in PLACES if name != "ledger")])
def test_no_answer_but_the_right_one_earns_all(name: str) -> None:
    environment = load(name)
    for task in tasks_of(environment, count=20):
        right, *hostile = scores(environment, task, f" {task.answer}\n", *HOSTILE)
        assert right.reward == 1.0 and right.metrics["exact"] == 1.0
        assert all(0.0 <= score.reward < 1.0 and score.metrics["exact"] == 0.0 for score in hostile)


@pytest.mark.parametrize(("name", "args", "said"), [
    ("sort_letters", {"min_length": 9, "max_length": 8}, "1 <= min_length <= max_length"),
    ("sort_letters", {"max_length": 27, "distinct": True}, "max_length = 27 with distinct = true; there are 26"),
    ("addition", {"min_digits": 0}, "1 <= min_digits <= max_digits <= 4000"),
    ("addition", {"grow_every": 0}, "grow_every = 0; allowed are whole numbers from 1"),
    ("addition", {"min_digits": 3, "grow_every": 10}, "nothing to grow"),
    ("guess_number", {"low": 5, "high": 5}, "0 <= low < high"),
    ("guess_number", {"turns": 0}, "turns = 0; allowed are whole numbers from 1"),
    ("ledger", {"num_asked": 17}, "num_asked = 17; allowed are whole numbers from 1 to 16"),
    ("ledger", {"call_cost": -1}, "call_cost = -1.0; allowed are numbers from 0 to 1"),
    (PYTHON_CODE, {"min_steps": 3, "max_steps": 2}, "1 <= min_steps <= max_steps"),
    (PYTHON_CODE, {"num_inputs": 0}, "num_inputs = 0; allowed are whole numbers from 1 on"),
    (PYTHON_CODE, {"memory_mb": 8}, "memory_mb = 8; allowed are whole numbers from 64 on"),
    ("sums", {"terms": 4}, "terms = 4, largest = 9; allowed are 2 or 3 terms and 5 <= largest <= 50"),
])  # fmt: skip
def test_arguments_that_fit_no_task_are_refused(name: str, args: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(name, **args)


def test_letters_are_asked_for_in_the_users_words_and_earn_by_their_order() -> None:
    environment = load("sort_letters", min_length=2, max_length=5, prompt="Sort {letters}, {name}!")
    tasks = tasks_of(environment)
    words = [asked(task).removeprefix("Sort ").removesuffix(", {name}!") for task in tasks]
    assert {len(word) for word in words} == {2, 3, 4, 5}
    assert all("".join(sorted(word)) == task.answer for word, task in zip(words, tasks, strict=True))
    task = Task(prompt="", answer="abcd")
    assert rewards(environment, task, "abcd", "abdc", "dcba", "abcde") == [1.0, 0.75, 0.25, 0.8]
    plain, distinct = (tasks_of(load("sort_letters", max_length=26, distinct=one)) for one in (False, True))
    assert any(len(set(task.answer)) < len(task.answer) for task in plain)
    assert all(list(task.answer) == sorted(set(task.answer)) for task in distinct)


def _terms(task: Task) -> tuple[int, int]:
    first, second = asked(task).removesuffix("=").split("+")
    return int(first), int(second)


def _carries(task: Task) -> bool:
    first, second = _terms(task)
    return any(int(one) + int(other) > 9 for one, other in zip(str(first), str(second), strict=True))


def test_sums_are_right_and_as_asked_for() -> None:
    tasks = tasks_of(load("addition", min_digits=1, max_digits=3))
    assert all(str(sum(_terms(task))) == task.answer for task in tasks)
    assert {len(str(number)) for task in tasks for number in _terms(task)} == {1, 2, 3}
    assert all(len(str(first)) == len(str(second)) for first, second in map(_terms, tasks))
    words = tasks_of(load("addition", prompt="What is {first} plus {second}?"), count=1)
    assert re.fullmatch(r"What is \d+ plus \d+\?", asked(words[0]))
    assert any(map(_carries, tasks_of(load("addition", max_digits=4))))
    assert not any(map(_carries, tasks_of(load("addition", max_digits=4, carries=False))))


def test_digits_grow_with_the_tasks_alone() -> None:
    environment = load("addition", min_digits=1, max_digits=3, grow_every=50)
    digits = [len(str(_terms(task)[0])) for task in tasks_of(environment)]
    assert [max(digits[start : start + 50]) for start in (0, 50, 100, 150)] == [1, 2, 3, 3]
    # Task 120 is the same whichever tasks were made before it.
    assert len(str(_terms(environment.make_task(TaskSeed(0, "env", 120)))[0])) == digits[120]


def test_digits_of_a_sum_count_from_the_last() -> None:
    assert right_digits("125", "125") == 1.0 and right_digits("115", "125") == pytest.approx(2 / 3)
    assert right_digits("25", "125") == pytest.approx(2 / 3) and right_digits("1125", "125") == 0.75
    assert right_digits("125 ", "125") == 0.0 and right_digits("", "") == 0.0


def test_the_working_of_a_sum_goes_from_the_right() -> None:
    assert working_of(58, 67) == "8+7=15 5+6+1=12 125" and working_of(2, 3) == "2+3=5 5"
    environment = load("addition", min_digits=2, max_digits=2, working=True)
    task = tasks_of(environment, count=1)[0]
    assert task.answer == working_of(*_terms(task))
    whole, last, none = scores(environment, task, task.answer, task.answer.split()[-1], "")
    assert (whole.reward, whole.metrics) == (1.0, {"exact": 1.0, "working": 1.0})
    assert 0.0 < last.reward < 0.5 and last.metrics == {"exact": 1.0, "working": 0.0}
    assert (none.reward, none.metrics) == (0.0, {"exact": 0.0, "working": 0.0})


def test_guesses_end_with_the_number_the_turns_or_the_room() -> None:
    environment = load("guess_number", low=1, high=15, turns=4)
    task = next(task for task in tasks_of(environment) if task.answer == "5")
    found, lost = play(environment, task, " 5 ", "1"), play(environment, task, "1", "no", "99", "7", "5")
    assert (found.texts, lost.texts) == ([" 5 "], ["1", "no", "99", "7"])
    assert "a number from 1 to 15" in load_tokenizer(BASE).decode(lost.token_ids.tolist())
    full = play(environment, task, "1", "5", seq_len=20)
    assert full.texts == ["1"]
    of_found, of_lost, of_full = asyncio.run(environment.score(task, [found, lost, full]))
    assert (of_found.reward, of_lost.reward, of_full.reward) == (1.0, 0.05, 0.1)
    assert of_lost.metrics == {"exact": 0.0, "valid": 0.5, "guesses": 4.0}


def test_accounts_are_looked_up_and_wrong_calls_cost() -> None:
    environment = load("ledger")
    # The task of `play_with_tools`.
    task = environment.make_task(TaskSeed(0, "adds", 0))
    assert isinstance(task, Books) and all(name in asked(task) for name in task.asked)
    assert task.answer == str(sum(task.ledger[name] for name in task.asked))
    first, second = task.asked
    other = next(name for name in task.ledger if name not in task.asked)

    def look_up(account: object) -> str:
        return called("hermes", "look_up", {"account": account})

    def scored(*turns: str) -> Score:
        (score,) = asyncio.run(environment.score(task, [play_with_tools("qwen3", [*turns, "end"], environment)]))
        return score

    right = f"They hold 7 and more: {task.answer}."
    assert scored(look_up(first), look_up(second), right) == Score(1.0, {"exact": 1.0, "wrong_calls": 0.0})
    assert scored(look_up(first), f"{task.answer}0").reward == pytest.approx(0.1)
    assert scored("no number").reward == 0.0 and scored(right).reward == 0.8
    # An account that there is not, a wrong type, what nobody asked for, and the same twice.
    wasted = [look_up("nothing"), look_up(3), look_up(other), look_up(first), look_up(first), look_up(second)]
    wasteful = scored(*wasted, right)
    assert wasteful.reward == pytest.approx(1.0 - 0.4) and wasteful.metrics == {"exact": 1.0, "wrong_calls": 4.0}


def contents(task: Task) -> set[str]:
    """Return what a task of smollm2 is about: its numbers in any order, or its name and its city."""
    if task.answer.startswith("{"):
        person = json.loads(task.answer)
        return {person["name"], person["city"]}
    return {" ".join(sorted(re.findall(r"[0-9]+", asked(task))))}


@pytest.mark.parametrize(("name", "args"), [("sums", {}), ("sums", {"terms": 3}), ("boxes", {}), ("to_json", {})])
def test_what_is_held_out_is_in_no_task_of_training(name: str, args: dict[str, Any]) -> None:
    environment = load(name, **args)
    number = environment.num_tasks or TASKS
    held_out = [environment.make_task(TaskSeed(7, "env", index, held_out=True)) for index in range(number)]
    seen = {content for task in tasks_of(environment, count=2000) for content in contents(task)}
    asked_for = {content for task in held_out for content in contents(task)}
    assert asked_for and not asked_for & seen
    if environment.num_tasks:
        assert len({asked(task) for task in held_out}) == number, "none is asked twice"
    assert len(asked_for) * 2 < len(seen), "most of it is for training"


def test_a_number_alone_earns_all_and_in_words_half() -> None:
    task = Task(prompt="", answer="12")
    said = ("12", " 12\n", "The answer is 12.", "7 + 5 = 12", "12 is 7 + 5", "112", "-12", "12.5", "")
    assert rewards(load("sums"), task, *said) == [1.0, 1.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_an_object_alone_earns_all_and_right_values_of_another_half() -> None:
    task = Task(prompt="", answer='{"name": "Mia", "age": 34, "city": "Oslo"}')
    said = {
        '{\n "city": "Oslo", "age": 34, "name": "Mia"\n}': 1.0, f"```json\n{task.answer}\n```": 0.5,
        task.answer.replace("}", ', "country": "Norway"}'): 0.5, task.answer.replace("}", ', "age": 34}'): 0.5,
        task.answer.replace("34", '"34"'): 0.5 * 2 / 3, task.answer.replace("34", "34.0"): 0.5 * 2 / 3,
        task.answer.replace("Oslo", "Paris").replace("Mia", "Ben"): 0.5 / 3, f"[{task.answer}]": 0.5, "{}": 0.0,
        '{"name": "Mia", "age": 34, "city": "Oslo"': 0.0, "{" * 5000: 0.0,
    }  # fmt: skip
    found = scores(load("to_json"), task, *said)
    assert [score.reward for score in found] == pytest.approx(list(said.values()))
    assert [score.metrics["exact"] for score in found] == [1.0] + [0.0] * (len(said) - 1)


def test_the_data_are_of_tasks_of_training_and_their_answers_earn_what_they_should(in_root: Path) -> None:
    lines = {kind: Path(f"examples/smollm2/{kind}.jsonl").read_text().splitlines() for kind in make_data.NUMBERS}
    rows = {kind: [json.loads(line) for line in lines[kind]] for kind in lines}
    assert rows["sft"] == make_data.make_rows("sums", make_data.NUMBERS["sft"], seed=0)
    assert rows["preferences"] == make_data.make_pairs("sums", make_data.NUMBERS["preferences"], seed=0)
    for name in make_data.TASKS:
        environment = load(name)
        for row in make_data.make_pairs(name, 30, seed=1):
            chosen, rejected = (row[side][0]["content"] for side in ("chosen", "rejected"))
            task = Task(prompt=[Message(**row["prompt"][0])], answer=chosen)
            better, worse = rewards(environment, task, chosen, rejected)
            assert better == 1.0 and worse <= 0.5
        held_out = [environment.make_task(TaskSeed(0, "env", index, held_out=True)) for index in range(20)]
        trained = {content for row in make_data.make_rows(name, 300, seed=1) for content in contents(
            Task(prompt=[Message(**row["prompt"][0])], answer=row["completion"][0]["content"])
        )}  # fmt: skip
        assert not trained & {content for task in held_out for content in contents(task)}
