"""Every family computes what transformers does, or is refused. `UPDATE_DOCS=1 pytest …` writes docs/models.md."""

import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.config.training import TrainedModelConfig
from holdfast.errors import DataError
from holdfast.run.weights import adapted_matrices
from holdfast.trainer.data import packing
from holdfast.trainer.data.packing import Sample
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.attention import KERNELS, Kernel
from holdfast.trainer.model.lora import adapter_parameters, whole_tensors
from holdfast.trainer.model.parity_check import check_model
from holdfast.trainer.model.policy import Policy, build_policy
from tests.models import families
from tests.models.families import FAMILIES, Family, random_samples, reference_outcome, trainer_outcome, write_model
from tests.models.per_sample import PerSample
from tests.pages.families import PAGE, Row, page

LENGTHS = (23, 5, 31, 2, 14, 9)
REFUSED = {
    "falcon (alibi)": "in transformers FalconForCausalLM is two models, by its own eager and by its own sdpa attention",
    "rwkv": "RwkvForCausalLM changes its own weights in a forward pass that only measures",
    "qwen3_vl_text": "transformers has no causal language model of type qwen3_vl_text",
}
WITHOUT_KERNEL = {"gemma2", "vaultgemma", "gpt_oss"}  # soft caps and sinks


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    """Rows of the table by family: filled by the tests, and compared when all of them have run."""
    return {}


def build(family: Family, directory: Path, mesh: Mesh) -> Policy:
    policy = build_policy(TrainedModelConfig(name=str(directory), logits_chunk_tokens=16), mesh, seed=0)
    check_model(policy, mesh, name=family.name, pack=True, share=True, dtype="float32")
    return policy.eval()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_loss_and_gradient_are_those_of_plain_transformers(
    family: Family, rows: dict[str, Row], mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_model(family, tmp_path, seed=1)
    if family.name in REFUSED:
        with pytest.raises(DataError) as refused:
            build(family, directory, mesh)
        assert REFUSED[family.name] in str(refused.value) and "\n" not in str(refused.value)
        rows[family.name] = Row(family, refusal=REFUSED[family.name])
        return
    samples: list[Sample] = random_samples(LENGTHS, seed=1)
    expected = reference_outcome(directory, samples)
    policy, kernel, groups = build(family, directory, mesh), PerSample(), families.group_samples(samples)
    monkeypatch.setattr(packing, "SHORT", 8)  # one prompt is shorter, one is longer
    packed: list[Any] = [(samples, expected, {"pack": True, "budget": 64})]
    if policy.layout.shares:
        packed.append((groups, reference_outcome(directory, groups), {"pack": True, "share": True, "budget": 128}))
    for cases in ([*packed, (samples, expected, {"pack": False, "budget": 64})], packed):
        for given, plain, how in cases:
            apart = max(trainer_outcome(policy, given, **how).difference(plain))
            assert apart < 1e-5, f"{how}, by the kernel {kernel.calls} times: {policy.layout}, {policy.has_plain_head}"
        monkeypatch.setitem(KERNELS, "cpu", Kernel(kernel, frozenset({torch.float32}), 256))  # the route of GPUs
    assert (kernel.calls > 0) == (policy.layout.attention == "packed" and family.kind not in WITHOUT_KERNEL)
    assert torch.stack([gradient.norm() for gradient in expected.gradients.values()]).max() > 1e-3
    rows[family.name] = Row(family, layout=policy.layout)


@pytest.mark.parametrize("name", ["llama", "qwen3_5_text", "granitemoehybrid"])
def test_adapters_train_as_the_merged_model_would(name: str, mesh: Mesh, tmp_path: Path) -> None:
    family = next(family for family in FAMILIES if family.name == name)
    directory = write_model(family, tmp_path, seed=3)
    config = TrainedModelConfig.model_validate({"name": str(directory), "lora": {"rank": 3, "alpha": 6.0}})
    policy = build_policy(config, mesh, seed=0)
    factors = adapter_parameters(policy.hf_model)
    with torch.no_grad():
        for factor_name, factor in factors.items():
            if ".lora_B." in factor_name:
                factor.normal_(std=0.1)
    check_model(policy, mesh, name=name, pack=True, dtype="float32")
    samples = random_samples(LENGTHS, seed=2)
    found = trainer_outcome(policy.eval(), samples, pack=True, budget=64)
    expected = reference_outcome(directory, samples, dict(whole_tensors(policy.hf_model, keep=True)))
    assert found.loss == pytest.approx(expected.loss, abs=1e-5)
    matrices = adapted_matrices(factors)
    assert len(matrices) > 8
    for matrix, (a_name, b_name) in matrices.items():
        a, b, gradient = factors[a_name], factors[b_name], expected.gradients[matrix]
        for found_one, by_hand in ((b.grad, 2.0 * gradient @ a.detach().T), (a.grad, 2.0 * b.detach().T @ gradient)):
            torch.testing.assert_close(found_one, by_hand, rtol=1e-3, atol=5e-6)  # float32 sums


ORIGINAL = 16
FACTORS = [3.0, 2.0, 5.0, 1.5, 4.0, 7.0, 2.0, 3.0]
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.1] * 8, "long_factor": FACTORS,
    "original_max_position_embeddings": ORIGINAL, "short_mscale": 1.2, "long_mscale": 1.4,
}  # fmt: skip
PER_LAYER = {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
# Rotary frequencies that depend on the length of a sample.
ROTARY: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": ORIGINAL}),
    ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": ORIGINAL}),
    ("phimoe", {"rope_parameters": LONGROPE, "num_local_experts": 4}),
    ("stablelm", {"rope_parameters": DYNAMIC, "max_position_embeddings": ORIGINAL}),  # cannot be packed
    (
        "gemma3_text",
        {"rope_parameters": PER_LAYER, "max_position_embeddings": ORIGINAL, "sliding_window": 8,
         "layer_types": ["sliding_attention", "full_attention"]},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "fields"), ROTARY, ids=[kind for kind, _ in ROTARY])
def test_samples_beyond_the_length_at_which_rotary_frequencies_change_are_refused(
    kind: str, fields: dict[str, Any], mesh: Mesh, tmp_path: Path
) -> None:
    directory = write_model(Family(kind, deepcopy(fields)), tmp_path, seed=3)  # transformers writes into them
    samples = random_samples((ORIGINAL, 5, ORIGINAL, 2, 14), seed=3)
    expected = reference_outcome(directory, samples)
    policy = build_policy(TrainedModelConfig(name=str(directory)), mesh, seed=0)
    check_model(policy, mesh, name=kind, pack=True, dtype="float32")
    policy.eval()
    for pack in (True, False):
        loss, gradient = trainer_outcome(policy, samples, pack=pack, budget=64).difference(expected)
        assert loss < 1e-5 and gradient < 1e-5, f"pack = {pack}"
    with pytest.raises(DataError, match=f"a sample has {ORIGINAL + 1} tokens, and .* has positions for {ORIGINAL}"):
        trainer_outcome(policy, random_samples((ORIGINAL + 1,), seed=3), pack=True, budget=64)


def test_the_page_is_what_the_tests_found(rows: dict[str, Row]) -> None:
    if rows.keys() != {family.name for family in FAMILIES}:
        pytest.skip("needs the outcomes of all families")
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(page(rows))
    assert PAGE.read_text() == page(rows), "run UPDATE_DOCS=1 pytest tests/unit/trainer/test_families.py"
