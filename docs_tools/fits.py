"""Writes the table of docs/memory.md: which GPUs a model fits, as the plan of `--dry-run` calculates it.

    python -m docs_tools.fits [MODEL ...]

drives the steps of all models, or prints the rows of some. It takes about ten minutes of one core.
"""

from __future__ import annotations

import logging
import re
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from holdfast.config import RlConfig, SftConfig
from holdfast.config.resolved import GPU_MEMORY_UTILIZATION, choose_for_training
from holdfast.config.training import TrainingCommand
from holdfast.launcher.forecast import CARDS_GB, RESERVED_BYTES, PlannedEngine, load_of
from holdfast.run.forecast import Forecast, Load, Room
from holdfast.trainer.forecast.drive import Planner

PAGE = Path(__file__).resolve().parents[1] / "docs" / "memory.md"
_BEGIN, _END = "<!-- fits -->", "<!-- /fits -->"
_QWEN2 = {"model_type": "qwen2", "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True}
MODELS: dict[str, dict[str, Any]] = {
    # Qwen2.5, table 1 of arXiv:2412.15115, and its config.json.
    "0.5B": {**_QWEN2, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
             "num_attention_heads": 14},
    "1.5B": {**_QWEN2, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
             "num_attention_heads": 12},
    "3B": {**_QWEN2, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
           "num_attention_heads": 16},
    # Qwen3-8B, table 1 of arXiv:2505.09388, and its config.json.
    "8B": {"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
           "tie_word_embeddings": False},
}  # fmt: skip
_RANKS = (1, 2, 4, 8)
_METHODS = ("full", "LoRA")
_TOKENS = 2048
"""The length of a sample or rollout; half of a rollout is its answer."""


class _Model:
    """The forecasts of one model."""

    def __init__(self, directory: str) -> None:
        self._name = directory
        self._planner = Planner(SftConfig.model_validate(self._given()).model, is_gpu=True)
        self.forecast = cache(self._forecast)

    def _given(self, method: str = "full", ranks: int = 1) -> dict[str, Any]:
        lora = {"lora": {}} if method == "LoRA" else {}
        return {"model": {"name": self._name, **lora}, "parallel": {"num_ranks": ranks}}

    def rl(self, method: str, ranks: int) -> RlConfig:
        """Return the settings of `rl`."""
        return RlConfig.model_validate({
            "trainer": self._given(method, ranks),
            "orchestrator": {
                "seq_len": _TOKENS, "sampling": {"max_tokens": _TOKENS // 2}, "environments": [{"id": "reverse_text"}]
            },
            "inference": {"model": {"name": self._name, "max_len": _TOKENS, "dtype": "bfloat16"}},
        })  # fmt: skip

    def _forecast(self, program: str, method: str, ranks: int) -> Forecast:
        config: TrainingCommand
        if program == "sft":
            data = {"name": "any", "seq_len": _TOKENS}
            config, load = SftConfig.model_validate(self._given(method, ranks) | {"data": data}), Load()
        else:
            of_all = self.rl(method, ranks)
            config, load = of_all.trainer, load_of(of_all.orchestrator)
        choose_for_training(config, "cuda", num_devices=ranks)
        return self._planner.forecast(config, load)

    def cell(self, program: str, method: str, card: float) -> str:
        """Return the fewest GPUs that take a run."""
        if program == "rl" and self._shares(method, card):
            return "1, shared"
        for ranks in _RANKS:
            if self.forecast(program, method, ranks).peak[1].total + RESERVED_BYTES <= card:
                beside = "+1" if program == "rl" else ""
                return f"{ranks}{beside}" if not beside or self._serves(method, card) else "none"
        return f"more than {_RANKS[-1]}"

    def _shares(self, method: str, card: float) -> bool:
        engine = PlannedEngine(self.rl(method, 1).inference, shares=True).size
        return Room(int(card), RESERVED_BYTES, engine).fits(self.forecast("rl", method, 1))

    def _serves(self, method: str, card: float) -> bool:
        inference = self.rl(method, 1).inference
        inference.engine.gpu_memory_utilization = GPU_MEMORY_UTILIZATION
        return PlannedEngine(inference, shares=False).room(self.forecast("rl", method, 1), card)[1] >= 0


def rows(names: list[str]) -> Iterator[str]:
    """Yield the rows of these models."""
    for name in names:
        with tempfile.TemporaryDirectory() as directory:
            AutoConfig.for_model(**MODELS[name]).save_pretrained(directory)
            model = _Model(directory)
            for program in ("sft", "rl"):
                cells = [model.cell(program, method, gb * 1e9) for method in _METHODS for gb in CARDS_GB]
                yield f"|{name}|`{program}`|{'|'.join(cells)}|"


def table(names: list[str]) -> str:
    """Return the table of these models."""
    first = [f"{method}: {gb} GB" if gb == CARDS_GB[0] else f"{gb} GB" for method in _METHODS for gb in CARDS_GB]
    heads = ["model", "program", *first]
    return "\n".join([f"|{'|'.join(heads)}|", "|---" * len(heads) + "|", *rows(names)])


def main() -> None:
    """Write the page, or print the rows of the models that are named."""
    logging.disable()
    if names := sys.argv[1:]:
        print("\n".join(rows(names)))
        return
    written = f"{_BEGIN}\n{table([*MODELS])}\n{_END}"
    PAGE.write_text(re.sub(f"{_BEGIN}.*{_END}", lambda _: written, PAGE.read_text(), flags=re.DOTALL))


if __name__ == "__main__":
    main()
