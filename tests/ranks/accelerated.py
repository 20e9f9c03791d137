"""Two ranks that train with FSDP of accelerate, save their state at step 20 and return the losses of all steps:
`python -m tests.ranks.accelerated MODEL ROWS DIRECTORY`. The name of the directory is the kind of the state dict.

accelerate shards on GPUs only. Here its own code shards and saves on CPUs, because the test sets the kind of its state.
"""

import json
import os
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, get_linear_schedule_with_warmup

from holdfast.trainer.mesh import Mesh
from tests.ranks.two import run_on_ranks

STEP, LAST, BATCH = 20, 40, 8


def train(mesh: Mesh, model: Path, rows: Path, directory: Path) -> dict[int, float]:
    for name in ("RANK", "LOCAL_RANK"):
        os.environ[name] = str(mesh.rank)
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type=directory.name, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3DecoderLayer"], reshard_after_forward=True,
    )  # fmt: skip
    accelerator = Accelerator(cpu=True)
    state = cast(Any, accelerator.state)  # which every other object of accelerate sets back
    state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
    policy = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    assert all(isinstance(parameter, DTensor) for parameter in policy.parameters())
    schedule = get_linear_schedule_with_warmup(optimizer.optimizer, 4, LAST)
    accelerator.register_for_checkpointing(schedule)
    tokenizer = AutoTokenizer.from_pretrained(model)
    samples = [_tokens(json.loads(line), tokenizer) for line in rows.read_text().splitlines()]
    losses: dict[int, float] = {}
    for step in range(1, LAST + 1):
        batch = [samples[((step - 1) * BATCH + place) % len(samples)] for place in range(BATCH)]
        total = sum(len(ids) - start for ids, start in batch)
        loss = torch.zeros(())
        for ids, start in batch[accelerator.process_index :: 2]:
            logprobs = policy(input_ids=ids[None]).logits[0, start - 1 : -1].log_softmax(-1)
            loss = loss - logprobs.gather(1, ids[start:, None]).sum() / total
        accelerator.backward(2 * loss)  # FSDP averages over the ranks
        accelerator.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        losses[step] = whole.item()
        if step == STEP:
            state.distributed_type = DistributedType.FSDP
            accelerator.save_state(str(directory / f"step_{step}"))
    return losses


def _tokens(row: dict[str, str], tokenizer: Any) -> tuple[torch.Tensor, int]:
    """Return the tokens of a row, and where its completion begins."""
    prompt = tokenizer(row["prompt"])["input_ids"]
    return torch.tensor([*prompt, *tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]), len(prompt)


if __name__ == "__main__":
    run_on_ranks(train)
