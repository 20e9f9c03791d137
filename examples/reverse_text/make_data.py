"""Write data for the reverse-text example: `python examples/reverse_text/make_data.py --num 8192`.

Tasks come from the RL environment's own task function, under a name that no run's environment has,
so that no RL task is among them by its seed. As real demonstrations often are, these are chatty: two
of three answers end with a remark, which the reward of the environment does not pay for.

`--kind preferences --num 512` writes pairs: chosen is the exact reversal, rejected one with a remark
(two of three) or with two letters in the wrong order.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import msgspec

from holdfast import TaskSeed
from holdfast.orchestrator.env.reverse_text import ReverseText

_NAME = "reverse_text/supervised"
_PAIRS_NAME = "reverse_text/preferences"
_REMARK = " done"
_REMARKS_OF = (2, 3)


def make_rows(num: int, *, seed: int) -> list[dict[str, list[dict[str, str]]]]:
    """Return `num` rows with `prompt` and `completion`, both lists of messages."""
    environment = ReverseText()
    rows = []
    for index in range(num):
        task = environment.make_task(TaskSeed(run_seed=seed, environment=_NAME, index=index))
        prompt = msgspec.to_builtins(task.prompt)
        with_remark = index % _REMARKS_OF[1] < _REMARKS_OF[0]
        answer = task.answer + _REMARK if with_remark else task.answer
        rows.append({"prompt": prompt, "completion": [{"role": "assistant", "content": answer}]})
    return rows


def make_pairs(num: int, *, seed: int) -> list[dict[str, list[dict[str, str]]]]:
    """Return `num` rows with `prompt`, `chosen` and `rejected`, all lists of messages."""
    environment = ReverseText()
    rows = []
    for index in range(num):
        task = environment.make_task(TaskSeed(run_seed=seed, environment=_PAIRS_NAME, index=index))
        with_remark = index % _REMARKS_OF[1] < _REMARKS_OF[0]
        worse = task.answer + _REMARK if with_remark else _misspelt(task.answer)
        row = {"prompt": msgspec.to_builtins(task.prompt)}
        row |= {
            side: [{"role": "assistant", "content": text}]
            for side, text in (("chosen", task.answer), ("rejected", worse))
        }
        rows.append(row)
    return rows


def _misspelt(answer: str) -> str:
    """Swap the first two neighbours that differ; a text of one letter only loses its last."""
    for place in range(len(answer) - 1):
        if answer[place] != answer[place + 1]:
            return answer[:place] + answer[place + 1] + answer[place] + answer[place + 2 :]
    return answer[:-1]


def main() -> None:
    """Write the rows as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=8192, help="rows to write")
    parser.add_argument("--seed", type=int, default=0, help="other seeds give other rows")
    parser.add_argument("--kind", choices=("sft", "preferences"), default="sft", help="demonstrations or pairs")
    parser.add_argument("--output", type=Path, help="file to write; unset: KIND.jsonl beside this program")
    arguments = parser.parse_args()
    make = {"sft": make_rows, "preferences": make_pairs}[arguments.kind]
    rows = make(arguments.num, seed=arguments.seed)
    output = arguments.output or Path(__file__).parent / f"{arguments.kind}.jsonl"
    output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"wrote {len(rows)} rows to {output}")


if __name__ == "__main__":
    main()
