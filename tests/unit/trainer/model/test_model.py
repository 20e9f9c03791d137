"""The policy against transformers: values, gradients, dtypes, what it begins with, errors."""

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from holdfast.config.training import AdamWConfig, TrainedModelConfig
from holdfast.errors import DataError
from holdfast.trainer.data.packing import Sample, build_micro_batch
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.build import trained_tensors
from holdfast.trainer.model.decoder import reshard
from holdfast.trainer.model.lora import whole_tensors
from holdfast.trainer.model.policy import Policy, build_policy, predict
from holdfast.trainer.model.structure import decoder_layers
from holdfast.trainer.optimizer import build_optimizer
from tests.builders.train_states import local_part

Models = Callable[..., Path]
CPU = torch.device("cpu")


def samples() -> list[Sample]:
    generator = np.random.default_rng(0)
    return [Sample(generator.integers(5, 100, n).astype(np.int32), np.ones(n, dtype=bool)) for n in (7, 3, 12)]


def logprobs(policy: Policy) -> Tensor:
    return predict(policy, build_micro_batch(samples(), [0, 1, 2], pack=True, device=CPU)).logprobs_N


def reference_logprobs(directory: Path, dtype: torch.dtype) -> Tensor:
    model, parts = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager"), []
    for sample in samples():
        ids = torch.as_tensor(sample.token_ids, dtype=torch.long)
        parts.append(model(ids[None]).logits[0, :-1].float().log_softmax(-1).gather(1, ids[1:, None])[:, 0])
    return torch.cat(parts)


def gradients(policy: Policy) -> dict[str, Tensor]:
    found = {name: local_part(p.grad).clone() for name, p in policy.hf_model.named_parameters() if p.grad is not None}
    policy.zero_grad(set_to_none=True)
    return found


def build(directory: Path, mesh: Mesh, *, seed: int = 0, **config: Any) -> Policy:
    return build_policy(TrainedModelConfig(name=str(directory), **config), mesh, seed=seed)


def test_a_random_policy_is_a_function_of_the_seed(tiny_model: Models, mesh: Mesh) -> None:
    directory = tiny_model(weights=False)

    def tensors(seed: int) -> dict[str, Tensor]:
        policy = build(directory, mesh, seed=seed, init="random")
        return {name: local_part(tensor) for name, tensor in trained_tensors(policy.hf_model).items()}

    torch.manual_seed(123)
    before = torch.get_rng_state()
    first = tensors(0)
    assert torch.equal(torch.get_rng_state(), before), "initialisation must not move the run's generator"
    torch.rand(10)
    again, other = tensors(0), tensors(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first[EMBEDDING], other[EMBEDDING])
    assert 0.08 < first[EMBEDDING].std().item() < 0.12, "initializer_range is 0.1"
    assert all(torch.isfinite(tensor).all() for tensor in first.values())


@pytest.mark.parametrize("given", [{}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "lora": {"rank": 4}}], ids=str)
def test_recomputed_activations_give_the_same_gradients(given: Any, tiny_model: Models, mesh: Mesh) -> None:
    """Also if the copies in bfloat16 are freed between the passes, and made again."""
    results, calls = [], []
    for recompute in (False, True):
        policy = build(tiny_model(), mesh, activation_checkpointing=recompute, **given)
        passes = list[None]()
        mlp = decoder_layers(policy.hf_model)[0].get_submodule("mlp")
        mlp.register_forward_pre_hook(lambda *_, passes=passes: passes.append(None))
        values = logprobs(policy)
        values.sum().backward()
        results.append({"values": values.detach(), **gradients(policy)})
        calls.append(len(passes))
    assert calls == [1, 2], "they are recomputed"
    assert all(torch.equal(tensor, results[1][name]) for name, tensor in results[0].items())


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_masters(tiny_model: Models, mesh: Mesh) -> None:
    directory = tiny_model("qwen3", tied=False)
    policy = build(directory, mesh, dtype="bfloat16")
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    seen = []
    mlp = decoder_layers(policy.hf_model)[0].get_submodule("mlp")
    mlp.register_forward_hook(lambda *args: seen.append(args[2].dtype))
    values = logprobs(policy)
    assert seen == [torch.bfloat16] and values.dtype == torch.float32
    low, exact = (reference_logprobs(directory, dtype) for dtype in (torch.bfloat16, torch.float32))
    assert (values - exact).abs().mean() < 2 * (low - exact).abs().mean() + 1e-3
    values.sum().backward()
    assert {gradient.dtype for gradient in gradients(policy).values()} == {torch.float32}


HEADS = {
    "tied": ("qwen3", {}), "untied": ("qwen3", {"tied": False}), "bias": ("phi", {"tied": False}),
    "capped": ("gemma2", {"final_logit_softcapping": 3.0}), "own": ("granite", {"logits_scaling": 0.25}),
}  # fmt: skip


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("lora", [None, {}])
def test_a_float32_head_rounds_no_logit(head: str, lora: dict[str, Any] | None, tiny_model: Models, mesh: Mesh) -> None:
    """Hidden states and weights are those in bfloat16, as in the engine; the rest is within float32 of float64."""
    kind, fields = HEADS[head]
    model, config = tiny_model(kind, **fields), {"dtype": "bfloat16", "lora": lora, "logits_chunk_tokens": 5}
    policies = [build(model, mesh, fp32_lm_head=on, **config) for on in (True, False)]
    assert policies[0].has_plain_head == (head != "own")
    errors = []
    for policy in policies:
        hidden: list[Tensor] = []
        decoder = policy.hf_model.base_model
        decoder.register_forward_hook(lambda *args, seen=hidden: seen.append(args[2].last_hidden_state[0]))
        values = logprobs(policy)
        module, config = policy.hf_model.get_output_embeddings(), policy.hf_model.config
        assert module is not None
        weight = local_part(module.weight).bfloat16().double().requires_grad_()
        bias = local_part(module.bias).bfloat16().double() if module.bias is not None else 0.0
        micro = build_micro_batch(samples(), [0, 1, 2], pack=True, device=CPU)
        logits = hidden[0].double()[micro.predict_index_N] @ weight.T + bias
        if head == "own":
            logits = logits / config.logits_scaling
        if head == "capped":
            logits = 3.0 * torch.tanh(logits / 3.0)
        expected = logits.log_softmax(-1).gather(1, micro.target_ids_N[:, None])[:, 0]
        errors.append((values - expected).abs().max().item())
        if policy is policies[0] and lora is None and head == "untied":
            (expected_gradient,) = torch.autograd.grad(expected.sum(), weight)
            values.sum().backward()
            gradient = gradients(policy)["lm_head.weight"].double()
            # The gradient of a weight in bfloat16 is rounded once, when all chunks are summed.
            torch.testing.assert_close(gradient, expected_gradient, rtol=2.0**-8, atol=1e-4)
    assert errors[0] < 1e-5 < 1e-3 < errors[1]


def test_after_a_forward_alone_the_parameters_go_back_to_shards(tiny_model: Models, mesh: Mesh) -> None:
    policy = build(tiny_model(), mesh, dtype="bfloat16")
    with torch.no_grad():
        logprobs(policy)
    reshard(policy)
    assert all(isinstance(parameter, DTensor) for parameter in policy.parameters())
    assert all(isinstance(tensor, DTensor) for tensor in trained_tensors(policy.hf_model).values())


def test_what_is_offloaded_lies_on_the_host_and_is_whole_only_in_use(tiny_model: Models, mesh: Mesh) -> None:
    """On one rank in float32, too, which is not sharded otherwise; values and gradients are the same bits."""
    plain, offloaded = build(tiny_model(), mesh), build(tiny_model(), replace(mesh, cpu_offload=True))
    parts = [module for module in offloaded.modules() if isinstance(module, FSDPModule)]
    assert len(parts) == 1 + len(decoder_layers(offloaded.hf_model))
    for part in parts:
        group = part._get_fsdp_state()._fsdp_param_group
        assert group is not None and isinstance(group.offload_policy, CPUOffloadPolicy)
    values = [logprobs(policy) for policy in (plain, offloaded)]
    torch.testing.assert_close(values[1], values[0], rtol=0, atol=0)
    layer = decoder_layers(offloaded.hf_model)[0]
    assert all(isinstance(parameter, DTensor) for parameter in layer.parameters()), "freed behind its forward pass"
    for value in values:
        value.sum().backward()
    for policy in (plain, offloaded):
        build_optimizer(policy.hf_model, AdamWConfig()).step()
    found = gradients(offloaded)
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=0)
    assert all(isinstance(parameter, DTensor) for parameter in offloaded.parameters())
    weights = [dict(whole_tensors(policy.hf_model, keep=True)) for policy in (plain, offloaded)]
    assert all(torch.equal(weights[1][name], tensor) for name, tensor in weights[0].items())


Tensors = dict[str, Tensor]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"


def with_tensors(change: Callable[[Tensors], Tensors]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        path = directory / "model.safetensors"
        save_file(change(load_file(path)), path, metadata={"format": "pt"})

    return apply


def without(tensors: Tensors, name: str) -> Tensors:
    return {other: tensor for other, tensor in tensors.items() if other != name}


def with_config(**fields: Any) -> Callable[[Path], object]:
    def change(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


@pytest.mark.parametrize(("prepare", "said"), [
    (lambda path: (path / "config.json").unlink(), "no model config"),
    (lambda path: (path / "config.json").write_text("{"), "no model config"),
    (lambda path: (path / "config.json").write_text('{"model_type": "no_such_kind"}'), "no such kind of model"),
    (lambda path: (path / "model.safetensors").unlink(), "model.init = random"),
    (lambda path: (path / "model.safetensors").write_bytes(b"\0" * 64), "its header cannot be read"),
    (with_tensors(lambda of: without(of, UP)), f"lack 1 tensors, such as {UP}"),
    (with_tensors(lambda of: of | {NORM: torch.ones(7)}), f"{NORM} is (7,) torch.float32 there, (32,) torch.fl"),
    (with_config(num_attention_heads=5), "is (32, 32) torch.float32 there, (32, 40) torch.float32 here"),
    (with_config(hidden_act="no_such"), "cannot build a causal language model of type qwen3 with eager"),
    (with_config(rope_parameters={"rope_type": "no_such"}), "with eager attention. KeyError: 'no_such'"),
    (with_config(hidden_size="32"), "Field 'hidden_size' expected int"),
    (with_config(num_hidden_layers=3), "`num_hidden_layers` (3) must be equal to the number of `layer_types` (2)"),
    (with_config(quantization_config={"quant_method": "gptq", "bits": 4}), "its weights are quantised (gptq, see"),
])  # fmt: skip
def test_a_directory_that_is_no_model_is_named(
    prepare: Callable[[Path], object], said: str, tiny_model: Models, mesh: Mesh, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny_model(), directory)
    prepare(directory)
    with pytest.raises(DataError) as caught:
        build(directory, mesh)
    assert caught.value.exit_code == 2
    assert str(directory) in str(caught.value) and said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("kind", "fields"), [("gpt2", {}), ("opt", {}), ("gptj", {"rotary_dim": 4}), ("llama", {})])
@pytest.mark.parametrize("pack", [True, False])
def test_a_sample_beyond_the_last_position_is_refused_where_there_is_one(
    kind: str, fields: dict[str, Any], pack: bool, tiny_model: Models, mesh: Mesh
) -> None:
    policy = build(tiny_model(kind, max_position_embeddings=16, **fields), mesh)

    def run(length: int) -> None:
        sample = Sample(np.arange(length, dtype=np.int32), np.ones(length, dtype=bool))
        predict(policy, build_micro_batch([sample], [0], pack=pack and policy.layout.packs, device=mesh.device))

    run(16)
    if kind == "llama":
        run(40)
        return
    with pytest.raises(DataError, match="a sample has 17 tokens, and .* has positions for 16"):
        run(17)


def test_a_token_that_the_model_does_not_have_is_refused_by_name(tiny_model: Models, mesh: Mesh) -> None:
    policy = build(tiny_model("llama"), mesh)
    rows = policy.hf_model.config.vocab_size

    def run(largest: int) -> None:
        sample = Sample(np.array([0, largest, 1], dtype=np.int32), np.ones(3, dtype=bool))
        predict(policy, build_micro_batch([sample], [0], pack=True, device=mesh.device))

    run(rows - 1)
    with pytest.raises(DataError, match=rf"token {rows}, .* has {rows} tokens.*model\.tokenizer"):
        run(rows)


def beside(name: str, text: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_text(text)


def in_several_files(directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory)
    (directory / "model.safetensors").unlink()
    model.save_pretrained(directory, max_shard_size="20kB")
    assert len(list(directory.glob("*.safetensors"))) > 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (in_several_files, None),
        (beside("model.safetensors.index.json", '{"metadata": {}, "weight_map": {}}'), None),
        (beside("adapter_config.json", "{}"), r"holds both a model and adapter_config\.json"),
        # As files of a decoder without its head have them.
        (with_tensors(lambda of: {name.removeprefix("model."): tensor for name, tensor in of.items()}), None),
        (with_tensors(lambda of: of | {HEAD: of[EMBEDDING].clone()}), None),
        (with_tensors(lambda of: without(of, EMBEDDING) | {HEAD: of[EMBEDDING]}), None),
        (with_tensors(lambda of: of | {HEAD: of[EMBEDDING] + 1}), "s.weight and lm_head.weight differ in its files"),
    ],
    ids=["several files", "empty index", "adapter", "no prefix", "copy of the head", "head alone", "another head"],
)
def test_what_files_of_a_tied_model_may_hold(
    change: Callable[[Path], object], said: str | None, tiny_model: Models, mesh: Mesh, tmp_path: Path
) -> None:
    shutil.copytree(tiny_model(), tmp_path / "model")
    change(tmp_path / "model")
    with pytest.raises(DataError, match=said) if said else nullcontext():
        mine = trained_tensors(build(tmp_path / "model", mesh).hf_model)
        theirs = trained_tensors(AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())
