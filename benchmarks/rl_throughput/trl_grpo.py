"""TRL's GRPOTrainer, which `rl` is measured against, on the same task, with the settings of the other contestants.

    python benchmarks/rl_throughput/trl_grpo.py '{"model": ..., "steps": ..., ...}'

Float32, generation by transformers with its key-value cache, all rollouts of a step at once and in one forward pass
each of generating and training, no reference model, all cores; what TRL sets otherwise stays. Prints one JSON object
with the seconds and sampled tokens of every step.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import time
from typing import Any, cast

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from holdfast import Message, Task, TaskSeed
from holdfast.orchestrator.env.jsonl import lcs
from holdfast.orchestrator.env.reverse_text import ReverseText

# TRL is not made for the vLLM that is installed beside it, and generates with transformers here.
setattr(importlib.import_module("trl.import_utils"), "is_vllm_available", lambda *_, **__: False)  # noqa: B010

from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.trainer.grpo_trainer import RewardFunc  # noqa: E402


class Clock(TrainerCallback):
    """Notes when every step ends, and how many tokens were sampled until then."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, int]] = []
        self.tokens = 0

    def on_step_end(self, *_: object, **__: object) -> None:
        """Note the end of a step."""
        self.ends.append((time.perf_counter(), self.tokens))


def main() -> None:
    """Train `steps` steps and print what each took."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings["threads"])
    clock = Clock()

    def reward(
        completions: list[list[dict[str, str]]], answer: list[str], completion_ids: list[list[int]], **_: object
    ) -> list[float]:
        clock.tokens += sum(map(len, completion_ids))
        return [lcs(texts[0]["content"].strip(), wanted) for texts, wanted in zip(completions, answer, strict=True)]

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
            reward_funcs=cast("RewardFunc", reward),
            args=training_arguments(settings, folder),
            train_dataset=tasks(settings),
            processing_class=AutoTokenizer.from_pretrained(settings["model"]),
            callbacks=[clock],
        )
        begin = time.perf_counter()
        trainer.train()
    times, tokens = zip(*[(begin, 0), *clock.ends], strict=True)
    steps = [
        {"seconds": times[k + 1] - times[k], "tokens": tokens[k + 1] - tokens[k]} for k in range(settings["steps"])
    ]
    print(json.dumps(steps))


def tasks(settings: dict[str, Any]) -> Dataset:
    """Return the tasks that `rl` draws, in the same order."""
    environment = ReverseText(**settings["environment"])
    rows = []
    for index in range(settings["steps"] * settings["problems"]):
        task = environment.make_task(TaskSeed(run_seed=0, environment="reverse_text", index=index))
        prompt = [{"role": message.role, "content": message.content} for message in messages_of(task)]
        rows.append({"prompt": prompt, "answer": task.answer})
    return Dataset.from_list(rows)


def messages_of(task: Task) -> list[Message]:
    """Return the prompt of a task of `reverse_text`, which is made of messages."""
    return [message for message in task.prompt if isinstance(message, Message)]


def training_arguments(settings: dict[str, Any], folder: str) -> GRPOConfig:
    """Return what TRL is told."""
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        dataloader_pin_memory=False,
        shuffle_dataset=False,
        max_steps=settings["steps"],
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        num_generations=settings["group_size"],
        max_completion_length=settings["max_tokens"],
        per_device_train_batch_size=settings["problems"] * settings["group_size"],
        gradient_accumulation_steps=1,
    )


if __name__ == "__main__":
    main()
