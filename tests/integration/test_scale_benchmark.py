"""`benchmarks.scale` plans for ranks that are not there: its plans are those of real ones."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.scale.measure import Figures, plan_twice
from benchmarks.scale.models import model_tensors
from benchmarks.scale.plans import fake_mesh, local_plan, plan_of_rank, sharded_state
from holdfast.trainer.model.policy import Policy
from holdfast.trainer.model.structure import decoder_layers
from holdfast.trainer.state import Progress, TrainState

pytestmark = pytest.mark.ranks

NUM_RANKS = 2
TINY: dict[str, Any] = {  # three experts and odd widths: shards of unequal size, and empty ones
    "model_type": "deepseek_v3", "hidden_size": 24, "intermediate_size": 37, "moe_intermediate_size": 5,
    "num_hidden_layers": 2, "first_k_dense_replace": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "n_routed_experts": 3, "n_shared_experts": 1, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1,
    "q_lora_rank": 1, "kv_lora_rank": 6, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4,
    "vocab_size": 31,
}  # fmt: skip


def plan_for_real(rank: int, store: str) -> SavePlan:
    """In a process of its own: shard a model with FSDP2 and plan to save what the trainer saves."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, NUM_RANKS), rank=rank, world_size=NUM_RANKS)
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**TINY, tie_word_embeddings=False), dtype=torch.float32
    )
    policy = Policy(model, logits_chunk_tokens=8)
    for module in (*decoder_layers(model), policy):
        fully_shard(module, mesh=mesh)
    state = TrainState(policy, torch.optim.AdamW(model.parameters()), Progress())
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(state.tensors()), is_coordinator=rank == 0)
    plan = planner.create_local_plan()
    dist.barrier()
    dist.destroy_process_group()
    return plan


def simulated(rank: int) -> SavePlan:
    """In a process of its own: the plan of `rank` without any other rank, and made from rank 0's."""
    parameters, buffers = model_tensors(TINY)
    with fake_mesh(NUM_RANKS, rank=rank) as mesh:
        own = local_plan(sharded_state(parameters, buffers, mesh), rank=rank)
    with fake_mesh(NUM_RANKS) as mesh:
        first = local_plan(sharded_state(parameters, buffers, mesh), rank=0)
        assert plan_of_rank(first, rank, NUM_RANKS) == own
    return own


def figures_of_two_saves() -> Figures:
    """In a process of its own: plan twice, as the benchmark does."""
    figures = Figures()
    parameters, buffers = model_tensors(TINY)
    with fake_mesh(NUM_RANKS) as mesh:
        state = sharded_state(parameters, buffers, mesh)
        planned, metadata = plan_twice(figures, state, local_plan(state, rank=0), NUM_RANKS)
    written = [item.index for plan in planned for item in plan.items]
    assert len(written) == len(set(written)), "what all ranks hold is written once"
    assert metadata.state_dict_metadata.keys() == state.keys()
    return figures


def test_simulated_plans_are_those_of_real_ranks(tmp_path: Path) -> None:
    with ProcessPoolExecutor(NUM_RANKS, mp_context=multiprocessing.get_context("spawn")) as pool:
        real = list(pool.map(plan_for_real, range(NUM_RANKS), [str(tmp_path / "store")] * NUM_RANKS))
        assert list(pool.map(simulated, range(NUM_RANKS))) == real
        figures = pool.submit(figures_of_two_saves).result()
    assert real[0] != real[1] and len(real[0].items) > 100
    empty = [item for item in real[1].items if item.tensor_data and 0 in item.tensor_data.chunk.sizes]
    assert empty, "the widths leave a rank without a shard somewhere"
    assert figures.gathered_bytes > 0 and figures.global_s >= figures.validate_s
