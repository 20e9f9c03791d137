"""Four real ranks, divided in several ways: `python -m tests.ranks.parallelism MODEL DIRECTORY`."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holdfast.config import DpoConfig, training
from holdfast.config.data import SftDataConfig
from holdfast.config.preference import PreferenceDataConfig
from holdfast.config.training import AdamWConfig, ParallelConfig, TrainedModelConfig
from holdfast.trainer.checkpoint.checkpointer import load_state_with_optimizer, save_state
from holdfast.trainer.mesh import Mesh, join_mesh
from holdfast.trainer.model.lora import whole_tensors
from holdfast.trainer.model.parity_check import check_model
from holdfast.trainer.model.policy import Policy, build_policy, supervised_step
from holdfast.trainer.model.value_model import build_scalar_model, score_samples
from holdfast.trainer.optimizer import build_optimizer, clip_gradients, update_parameters
from holdfast.trainer.preference.pairs import Pair
from holdfast.trainer.preference.reference import Reference, reference_logprobs
from holdfast.trainer.programs.dpo import dpo_objective
from tests.models.families import gradients_of, random_samples
from tests.ranks.checkpoints import whole
from tests.ranks.policy_metrics import measured, ragged_samples, statistics_of, taught
from tests.ranks.two import run_on_ranks

RANKS = 4
LENGTHS = (23, 5, 31, 2, 14, 9, 30)
STEPS = 2
LORA = {"lora": {"rank": 2, "target_modules": ["q_proj", "down_proj"]}}
# How the ranks are divided, and what is trained then; `measured` is the one whose ranks `measure` as well.
DIVISIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "copies of shards": ({"replicas": 2}, ("adamw", "muon", "lora", "compact")),
    "slices": ({"sequence_parallel": 4}, ("adamw",)),
    "copies of slices": ({"sequence_parallel": 2, "replicas": 2}, ("adamw", "lora")),
    "offloaded copies of shards": ({"replicas": 2, "cpu_offload": True}, ("adamw", "muon", "lora", "compact")),
    "offloaded copies of slices": ({"sequence_parallel": 2, "replicas": 2, "cpu_offload": True}, ("adamw", "lora")),
}
# Of a mixture of experts.
EXPERTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "shards of experts": ({}, ()),
    "halves of experts": ({"expert_parallel": 2}, ("adamw", "clipped", "adapters", "compact")),
    "quarters of experts": ({"expert_parallel": 4}, ("clipped",)),
    "copies of halves": ({"expert_parallel": 2, "replicas": 2}, ("clipped",)),
    "slices and quarters": ({"expert_parallel": 4, "sequence_parallel": 2}, ("clipped",)),
}
RESUMED = "halves of experts"
MEASURED = "copies of slices"
RUNS: dict[str, tuple[dict[str, Any], training.AnyOptim]] = {
    "adamw": ({}, AdamWConfig(lr=1e-2, eps=1e-2, max_grad_norm=float("inf"))),
    "muon": ({}, training.MuonConfig(lr=1e-2, max_grad_norm=0.5)),
    "compact": ({}, AdamWConfig(lr=1e-2, eps=1e-2, moments_dtype="bfloat16")),
    "lora": (LORA, AdamWConfig(lr=1e-2, max_grad_norm=0.5)),
    "clipped": ({}, AdamWConfig(lr=1e-2, eps=1e-2, max_grad_norm=0.5)),
    "adapters": ({"lora": {"rank": 2}}, AdamWConfig(lr=1e-2, max_grad_norm=0.5)),
}


def build(model_dir: Path, mesh: Mesh, run: str) -> tuple[Policy, torch.optim.Optimizer, dict[str, Any]]:
    """Return policy and optimizer, and their state. Collective."""
    model, optim = RUNS[run]
    config = TrainedModelConfig.model_validate({"name": str(model_dir), "logits_chunk_tokens": 8} | model)
    policy = build_policy(config, mesh, seed=0)
    optimizer = build_optimizer(policy.hf_model, optim)
    return policy, optimizer, {"model": policy.hf_model, "optimizer": optimizer}


def train(model_dir: Path, mesh: Mesh, run: str, *, between: Path | None = None) -> dict[str, Tensor]:
    """Return losses and norms of a few supervised steps, and the weights after them. Collective.

    Args:
        between: where to save before the last step, which new objects take that load the state."""
    policy, optimizer, objects = build(model_dir, mesh, run)
    optim = RUNS[run][1]
    data, samples = SftDataConfig(name="", seq_len=32, micro_batch_size=1), random_samples(LENGTHS, seed=1)
    losses, norms = list[float](), list[float]()
    for step in range(STEPS):
        if between is not None and step == STEPS - 1:
            save_state(between, objects, step=step)
            policy, optimizer, objects = build(model_dir, mesh, run)
            load_state_with_optimizer(between, objects)
        losses.append(supervised_step(policy, samples, data, mesh)["loss"])
        norms.append(clip_gradients(policy, optim.max_grad_norm))
        update_parameters(optimizer, lr=optim.lr)
    found = {"losses": torch.tensor(losses, dtype=torch.float64), "norms": torch.tensor(norms, dtype=torch.float64)}
    return found | {name: tensor.clone() for name, tensor in whole_tensors(policy.hf_model, keep=True)}


def measure(model_dir: Path, mesh: Mesh) -> dict[str, Any]:
    """Return what RL, preferences and reward models compute of samples, and gradients of it. Collective."""
    samples, config = ragged_samples(), TrainedModelConfig(name=str(model_dir))
    found: dict[str, Any] = {"statistics": statistics_of(mesh)}
    found |= {f"logprob {number}": torch.tensor(one) for number, one in enumerate(measured(model_dir, mesh))}
    for how, shares in (("taught", False), ("taught of shared prompts", True)):
        found |= {f"{how} {name}": one for name, one in taught(model_dir, mesh, shares=shares).items()}
    policy = build_policy(config, mesh, seed=0)
    check_model(policy, mesh, name=config.name, pack=True, dtype="float32")
    pairs = PreferenceDataConfig(name="", batch_size=2, seq_len=12, micro_batch_size=1)
    given = [Pair(*samples[place : place + 2], number=place // 2) for place in (0, 2)]
    reference_P2 = reference_logprobs(policy, given, pairs, mesh)
    dpo = DpoConfig(output_dir=model_dir, model=config, data=pairs)
    compared = dpo_objective(dpo, Reference(reference_P2 - 0.1, {}), mesh).accumulate_gradients(policy, given)
    found |= {"reference": torch.from_numpy(reference_P2), "dpo": torch.tensor(list(compared.values()))}
    found["norm of dpo"] = torch.tensor(clip_gradients(policy, 1.0))
    rows = SftDataConfig(name="", pack=False, micro_batch_size=2)
    found["rows"] = torch.tensor(supervised_step(policy, samples, rows, mesh)["loss"])
    scalar = build_scalar_model(config, mesh, seed=0)
    check_model(scalar, mesh, name=config.name, pack=True, dtype="float32")
    scores_S = score_samples(scalar, samples, list(range(len(samples))), pack=True, device=mesh.device)
    scores_S.square().sum().backward()  # the same on every rank, so its mean over ranks is itself
    found["scores"] = scores_S.detach()
    assert all(parameter.grad is not None for parameter in scalar.parameters())
    # Ranks that share the tokens of a sample have a part of its gradient each.
    parts = mesh.world_size // mesh.data_size
    return found | {f"scored {name}": gradient * parts for name, gradient in gradients_of(scalar.hf_model).items()}


def _work(given: Mesh, model_dir: Path, directory: Path) -> dict[tuple[str, str], dict[str, Any]]:
    found: dict[tuple[str, str], dict[str, Any]] = {}
    has_experts, saved = "moe" in model_dir.name, directory / "one"
    for division, (settings, runs) in (EXPERTS if has_experts else DIVISIONS).items():
        config = ParallelConfig(num_ranks=RANKS, **settings)
        mesh = join_mesh(config, rank=given.rank, world_size=RANKS, device=given.device)
        found |= {(division, run): train(model_dir, mesh, run) for run in runs}
        if has_experts:  # each loads what another has saved
            *_, objects = build(model_dir, mesh, "adamw")
            load_state_with_optimizer(saved, objects)
            found[division, "loaded"] = whole(objects)
            saved = directory / division
            save_state(saved, objects)
        if division == RESUMED:
            for run in ("adamw", "compact"):
                found[division, f"{run} resumed"] = train(model_dir, mesh, run, between=directory / f"{run} between")
        if division == MEASURED:
            found[division, "measured"] = measure(model_dir, mesh)
    return found


if __name__ == "__main__":
    run_on_ranks(_work, number=RANKS)
