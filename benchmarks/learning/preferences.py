"""Pairs of answers that a model gave itself: for each task one that is right and one that is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

_PROMPT = re.compile(r"<\|user\|>(.*)<\|end\|><\|assistant\|>")


def pairs_of(samples: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Return rows of `dpo` from the lines of `rollouts.jsonl`; tasks with one kind of answer alone have none."""
    for _, group in groupby(map(json.loads, samples), key=lambda line: line["task"]):
        lines = list(group)
        right, wrong = ([line for line in lines if line["solved"] is solved] for solved in (True, False))
        if right and wrong:
            prompt = _PROMPT.fullmatch(lines[0]["turns"][0]["text"])
            assert prompt is not None
            yield {
                "prompt": [{"role": "user", "content": prompt[1]}],
                **{side: [{"role": "assistant", "content": line["turns"][1]["text"].removesuffix("<|end|>")}]
                   for side, line in (("chosen", right[0]), ("rejected", wrong[0]))},
            }  # fmt: skip


def write_pairs(samples: Path, path: Path) -> int:
    """Write the pairs of an evaluation's samples as JSON lines; return how many there are."""
    with samples.open() as lines:
        rows = list(pairs_of(lines))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return len(rows)
