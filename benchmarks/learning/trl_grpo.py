"""TRL's GRPOTrainer on `sort_letters`, with the settings of our recipe.

    python -m benchmarks.learning.trl_grpo '{"model": ..., "folder": ..., "seed": 0, "steps": 200, "save_every": 50}'

The same start, tasks in the same order, batch, group size, steps, learning rate, optimizer, clip range and reward;
float32, generation by transformers, no reference model. What TRL sets otherwise stays: it samples every batch with the
newest weights, where the recipe's are one step behind, and lowers the learning rate from update to update, not from
step to step. Leaves Hugging Face directories `checkpoint-N`, where N counts updates.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any, cast

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.learning.commands import recipe
from examples.environments.sort_letters import SortLetters
from holdfast import Message, TaskSeed

# TRL is not made for the vLLM that is installed beside it, and generates with transformers here.
setattr(importlib.import_module("trl.import_utils"), "is_vllm_available", lambda *_, **__: False)  # noqa: B010

from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.trainer.grpo_trainer import RewardFunc  # noqa: E402


def exact(completions: list[list[dict[str, str]]], answer: list[str], **_: object) -> list[float]:
    """Return 1 for the right answers, else 0."""
    return [float(turns[0]["content"].strip() == right) for turns, right in zip(completions, answer, strict=True)]


def tasks(seed: int, num: int) -> Dataset:
    """Return the tasks that `rl` draws with this seed, in the same order."""
    (section,) = recipe("sort_letters")["orchestrator"]["environments"]
    environment = SortLetters(**section["args"])
    rows = []
    for index in range(num):
        task = environment.make_task(TaskSeed(run_seed=seed, environment="sort_letters", index=index))
        messages = [message for message in task.prompt if isinstance(message, Message)]
        prompt = [{"role": message.role, "content": message.content} for message in messages]
        rows.append({"prompt": prompt, "answer": task.answer})
    return Dataset.from_list(rows)


def updates_of_a_step() -> int:
    """Return how many updates a batch of rollouts is divided into."""
    return recipe("sort_letters")["trainer"].get("updates", {}).get("minibatches", 1)


def training_arguments(settings: dict[str, Any]) -> GRPOConfig:
    """Return what TRL is told."""
    ours = recipe("sort_letters")
    orchestrator = ours["orchestrator"]
    # TRL counts updates as steps.
    updates = updates_of_a_step()
    return GRPOConfig(
        output_dir=settings["folder"],
        seed=settings["seed"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        disable_tqdm=True,
        save_strategy="steps",
        save_steps=settings["save_every"] * updates,
        save_only_model=True,
        logging_strategy="no",
        dataloader_pin_memory=False,
        shuffle_dataset=False,
        max_steps=settings["steps"] * updates,
        learning_rate=ours["trainer"]["optim"]["lr"],
        weight_decay=ours["trainer"]["optim"]["weight_decay"],
        lr_scheduler_type=ours["trainer"]["optim"]["schedule"],
        adam_beta2=0.95,
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        num_generations=orchestrator["group_size"],
        max_completion_length=orchestrator["sampling"]["max_tokens"],
        per_device_train_batch_size=orchestrator["problems_per_step"] * orchestrator["group_size"] // updates,
        steps_per_generation=updates,
        gradient_accumulation_steps=1,
    )


def main() -> None:
    """Train, and leave the weights of every `save_every` steps."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    num_tasks = settings["steps"] * recipe("sort_letters")["orchestrator"]["problems_per_step"]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        reward_funcs=cast("RewardFunc", exact),
        args=training_arguments(settings),
        train_dataset=tasks(settings["seed"], num_tasks),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
    )
    trainer.train()


if __name__ == "__main__":
    main()
