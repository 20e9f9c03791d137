"""Reading somebody else's checkpoint runs nothing of its author's choice; what an index says, and what is exported."""

import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from holdfast.errors import CheckpointError, SaveError
from holdfast.launcher.resume.attempt import copy_fork, find_fork
from holdfast.run import manifest
from holdfast.run.checkpoints import require_weights
from holdfast.run.manifest import FileEntry, decode_manifest, encode_manifest
from holdfast.run.run_dir import RunDir
from holdfast.trainer.checkpoint.checkpointer import save_state
from holdfast.trainer.checkpoint.dcp import IndexReader
from holdfast.trainer.checkpoint.init_from import load_weights_only
from holdfast.trainer.export import Export, Group, TensorReader, describe, export, new_directory
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.safetensors_files import SafetensorsWriter
from tests.builders.checkpoint_files import commit, write_checkpoint

NAMES = [
    "os system", "builtins eval", "pathlib os.system", "torch load", "torch Size.__class__",
    "torch.serialization os.system", "torch.distributed.checkpoint.metadata os.system",
    "torch.distributed.checkpoint.filesystem FileSystem.rm_file",
]  # fmt: skip

Read = Callable[[Path], object]


def read_names(directory: Path) -> object:
    return IndexReader(directory).only_tensors()


def load_weights(directory: Path) -> object:
    return load_weights_only({"weight": torch.zeros(2)}, directory)


def calls(name: str, argument: str) -> list[bytes]:
    """Return pickles that call a function, as the old and the new protocols name it."""
    module, attribute = name.split(" ")
    named = (f"c{module}\n{attribute}\n".encode(), f"\x80\x04V{module}\nV{attribute}\n\x93".encode("latin-1"))
    return [function + b"(V" + argument.encode() + b"\ntR." for function in named]


@pytest.mark.parametrize("read", [read_names, TensorReader, load_weights])
@pytest.mark.parametrize("name", NAMES)
def test_an_index_can_name_nothing_but_parts_of_an_index(name: str, read: Read, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "index").mkdir()
    for content in calls(name, f"touch {mark}"):
        (tmp_path / "index/.metadata").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: it names .* not part of an index"):
            read(tmp_path / "index")
    assert not mark.exists()


def test_an_index_must_be_there_and_be_one(tmp_path: Path) -> None:
    for reads in (IndexReader(tmp_path).tensors, lambda: TensorReader(tmp_path)):
        with pytest.raises(CheckpointError, match=r"/\.metadata cannot be read"):
            reads()
    (tmp_path / ".metadata").write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(CheckpointError, match="it holds a list, not an index of tensors"):
        read_names(tmp_path)


def test_a_spoilt_index_is_an_index_or_an_error(tmp_path: Path) -> None:
    save_state(tmp_path / "made", {"model": torch.nn.Linear(2, 2), "progress": {"step": 1}})
    path = tmp_path / "made/trainer/.metadata"
    original = path.read_bytes()
    assert read_names(path.parent)
    draw = random.Random(11)
    for _ in range(300):
        spoilt = bytearray(original)
        for _ in range(draw.choice((1, 2, 8))):
            spoilt[draw.randrange(len(spoilt))] = draw.randrange(256)
        path.write_bytes(spoilt)
        try:
            read_names(path.parent)
        except CheckpointError as error:
            assert ".metadata cannot be read" in str(error) or "not tensors" in str(error)


def test_weights_beside_a_foreign_index_are_refused(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", ".metadata"):
        (tmp_path / name).write_bytes(calls("os system", f"touch {tmp_path}/mark")[0])
    for read in (require_weights, load_weights):
        with pytest.raises(CheckpointError, match="two kinds at once .*move away what is not meant"):
            read(tmp_path)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("name", ["../../payload", "/etc/passwd", "trainer/../../x", "", "a\0b"])
def test_a_manifest_names_files_of_its_directory_alone(name: str, tmp_path: Path) -> None:
    mine, directory = RunDir(tmp_path / "mine"), write_checkpoint(RunDir(tmp_path / "other"), 1)
    listing = manifest.read_manifest(directory)
    listing.files[name] = FileEntry(0, "")
    manifest.write_manifest(directory, listing)
    for reads in (
        lambda: decode_manifest(encode_manifest(listing), "it"),
        lambda: manifest.verify(directory),
        lambda: copy_fork(find_fork(directory, mine, how="full"), mine, how="full"),
    ):
        with pytest.raises(CheckpointError, match="names a file outside of its directory"):
            reads()
    assert not mine.checkpoints.exists()


def test_tensors_are_found_among_other_objects_and_only_tensors_are_ours(tmp_path: Path, mesh: Mesh) -> None:
    index = IndexReader(saved(tmp_path / "mixed", {"weight": torch.ones(2, 3), "note": "of another loop"}))
    assert {name: tuple(entry.size) for name, entry in index.tensors().items()} == {"weight": (2, 3)}
    with pytest.raises(CheckpointError, match="mixed holds objects that are not tensors: note"):
        index.only_tensors()


def saved(directory: Path, tensors: dict[str, Any]) -> Path:
    dcp.save(dict(tensors), checkpoint_id=directory)
    return directory


@pytest.fixture
def tensors(mesh: Mesh, tmp_path: Path) -> Path:
    """A directory with tensors of a model and of an optimizer."""
    bfloat16 = torch.ones(2, dtype=torch.bfloat16)
    named = {"model.near": torch.tensor([3.0, 4.0]), "model.dtype": bfloat16, "optim.same.step": torch.tensor(5.0)}
    return saved(tmp_path / "tensors", named)


def test_tensors_are_read_one_by_one_and_counted_by_the_first_part_of_their_names(tensors: Path) -> None:
    assert describe(tensors) == {"model": Group(2, 4, 2 * 4 + 2 * 2), "optim": Group(1, 1, 4)}
    reader = TensorReader(tensors)
    assert torch.equal(reader.read("model.near"), torch.tensor([3.0, 4.0]))
    assert reader.read("optim.same.step").shape == () and reader.read("model.dtype").dtype == torch.bfloat16
    for file in tensors.glob("*.distcp"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"loading .*tensors failed"):
        reader.read("model.near")


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
def test_an_unfinished_directory_goes_away(raised: BaseException, seen: type[BaseException], tmp_path: Path) -> None:
    with pytest.raises(seen), new_directory(tmp_path / "exports" / "x") as directory:
        (directory / "part-0.safetensors").write_bytes(b"half")
        raise raised
    assert list((tmp_path / "exports").iterdir()) == []


def test_a_checkpoint_that_cannot_be_exported_as_asked_is_refused(mesh: Mesh, tmp_path: Path) -> None:
    def refused(name: str, tensors: dict[str, Tensor], said: str, **options: Any) -> None:
        step = tmp_path / name
        saved(step / "trainer", tensors)
        commit(step, "checkpoint", 1)
        with pytest.raises(CheckpointError, match=said):
            export(Export(step, tmp_path / "exported", **options))
        assert not (tmp_path / "exported").exists()

    refused("step_1", {"optim.x": torch.ones(1)}, r"holds no tensors named 'model\.\*'; it has optim\.x")
    refused("step_2", {"model.x": torch.ones(1)}, "holds whole weights, not a LoRA adapter: leave out --base", base="b")
