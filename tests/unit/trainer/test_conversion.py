"""Reading torch.distributed.checkpoint directories tensor by tensor, and what is made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor

from holdfast.errors import CheckpointError, SaveError
from holdfast.run import manifest
from holdfast.run.manifest import Manifest
from holdfast.trainer.export import (
    Export,
    Group,
    TensorReader,
    describe,
    export,
    import_weights,
    new_directory,
)
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.hf_files import SafetensorsWriter


def saved(directory: Path, tensors: dict[str, Tensor]) -> Path:
    dcp.save(dict(tensors), checkpoint_id=directory)
    return directory


@pytest.fixture
def tensors(mesh: Mesh, tmp_path: Path) -> Path:
    """A directory with tensors of a model and of an optimizer."""
    bfloat16 = torch.ones(2, dtype=torch.bfloat16)
    named = {"model.near": torch.tensor([3.0, 4.0]), "model.dtype": bfloat16, "optim.same.step": torch.tensor(5.0)}
    return saved(tmp_path / "tensors", named)


def test_tensors_are_read_one_by_one(tensors: Path, tmp_path: Path) -> None:
    reader = TensorReader(tensors)
    assert torch.equal(reader.read("model.near"), torch.tensor([3.0, 4.0]))
    assert reader.read("optim.same.step").shape == ()
    assert reader.read("model.dtype").dtype == torch.bfloat16
    for file in tensors.glob("*.distcp"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"model\.near cannot be read from .*tensors"):
        reader.read("model.near")
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read"):
        TensorReader(tmp_path)


def test_tensors_are_counted_by_the_first_part_of_their_names(tensors: Path) -> None:
    assert describe(tensors) == {"model": Group(2, 4, 2 * 4 + 2 * 2), "optim": Group(1, 1, 4)}


def test_files_hold_no_more_than_asked_unless_one_tensor_does(tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path, max_file_bytes=100)
    for name, elements in (("a", 10), ("b", 16), ("c", 50), ("d", 1), ("e", 24)):
        writer.add(name, torch.zeros(elements))
    writer.close()
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert names == [f"model-0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == names and index["metadata"]["total_size"] == 404
    assert (writer.num_tensors, writer.num_elements, writer.num_bytes) == (5, 101, 404)


@pytest.mark.parametrize(
    ("raised", "seen"), [(OSError(28, "No space left on device"), SaveError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_a_directory_that_is_not_finished_goes_away(
    raised: BaseException, seen: type[BaseException], tmp_path: Path
) -> None:
    with pytest.raises(seen), new_directory(tmp_path / "exports" / "x") as directory:
        (directory / "part-0.safetensors").write_bytes(b"half")
        raise raised
    assert list((tmp_path / "exports").iterdir()) == []


def test_a_checkpoint_that_cannot_be_exported_as_asked_is_refused(mesh: Mesh, tmp_path: Path) -> None:
    def refused(name: str, tensors: dict[str, Tensor], said: str, **options: Any) -> None:
        step = tmp_path / name
        saved(step / "trainer", tensors)
        files = manifest.describe_files(step)
        manifest.write_manifest(step, Manifest(kind="checkpoint", step=1, policy_version=1, files=files))
        with pytest.raises(CheckpointError, match=said):
            export(Export(step, tmp_path / "exported", **options))
        assert not (tmp_path / "exported").exists()

    refused("step_1", {"optim.x": torch.ones(1)}, r"holds no tensors named 'model\.\*'; it has optim\.x")
    refused("step_2", {"model.x": torch.ones(1)}, "holds whole weights, not a LoRA adapter: leave out --base", base="b")


def test_weights_that_come_without_a_config_need_a_model(tmp_path: Path) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"comes without a config\.json: say with --model"):
        import_weights(tmp_path / "x.safetensors", tmp_path / "imported")
