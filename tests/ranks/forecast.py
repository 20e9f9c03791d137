"""Two real ranks take the steps that are forecast: `python -m tests.ranks.forecast MODEL DIRECTORY`."""

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config

from holdfast.config import SftConfig, TrainerConfig
from holdfast.config.preference import DpoConfig
from holdfast.config.training import TrainingCommand
from holdfast.run.forecast import Load, extended
from holdfast.trainer.forecast.drive import Planner, drive
from holdfast.trainer.forecast.tracker import StepTracker, collective_of
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.policy import build_policy
from tests.ranks.two import run_on_ranks

LOAD = Load(rollouts=32, group_size=4, seq_len=96, max_tokens=32)
LAYERS, FEW = 14, 2
DIVISIONS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "hsdp": {"parallel": {"replicas": 2}},
    "ulysses": {"parallel": {"sequence_parallel": 2}},
    "lora": {"model": {"lora": {"rank": 4}}},
}
"""Ways to divide four ranks."""


def sft(directory: Path, *, ranks: int = 2, **given: dict[str, Any]) -> SftConfig:
    """Return settings with two rows on each rank."""
    data = {"name": "none", "seq_len": 256, "micro_batch_size": 2, "batch_size": 4 * ranks}
    return SftConfig.model_validate(
        {
            "model": {"name": str(directory), "logits_chunk_tokens": 256} | given.get("model", {}),
            "parallel": {"num_ranks": ranks} | given.get("parallel", {}),
            "data": data | given.get("data", {}),
            "optim": given.get("optim", {}),
        }
    )


def programs(model: Path) -> dict[str, TrainingCommand]:
    plain = sft(model)
    both = {"model": plain.model, "parallel": plain.parallel}
    return {
        "sft": plain,
        "sft in bfloat16": sft(model, model={"dtype": "bfloat16"}),
        "compact": sft(model, optim={"moments_dtype": "bfloat16"}),
        "dpo": DpoConfig(**both, data=plain.data.model_dump() | {"seq_len": 128}),  # type: ignore[arg-type]
        "rl": TrainerConfig(**both, row_tokens=512),  # type: ignore[arg-type]
        "lora": sft(model, model={"lora": {"rank": 4}}),
    }


def save_forecasts(model: str, path: str) -> None:
    """Forecast the programs, the divisions, and a model by fewer of its layers; in a process without ranks."""
    planner = Planner(sft(Path(model)).model, is_gpu=False)
    found: dict[str, Any] = {name: planner.forecast(config, LOAD) for name, config in programs(Path(model)).items()}
    config = Qwen3Config(hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=16, vocab_size=512, tie_word_embeddings=False,
                         architectures=["Qwen3ForCausalLM"])  # fmt: skip
    deep = Path(path).with_name("deep")
    config.save_pretrained(deep)
    planner = Planner(sft(deep).model, is_gpu=True)
    bf16 = {"dtype": "bfloat16", "activation_checkpointing": True}
    found["divided"] = {
        name: planner.driven(sft(deep, ranks=4, **given | {"model": bf16 | given.get("model", {})}), LOAD, FEW)[0]
        for name, given in DIVISIONS.items()
    }
    few = {count: planner.driven(sft(deep, model=bf16), LOAD, count)[0] for count in (6, 10, LAYERS)}
    found["whole"], found["extended"] = few[LAYERS], extended(few[6], few[10], (6, 10), LAYERS)
    torch.save(found, path)


def _work(mesh: Mesh, model: Path, _: Path) -> dict[str, Any]:
    found = {}
    for name, config in programs(model).items():
        tracker = StepTracker()
        with tracker.watching():
            policy = build_policy(config.model, mesh, seed=0)
        before = tracker.now
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            drive(config, policy, mesh, tracker, LOAD)
        now = peak = before
        for event in profiled.profiler.kineto_results.events():  # type: ignore[union-attr]
            if event.name() == "[memory]":
                now += event.nbytes()
                peak = max(peak, now)
        keys = [one.key.replace("::", ".") for one in profiled.events()]
        sent = Counter(collective_of(key) for key in keys if key.startswith("c10d."))
        found[name] = {"peak": peak, "sent": {kind: count for kind, count in sent.items() if kind}}
    return found


if __name__ == "__main__":
    run_on_ranks(_work)
