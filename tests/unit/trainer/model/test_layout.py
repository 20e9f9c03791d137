"""What is found out about a model before it is trained, and which are refused: structure, attention, head, slices."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaPreTrainedModel

from holdfast.config import SftConfig
from holdfast.config.training import TrainedModelConfig
from holdfast.errors import DataError, RankLost
from holdfast.trainer.data.packing import PackedIndex
from holdfast.trainer.mesh import Mesh, SequenceGroup
from holdfast.trainer.model import packing_check
from holdfast.trainer.model.attention import packed_attention
from holdfast.trainer.model.build import naming_failures
from holdfast.trainer.model.context_parallel import RowSlice, reason_against
from holdfast.trainer.model.expert_parallel import StableDispatch, divide_experts, number_of_experts
from holdfast.trainer.model.packing_check import PACKED, Layout, find_layout
from holdfast.trainer.model.policy import Policy, build_policy
from holdfast.trainer.model.structure import decoder_layers, decoder_of, has_plain_head, longest_sample, pair_cost
from holdfast.trainer.model.value_model import build_scalar_model
from holdfast.trainer.positions import positions_of
from tests.conftest import ModelFactory as Models
from tests.models.families import FAMILIES, write_model
from tests.unit.trainer.programs.cases import MIXTURE

PLANNED = "model.layers.*.mlp.experts"
CPU = torch.device("cpu")


@pytest.fixture
def hf_model(tiny_model: Models) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_model("llama"), attn_implementation="packed")


def layout_of(hf_model: PreTrainedModel, attention: str = "packed", **arguments: Any) -> Layout:
    """Return the layout of a model whose decoder is called with more arguments."""

    def run(ids_1L: Tensor) -> Tensor:
        index = PackedIndex.from_lengths([ids_1L.shape[1]], device=CPU)
        return decoder_of(hf_model)(ids_1L, packed_index=index, use_cache=False, **arguments).last_hidden_state[0]

    return find_layout(hf_model, run, attention)


def test_a_model_that_cannot_be_packed_says_why(hf_model: PreTrainedModel) -> None:
    assert layout_of(hf_model) == PACKED
    unknown = layout_of(hf_model, banana=torch.ones(1))
    assert (unknown.packs, unknown.attention) == (False, "sdpa")
    assert "its attention is not that of packed rows (LlamaAttention calls its attention with banana" in unknown.reason
    assert layout_of(hf_model, is_causal=False).reason == "its attention is not causal"
    decoder = decoder_of(hf_model)
    forward = decoder.forward
    # It is told no positions any more.
    decoder.forward = lambda input_ids, **others: forward(input_ids=input_ids, **others)  # type: ignore[method-assign]
    assert layout_of(hf_model) == Layout(False, "sdpa", "it counts positions along the row by itself")


def test_an_attention_that_was_chosen_is_kept_or_refused(hf_model: PreTrainedModel, tiny_model: Models) -> None:
    for name in ("sdpa", "eager"):
        why = f"{name} attention would need a mask of the square of the row's length"
        assert layout_of(hf_model, name) == Layout(False, name, why)
    by_borders = "its layers do not tell attention where the samples of a row are"
    assert layout_of(hf_model, "flash_attention_2") == Layout(False, "flash_attention_2", by_borders)
    borders = torch.tensor([0, 160], dtype=torch.int32)
    assert layout_of(hf_model, "flash_attention_2", cu_seq_lens_q=borders) == Layout(True, "flash_attention_2")
    capped = AutoModelForCausalLM.from_pretrained(tiny_model("gemma2", head_dim=16), attn_implementation="eager")
    assert layout_of(capped, "eager").attention == "eager"
    with pytest.raises(DataError, match=r"sdpa is not the attention of Gemma2ForCausalLM \(the results are .* apart\)"):
        layout_of(capped, "sdpa")


def test_attention_of_fewer_keys_and_of_modules_without_an_own_one(monkeypatch: pytest.MonkeyPatch) -> None:
    record = packing_check._Record()
    monkeypatch.setattr(packing_check, "_recorded", record)
    query, key = torch.ones(1, 2, 6, 4), torch.ones(1, 2, 3, 4)
    out, _ = packing_check._probe_attention(nn.Identity(), query, key, key, None)
    assert out.shape == (1, 6, 2, 4) and not out.any()
    assert record.faults == ["its queries and keys differ in number"]
    assert record.differs == {}, "there is nothing to compare with"


def test_a_mask_that_looks_something_up_by_position_is_no_window() -> None:
    table = torch.ones(70, dtype=torch.bool)

    def looks_up(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & table[query]

    def causal(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query

    assert packing_check._is_causal_window(causal, None, CPU, nn.Identity())
    assert not packing_check._is_causal_window(looks_up, None, CPU, nn.Identity())


def test_packed_attention_refuses_what_it_does_not_know() -> None:
    query = torch.ones(1, 2, 6, 4)
    for arguments, said in (({"banana": 1}, "with banana,"), ({"is_causal": False}, "with is_causal = False,")):
        with pytest.raises(DataError, match=f"Identity calls its attention {said} .*set model.attention to eager"):
            packed_attention(nn.Identity(), query, query, query, None, **arguments)  # type: ignore[arg-type]
    packed_attention(nn.Identity(), query, query, query, None, banana=None, use_cache=False)


def test_models_without_a_decoder_layers_head_or_last_position(hf_model: PreTrainedModel, tiny_model: Models) -> None:
    decoder = decoder_of(hf_model)
    assert not has_plain_head(decoder, None)
    with pytest.raises(DataError, match="LlamaModel has no decoder apart from its head"):
        decoder_of(decoder)
    del decoder.layers
    with pytest.raises(DataError, match="LlamaForCausalLM has no list of decoder layers and cannot be sharded"):
        decoder_layers(hf_model)
    mamba = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_model("mamba")))
    del mamba.config.max_position_embeddings
    assert longest_sample(mamba) is None


_ROPE = {"rope_theta": 1e4, "factor": 2.0}
_YARN = {"rope_type": "yarn", "original_max_position_embeddings": 16}


@pytest.mark.parametrize(("kind", "fields", "expected"), [
    *((kind, {}, (16, True)) for kind in ("biogpt", "codegen", "gpt2", "gpt_bigcode", "gptj", "opt")),
    *((kind, {}, (16, False)) for kind in ("llama", "qwen3", "gpt_neox")),
    ("llama", {"rope_parameters": _ROPE | {"rope_type": "dynamic"}}, (16, True)),
    ("llama", {"rope_parameters": _ROPE | {"rope_type": "linear"}}, (16, False)),
    ("llama", {"rope_parameters": _ROPE | _YARN}, (32, False)),
])  # fmt: skip
def test_config_json_tells_how_long_samples_may_be_as_the_model_does(
    kind: str, fields: dict[str, Any], expected: tuple[int, bool], tiny_model: Models
) -> None:
    model = tiny_model(kind, max_position_embeddings=16, **fields)
    assert positions_of(str(model)) == expected
    limit = longest_sample(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)))
    assert limit == (16 if expected[1] else None)


def test_a_buffer_nobody_can_compute_is_named(tiny_model: Models, mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = LlamaMLP.__init__

    def with_a_buffer(self: LlamaMLP, config: LlamaConfig) -> None:
        begin(self, config)
        self.register_buffer("odd", torch.ones(2), persistent=False)

    monkeypatch.setattr(LlamaMLP, "__init__", with_a_buffer)
    with pytest.raises(DataError, match=r"does not say how to compute its buffer model\.layers\.0\.mlp\.odd"):
        build(tiny_model("llama"), mesh)


def build(directory: Path, mesh: Mesh, **config: Any) -> Policy:
    return build_policy(TrainedModelConfig.model_validate({"name": str(directory), **config}), mesh, seed=0)


def test_what_a_model_cannot_do_is_refused(tiny_model: Models, mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny_model("llama")
    with pytest.raises(DataError, match="transformers cannot build a causal language model of type llama with banana"):
        build(directory, mesh, attention="banana")
    monkeypatch.setattr(LlamaPreTrainedModel, "supports_gradient_checkpointing", False)
    with pytest.raises(DataError, match="transformers cannot recompute the layers of LlamaForCausalLM"):
        build(directory, mesh, activation_checkpointing=True)


def test_layers_are_compiled_where_that_is_asked_for_and_can_be(tiny_model: Models, mesh: Mesh) -> None:
    for is_asked in (True, False):
        layers = decoder_layers(build(tiny_model("llama"), mesh, compile=is_asked).hf_model)
        assert {layer._compiled_call_impl is not None for layer in layers} == {is_asked}
    for name in ("sequence_parallel", "expert_parallel"):
        settings = {"model": {"compile": True}, "parallel": {"num_ranks": 2, name: 2}}
        with pytest.raises(ValidationError, match=rf"model\.compile does not go with parallel\.{name}"):
            SftConfig.model_validate({"output_dir": "run", **settings})


@pytest.mark.parametrize(("kind", "ranks", "rules", "why"), [
    ("llama", 2, {}, "transformers cannot send tokens of LlamaForCausalLM .model.name = 'x'. to experts on other"),
    ("qwen3_moe", 2, {"model.norm": "colwise"}, "transformers cannot send tokens of Qwen3MoeForCausalLM"),
    ("qwen3_moe", 3, {}, "does not divide the 4 experts of model.layers.0.mlp.experts .model.name = 'x'."),
    ("qwen3_moe", 1, {f"{PLANNED}.down_proj": "ep_dispatch_experts"}, "how to divide .*mlp.experts.down_proj"),
])  # fmt: skip
def test_experts_that_cannot_be_divided_are_refused(
    kind: str, ranks: int, rules: dict[str, str], why: str, tiny_model: Models, mesh: Mesh
) -> None:
    config = AutoConfig.from_pretrained(tiny_model(kind, **(MIXTURE if kind == "qwen3_moe" else {})))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert number_of_experts(model) == (4 if kind == "qwen3_moe" else 0)
    model.ep_plan.update(rules)
    own = init_device_mesh("cpu", (1, 1), mesh_dim_names=("efsdp", "ep"))
    given: Any = own if ranks == mesh.world_size else {"ep": SimpleNamespace(size=lambda: ranks)}
    with pytest.raises(DataError, match=f"parallel.expert_parallel = {ranks}: .*{why}"):
        divide_experts(model, given, name="x")


def test_tokens_of_an_expert_keep_their_order(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a sort does not, unless it is asked to."""
    sort = torch.argsort
    monkeypatch.setattr(
        torch, "argsort", lambda keys, *, stable=False: sort(keys if stable else keys - torch.arange(len(keys)) / 99)
    )
    group = init_device_mesh("cpu", (mesh.world_size,)).get_group()
    experts_TK = torch.tensor([[1, 0], [0, 1], [1, 0]])
    tokens_PH, expert_P, *_ = StableDispatch()._dispatch_tokens(torch.arange(3.0)[:, None], experts_TK, 2, group, 1)
    assert (tokens_PH.flatten().tolist(), expert_P.tolist()) == ([0, 1, 2, 0, 1, 2], [0, 0, 0, 1, 1, 1])


@pytest.mark.parametrize(("dtype", "advice"), [("bfloat16", True), ("float32", False)])
def test_a_forward_pass_that_fails_names_the_model(
    hf_model: PreTrainedModel, dtype: str, advice: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    policy = Policy(hf_model, logits_chunk_tokens=8)
    with pytest.raises(DataError) as caught, naming_failures(policy, "a/model", dtype):
        torch.ones(2, 3) @ torch.ones(2, 3)
    said = str(caught.value)
    assert f"'a/model': transformers' forward pass of LlamaForCausalLM fails with this config.json in {dtype}" in said
    assert "RuntimeError: mat1 and mat2 shapes" in said and ("Try model.dtype = float32." in said) is advice
    assert "Traceback" in caplog.text
    for error in (DataError("known"), torch.OutOfMemoryError("full")):
        with pytest.raises(type(error)) as passed, naming_failures(policy, "a/model", dtype):
            raise error
        assert passed.value is error


def test_the_death_of_another_rank_in_a_forward_pass_is_no_fault_of_the_model(hf_model: PreTrainedModel) -> None:
    """As a fault of the model it would end the run, which heals from the death of a rank."""
    policy = Policy(hf_model, logits_chunk_tokens=8)
    gloo = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    for error in (gloo, torch.distributed.DistBackendError("NCCL communicator was aborted")):
        with pytest.raises(RankLost, match="rank of the trainer ended"), naming_failures(policy, "model", "float32"):
            raise error


def test_the_cost_of_attention_is_what_it_computes(hf_model: PreTrainedModel, tiny_model: Models, mesh: Mesh) -> None:
    config = hf_model.config
    assert config.tie_word_embeddings
    matrices = sum(parameter.numel() for parameter in hf_model.parameters())
    length = 50
    outside = 6 * matrices * length  # forward 2, backward 4
    pairs = length * length / 2
    within = 3 * 2 * 2 * pairs * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    found = Layout(packs=True, attention="packed", pair_cost=pair_cost(hf_model))
    assert found.cost(length) / length == pytest.approx(1 + within / outside)
    hf_model.config = PreTrainedConfig()  # which does not say how large anything is
    assert pair_cost(hf_model) == 0
    policy = build_policy(TrainedModelConfig(name=str(tiny_model("llama"))), mesh, seed=0)
    assert policy.layout.cost(10) > 10
    scalar = build_scalar_model(TrainedModelConfig(name=str(tiny_model("llama"))), mesh, seed=0)
    assert scalar.layout.cost(10) > policy.layout.cost(10), "it has no head, which costs the policy something"


def group(size: int, rank: int = 0) -> SequenceGroup:
    """Return one whose collectives are not called."""
    world = dist.group.WORLD
    assert world is not None
    return SequenceGroup(rank, size, world)


@pytest.mark.parametrize(("name", "why"), [
    ("falcon_h1", "its tokens meet outside of attention"),
    ("bloom", "its layers do not use transformers' attention interface"),
    ("llama4_text", "what its tokens see depends on more than a sliding window"),
])  # fmt: skip
def test_families_whose_tokens_meet_elsewhere_are_refused(name: str, why: str, mesh: Mesh, tmp_path: Path) -> None:
    directory = write_model(next(one for one in FAMILIES if one.name == name), tmp_path / "model", seed=2)
    policy = build_policy(TrainedModelConfig(name=str(directory)), mesh, seed=0)
    policy.share_rows(None)
    with pytest.raises(DataError, match=rf"parallel\.sequence_parallel = 2: .* in slices of its rows: {why}"):
        policy.share_rows(group(2))


@pytest.mark.parametrize(("fields", "attention", "size", "why"), [
    ({}, "packed", 3, "its attention has 4 heads, which 3 ranks cannot share evenly"),
    ({"num_attention_heads": 12, "num_key_value_heads": 6}, "packed", 4, "has 6 heads of keys and values"),
    ({}, "sdpa", 2, "would need a mask"),
    ({}, "flash_attention_2", 2, "only packed attention is computed so"),
])  # fmt: skip
def test_what_cannot_be_sliced_is_refused(
    fields: dict[str, Any], attention: str, size: int, why: str, tiny_model: Models, mesh: Mesh
) -> None:
    policy = build_policy(TrainedModelConfig(name=str(tiny_model(**fields))), mesh, seed=0)
    if attention != "packed":
        # Of another implementation the layout is known without its kernels, which are not installed.
        policy.layout = type(policy.layout)(attention != "sdpa", attention, "" if attention != "sdpa" else why)
    with pytest.raises(DataError, match=why):
        policy.share_rows(group(size))


@pytest.mark.parametrize(("heads", "key_heads", "ranks", "fits"), [
    (8, 8, 4, True), (8, 2, 4, True), (8, 2, 8, True), (8, 8, 16, False), (12, 6, 4, False), (6, 2, 4, False),
])  # fmt: skip
def test_heads_are_shared_evenly_or_repeated(heads: int, key_heads: int, ranks: int, fits: bool) -> None:
    assert (reason_against(heads, key_heads, ranks) == "") == fits


@pytest.mark.parametrize("length", [1, 2, 5, 8, 9])
def test_every_token_is_one_ranks(length: int) -> None:
    rows_BL = torch.arange(1, 2 * length + 1).view(2, length)
    index_N = torch.randperm(2 * length)[: length + 1]
    owned = list[int]()
    for rank in range(4):
        row = RowSlice(group(4, rank), length)
        part_BT = row.of(rows_BL)
        assert part_BT.shape == (2, row.width) and row.width * 4 >= length > (row.width - 1) * 4
        own_O = row.own(index_N)
        assert torch.equal(part_BT.flatten()[row.places(index_N)], rows_BL.flatten()[index_N[own_O]])
        owned += own_O.tolist()
    assert sorted(owned) == list(range(length + 1))
