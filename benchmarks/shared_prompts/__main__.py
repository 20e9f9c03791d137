"""A train step of `rl` with prompts shared and not, beside TRL's.

`uv run --group dev python -m benchmarks.shared_prompts`

One process makes a batch of made-up rollouts and trains on it in turns, in another order every round: with a prompt
computed once for all its answers (`trainer.share_prompts`), with a prompt for each answer, and by the loss of TRL's
GRPOTrainer with all answers in one padded batch. Each is forward, backward and AdamW; nothing is sampled. Prints the
tokens that a step computes, seconds, and the ratios within rounds. With `--only` one of the three trains alone, and the
peak of the process's memory is printed, too. With `--device cuda` all compute in bfloat16 on float32 weights, and the
peak is that of the device.
"""

from __future__ import annotations

import argparse
import importlib
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from holdfast.config.training import ParallelConfig
from holdfast.process.child import available_cores
from holdfast.protocol.rollouts import Batch, Logprobs, LossMask, Rollout, TokenIds, VersionSpan
from holdfast.trainer.mesh import Mesh, open_mesh
from tests.builders.learner_runs import start_learner

# TRL is not made for the vLLM that is installed beside it, and generates with transformers here.
setattr(importlib.import_module("trl.import_utils"), "is_vllm_available", lambda *_, **__: False)  # noqa: B010

from trl import GRPOConfig, GRPOTrainer  # noqa: E402

LEARNING_RATE = 1e-7


@dataclass
class Contestant:
    """A train step over a batch.

    Attributes:
        tokens: that the model has computed in all steps so far.
    """

    step: Callable[[], Any]
    model: nn.Module
    tokens: int = 0

    def __post_init__(self) -> None:
        embeddings = next(module for module in self.model.modules() if isinstance(module, nn.Embedding))
        embeddings.register_forward_pre_hook(self._count)

    def _count(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.tokens += inputs[0].numel()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("examples/reverse_text/model"))
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[16, 64, 256], metavar="N")
    parser.add_argument("--answer-tokens", type=int, default=32, help="of the longest answer; the shortest has half")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--row-tokens", type=int, default=4096, help="tokens of a micro-batch at most (4096)")
    parser.add_argument("--only", choices=["shared", "apart", "trl"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(available_cores())
    print(f"{arguments.model}, {torch.get_num_threads()} threads, {arguments.prompts} prompts x {arguments.group_size} "
          f"answers of {arguments.answer_tokens // 2} to {arguments.answer_tokens} tokens", flush=True)  # fmt: skip
    backend = "gloo" if arguments.device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    os.environ.setdefault("LOCAL_RANK", "0")
    with tempfile.TemporaryDirectory() as folder, open_mesh(ParallelConfig(device=arguments.device)) as mesh:
        for length in arguments.prompt_tokens:
            rollouts = make_rollouts(arguments, length)
            contestants = make_contestants(arguments, rollouts, mesh, Path(folder) / str(length))
            print(f"\nprompts of {length} tokens")
            report(*measure(contestants, arguments.rounds), device=arguments.device)
    dist.destroy_process_group()


def make_rollouts(arguments: argparse.Namespace, length: int) -> list[Rollout]:
    """Return groups of answers with made-up tokens, log-probabilities and rewards, to prompts of `length` tokens."""
    generator = np.random.default_rng(length)
    vocabulary = AutoTokenizer.from_pretrained(arguments.model).vocab_size
    rollouts = []
    for number in range(arguments.prompts):
        prompt = generator.integers(0, vocabulary, length).tolist()
        for sample in range(arguments.group_size):
            sampled = int(generator.integers(arguments.answer_tokens // 2, arguments.answer_tokens + 1))
            rollout = Rollout(
                environment="made_up", task_id=number, sample_index=sample,
                token_ids=TokenIds([*prompt, *generator.integers(0, vocabulary, sampled).tolist()]),
                loss_mask=LossMask([0] * length + [1] * sampled), logprobs=Logprobs([0.0] * length + [-5.0] * sampled),
                versions=[VersionSpan(version=0, start=length, end=length + sampled)], reward=float(generator.normal()),
            )  # fmt: skip
            rollouts.append(rollout)
    return rollouts


def make_contestants(
    arguments: argparse.Namespace, rollouts: list[Rollout], mesh: Mesh, folder: Path
) -> dict[str, Contestant]:
    """Return those that train on `rollouts` by name, each with a model of its own."""
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    contestants: dict[str, Contestant] = {}
    dtype = "float32" if arguments.device == "cpu" else "bfloat16"
    for name in ("shared", "apart"):
        if arguments.only not in (None, name):
            continue
        (folder / name).mkdir(parents=True)
        run = start_learner(
            folder / name, arguments.model, mesh, tokenizer,
            model={"name": str(arguments.model), "dtype": dtype}, share_prompts=name == "shared",
            row_tokens=arguments.row_tokens,
            optim={"lr": LEARNING_RATE}, loss={"type": "grpo"}, ckpt=None,
        )  # fmt: skip
        batch = Batch(step=1, policy_version=0, weights_digest="d" * 32, rollouts=rollouts)
        contestants[name] = Contestant(partial(run.learn_from, batch), run.session.policy)
    if arguments.only in (None, "trl"):
        contestants["trl"] = _trl(arguments.model, rollouts, folder / "trl", arguments.device)
    return contestants


def _trl(model: Path, rollouts: list[Rollout], folder: Path, device: str) -> Contestant:
    """Return forward, backward and update of TRL's trainer, as it does them itself when it has sampled."""
    size = len({rollout.sample_index for rollout in rollouts})
    arguments = GRPOConfig(
        output_dir=str(folder), use_cpu=device == "cpu", bf16=device != "cpu", gradient_checkpointing=False,
        report_to=[], disable_tqdm=True, save_strategy="no", logging_strategy="no", max_steps=1,
        learning_rate=LEARNING_RATE, beta=0.0, loss_type="grpo", num_generations=size,
        per_device_train_batch_size=len(rollouts), dataloader_pin_memory=False,
    )  # fmt: skip
    trained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    nn.Module.to(trained, device)
    trainer = GRPOTrainer(
        model=trained,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "a"}] * len(rollouts)),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    optimizer = trainer.create_optimizer()
    length = rollouts[0].versions[0].start
    prompt_ids = torch.tensor([list(rollout.token_ids)[:length] for rollout in rollouts])
    sampled = [torch.tensor(list(rollout.token_ids)[length:]) for rollout in rollouts]
    answers = nn.utils.rnn.pad_sequence(sampled, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(ids) for ids in sampled], batch_first=True)
    inputs = {
        "prompt_ids": prompt_ids, "prompt_mask": torch.ones_like(prompt_ids), "completion_ids": answers,
        "completion_mask": mask, "advantages": torch.tensor([rollout.reward for rollout in rollouts]),
        "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            loss = trainer._compute_loss(trained, inputs)
        loss.backward()
        nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()

    return Contestant(step, trained)


def measure(contestants: dict[str, Contestant], rounds: int) -> tuple[dict[str, int], dict[str, list[float]]]:
    """Return the tokens of a step by contestant, and its seconds in each round; a first step is not timed."""
    for one in contestants.values():
        one.step()
    tokens = {name: one.tokens for name, one in contestants.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            begin = time.perf_counter()
            contestants[name].step()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - begin)
    return tokens, seconds


def report(tokens: dict[str, int], seconds: dict[str, list[float]], *, device: str) -> None:
    """Print tokens, medians and ratios."""
    for name, computed in tokens.items():
        print(f"  {name:<7} {computed:>7,} tokens  {statistics.median(seconds[name]):7.3f} s a step")
    if len(seconds) == 1:
        of_process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        peak = of_process if device == "cpu" else torch.cuda.max_memory_allocated() / 2**30
        print(f"  peak memory {peak:.2f} GiB", flush=True)
        return
    for name in ("apart", "trl"):
        ratios = [other / own for other, own in zip(seconds[name], seconds["shared"], strict=True)]
        median = statistics.median(ratios)
        print(f"  {name} / shared: {median:.2f} ({min(ratios):.2f} to {max(ratios):.2f})", flush=True)


if __name__ == "__main__":
    main()
