"""Nothing waits for the device within a step: on `meta` whatever reads a number fails; copies must be `to_device`."""

import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from holdfast.config import DpoConfig, RewardTrainingConfig
from holdfast.config.algorithm import CriticConfig
from holdfast.config.data import SftDataConfig
from holdfast.config.policy_losses import PolicyLossConfig
from holdfast.protocol.rollouts import Sampling
from holdfast.trainer.data.packing import MicroBatch, Sample, to_device
from holdfast.trainer.mesh import Mesh, Sums
from holdfast.trainer.model.attention import KERNELS
from holdfast.trainer.model.logprobs import Reading, SamplingByToken
from holdfast.trainer.model.policy import Policy, predict, supervised_step
from holdfast.trainer.model.value_model import ScalarModel
from holdfast.trainer.preference.kto import KtoObjective
from holdfast.trainer.preference.pairs import LabelledAnswer, Pair
from holdfast.trainer.preference.reference import Reference, reference_logprobs
from holdfast.trainer.programs.dpo import dpo_objective
from holdfast.trainer.programs.reward_model import reward_objective
from holdfast.trainer.rl import auxiliary_models, batch
from holdfast.trainer.rl.auxiliary_models import Critic
from holdfast.trainer.rl.batch import Minibatch, measure_targets
from holdfast.trainer.rl.losses import build_policy_loss
from holdfast.trainer.rl.metrics import PolicyStatistics
from holdfast.trainer.rl.train_step import forward_backward
from tests.conftest import ModelFactory

META = torch.device("meta")


class Watch(TorchDispatchMode):
    """Refuses copies to the device that would wait for it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_copy = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        sources = [arg for arg in args[-1:] if isinstance(arg, Tensor) and arg.device.type == "cpu"]
        if is_copy and sources and isinstance(result, Tensor) and result.device == META:
            callers = {frame.f_code.co_name for frame, _ in traceback.walk_stack(sys._getframe())}
            assert "to_device" in callers, "a copy to the device that waits for it"
        return result


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Watch the device in the test; return the names of the sums that were read of it, one entry a read."""
    found = list[str]()
    tensor = torch.tensor

    def read(sums: Sums) -> dict[str, float]:
        found.append(" ".join(sums._sums))
        return dict.fromkeys(sums._sums, 0.5)

    def on_cpu(*args: Any, **kwargs: Any) -> Tensor:
        assert str(kwargs.get("device", "cpu")) in ("cpu", "None"), "torch.tensor would wait for the device"
        return tensor(*args, **kwargs)

    monkeypatch.setattr(Sums, "read", read)
    monkeypatch.setattr(torch, "tensor", on_cpu)
    with Watch():
        yield found


@pytest.fixture
def on_device(mesh: Mesh) -> Mesh:
    return replace(mesh, device=META)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the tokens of each forward pass."""
    found = list[int]()
    for kind in (Policy, ScalarModel):

        def hidden_states(model: Any, ids_BL: Tensor, *args: Any, _own: Any = kind.hidden_states, **kwargs: Any) -> Any:
            found.append(ids_BL.numel())
            return _own(model, ids_BL, *args, **kwargs)

        monkeypatch.setattr(kind, "hidden_states", hidden_states)
    return found


@pytest.fixture
def policy(tiny_model: ModelFactory) -> Policy:
    config = AutoConfig.from_pretrained(tiny_model("qwen3"), attn_implementation="packed")
    with META:
        return Policy(AutoModelForCausalLM.from_config(config), logits_chunk_tokens=4)


@pytest.fixture
def scorer(tiny_model: ModelFactory) -> ScalarModel:
    config = AutoConfig.from_pretrained(tiny_model("qwen3"), attn_implementation="packed", num_labels=1)
    with META:
        return ScalarModel(AutoModelForSequenceClassification.from_config(config))


def samples(*names: str) -> list[Sample]:
    generator = np.random.default_rng(0)

    def one(length: int) -> Sample:
        per_token = {name: generator.random(length).astype(np.float32) for name in names}
        return Sample(generator.integers(5, 100, length).astype(np.int32), np.ones(length, dtype=bool), per_token)

    return [one(length) for length in (9, 4, 12, 7, 3)]


def minibatch(*names: str) -> Minibatch:
    # The last one is that of a rank without work.
    return Minibatch(samples(*names), [[0, 1], [2, 4], [3], []])


def has_gradients(model: torch.nn.Module) -> bool:
    return all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_reading_a_number_fails_here(policy: Policy) -> None:
    """So the other tests can fail."""
    number = torch.ones((), device=META)
    for waits in (float, bool, Tensor.tolist, Tensor.cpu, Tensor.item):
        with pytest.raises((RuntimeError, NotImplementedError)):
            waits(number)
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.ones(3, device=META)[torch.ones(3, device=META) > 0]
    with Watch():
        to_device(torch.ones(3), META)
        with pytest.raises(AssertionError, match="waits for it"):
            torch.ones(3).to(META)


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("kernel", [True, False])
def test_supervised_steps(
    pack: bool, kernel: bool, policy: Policy, on_device: Mesh, passes: list[int], reads: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if kernel:  # that of GPUs
        monkeypatch.setitem(KERNELS, "meta", replace(KERNELS["cuda"], is_usable=lambda _: True))
        policy.to(torch.bfloat16)
    config = SftDataConfig(pack=pack, seq_len=12, micro_batch_size=1 if pack else 2)
    found = supervised_step(policy, samples(), config, on_device)
    assert found == {"loss": 0.5, "entropy": 0.5, "token_accuracy": 0.5}
    assert len(passes) == 3 and reads == ["loss entropy token_accuracy"] and has_gradients(policy)


LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {}, "gspo": {"correction": {"type": "mask", "level": "geometric", "low": 0.5, "high": 2.0, "veto": 0.01}},
    "gspo_token": {"correction": {"type": "truncate", "level": "sequence"}}, "dapo": {},
    "cispo": {"correction": {"type": "truncate"}},
}  # fmt: skip
ONE = Reading(Sampling(temperature=0.7, top_p=0.9, min_p=0.01, top_k=5), entropy_gradient=True)
SEVERAL = Reading(SamplingByToken((Sampling(0.7, top_p=0.9, top_k=5), Sampling(1.2, min_p=0.1))))


@pytest.mark.parametrize(("name", "reading"), [*((name, ONE) for name in LOSSES), ("grpo", SEVERAL)])
def test_forward_and_backward(
    name: str, reading: Reading, policy: Policy, on_device: Mesh, passes: list[int], reads: list[str]
) -> None:
    config = PolicyLossConfig.of(type=name, **LOSSES[name])
    statistics = PolicyStatistics([0, 1], has_reference=True)
    measured = (batch.SAMPLER_LOGPROB, batch.OLD_LOGPROB, batch.REFERENCE_LOGPROB)
    given = minibatch(*measured, batch.ADVANTAGE, batch.AGE, batch.SAMPLING)
    loss = forward_backward(policy, given, build_policy_loss(config), on_device, statistics, reading=reading)
    assert loss == 0.5 and len(passes) == 4 and reads == ["loss"] and has_gradients(policy)


def pairs() -> list[Pair]:
    sides = samples()
    return [Pair(sides[k], sides[k + 1], number=k) for k in range(4)]


def test_steps_of_pairs(policy: Policy, on_device: Mesh, passes: list[int], reads: list[str]) -> None:
    config = DpoConfig.model_validate({"data": {"seq_len": 12, "micro_batch_size": 1}})
    objective = dpo_objective(config, Reference(np.zeros((4, 2)), {}), on_device)
    assert objective.accumulate_gradients(policy, pairs())["loss"] == 0.5 / 4
    assert len(passes) > 1 and len(reads) == 1 and has_gradients(policy)


def test_steps_of_labelled_answers(policy: Policy, on_device: Mesh, passes: list[int], reads: list[str]) -> None:
    config = DpoConfig.model_validate({"loss": {"type": "kto"}, "data": {"seq_len": 12, "micro_batch_size": 1}})
    sides = samples()
    answers = [LabelledAnswer(replace(sides[k], value=float(k % 2)), sides[k + 1], k, k) for k in range(4)]
    KtoObjective(config, Reference(np.zeros((4, 2)), {}), on_device).accumulate_gradients(policy, answers)
    assert len(passes) > 2 and len(reads) == 2 and has_gradients(policy)  # the divergence comes first


def test_steps_of_a_reward_model(scorer: ScalarModel, on_device: Mesh, passes: list[int], reads: list[str]) -> None:
    config = RewardTrainingConfig.model_validate({"data": {"seq_len": 12, "micro_batch_size": 1}})
    reward_objective(config, on_device).accumulate_gradients(scorer, pairs())
    assert len(passes) > 1 and len(reads) == 1 and has_gradients(scorer)


def test_updates_of_a_critic(
    scorer: ScalarModel, on_device: Mesh, passes: list[int], reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def clip(model: torch.nn.Module, _max_norm: float) -> float:
        assert len(passes) == 4 and reads == [] and has_gradients(model)
        return 1.0

    monkeypatch.setattr(auxiliary_models, "clip_gradients", clip)
    critic = Critic.__new__(Critic)  # whose own model would be on the CPU
    critic._config, critic._mesh, critic.model, critic._sums = CriticConfig(), on_device, scorer, Sums()
    critic.optimizer = torch.optim.AdamW(scorer.parameters())
    critic.update(minibatch(batch.RETURN, batch.VALUE), lr=0.1)
    assert len(reads) == 1


def test_measures_come_behind_all_passes(policy: Policy, on_device: Mesh, passes: list[int], reads: list[str]) -> None:
    def forward(micro: MicroBatch) -> Tensor:
        return predict(policy, micro).logprobs_N

    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        measure_targets("x", forward, [minibatch()], on_device, pack=True)
    assert len(passes) == 4
    passes.clear()
    config = DpoConfig.model_validate({"data": {"seq_len": 12, "micro_batch_size": 1, "batch_size": 4}})
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        reference_logprobs(policy, pairs(), config.data, on_device)
    assert len(passes) > 1 and reads == []


def test_sums_are_float64_and_keep_their_order() -> None:
    sums = Sums("b", "a")
    assert sums.read() == {"b": 0.0, "a": 0.0}
    for _ in range(3):
        sums.add({"a": torch.tensor(0.1, requires_grad=True), "c": 2.0, "b": torch.tensor(1)})
    exact = float(torch.tensor(0.1)) * 3
    assert list(sums.read().items()) == [("b", 3.0), ("a", pytest.approx(exact, abs=1e-15)), ("c", 6.0)]
