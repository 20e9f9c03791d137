"""Published weights: a Hugging Face directory that others load with equal logits."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from holdfast.config.training import TrainedModelConfig
from holdfast.run import atomic, manifest
from holdfast.run.run_dir import RunDir
from holdfast.run.weights import weights_digest
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.build import trained_tensors
from holdfast.trainer.model.policy import Policy, build_policy
from holdfast.trainer.model.publish import WeightPublisher
from tests.builders.train_states import local_part

Models = Callable[..., Path]


@pytest.fixture
def publish(
    tiny_model: Models, mesh: Mesh, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> Callable[..., tuple[WeightPublisher, Policy]]:
    def make(directory: Path, dtype: str = "float32") -> tuple[WeightPublisher, Policy]:
        config = TrainedModelConfig.model_validate({"name": str(directory), "dtype": dtype})
        policy = build_policy(config, mesh, seed=0)
        with torch.no_grad():  # no longer what was loaded
            for parameter in policy.parameters():
                local_part(parameter).mul_(1.25)
        return WeightPublisher(RunDir(tmp_path), policy, tokenizer, mesh, dtype=dtype), policy

    return make


def tensors_of(policy: Policy) -> dict[str, Tensor]:
    return {name: local_part(tensor) for name, tensor in trained_tensors(policy.hf_model).items()}


@pytest.mark.parametrize(("kind", "tied"), [("qwen3", True), ("qwen3", False), ("llama", True), ("llama", False)])
def test_published_weights_load_in_transformers_with_equal_logits(
    kind: str, tied: bool, publish: Any, tiny_model: Models
) -> None:
    publisher, policy = publish(tiny_model(kind, tied=tied))
    directory = publisher.publish(3)
    assert directory.name == "step_3"
    loaded, findings = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not findings["missing_keys"] and not findings["unexpected_keys"] and not findings["mismatched_keys"]
    assert type(loaded) is type(policy.hf_model) and loaded.dtype == torch.float32
    assert loaded.config.tie_word_embeddings is tied
    expected = tensors_of(policy)
    for name, tensor in trained_tensors(loaded).items():
        assert torch.equal(tensor, expected[name]), name
    ids = torch.randint(5, 100, (1, 9))
    with torch.no_grad():
        ours, *_ = policy(ids, torch.arange(9)[None], torch.arange(8), ids[0, 1:])
        theirs = loaded.eval()(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert torch.equal(loaded.lm_head.weight, expected["model.embed_tokens.weight" if tied else "lm_head.weight"])


def test_the_tokenizer_comes_along(publish: Any, tiny_model: Models, tokenizer: PreTrainedTokenizerBase) -> None:
    publisher, _ = publish(tiny_model())
    loaded = AutoTokenizer.from_pretrained(publisher.publish(0))
    assert loaded("abc")["input_ids"] == tokenizer("abc")["input_ids"]
    assert loaded.chat_template == tokenizer.chat_template and loaded.eos_token == tokenizer.eos_token


def test_bfloat16_weights_are_the_rounded_masters(publish: Any, tiny_model: Models) -> None:
    publisher, policy = publish(tiny_model(), "bfloat16")
    directory = publisher.publish(1)
    expected = tensors_of(policy)
    saved = load_file(directory / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert all(torch.equal(tensor, expected[name].bfloat16()) for name, tensor in saved.items())
    assert json.loads((directory / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_manifest_covers_every_file_and_the_digest_follows_the_weights(publish: Any, tiny_model: Models) -> None:
    publisher, policy = publish(tiny_model())
    first = publisher.publish(1)
    listing = manifest.verify(first)
    assert (listing.kind, listing.step, listing.policy_version) == ("weights", 1, 1)
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= listing.files.keys()
    same = publisher.publish(2)
    assert weights_digest(same) == weights_digest(first)
    with torch.no_grad():
        local_part(next(iter(policy.parameters()))).add_(1e-3)
    assert weights_digest(publisher.publish(3)) != weights_digest(first)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)], ids=["open", "private"])
def test_weights_may_be_read_by_whom_the_umask_lets(publish: Any, tiny_model: Models, mask: int, mode: int) -> None:
    publisher, _ = publish(tiny_model())
    before = os.umask(mask)
    try:
        directory = publisher.publish(1)
    finally:
        os.umask(before)
    files = {path.name: path.stat().st_mode & 0o777 for path in directory.rglob("*") if path.is_file()}
    assert files["model.safetensors"] == mode
    assert all(found & 0o044 == mode & 0o044 for found in files.values()), files


def test_publishing_a_version_again_replaces_it(publish: Any, tiny_model: Models) -> None:
    publisher, _ = publish(tiny_model())
    directory = publisher.publish(1)
    (directory / "model.safetensors").write_bytes(b"damaged")
    assert publisher.publish(1) == directory
    manifest.verify(directory)
    assert atomic.clear_leftovers(directory.parent) == []


def test_pruning_keeps_what_is_needed(publish: Any, tiny_model: Models, tmp_path: Path) -> None:
    publisher, _ = publish(tiny_model())
    for version in (0, 1, 2, 10):
        publisher.publish(version)
    publisher.prune({1, 10, 99})
    assert RunDir(tmp_path).published_weights() == [1, 10]
