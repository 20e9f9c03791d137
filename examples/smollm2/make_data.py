"""Write data for SFT and DPO on a task of tasks.py: `uv run python -m examples.smollm2.make_data --kind sft`.

The tasks are those of training under a name of their own: neither an evaluation nor an RL run has one of their seeds,
and what is held out from training is in none of them. `--kind preferences` writes pairs: the right answer is chosen;
the rejected one is the right answer in words (two of three pairs) or a wrong answer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec

from examples.smollm2.tasks import Boxes, Sums, ToJson
from holdfast import Task, TaskSeed

TASKS = {"boxes": Boxes, "sums": Sums, "to_json": ToJson}
NUMBERS = {"sft": 768, "preferences": 384}
"""Rows of the files that lie here."""
_OTHER_WORDS = (2, 3)

Row = dict[str, list[dict[str, str]]]


def make_rows(task: str, num: int, *, seed: int) -> list[Row]:
    """Return `num` rows with `prompt` and `completion`, both lists of messages."""
    return [_row(one, completion=one.answer) for one in _tasks(task, "sft", num, seed=seed)]


def make_pairs(task: str, num: int, *, seed: int) -> list[Row]:
    """Return `num` rows with `prompt`, `chosen` and `rejected`, all lists of messages."""
    environment, random = TASKS[task](), Random(seed)
    rows = []
    for number, one in enumerate(_tasks(task, "preferences", num, seed=seed)):
        in_words, wrong = environment.wrong_answers(one, random)
        is_in_words = number % _OTHER_WORDS[1] < _OTHER_WORDS[0]
        rows.append(_row(one, chosen=one.answer, rejected=in_words if is_in_words else wrong))
    return rows


def _tasks(task: str, kind: str, num: int, *, seed: int) -> Iterator[Task]:
    environment = TASKS[task]()
    for index in range(num):
        yield environment.make_task(TaskSeed(run_seed=seed, environment=f"{task}/{kind}", index=index))


def _row(task: Task, **answers: str) -> Row:
    turns = {side: [{"role": "assistant", "content": text}] for side, text in answers.items()}
    return {"prompt": msgspec.to_builtins(task.prompt), **turns}


def main() -> None:
    """Write the rows as JSON lines."""
    parser = argparse.ArgumentParser(prog="make_data", description=__doc__)
    parser.add_argument("--task", choices=TASKS, default="sums", help="of tasks.py (sums)")
    parser.add_argument("--kind", choices=NUMBERS, default="sft", help="demonstrations (sft) or pairs")
    parser.add_argument("--num", type=int, help=f"rows to write {NUMBERS}")
    parser.add_argument("--seed", type=int, default=0, help="other seeds give other rows (0)")
    parser.add_argument("--output", type=Path, help="file to write; unset: KIND.jsonl beside this program")
    arguments = parser.parse_args()
    make = {"sft": make_rows, "preferences": make_pairs}[arguments.kind]
    rows = make(arguments.task, arguments.num or NUMBERS[arguments.kind], seed=arguments.seed)
    output = arguments.output or Path(__file__).parent / f"{arguments.kind}.jsonl"
    output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"wrote {len(rows)} rows to {output}")


if __name__ == "__main__":
    main()
