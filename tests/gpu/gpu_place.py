"""Where a check runs and how large, and the figures that it finds."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from tests.conftest import BASE
from tests.runs.training import SftRun, run_command, write_data

FIGURES_ENV = "TESTS_GPU_FIGURES"
"""A file that gets one JSON line for every figure."""

TOY = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "tie_word_embeddings": True,
    "pad_token_id": 0, "eos_token_id": 3, "bos_token_id": None,
}  # fmt: skip
# The shape of Qwen3-0.6B: three of its checkpoints are 22 GB.
SMALL = TOY | {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
}  # fmt: skip
# The shape of Qwen3-1.7B, whose activations of 8,192 tokens an 80 GB card holds.
LARGE = SMALL | {"hidden_size": 2048, "intermediate_size": 6144}


@dataclass(frozen=True)
class Figure:
    check: str
    what: str
    value: float
    unit: str
    expected: str = ""

    def __str__(self) -> str:
        expected = f" (expected {self.expected})" if self.expected else ""
        return f"{self.check}: {self.what}: {self.value:.4g} {self.unit}{expected}"


@dataclass(frozen=True)
class Place:
    device: str  # `cuda` or `cpu`
    folder: Path  # for runs, models and data
    is_toy: bool  # tiny shapes, and commands forked from a process that has imported torch; otherwise real ones
    figures: list[Figure] = field(default_factory=list)  # what was found

    def note(self, check: str, what: str, value: float, unit: str, expected: str = "") -> None:
        figure = Figure(check, what, value, unit, expected)
        self.figures.append(figure)
        print(figure, flush=True)
        if path := os.environ.get(FIGURES_ENV):
            with open(path, "a") as file:
                file.write(json.dumps(asdict(figure)) + "\n")

    def model(self, **fields: Any) -> Path:
        """Return the directory of a model without weights, Qwen3 of the example's characters."""
        directory = self.folder / ("model_" + "_".join(f"{name}_{value}" for name, value in fields.items()))[:80]
        if not directory.exists():
            config = AutoConfig.for_model("qwen3", **(TOY | fields))
            config.architectures = ["Qwen3ForCausalLM"]
            config.save_pretrained(directory)
            for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
                shutil.copy(BASE / name, directory)
        return directory

    def data(self) -> Path:
        path = self.folder / "samples.jsonl"
        return path if path.exists() else write_data(path)

    def command(self, name: str, *flags: object, program: str = "sft", device: str | None = None) -> list[str]:
        """Return the command of a run in the directory `name`; weights random where it is `sft`."""
        output = self.folder / name
        settings = {"output-dir": output, "parallel.device": device or self.device, "parallel.threads": 1}
        words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        installed = str(Path(sys.executable).with_name(program))
        start = [installed] if self.is_toy else [sys.executable, "-m", "holdfast", program]
        return [*start, *words, *map(str, flags)]

    def run(self, name: str, *flags: object, program: str = "sft", device: str | None = None) -> SftRun:
        command = self.command(name, *flags, program=program, device=device)
        return run_command(command, self.folder / name, starts_python=not self.is_toy)

    def small(self, *flags: object) -> list[object]:
        """Return flags of short steps of several micro-batches of the tiny model, `flags` last."""
        return [
            "--model.name", self.model(), "--model.init", "random", "--data.name", self.data(), "--data.batch-size", 8,
            "--data.micro-batch-size", 2, "--data.seq-len", 32, "--optim.lr", 1e-3, "--optim.schedule", "constant",
            "--seed", 3, *flags,
        ]  # fmt: skip

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, action: Callable[[], object], *, repeat: int = 3) -> float:
        """Return the least seconds of an action, which is warm by then."""
        action()
        found = []
        for _ in range(repeat):
            self.synchronize()
            begin = time.perf_counter()
            action()
            self.synchronize()
            found.append(time.perf_counter() - begin)
        return min(found)

    @contextmanager
    def peak_mib(self) -> Iterator[Callable[[], float]]:
        """Return what says the most memory of the device in the block, beyond what was taken before; 0 on a CPU."""
        if self.device != "cuda":
            yield lambda: 0.0
            return
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield lambda: (torch.cuda.max_memory_allocated() - before) / 2**20
