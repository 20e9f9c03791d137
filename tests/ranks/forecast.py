"""Real ranks take the steps that are forecast: `python -m tests.ranks.forecast MODEL DIRECTORY`."""

import math
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

from holdfast.config import SftConfig, TrainerConfig
from holdfast.config.preference import DpoConfig
from holdfast.config.training import TrainingCommand
from holdfast.run.forecast import Collectives, Load, Room, extended
from holdfast.trainer.forecast.drive import Planner, drive, ways_out
from holdfast.trainer.forecast.tracker import StepTracker, collective_of
from holdfast.trainer.mesh import Mesh, join_mesh
from holdfast.trainer.model.policy import build_policy
from tests.ranks.two import run_on_ranks

LOAD = Load(rollouts=32, group_size=4, seq_len=96, max_tokens=32)
LAYERS, FEW = 14, 2
DIVISIONS: dict[str, dict[str, Any]] = {
    "fsdp": {}, "hsdp": {"parallel": {"replicas": 2}}, "ulysses": {"parallel": {"sequence_parallel": 2}},
    "lora": {"model": {"lora": {"rank": 4}}}, "experts": {"parallel": {"expert_parallel": 2}},
}  # fmt: skip
"""Ways to divide four ranks."""
MIXED = {"init": "random", "dtype": "bfloat16"}  # float32 has no fused experts without numbers
EVEN, CHOSEN = "all experts", "a few experts"
"""Models on four ranks: a token goes to all eight experts, so each gets as many, or to two that the model chooses."""
REAL = "135M parameters"
"""A model of SmolLM2's sizes, on two ranks."""
_WIDTHS = {"float": 4, "c10::BFloat16": 2, "long int": 8, "int": 4, "double": 8, "unsigned char": 1, "bool": 1}
"""Bytes of a number, by the profiler's names."""


def sft(directory: Path, *, ranks: int = 2, **given: dict[str, Any]) -> SftConfig:
    """Return settings with two rows on each rank."""
    data = {"name": "none", "seq_len": 256, "micro_batch_size": 2, "batch_size": 4 * ranks}
    return SftConfig.model_validate(
        {
            "model": {"name": str(directory), "logits_chunk_tokens": 256} | given.get("model", {}),
            "parallel": {"num_ranks": ranks} | given.get("parallel", {}), "data": data | given.get("data", {}),
            "optim": given.get("optim", {}), "max_steps": 1,
        }
    )  # fmt: skip


def programs(model: Path) -> dict[str, TrainingCommand]:
    if model.name == REAL:
        random = {"init": "random"}
        return {"135M": sft(model, model=random), "135M in bfloat16": sft(model, model=random | {"dtype": "bfloat16"})}
    if model.name in (EVEN, CHOSEN):
        halves, quarters, copies = (
            sft(model, ranks=4, model=MIXED, parallel={"expert_parallel": number, "replicas": replicas})
            for number, replicas in ((2, 1), (4, 1), (2, 2))
        )
        if model.name == CHOSEN:
            return {"chosen": halves}
        rl = TrainerConfig(model=quarters.model, parallel=quarters.parallel, row_tokens=512)
        return {"halves": halves, "copies of halves": copies, "rl of quarters": rl}
    plain = sft(model)
    both = {"model": plain.model, "parallel": plain.parallel}
    return {
        "sft": plain,
        "sft in bfloat16": sft(model, model={"dtype": "bfloat16"}),
        "compact": sft(model, optim={"moments_dtype": "bfloat16"}),
        "dpo": DpoConfig(**both, data=plain.data.model_dump(exclude={"mix"}) | {"seq_len": 128}),  # type: ignore[arg-type]
        "rl": TrainerConfig(**both, row_tokens=512),  # type: ignore[arg-type]
        "lora": sft(model, model={"lora": {"rank": 4}}),
    }


def save_forecasts(model: str, path: str) -> None:
    """Forecast the programs of one model, in a process without ranks."""
    planner = Planner(sft(Path(model)).model, is_gpu=False)
    torch.save({name: planner.forecast(config, LOAD) for name, config in programs(Path(model)).items()}, path)


def save_divisions(path: str) -> None:
    """Write all models beside `path`. Forecast how ranks are divided, and a model by fewer of its layers."""
    fields: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS,
                              "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
                              "tie_word_embeddings": False}  # fmt: skip
    deep, real, *mixtures = (Path(path).with_name(name) for name in ("deep", REAL, EVEN, CHOSEN))
    Qwen3Config(**fields).save_pretrained(deep)
    for mixture, chosen, layers in zip(mixtures, (8, 2), (FEW, LAYERS), strict=True):
        sizes = fields | {"num_hidden_layers": layers, "moe_intermediate_size": 32}
        Qwen3MoeConfig(**sizes, num_experts=8, num_experts_per_tok=chosen).save_pretrained(mixture)
    LlamaConfig(hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
                num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True).save_pretrained(real)  # fmt: skip
    found: dict[str, Any] = {"divided": {}, "whole": {}, "extended": {}}
    bf16 = {"dtype": "bfloat16", "activation_checkpointing": True}
    planners = {own: Planner(sft(own).model, is_gpu=True) for own in (deep, mixtures[1])}
    for name, given in DIVISIONS.items():
        own = mixtures[1] if name == "experts" else deep
        config = sft(own, ranks=4, **given | {"model": bf16 | given.get("model", {})})
        found["divided"][name] = planners[own].driven(config, LOAD, FEW)[0]
        if name in ("fsdp", "experts"):
            config = config if name == "experts" else sft(deep, model=bf16)
            few = {count: planners[own].driven(config, LOAD, count)[0] for count in (6, 10, LAYERS)}
            found["whole"][name], found["extended"][name] = few[LAYERS], extended(few[6], few[10], (6, 10), LAYERS)
    found["alone"] = planners[deep].driven(sft(deep, ranks=1, model=bf16), LOAD, FEW)[0]
    small = sft(mixtures[1], ranks=4, model=bf16, data={"micro_batch_size": 1})
    found["ways"] = list(ways_out(planners[mixtures[1]], small, LOAD, Room(1 << 30), ""))
    torch.save(found, path)


def _work(given: Mesh, model: Path, _: Path) -> dict[str, Any]:
    found = {}
    for name, config in programs(model).items():
        size = given.world_size
        mesh = join_mesh(config.parallel, rank=given.rank, world_size=size, device=given.device)
        tracker = StepTracker()
        with tracker.watching():
            policy = build_policy(config.model, mesh, seed=0)
        before = tracker.now
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as profiled:
            drive(config, policy, mesh, tracker, LOAD)
        now = peak = before
        sent, by_gloo = Collectives(), Counter[str]()
        for event in profiled.profiler.kineto_results.events():  # type: ignore[union-attr]
            operator, sizes = event.name(), list(_sizes(event))
            if operator == "[memory]":
                now += event.nbytes()
                peak = max(peak, now)
            elif operator.startswith("gloo:"):
                by_gloo[operator] += max(sizes)
            elif operator.startswith("c10d::") and (kind := collective_of(operator.replace("::", "."))):
                sent.add(kind, 1, max(sizes, default=0))
                by_gloo[operator] += min(sizes, default=0)
        # Some operators hide their tensors in lists. Gloo also scatters sums by an all-reduce.
        sent.add("all-reduce", 0, by_gloo["gloo:all_reduce"] - sent.kinds["reduce-scatter"][1])
        sent.add("all-gather", 0, size * (by_gloo["gloo:all_gather"] - by_gloo["c10d::_allgather_base_"]))
        found[name] = {"peak": peak, "sent": sent.kinds}
    return found


def _sizes(event: Any) -> Iterator[int]:
    """Yield the bytes of each tensor that an operator was given."""
    for shape, dtype in zip(event.shapes(), event.dtypes(), strict=True):
        if dtype in _WIDTHS:
            yield _WIDTHS[dtype] * math.prod(shape)


if __name__ == "__main__":
    run_on_ranks(_work, number=4 if Path(sys.argv[1]).name in (EVEN, CHOSEN) else 2)
