"""The plain PyTorch loop that `sft` is measured against: padded batches, transformers' own loss, AdamW.

    python benchmarks/sft_throughput/plain_loop.py '{"model": ..., "data": ..., ...}'

Prints one JSON object with the seconds and tokens of every step.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Train `steps` steps and print what each took."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings["threads"])
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(settings["model"]), dtype=torch.float32)
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    samples = [tokenize(json.loads(line), tokenizer) for line in open(settings["data"])]
    size, taken = settings["batch_size"], []
    for step in range(settings["steps"]):
        begin = time.perf_counter()
        batch = [samples[(step * size + k) % len(samples)] for k in range(size)]
        train_step(model, optimizer, batch, settings["micro_batch_size"])
        taken.append({"seconds": time.perf_counter() - begin, "tokens": sum(len(ids) for ids, _ in batch)})
    print(json.dumps(taken))


def tokenize(row: dict[str, object], tokenizer: object) -> tuple[list[int], list[int]]:
    """Return (token ids, labels) with -100 on the prompt."""
    prompt = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)  # type: ignore[attr-defined]
    whole = tokenizer.apply_chat_template(row["prompt"] + row["completion"], tokenize=False)  # type: ignore[attr-defined, operator]
    first, second = tokenizer(prompt)["input_ids"], tokenizer(whole[len(prompt) :])["input_ids"]  # type: ignore[operator]
    return first + second, [-100] * len(first) + second


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: list[tuple[list[int], list[int]]], micro: int
) -> None:
    """Accumulate over micro-batches padded to their longest sample, clip, update."""
    targets = sum(sum(label != -100 for label in labels[1:]) for _, labels in batch)
    for start in range(0, len(batch), micro):
        rows = batch[start : start + micro]
        longest = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows])
        labels = torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in rows])
        mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows])
        output = model(input_ids=ids, attention_mask=mask, labels=labels, num_items_in_batch=targets)
        output.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
