"""Warm start: the weights of every kind of source are taken exactly, and nothing that does not fit is."""

import logging
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from holdfast.config.training import LoraConfig, TrainedModelConfig
from holdfast.errors import CheckpointError
from holdfast.run.checkpoints import kind_of
from holdfast.run.inputs import check_warm_start
from holdfast.trainer.checkpoint import init_from
from holdfast.trainer.checkpoint.init_from import load_weights_only
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.build import trained_tensors
from tests.builders.checkpoint_files import commit, flip
from tests.conftest import ModelFactory

Make = Callable[[Path, Path], Path]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest, tiny_model: ModelFactory) -> Path:
    return tiny_model(tied=request.param, num_hidden_layers=1)


def weights_of(model: Path) -> dict[str, Tensor]:
    return load_file(model / "model.safetensors")


def empty(model: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Tensors as a trainer would have them, filled with what must not stay."""
    tensors = trained_tensors(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=dtype))
    for tensor in tensors.values():
        tensor.fill_(float("nan"))
    return tensors


def assert_loaded(path: str | Path, model: Path) -> None:
    tensors, expected = empty(model), weights_of(model)
    load_weights_only(tensors, path)
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name


def make_checkpoint(model: Path, directory: Path) -> Path:
    weights = weights_of(model)
    tensors = {f"model.{name}": tensor for name, tensor in weights.items()}
    tensors |= {f"optim.{name}.exp_avg": torch.zeros_like(tensor) for name, tensor in weights.items()}
    dcp.save(tensors, checkpoint_id=directory / "trainer", no_dist=True)
    return commit(directory, "checkpoint", 3)


def as_hugging_face(model: Path, directory: Path) -> Path:
    return Path(shutil.copytree(model, directory))


def as_shards(model: Path, directory: Path) -> Path:
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(directory, max_shard_size="20KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    return directory


def as_published_weights(model: Path, directory: Path) -> Path:
    return commit(as_hugging_face(model, directory), "weights", 3)


def as_dcp(model: Path, directory: Path) -> Path:
    dcp.save(dict(weights_of(model)), checkpoint_id=directory, no_dist=True)
    return directory


def as_dcp_of_an_app(model: Path, directory: Path) -> Path:
    """As torch's tutorials write it: nested, with an optimizer, and with an object that is no tensor."""
    weights = dict(weights_of(model))
    optimizer = {"state": {name: {"exp_avg": tensor * 0} for name, tensor in weights.items()}}
    state = {"app": {"model": weights, "optim": optimizer, "step": {"a": object}}}
    dcp.save(state, checkpoint_id=directory, no_dist=True)
    return directory


def as_dcp_beside_an_optimizer(model: Path, directory: Path) -> Path:
    dcp.save({**weights_of(model), "optimizer": {"exp_avg": torch.zeros(3)}}, checkpoint_id=directory, no_dist=True)
    return directory


def as_file(model: Path, directory: Path) -> Path:
    return Path(shutil.copy(model / "model.safetensors", directory.with_suffix(".safetensors")))


@pytest.mark.parametrize(
    "make",
    [make_checkpoint, as_hugging_face, as_shards, as_published_weights, as_dcp,
     as_dcp_of_an_app, as_dcp_beside_an_optimizer, as_file],
)  # fmt: skip
def test_every_kind_of_source_gives_the_same_weights(make: Make, model: Path, tmp_path: Path) -> None:
    assert_loaded(make(model, tmp_path / "source"), model)


@pytest.mark.parametrize("make", [make_checkpoint, as_dcp, as_file])
def test_sharded_tensors_are_filled(make: Make, tiny_model: ModelFactory, tmp_path: Path, mesh: Mesh) -> None:
    model = tiny_model(num_hidden_layers=1)
    causal_lm = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.float32)
    fully_shard(causal_lm, mesh=mesh.device_mesh)
    tensors = trained_tensors(causal_lm)
    load_weights_only(tensors, make(model, tmp_path / "source"))
    for name, expected in weights_of(model).items():
        assert torch.equal(tensors[name].full_tensor(), expected), name  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [as_dcp, as_file])
def test_other_dtypes_are_cast_and_the_log_says_so(
    make: Make, tiny_model: ModelFactory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    half = tmp_path / "half"
    half.mkdir()
    model = tiny_model(num_hidden_layers=1)
    expected = {name: tensor.bfloat16() for name, tensor in weights_of(model).items()}
    save_file(expected, half / "model.safetensors")
    shutil.copy(model / "config.json", half)
    tensors = empty(model)
    with caplog.at_level(logging.INFO, logger="trainer"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(init_from, "_BUFFER_BYTES", 5000)  # several groups of buffers
        load_weights_only(tensors, make(half, tmp_path / "source"))
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name].float()), name
    assert "cast from torch.bfloat16 to torch.float32" in caplog.text


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def written(path: Path, tensors: dict[str, Tensor]) -> Path:
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)
    return path


def test_a_tied_model_takes_either_name_or_both(tiny_model: ModelFactory, tmp_path: Path) -> None:
    model = tiny_model(num_hidden_layers=1)
    weights = weights_of(model)
    embedding = weights[EMBEDDING]
    assert HEAD not in weights
    head_only = {name: tensor for name, tensor in weights.items() if name != EMBEDDING}
    for name, some in (("both", weights), ("head", head_only)):
        assert_loaded(written(tmp_path / f"{name}.safetensors", some | {HEAD: embedding}), model)
    values = "lm_head.weight differs from model.embed_tokens.weight .*tie_word_emb"
    kind = "it lacks nothing and has besides lm_head.weight"
    for other, said in ((embedding + 1, values), (embedding.half(), values), (embedding[1:], kind)):
        different = written(tmp_path / "different.safetensors", weights | {HEAD: other})
        with pytest.raises(CheckpointError, match=said):
            load_weights_only(empty(model), different)


def test_numbers_of_an_unknown_kind_and_quantized_weights_are_refused(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "odd.safetensors"
    for odd, said in (
        ({"odd": torch.ones(2, dtype=torch.uint64)}, f"{file}: odd has the dtype U64, which is not known"),
        ({EMBEDDING: torch.zeros(128, 32, dtype=torch.int8)}, "torch.int8 there"),
    ):
        with pytest.raises(CheckpointError, match=said):
            load_weights_only(empty(model), written(file, weights_of(model) | odd))


def test_what_older_files_hold_besides_weights_is_ignored(model: Path, tmp_path: Path) -> None:
    computed = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    assert_loaded(written(tmp_path / "old.safetensors", weights_of(model) | computed), model)


@pytest.mark.parametrize("make", [make_checkpoint, as_dcp, as_file, as_published_weights])
def test_another_model_is_refused_with_no_tensor_touched(make: Make, tiny_model: ModelFactory, tmp_path: Path) -> None:
    one, two = (tiny_model(num_hidden_layers=number) for number in (1, 2))
    source = make(one, tmp_path / "source")
    for model, taken, text in (
        (two, source, "lacks model.layers.1.* and 8 more and has besides nothing"),
        (tiny_model(num_hidden_layers=1, hidden_size=16), source, r"embed_tokens.weight is \(128, 32\).* \(128, 16\)"),
        (one, two, "has besides model.layers.1"),
        (tiny_model(tied=False, num_hidden_layers=1), one, "it lacks lm_head.weight and has besides nothing"),
    ):
        tensors = empty(model)
        with pytest.raises(CheckpointError, match=text) as caught:
            load_weights_only(tensors, taken)
        assert str(taken) in str(caught.value) and str(kind_of(taken)) in str(caught.value)
        assert all(tensor.isnan().all() for tensor in tensors.values())


@pytest.mark.parametrize("make", [make_checkpoint, as_published_weights])
def test_damage_is_found_before_a_tensor_is_touched(make: Make, model: Path, tmp_path: Path) -> None:
    source = make(model, tmp_path / "source")
    largest = max((path for path in source.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    flip(largest)
    tensors = empty(model)
    with pytest.raises(CheckpointError, match=f"{largest} is damaged"):
        load_weights_only(tensors, source)
    assert all(tensor.isnan().all() for tensor in tensors.values())
    load_weights_only(tensors, source, how="size")


@pytest.mark.parametrize(
    ("make", "name"),
    [(as_hugging_face, "model.safetensors"),
     (as_shards, "model.safetensors.index.json"), (as_dcp, ".metadata"), (as_dcp, "__0_0.distcp")],
)  # fmt: skip
def test_a_cut_file_is_one_message_that_names_it(make: Make, name: str, model: Path, tmp_path: Path) -> None:
    source = make(model, tmp_path / "source")
    content = (source / name).read_bytes()
    (source / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=str(source)):
        load_weights_only(empty(model), source)


def test_a_missing_file_of_an_index_and_what_holds_no_weights_are_named(model: Path, tmp_path: Path) -> None:
    source = as_shards(model, tmp_path / "source")
    gone = sorted(source.glob("*.safetensors"))[1]
    gone.unlink()
    for path, said in ((source, f"{gone} cannot be read"), (tmp_path / "no", "/no .*it is nothing:.*Needed: a check")):
        with pytest.raises(CheckpointError, match=said):
            load_weights_only(empty(model), path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00001.bin", "state.pt"])
def test_pickles_are_refused_with_the_command_that_converts_them(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "pickled"
    source.mkdir()
    shutil.copy(model / "config.json", source)
    torch.save(weights_of(model), source / name)
    given = source if name.endswith(".bin") else source / name
    with pytest.raises(CheckpointError, match=f"{given}.* is a pickle, which may hold code and is never") as caught:
        load_weights_only(empty(model), given)
    _, _, command = str(caught.value).partition("Convert it: ")
    python, flag, code, files = shlex.split(command)
    assert (python, flag, "\n" in command) == ("python", "-c", False)
    monkeypatch.setattr("sys.argv", ["-c", *map(str, source.glob(Path(files).name))])
    exec(compile(code, "printed", "exec"), {})
    assert_loaded(str(source), model)


def test_an_adapter_is_taken_only_by_a_model_with_adapters(model: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file({"base_model.model.x.lora_A.weight": torch.zeros(2, 3)}, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 4}')
    with pytest.raises(CheckpointError, match="a LoRA adapter, and weights are needed. Train it on with --model.lora"):
        check_warm_start(adapter, TrainedModelConfig(name=str(model)), how="full")
    check_warm_start(adapter, TrainedModelConfig(name=str(model), lora=LoraConfig()), how="full")
    shutil.copy(model / "model.safetensors", adapter)  # merged weights beside the adapter, as some programs save them
    factor = torch.ones(2, 3)
    load_weights_only({"x.lora_A.weight": factor}, adapter)
    assert not factor.any()
