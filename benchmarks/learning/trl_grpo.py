"""TRL's GRPOTrainer on a task of one turn, with the settings of our recipe.

    python -m benchmarks.learning.trl_grpo \
      '{"task": "sort_letters", "model": ..., "folder": ..., "seed": 0, "steps": 200, "save_every": 50}'

The same start, tasks in the same order, batch, group size, steps, learning rate, optimizer, clip range and reward;
float32, generation by transformers, no reference model. What TRL sets otherwise stays: it samples every batch with the
newest weights, where the recipe's are one step behind, and lowers the learning rate from update to update, not from
step to step. Leaves Hugging Face directories `checkpoint-N`, where N counts updates, and the seconds of each step.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from benchmarks.learning.commands import environment_of, recipe
from benchmarks.learning.runs import TRL_SECONDS
from holdfast import Environment, Message, Session, Task, TaskSeed
from holdfast.config.environments import EnvironmentConfig
from holdfast.orchestrator.env.registry import load_environment
from holdfast.process.child import available_cores

# TRL is not made for the vLLM that is installed beside it, and generates with transformers here.
setattr(importlib.import_module("trl.import_utils"), "is_vllm_available", lambda *_, **__: False)  # noqa: B010

from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.trainer.grpo_trainer import RewardFunc  # noqa: E402


def reward_of(name: str, environment: Environment, drawn: list[Task]) -> Callable[..., list[float]]:
    """Return the reward that the recipe gives an answer, as TRL asks for it."""
    weights = recipe(name)["trainer"].get("rewards", {}).get("weights")

    def reward(completions: list[list[dict[str, str]]], index: list[int], **_: object) -> list[float]:
        rewards = []
        for turns, place in zip(completions, index, strict=True):
            answered = cast(Session, SimpleNamespace(completion=turns[0]["content"]))
            (score,) = asyncio.run(environment.score(drawn[place], [answered]))
            by_name = score.metrics if weights is not None else {"reward": score.reward}
            rewards.append(sum((weights or {"reward": 1.0}).get(key, 0.0) * value for key, value in by_name.items()))
        return rewards

    return reward


def draw(name: str, environment: Environment, seed: int, num: int) -> list[Task]:
    """Return the tasks that `rl` draws with this seed, in the same order."""
    return [environment.make_task(TaskSeed(run_seed=seed, environment=name, index=index)) for index in range(num)]


def rows_of(drawn: list[Task]) -> Dataset:
    """Return prompts, each with its place among the tasks."""
    rows = []
    for index, task in enumerate(drawn):
        messages = [message for message in task.prompt if isinstance(message, Message)]
        prompt = [{"role": message.role, "content": message.content} for message in messages]
        rows.append({"prompt": prompt, "index": index})
    return Dataset.from_list(rows)


def updates_of_a_step(name: str) -> int:
    """Return how many updates a batch of rollouts is divided into."""
    return recipe(name)["trainer"].get("updates", {}).get("minibatches", 1)


def training_arguments(settings: dict[str, Any]) -> GRPOConfig:
    """Return what TRL is told."""
    ours = recipe(settings["task"])
    orchestrator = ours["orchestrator"]
    # TRL counts updates as steps.
    updates = updates_of_a_step(settings["task"])
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


class _Clock(TrainerCallback):
    """Notes how long each step takes, with its generation."""

    def __init__(self, updates: int) -> None:
        self.seconds: list[float] = []
        self._updates = updates
        self._began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._updates == 0:
            now = time.monotonic()
            self.seconds.append(now - self._began)
            self._began = now


def main() -> None:
    """Train, and leave the weights of every `save_every` steps."""
    settings = json.loads(sys.argv[1])
    name, ours = settings["task"], recipe(settings["task"])
    torch.set_num_threads(ours["trainer"].get("parallel", {}).get("threads") or available_cores())
    environment = load_environment(EnvironmentConfig(**environment_of(name)), key="environment")
    drawn = draw(name, environment, settings["seed"], settings["steps"] * ours["orchestrator"]["problems_per_step"])
    clock = _Clock(updates_of_a_step(name))
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        reward_funcs=cast("RewardFunc", reward_of(name, environment, drawn)),
        args=training_arguments(settings),
        train_dataset=rows_of(drawn),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        callbacks=[clock],
    )
    trainer.train()
    (Path(settings["folder"]) / TRL_SECONDS).write_text(json.dumps(clock.seconds))


if __name__ == "__main__":
    main()
