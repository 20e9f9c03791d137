"""Files and scorer for recipes/gsm8k.toml: `python -m benchmarks.learning.gsm8k` fetches the dataset from the hub.

Writes `gsm8k_train.jsonl` and `gsm8k_test.jsonl` into the working directory. Prompt and scorer are those of verl: the
answer is what stands behind the last `####`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
_ANSWER = re.compile(r"####\s*(-?[\d.,]+)")


def row(question: str, answer: str) -> dict[str, str]:
    """Return a row of `jsonl`: the question with the instruction, and the number behind the `####` of the answer."""
    return {"prompt": f"{question} {_INSTRUCTION}", "answer": answer.rsplit("####", 1)[1].strip().replace(",", "")}


def score(completion: str, answer: str) -> float:
    """Return whether the last number behind a `####` is the right one."""
    found = _ANSWER.findall(completion)
    return float(bool(found) and found[-1].replace(",", "").rstrip(".") == answer)


def main() -> None:
    """Fetch and write."""
    from datasets import load_dataset

    for split in ("train", "test"):
        dataset = load_dataset("openai/gsm8k", "main", split=split)
        rows = [row(question, answer) for question, answer in zip(dataset["question"], dataset["answer"], strict=True)]
        Path(f"gsm8k_{split}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))


if __name__ == "__main__":
    main()
