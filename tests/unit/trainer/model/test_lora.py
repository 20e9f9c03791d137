"""LoRA, of policies and of reward models: what is trained, what it starts with, what checkpoints and files hold."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerBase

from holdfast.config.training import AdamWConfig, TrainedModelConfig
from holdfast.errors import CheckpointError, DataError
from holdfast.run import weights as run_weights
from holdfast.run.checkpoints import Kind, kind_of
from holdfast.run.run_dir import RunDir
from holdfast.run.weights import _WITHOUT_EFFECT, ADAPTER_DIR, ADAPTER_NAME, Base, read_base, read_scaling
from holdfast.trainer.checkpoint.checkpointer import load_state_with_optimizer, save_state
from holdfast.trainer.checkpoint.init_from import load_weights_only
from holdfast.trainer.data.packing import Sample, build_micro_batch
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.build import trained_parameters, trained_tensors
from holdfast.trainer.model.lora import HEAD, Adapters, digest_of
from holdfast.trainer.model.policy import Policy, build_policy, predict
from holdfast.trainer.model.publish import WeightPublisher
from holdfast.trainer.model.structure import base_tensors
from holdfast.trainer.model.tensor_names import TensorLayout
from holdfast.trainer.model.value_model import ScalarModel, build_scalar_model, score_samples
from holdfast.trainer.optimizer import build_optimizer
from holdfast.trainer.rl.auxiliary_models import RewardModel
from holdfast.trainer.state import Progress, TrainState
from tests.builders.train_states import copied, fill, same, train
from tests.ranks.policy_metrics import ragged_samples

Models = Callable[..., Path]
LORA = {"rank": 2, "alpha": 6.0}


@pytest.fixture
def build(tiny_model: Models, mesh: Mesh) -> Callable[..., Policy]:
    """Return a maker of adapted policies: `build(directory, seed=0, dtype=..., **lora)`."""

    def make(directory: Path | None = None, *, seed: int = 0, dtype: str = "float32", **lora: Any) -> Policy:
        config = {"name": str(directory or tiny_model()), "dtype": dtype, "lora": LORA | lora}
        return build_policy(TrainedModelConfig.model_validate(config), mesh, seed=seed)

    return make


def state_of(policy: Policy, *, name: str = "base", steps: int = 0) -> TrainState:
    optimizer = build_optimizer(policy.hf_model, AdamWConfig(lr=0.01))
    adapters = Adapters(policy.hf_model, TensorLayout(policy.hf_model, None), base_name=name)
    state = TrainState(policy, optimizer, Progress(), {"base": adapters})
    train(state, steps)
    return state


def logprobs(policy: Policy) -> Tensor:
    ids = np.arange(5, 40, dtype=np.int32)
    micro = build_micro_batch([Sample(ids, np.ones(35, dtype=bool))], [0], pack=True, device=torch.device("cpu"))
    return predict(policy, micro)[0]


def test_a_new_adapter_changes_nothing_and_a_trained_one_does(build: Any, tiny_model: Models, mesh: Mesh) -> None:
    plain = build_policy(TrainedModelConfig(name=str(tiny_model())), mesh, seed=0)
    policy = build()
    with torch.no_grad():
        assert torch.equal(logprobs(policy), logprobs(plain))
        fill(policy.hf_model)
        assert not torch.allclose(logprobs(policy), logprobs(plain), atol=1e-2)


def test_adapters_start_from_the_seed_alone(build: Any) -> None:
    torch.manual_seed(1)
    first = copied(trained_tensors(build(seed=5).hf_model))
    torch.manual_seed(2)
    again, other = (copied(trained_tensors(build(seed=seed).hf_model)) for seed in (5, 6))
    assert same(first, again) and not same(first, other)
    for name, tensor in first.items():
        if name.endswith("lora_B.weight"):
            assert not tensor.any(), name
        else:  # uniform within 1 / sqrt(inputs): Kaiming with a = sqrt(5)
            bound = tensor.shape[1] ** -0.5
            assert 0.8 * bound < tensor.abs().max() <= bound, name


def test_every_linear_layer_of_the_decoder_is_adapted_and_nothing_else_is_trained(build: Any) -> None:
    policy = build()
    names = set(trained_tensors(policy.hf_model))
    layers = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    layers += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    assert names == {f"model.layers.{i}.{layer}.lora_{f}.weight" for i in (0, 1) for layer in layers for f in "AB"}
    before = copied(base_tensors(policy.hf_model))
    assert "model.embed_tokens.weight" in before and "model.layers.0.self_attn.q_proj.weight" in before
    logprobs(policy).sum().backward()
    got = {name for name, parameter in policy.named_parameters() if parameter.grad is not None}
    assert len(got) == len(names) and all(".lora_" in name for name in got)
    optimizer = build_optimizer(policy.hf_model, AdamWConfig(lr=0.1))
    optimizer.step()
    assert same(copied(base_tensors(policy.hf_model)), before)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(names)


def test_target_modules_choose_layers_by_the_ends_of_their_names(build: Any) -> None:
    policy = build(target_modules=["0.mlp.up_proj", "v_proj"])
    adapted = {name.split(".lora_")[0] for name in trained_tensors(policy.hf_model)}
    assert adapted == {"model.layers.0.mlp.up_proj", *(f"model.layers.{i}.self_attn.v_proj" for i in (0, 1))}
    with pytest.raises(DataError, match=r"ends like 'q_prj'. Did you mean 'q_proj'.* Its layers: down_proj, gate_proj"):
        build(target_modules=["q_prj"])
    with pytest.raises(DataError, match="ends like 'lm_head'"):
        build(target_modules=["lm_head"])


def test_a_resume_with_another_base_is_refused_before_anything_is_loaded(
    build: Any, tiny_model: Models, tmp_path: Path
) -> None:
    save_state(tmp_path / "step_1", state_of(build(), name="here", steps=1), step=1)
    other = state_of(build(tiny_model(seed=1)), name="there")
    before = copied(other.tensors())
    with pytest.raises(CheckpointError, match="trained on other weights: those of model.name = 'here' .*'there' has"):
        load_state_with_optimizer(tmp_path / "step_1", other)
    assert same(copied(other.tensors()), before)


def test_the_digest_of_a_base_is_what_it_is_defined_to_be() -> None:
    tensors = {"b": torch.tensor([1.5], dtype=torch.bfloat16), "a": torch.zeros(2, 3)}
    by_hand = [("a", (2, 3), memoryview(bytes(24))), ("b", (1,), memoryview(np.float32(1.5).tobytes()))]
    assert digest_of(tensors) == run_weights.tensors_digest(by_hand)
    assert digest_of(tensors) != digest_of(tensors | {"b": torch.tensor([1.25])})
    assert digest_of({"a": torch.zeros(2, 3)}) != digest_of({"a": torch.zeros(3, 2)})


@pytest.fixture
def published(
    build: Any, tiny_model: Models, mesh: Mesh, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> tuple[WeightPublisher, Policy]:
    policy = build()
    fill(policy.hf_model)
    adapters = Adapters(policy.hf_model, TensorLayout(policy.hf_model, None), base_name=str(tiny_model()))
    run_dir = RunDir(tmp_path / "run")
    return WeightPublisher(run_dir, policy, tokenizer, mesh, dtype="float32", adapters=adapters), policy


def test_published_weights_are_merged_as_peft_merges_them(published: Any, tiny_model: Models) -> None:
    publisher, policy = published
    directory = publisher.publish(1)
    assert kind_of(directory) is Kind.WEIGHTS and kind_of(directory / ADAPTER_DIR) is Kind.ADAPTER
    merged_here, findings = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not findings["missing_keys"] and not findings["unexpected_keys"]
    base = AutoModelForCausalLM.from_pretrained(tiny_model())
    by_peft = peft.PeftModel.from_pretrained(base, str(directory / ADAPTER_DIR)).eval()
    ids = torch.arange(5, 40)[None]
    with torch.no_grad():
        ours = logprobs(policy)
        for model in (by_peft, merged_here.eval()):
            theirs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    whole = by_peft.merge_and_unload()
    for name, tensor in trained_tensors(merged_here).items():
        assert torch.equal(tensor, whole.get_parameter(name)), name


def test_engines_get_the_adapter_alone(published: Any, tiny_model: Models) -> None:
    publisher, policy = published
    whole, alone = publisher.publish(1), publisher.publish(2, for_engines=True)
    assert kind_of(alone) is Kind.ADAPTER
    assert {path.name for path in alone.iterdir()} == {
        ADAPTER_NAME, "adapter_config.json", "base.json", "manifest.json"
    }  # fmt: skip
    assert (alone / ADAPTER_NAME).read_bytes() == (whole / ADAPTER_DIR / ADAPTER_NAME).read_bytes()
    assert (alone / ADAPTER_NAME).stat().st_mode & 0o444 == 0o444
    assert read_base(alone) == Base(str(tiny_model()), digest_of(base_tensors(policy.hf_model)))
    adapters = publisher._adapters
    adapters.base = msgspec.structs.replace(adapters.base, regrouped=["a.weight"])
    with pytest.raises(DataError, match=r"files of model\.name hold 'a\.weight' in another layout"):
        publisher.publish(3, for_engines=True)


def test_adapters_of_ours_and_of_peft_are_warm_starts_of_adapted_models_alone(
    published: Any, build: Any, tiny_model: Models, mesh: Mesh, tmp_path: Path
) -> None:
    publisher, policy = published
    directory = publisher.publish(1)
    wanted = copied(trained_tensors(policy.hf_model))
    save_state(tmp_path / "step_1", state_of(policy), step=1)
    base = AutoModelForCausalLM.from_pretrained(tiny_model())
    peft.PeftModel.from_pretrained(base, str(directory / ADAPTER_DIR)).save_pretrained(str(tmp_path / "by_peft"))
    for source in (directory / ADAPTER_DIR, tmp_path / "by_peft", publisher.publish(2, for_engines=True)):
        fresh = trained_tensors(build(seed=4).hf_model)
        load_weights_only(fresh, source)
        assert same(copied(fresh), wanted), source
    fresh = trained_tensors(build(seed=4).hf_model)
    load_weights_only(fresh, tmp_path / "step_1")
    assert same(copied(fresh), wanted)
    with pytest.raises(CheckpointError, match="holds no LoRA adapter, and with model.lora nothing else is loaded"):
        load_weights_only(fresh, directory)
    plain = build_policy(TrainedModelConfig(name=str(tiny_model())), mesh, seed=0)
    with pytest.raises(CheckpointError, match="holds a LoRA adapter, and weights are needed"):
        load_weights_only(trained_tensors(plain.hf_model), tmp_path / "step_1")


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning", "ignore::FutureWarning")
def test_every_setting_of_peft_is_refused_or_computes_what_peft_does(
    build: Any, tiny_model: Models, tmp_path: Path
) -> None:
    started = [False, "gaussian", "orthogonal", "pissa", "pissa_niter_4", "olora", "mica"]
    made: dict[str, list[Any]] = {
        "r": [3], "target_modules": [["q_proj"]], "exclude_modules": [["q_proj"]], "lora_alpha": [5],
        "lora_dropout": [0.5], "bias": ["all"], "use_rslora": [True], "modules_to_save": [["lm_head"]],
        "init_lora_weights": started, "layers_to_transform": [[0]], "rank_pattern": [{"q_proj": 2}, {"q_proj": 4}],
        "alpha_pattern": [{"q_proj": 2}, {"q_proj": 8}], "trainable_token_indices": [[5, 6]], "use_dora": [True],
        "alora_invocation_tokens": [[5]], "layer_replication": [[[0, 1], [0, 2]]], "lora_bias": [True],
    }  # fmt: skip
    # Others need data, devices or classes of their own, or are yet to come: only in the file.
    written = [*(field.name for field in dataclasses.fields(peft.LoraConfig)), "of_a_newer_peft"]
    taken, without_effect, ids = set[str](), set[str](), torch.arange(5, 40)[None]

    def check(name: str, value: Any, *, makes: bool) -> None:
        config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"], "task_type": "CAUSAL_LM"}
        config |= {name: value} if makes else {}
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model()), peft.LoraConfig(**config))
        with torch.no_grad():
            for factor in model.parameters():
                factor.add_(torch.full_like(factor, 0.02) if factor.requires_grad else 0)
        model.save_pretrained(tmp_path)
        path = tmp_path / "adapter_config.json"
        if not makes:
            path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
        lora_keys = (key for key in load_file(tmp_path / ADAPTER_NAME) if ".lora_" in key)
        layers = sorted({key.split(".lora_")[0].removeprefix("base_model.model.") for key in lora_keys})
        try:
            scaling = read_scaling(tmp_path)
            lora = {"alpha": scaling.lora_alpha, "use_rslora": scaling.use_rslora}
            policy = build(rank=scaling.r, target_modules=layers, **lora)
            load_weights_only(trained_tensors(policy.hf_model), tmp_path)
        except (CheckpointError, DataError) as error:
            assert name in str(error) or "does not fit this model" in str(error), error
            return
        (taken if makes else without_effect).add(f"{name} {value}" if makes else name)
        if makes:
            base = AutoModelForCausalLM.from_pretrained(tiny_model())
            with torch.no_grad():
                logits = peft.PeftModel.from_pretrained(base, str(tmp_path)).eval()(ids).logits[0, :-1]
                theirs = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
                torch.testing.assert_close(logprobs(policy), theirs, rtol=1e-4, atol=1e-4, msg=f"{name} = {value}")

    for name, values in made.items():
        for value in values:
            check(name, value, makes=True)
    for name in written:
        check(name, "x", makes=False)
    for value in ("corda", "loftq", "lora_ga"):
        check("init_lora_weights", value, makes=False)
    assert taken == {
        "r 3", "target_modules ['q_proj']", "exclude_modules ['q_proj']", "lora_alpha 5", "lora_dropout 0.5",
        "use_rslora True", "init_lora_weights False", "init_lora_weights gaussian", "init_lora_weights orthogonal",
        "layers_to_transform [0]", "rank_pattern {'q_proj': 4}", "alpha_pattern {'q_proj': 8}",
    }  # fmt: skip
    assert without_effect <= {*_WITHOUT_EFFECT}
    for kind in ("IA3", "ADALORA"):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": kind, "init_r": 8}))
        with pytest.raises(DataError, match=f"peft_type = '{kind}' is not LORA"):
            read_scaling(tmp_path)


def test_a_damaged_adapter_is_no_warm_start(published: Any, build: Any) -> None:
    publisher, _ = published
    directory = publisher.publish(1, for_engines=True)
    tensors = load_file(directory / ADAPTER_NAME)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, directory / ADAPTER_NAME)
    with pytest.raises(CheckpointError, match=ADAPTER_NAME):
        load_weights_only(trained_tensors(build().hf_model), directory)


@pytest.fixture
def build_scorer(tiny_model: Models, mesh: Mesh) -> Callable[..., ScalarModel]:
    """Return a maker of adapted reward models: `build_scorer(seed=0, weights=True, **lora)`."""

    def make(*, seed: int = 0, weights: bool = True, **lora: Any) -> ScalarModel:
        config = {"name": str(tiny_model()), "lora": LORA | lora}
        return build_scalar_model(TrainedModelConfig.model_validate(config), mesh, seed=seed, weights=weights)

    return make


def scores(model: ScalarModel) -> torch.Tensor:
    samples = ragged_samples()
    return score_samples(model, samples, list(range(len(samples))), pack=True, device=torch.device("cpu"))


def published_scorer(model: ScalarModel, tokenizer: PreTrainedTokenizerBase, mesh: Mesh, path: Path) -> Path:
    adapters = Adapters(model.hf_model, TensorLayout(model.hf_model, None), base_name="base")
    return WeightPublisher(RunDir(path), model, tokenizer, mesh, dtype="float32", adapters=adapters).publish(1)


def test_of_a_reward_model_adapters_and_head_are_trained(build_scorer: Any, tiny_model: Models, mesh: Mesh) -> None:
    model = build_scorer()
    names = set(trained_tensors(model.hf_model))
    assert HEAD in names and trained_parameters(model.hf_model).keys() == names
    assert {name for name in names if ".lora_" not in name} == {HEAD}
    assert {name for name, p in model.hf_model.named_parameters() if p.requires_grad and ".lora_" not in name} == {HEAD}
    plain = build_scalar_model(TrainedModelConfig(name=str(tiny_model())), mesh, seed=0)
    torch.testing.assert_close(scores(model), scores(plain), rtol=0, atol=0)  # B is 0 and the head the same
    for kind in (".lora_A.", ".lora_B."):
        assert sum(kind in name for name in names) == (len(names) - 1) // 2
    with pytest.raises(DataError, match="no linear layer of .* ends like 'score'"):
        build_scorer(target_modules=["score"])


def test_a_published_reward_model_scores_the_same_by_transformers_by_peft_and_in_rl(
    build_scorer: Any, tiny_model: Models, tokenizer: PreTrainedTokenizerBase, mesh: Mesh, tmp_path: Path
) -> None:
    model = build_scorer()
    fill(model.hf_model)
    directory = published_scorer(model, tokenizer, mesh, tmp_path)
    settings = json.loads((directory / ADAPTER_DIR / "adapter_config.json").read_text())
    assert (settings["task_type"], settings["modules_to_save"]) == ("SEQ_CLS", ["score"])
    merged, findings = AutoModelForSequenceClassification.from_pretrained(directory, output_loading_info=True)
    assert not findings["missing_keys"] and not findings["unexpected_keys"]
    base = AutoModelForSequenceClassification.from_pretrained(tiny_model(), num_labels=1)
    by_peft = peft.PeftModel.from_pretrained(base, str(directory / ADAPTER_DIR)).eval()
    by_peft.config.pad_token_id = merged.config.pad_token_id
    with torch.no_grad():
        ours = scores(model)
        for theirs in (merged.eval(), by_peft):
            found = [theirs(torch.from_numpy(s.token_ids)[None].long()).logits.item() for s in ragged_samples()]
            np.testing.assert_allclose(ours.numpy(), found, rtol=1e-4, atol=1e-4)
    in_rl = RewardModel(str(directory), TrainedModelConfig(name=str(tiny_model())), mesh)
    np.testing.assert_allclose(in_rl.score(ragged_samples(), row_tokens=64), ours.numpy(), rtol=1e-4, atol=1e-4)


def test_the_base_of_a_reward_model_is_the_weights_without_the_head_which_checkpoints_hold(
    build_scorer: Any, tokenizer: PreTrainedTokenizerBase, mesh: Mesh, tmp_path: Path
) -> None:
    """What is trained does not change the digest; adapters and head are a warm start of another run."""
    model = build_scorer()
    before = Adapters(model.hf_model, TensorLayout(model.hf_model, None), base_name="base").base.digest
    fill(model.hf_model)
    directory = published_scorer(model, tokenizer, mesh, tmp_path)
    assert read_base(directory / ADAPTER_DIR).digest == before
    wanted = copied(trained_tensors(model.hf_model))
    fresh = trained_tensors(build_scorer(seed=4).hf_model)
    assert not same(copied(fresh), wanted)
    load_weights_only(fresh, directory / ADAPTER_DIR)
    assert same(copied(fresh), wanted)
    resumed = build_scorer(seed=0, weights=False)  # as for a checkpoint, which has no base
    load_weights_only(trained_tensors(resumed.hf_model), directory / ADAPTER_DIR)
    with torch.no_grad():
        torch.testing.assert_close(scores(resumed), scores(model), rtol=0, atol=0)
