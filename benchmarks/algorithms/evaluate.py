"""How well weights reverse fresh strings: `uv run python -m benchmarks.algorithms.evaluate DIRECTORY ...`.

Samples with transformers, at temperature 1 and greedily, and scores every answer twice: as it is, and *cut*, with
everything behind the first space left out. The model that reinforcement learning starts from ends two of three
answers with a remark behind a space, so the difference between the two is what leaving out the remark is worth.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from holdfast import TaskSeed
from holdfast.chat.messages import as_dict
from holdfast.orchestrator.env.interface import Task, as_messages
from holdfast.orchestrator.env.jsonl import lcs
from holdfast.orchestrator.env.reverse_text import ReverseText

# A seed that no run of the benchmark has, so the strings are fresh.
_SEED = 12345
_BATCH = 256
# As in configs/reverse_text/rl.toml.
_MAX_TOKENS = 24


def main() -> None:
    """Evaluate every directory and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+", type=Path, help="Hugging Face directories, such as weights/step_50")
    parser.add_argument("--problems", type=int, default=1024, help="fresh strings (1024)")
    arguments = parser.parse_args()
    print(f"{'reward / exact match':40s} {'T = 1':>13s} {'T = 1, cut':>13s} {'greedy':>13s} {'greedy, cut':>13s}")
    for directory in arguments.directories:
        cells = [
            scores for greedy in (False, True) for scores in evaluate(directory, arguments.problems, greedy=greedy)
        ]
        print(f"{directory!s:40s} " + " ".join(f"{reward:.3f} / {exact:.3f}" for reward, exact in cells), flush=True)


def evaluate(directory: Path, num_problems: int, *, greedy: bool) -> list[tuple[float, float]]:
    """Return (mean reward, share of exact matches) of the answers as they are, and of the cut ones."""
    environment = ReverseText()
    tasks = [environment.make_task(TaskSeed(_SEED, "evaluate", index)) for index in range(num_problems)]
    answers = _answers(directory, tasks, greedy=greedy)
    right = [task.answer for task in tasks]
    return [_scores(answers, right), _scores([answer.split(" ")[0] for answer in answers], right)]


def _answers(directory: Path, tasks: Sequence[Task], *, greedy: bool) -> list[str]:
    """Let the model answer every task."""
    torch.manual_seed(_SEED)
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.eval()
    prompts = [
        tokenizer.apply_chat_template(
            [as_dict(message) for message in as_messages(task.prompt)], tokenize=False, add_generation_prompt=True
        )
        for task in tasks
        if not isinstance(task.prompt, str)
    ]
    answers: list[str] = []
    for start in range(0, len(prompts), _BATCH):
        inputs = tokenizer(prompts[start : start + _BATCH], return_tensors="pt", padding=True, add_special_tokens=False)
        choice = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        with torch.inference_mode():
            ids = model.generate(**inputs, max_new_tokens=_MAX_TOKENS, **choice)
        answers += tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [answer.strip() for answer in answers]


def _scores(answers: Sequence[str], right: Sequence[str]) -> tuple[float, float]:
    pairs = list(zip(answers, right, strict=True))
    reward = statistics.fmean(lcs(answer, wanted) for answer, wanted in pairs)
    return reward, statistics.fmean(float(answer == wanted) for answer, wanted in pairs)


if __name__ == "__main__":
    main()
