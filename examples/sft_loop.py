"""Supervised fine-tuning as one plain PyTorch loop that can be killed at any moment.

    uv run python examples/sft_loop.py outputs/sft_loop 100

Give the same command again after a crash, a kill or a power cut: it goes on behind the last checkpoint and ends with
the same bits. The model is a character model of 0.6M parameters that learns to reverse text, from random weights; 100
steps take about a minute on a laptop's CPU. `sft` is this loop with sharding, packing, LoRA, validation and much else:
read `src/holdfast/trainer/programs/sft.py` next.

Shape legend: B rows of a micro-batch, T tokens of its longest row, N targets: tokens of completions.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from holdfast import Checkpointer, Retention

EXAMPLE = Path(__file__).parent / "reverse_text"
SEED = 0
BATCH_SIZE = 128  # rows of one optimizer step
MICRO_BATCH_SIZE = 32  # rows of one forward and backward pass
LEARNING_RATE = 6e-3
WARMUP_STEPS = 10
SAVE_INTERVAL = 5


@dataclass(frozen=True)
class Row:
    """One tokenised row: the prompt is read, the completion behind it is learned."""

    token_ids: list[int]
    num_prompt_tokens: int

    @property
    def num_targets(self) -> int:
        """How many tokens are learned."""
        return len(self.token_ids) - self.num_prompt_tokens


def read_rows(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[Row]:
    """Return the rows of a JSONL file of `prompt` and `completion`, each a list of messages."""
    rows = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        whole = tokenizer.apply_chat_template(row["prompt"] + row["completion"], return_dict=False)
        assert whole[: len(prompt)] == prompt, "the template must not change what the policy has seen"
        rows.append(Row(whole, len(prompt)))
    return rows


def batch_of(rows: list[Row], step: int) -> list[Row]:
    """Return the rows of a step, counted from 1: a pure function of seed and step, so there is no order to save."""
    batch = []
    for position in range((step - 1) * BATCH_SIZE, step * BATCH_SIZE):
        epoch, place = divmod(position, len(rows))
        batch.append(rows[order_of(epoch, len(rows))[place]])
    return batch


@cache
def order_of(epoch: int, num_rows: int) -> list[int]:
    """Return the order in which an epoch takes its rows."""
    generator = torch.Generator().manual_seed(SEED + epoch)  # its own, so that the global one is not disturbed
    return torch.randperm(num_rows, generator=generator).tolist()


def learning_rate(step: int, max_steps: int) -> float:
    """Warm up linearly, then fall to 0 along a cosine."""
    if step <= WARMUP_STEPS:
        return LEARNING_RATE * step / WARMUP_STEPS
    share = (step - WARMUP_STEPS) / max(1, max_steps - WARMUP_STEPS)
    return LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * share))


def summed_loss(model: PreTrainedModel, rows: list[Row]) -> Tensor:
    """Return the negative log-likelihood of the rows' targets, summed."""
    longest = max(len(row.token_ids) for row in rows)
    tokens_BT = torch.zeros(len(rows), longest, dtype=torch.long)  # padded at the end: no earlier token sees it
    is_target_BT = torch.zeros(len(rows), longest, dtype=torch.bool)
    for b, row in enumerate(rows):
        tokens_BT[b, : len(row.token_ids)] = torch.tensor(row.token_ids)
        is_target_BT[b, row.num_prompt_tokens : len(row.token_ids)] = True
    logits_BTV = model(tokens_BT).logits
    predicted_NV = logits_BTV[:, :-1][is_target_BT[:, 1:]].float()  # the token at t is predicted at t - 1
    return torch.nn.functional.cross_entropy(predicted_NV, tokens_BT[is_target_BT], reduction="sum")


def main(directory: str, max_steps: int) -> None:
    """Train until `max_steps`, from wherever the checkpoints in `directory` have got to."""
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE / "base")
    rows = read_rows(EXAMPLE / "sft.jsonl", tokenizer)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(EXAMPLE / "base"))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    print(f"{len(rows)} rows, {BATCH_SIZE} a step in micro-batches of {MICRO_BATCH_SIZE}", flush=True)

    # Whatever the rest of the run depends on must be in the state, or be a function of the step.
    state = {"model": model, "optimizer": optimizer}
    with Checkpointer(directory, state, retention=Retention(keep=2)) as checkpointer:
        step = checkpointer.load("auto")  # random generators too; 0 where there is nothing to load
        while step < max_steps:
            step += 1
            batch = batch_of(rows, step)
            num_targets = sum(row.num_targets for row in batch)
            loss = 0.0
            for start in range(0, BATCH_SIZE, MICRO_BATCH_SIZE):
                # Divided by the targets of the whole step: its loss does not depend on the micro-batches.
                part = summed_loss(model, batch[start : start + MICRO_BATCH_SIZE]) / num_targets
                part.backward()
                loss += part.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, max_steps)
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step}/{max_steps}  loss {loss:.4f}", flush=True)
            if step % SAVE_INTERVAL == 0 or step == max_steps:
                checkpointer.save(step)  # a copy in memory; it is written behind the next steps

    model.save_pretrained(Path(directory) / "model")
    tokenizer.save_pretrained(Path(directory) / "model")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
