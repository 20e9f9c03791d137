"""TRL's SFTTrainer, which `sft` is measured against, with the settings of the other contestants.

    python benchmarks/sft_throughput/trl_sft.py '{"model": ..., "data": ..., "packing": true, ...}'

Float32, no gradient checkpointing, fused AdamW, no logging, the same threads; what TRL sets otherwise stays. Packed,
its rows hold `seq_len` tokens, by best-fit decreasing, and samples of a forward pass do not see each other; one row
goes through the model at a time, because attention has a mask of the square of all that do. Grouped, samples of about
one length make a step. Prints one JSON object with the seconds and tokens of every step, without padding.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer


class CountedTrainer(SFTTrainer):
    """Counts the tokens that go through the model."""

    tokens = 0

    def training_step(self, model: Any, inputs: dict[str, Any], *others: Any, **named: Any) -> torch.Tensor:
        """Train on one micro-batch."""
        mask = inputs.get("attention_mask")
        self.tokens += int(mask.sum()) if mask is not None else inputs["input_ids"].numel()
        return super().training_step(model, inputs, *others, **named)


class Clock(TrainerCallback):
    """Notes when every step ends, and how many tokens were trained until then."""

    def __init__(self) -> None:
        self.trainer: CountedTrainer | None = None
        self.ends: list[tuple[float, int]] = []

    def on_step_end(self, *_: object, **__: object) -> None:
        """Note the end of a step."""
        assert self.trainer is not None
        self.ends.append((time.perf_counter(), self.trainer.tokens))


def main() -> None:
    """Train `steps` steps and print what each took."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(settings["threads"])
    torch.manual_seed(0)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        clock.trainer = CountedTrainer(
            model=AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(settings["model"]), dtype=torch.float32),
            args=training_arguments(settings, folder),
            train_dataset=Dataset.from_list([json.loads(line) for line in open(settings["data"])]),
            processing_class=AutoTokenizer.from_pretrained(settings["model"]),
            callbacks=[clock],
        )
        begin = time.perf_counter()
        clock.trainer.train()
    times, tokens = zip(*[(begin, 0), *clock.ends], strict=True)
    steps = [
        {"seconds": times[k + 1] - times[k], "tokens": tokens[k + 1] - tokens[k]} for k in range(settings["steps"])
    ]
    print(json.dumps(steps))


def training_arguments(settings: dict[str, Any], folder: str) -> SFTConfig:
    """Return what TRL is told."""
    batch, micro = settings["batch_size"], settings["micro_batch_size"]
    if settings["packing"]:
        # About as many samples a step as the others train: a packed row holds several.
        batch, micro = max(1, round(batch * settings["mean_tokens"] / settings["seq_len"])), 1
    return SFTConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        dataloader_pin_memory=False,
        max_steps=settings["steps"],
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_length=settings["seq_len"],
        packing=settings["packing"],
        train_sampling_strategy="group_by_length" if settings["grouped"] else "random",
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=max(1, round(batch / micro)),
    )


if __name__ == "__main__":
    main()
