"""Muon beside AdamW: against torch's own, which matrices it takes, and what it makes of a matrix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from holdfast.config.rl_trainer import TrainerConfig
from holdfast.config.training import OptimConfig, SftConfig
from holdfast.trainer.optimizer import build_optimizer, hidden_matrices, initial_moments, update_parameters

MUON = OptimConfig(type="muon", lr=0.02, momentum=0.9, weight_decay=0.1)


def names_of(model: nn.Module) -> set[str]:
    """The last parts of the names of what Muon takes of a model."""
    chosen = {id(matrix) for matrix in hidden_matrices(model)}  # type: ignore[arg-type]
    return {".".join(name.split(".")[-2:]) for name, one in model.named_parameters() if id(one) in chosen}


def test_embeddings_heads_norms_and_biases_are_not_for_muon(tiny_model: Callable[..., Path]) -> None:
    attention, mlp = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    linear = {f"{name}.weight" for name in (*attention, *mlp)}
    assert names_of(AutoModelForCausalLM.from_pretrained(tiny_model(tied=False))) == linear
    assert names_of(AutoModelForSequenceClassification.from_pretrained(tiny_model("llama"), num_labels=1)) == linear
    gpt2 = names_of(AutoModelForCausalLM.from_pretrained(tiny_model("gpt2")))
    assert gpt2 == {"c_attn.weight", "c_proj.weight", "c_fc.weight"}


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_steps_are_those_of_torch(tiny_model: Callable[..., Path], weight_decay: float) -> None:
    ours, theirs = (AutoModelForCausalLM.from_pretrained(tiny_model(tied=False)) for _ in range(2))
    config = MUON.model_copy(update={"weight_decay": weight_decay})
    optimizer = build_optimizer(ours, config)
    matrices = hidden_matrices(theirs)
    known = {id(matrix) for matrix in matrices}
    rest = [parameter for parameter in theirs.parameters() if id(parameter) not in known]
    muon = torch.optim.Muon(matrices, lr=0.02, momentum=0.9, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [
            {"params": [one for one in rest if one.ndim >= 2], "weight_decay": weight_decay},
            {"params": [one for one in rest if one.ndim < 2], "weight_decay": 0.0},
        ],
        lr=0.02, betas=(0.9, 0.95), eps=1e-8, fused=True,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for lr in (0.01, 0.02, 0.005):
        for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            own.grad = torch.randn(own.shape, generator=generator)
            other.grad = own.grad.clone()
        update_parameters(optimizer, lr=lr)
        for one in (muon, adamw):
            update_parameters(one, lr=lr)
    assert all(parameter.grad is None for parameter in ours.parameters())
    for (name, own), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=0, msg=name)


def test_what_is_kept_of_a_parameter_is_what_a_first_step_makes(tiny_model: Callable[..., Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model())
    for config in (MUON, OptimConfig()):
        optimizer = build_optimizer(model, config)
        made = {parameter: initial_moments(optimizer, parameter) for parameter in model.parameters()}
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        update_parameters(optimizer, lr=1e-3)
        for parameter, moments in made.items():
            state: dict[str, Tensor] = optimizer.state[parameter]
            assert {key: (one.shape, one.dtype) for key, one in moments.items()} == {
                key: (one.shape, one.dtype) for key, one in state.items()
            }
            assert not any(one.any() for one in moments.values())


def test_a_parameter_without_a_gradient_stays(tiny_model: Callable[..., Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model())
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    update_parameters(build_optimizer(model, MUON), lr=0.1)
    assert all(torch.equal(one, before[name]) for name, one in model.named_parameters())


def test_muon_is_refused_where_it_is_not_what_it_says() -> None:
    with pytest.raises(ValueError, match="momentum = 0.9 is for type = 'muon'"):
        OptimConfig(momentum=0.9)
    for config in (SftConfig, TrainerConfig):
        with pytest.raises(ValueError, match="optim.type = 'muon' is for whole matrices, and model.lora"):
            config.model_validate({"optim": {"type": "muon"}, "model": {"lora": {}}})
