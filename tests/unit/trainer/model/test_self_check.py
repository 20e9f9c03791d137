"""The check at a start: it passes for models as they are, and notices each way of computing something else."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.config.base import CkptConfig, DType
from holdfast.config.load import to_toml
from holdfast.config.resolved import fingerprint
from holdfast.config.training import SftConfig, TrainedModelConfig
from holdfast.errors import DataError
from holdfast.run import manifest
from holdfast.run.manifest import Fingerprints
from holdfast.run.run_dir import RunDir
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model import attention
from holdfast.trainer.model.packing_check import PACKED
from holdfast.trainer.model.parity_check import check_model, is_random_in_training, was_checked
from holdfast.trainer.model.policy import Policy, build_policy
from holdfast.trainer.model.structure import use_attention
from holdfast.trainer.model.value_model import build_scalar_model
from tests.builders.checkpoint_files import commit
from tests.conftest import ModelFactory
from tests.models.families import FAMILIES, write_model

Build = Callable[..., Policy]


@pytest.fixture
def build(mesh: Mesh, tmp_path: Path) -> Build:
    """Return a maker of policies of a family: `build("gemma2", {"hidden_size": 8}, dtype="bfloat16")`."""

    def make(name: str, fields: Mapping[str, Any] = {}, *, dtype: DType = "float32", **config: Any) -> Policy:
        family = next(family for family in FAMILIES if family.name == name)
        family = replace(family, fields=family.fields | dict(fields))
        directory = write_model(family, tmp_path / name, seed=1)
        settings = TrainedModelConfig.model_validate({"name": str(directory), "dtype": dtype, **config})
        return build_policy(settings, mesh, seed=0)

    return make


def check(policy: Policy, mesh: Mesh, *, pack: bool = True, dtype: DType = "float32") -> None:
    check_model(policy, mesh, name="some/model", pack=pack, dtype=dtype)


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gemma2", "lfm2", "granite"])
def test_models_as_they_are_pass(name: str, dtype: DType, pack: bool, build: Build, mesh: Mesh) -> None:
    check(build(name, dtype=dtype), mesh, pack=pack, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_that_leaks_from_sample_to_sample_is_refused(dtype: DType, build: Build, mesh: Mesh) -> None:
    policy = build("lfm2", dtype=dtype)
    policy.layout = PACKED
    use_attention(policy.hf_model, "packed")
    with pytest.raises(DataError, match=r"a sample changes what the model says of the sample behind it.*data\.pack"):
        check(policy, mesh, dtype=dtype)
    policy.zero_grad(set_to_none=True)


def test_a_cap_or_multiplier_left_out_is_refused(build: Build, mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = build("granite")
    assert not policy.has_plain_head
    policy.has_plain_head = True
    with pytest.raises(DataError, match="of each alone; rounding explains 0.0001"):
        check(policy, mesh)
    policy = build("gemma2")

    def without_caps(*arguments: Any, softcap: float | None, sinks_H: torch.Tensor | None) -> torch.Tensor:
        return attention._causal(*arguments)

    monkeypatch.setattr(attention, "_causal_scores", without_caps)
    with pytest.raises(DataError, match=r"some/model.*Gemma2ForCausalLM.*nats away.*set model\.attention to eager"):
        check(policy, mesh)


def test_weights_that_a_pass_changes_are_refused(build: Build, mesh: Mesh) -> None:
    policy = build("llama")
    norm = policy.hf_model.get_parameter("model.norm.weight")

    def change(*_: object) -> None:
        norm.mul_(2.0)

    policy.hf_model.register_forward_hook(change)
    with pytest.raises(DataError, match="changes its own weights"):
        check(policy, mesh)


def test_nothing_is_left_behind(build: Build, mesh: Mesh) -> None:
    """Neither random numbers nor gradients nor another mode: a run is what it would be without the check."""
    policy = build("gpt2")  # dropout by default
    weights = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    before, implementation = torch.get_rng_state(), policy.hf_model.config._attn_implementation
    check(policy, mesh)
    assert torch.equal(torch.get_rng_state(), before)
    assert policy.training and policy.hf_model.training
    assert policy.hf_model.config._attn_implementation == implementation == "packed"
    assert all(parameter.grad is None for parameter in policy.parameters())
    assert all(torch.equal(parameter, weights[name]) for name, parameter in policy.named_parameters())


def test_tiny_vocabularies_and_few_positions_are_checked_too(tiny_model: ModelFactory, mesh: Mesh) -> None:
    few = {"vocab_size": 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    for kind, fields in (("llama", few | {"max_position_embeddings": 2}), ("gpt2", few | {"n_positions": 3})):
        check(build_policy(TrainedModelConfig(name=str(tiny_model(kind, **fields))), mesh, seed=0), mesh)


@pytest.mark.parametrize("head", ["random", "zero"])
def test_models_that_score_are_compared_by_their_hidden_states(
    head: Any, tiny_model: ModelFactory, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_scalar_model(TrainedModelConfig(name=str(tiny_model("llama"))), mesh, seed=0, head=head)
    check_model(model, mesh, name="critic", pack=True, dtype="float32")
    plain = attention._causal

    def hotter(query: torch.Tensor, *rest: Any) -> torch.Tensor:
        return plain(query * 1.1, *rest)

    monkeypatch.setattr(attention, "_causal", hotter)
    with pytest.raises(DataError, match="of the largest hidden state away"):
        check_model(model, mesh, name="critic", pack=True, dtype="float32")
    model.hf_model.get_parameter("model.norm.weight").data.zero_()
    check_model(model, mesh, name="critic", pack=True, dtype="float32")  # zeros are zeros


def test_a_resumed_run_checks_its_models_again_only_if_something_has_changed(tmp_path: Path) -> None:
    def config(step: int | None, **settings: Any) -> SftConfig:
        return SftConfig(output_dir=tmp_path, ckpt=CkptConfig(resume_step=step), **settings)

    def save(begun: SftConfig, **libraries: str) -> None:
        directory = RunDir(tmp_path).checkpoint(2)
        (directory / "trainer").mkdir(parents=True, exist_ok=True)
        (directory / "trainer/config.toml").write_text(to_toml(begun))
        own = {"fingerprints": Fingerprints(config=fingerprint(begun))}
        commit(directory, "checkpoint", 2, libraries=manifest.library_versions() | libraries, **own)

    save(config(None))
    assert was_checked(config(2)) and was_checked(config(2, keep_attempts=3))
    assert not was_checked(config(None)) and not was_checked(config(2, model={"name": "other"}))
    assert not was_checked(config(2, parallel={"sequence_parallel": 2}))
    save(config(None), torch="1.0")
    assert not was_checked(config(2))


_BIOGPT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.mark.parametrize(("name", "fields", "lora", "is_random"), [
    ("llama", {}, None, False),
    ("llama", {"attention_dropout": 0.1}, None, True),
    ("llama", {}, {"dropout": 0.1}, True),
    ("gpt2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "summary_first_dropout": 0.5}, None, False),
    ("gpt2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.1}, None, True),
    ("biogpt", _BIOGPT, None, False),  # it draws numbers, and does nothing with them
    ("biogpt", _BIOGPT | {"hidden_dropout_prob": 0.1}, None, True),
    ("biogpt", _BIOGPT | {"activation_dropout": 0.1}, None, True),
    ("starcoder2", {"residual_dropout": 0.1}, None, True),
    ("mixtral", {"router_jitter_noise": 0.1}, None, True),
    ("phimoe", {"router_jitter_noise": 2.0}, None, True),  # it draws experts that score alike by lot
])  # fmt: skip
def test_what_is_random_in_training_is_found_whatever_it_is_called(
    name: str, fields: dict[str, Any], lora: dict[str, Any] | None, is_random: bool, build: Build, mesh: Mesh
) -> None:
    policy = build(name, fields, lora=lora)
    before = torch.get_rng_state()
    assert is_random_in_training(policy, mesh) == is_random
    assert torch.equal(torch.get_rng_state(), before) and policy.training


def test_what_is_not_finite_is_told(build: Build, mesh: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    policy = build("gemma2")
    with torch.no_grad():
        next(policy.parameters()).fill_(math.nan)
    check(policy, mesh)
    assert "the model was not checked: what it computes is not finite" in caplog.text
