"""The synchronous trainer that `rl` is measured against: transformers generates, then trains, in turn.

    python benchmarks/rl_throughput/synchronous.py '{"model": ..., "steps": ..., ...}'

Same task, rewards, group sizes and loss as the quick start, one process, all cores. Prints one JSON
object with the seconds and sampled tokens of every step.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from holdfast import TaskSeed
from holdfast.orchestrator.env.jsonl import lcs
from holdfast.orchestrator.env.reverse_text import ReverseText


def main() -> None:
    """Train `steps` steps of GRPO and print what each took."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings["threads"])
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["lr"], betas=(0.9, 0.95), weight_decay=0.0)
    environment = ReverseText(**settings["environment"])
    steps = []
    for step in range(settings["steps"]):
        begin = time.perf_counter()
        seeds = [
            TaskSeed(run_seed=0, environment="reverse_text", index=step * settings["problems"] + k)
            for k in range(settings["problems"])
        ]
        tasks = [environment.make_task(seed) for seed in seeds]
        tokens = train_step(model, optimizer, tokenizer, tasks, settings)
        steps.append({"seconds": time.perf_counter() - begin, "tokens": tokens})
    print(json.dumps(steps))


def train_step(model, optimizer, tokenizer, tasks, settings) -> int:  # type: ignore[no-untyped-def]
    """Generate group_size rollouts of every task, take one GRPO step; return how many tokens it sampled."""
    group, pad = settings["group_size"], tokenizer.pad_token_id
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": m.role, "content": m.content} for m in task.prompt], tokenize=False, add_generation_prompt=True
        )
        for task in tasks
    ]
    tokenizer.padding_side = "left"
    encoded = tokenizer([prompt for prompt in prompts for _ in range(group)], return_tensors="pt", padding=True)
    width = encoded["input_ids"].shape[1]
    model.eval()
    with torch.no_grad():
        sequences = model.generate(
            input_ids=encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=settings["max_tokens"],
            pad_token_id=pad,
        )
    completions = sequences[:, width:]
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    rewards = torch.tensor([lcs(text, tasks[k // group].answer) for k, text in enumerate(texts)]).view(-1, group)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).flatten()
    ended = (completions == tokenizer.eos_token_id).long()
    sampled = (ended.cumsum(1) - ended == 0).float()
    mask = torch.cat([encoded["attention_mask"], sampled.long()], dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    model.train()
    logits = model(input_ids=sequences, attention_mask=mask, position_ids=positions, use_cache=False).logits
    logprobs = torch.log_softmax(logits[:, width - 1 : -1].float(), -1).gather(2, completions[..., None]).squeeze(2)
    weights = sampled / sampled.sum(1, keepdim=True) / len(sequences)
    loss = -(weights * torch.exp(logprobs - logprobs.detach()) * advantages[:, None]).sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return int(sampled.sum())


if __name__ == "__main__":
    main()
