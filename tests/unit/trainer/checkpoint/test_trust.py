"""What an index says, and that reading somebody else's checkpoint runs and touches nothing of its author's choice."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

from holdfast.errors import CheckpointError
from holdfast.launcher.resume.fork import copy_fork, find_fork
from holdfast.run import manifest
from holdfast.run.checkpoints import require_weights
from holdfast.run.manifest import FileEntry, decode_manifest, encode_manifest
from holdfast.run.run_dir import RunDir
from holdfast.trainer.checkpoint.checkpointer import save_state
from holdfast.trainer.checkpoint.dcp import IndexReader
from holdfast.trainer.checkpoint.init_from import load_weights_only
from holdfast.trainer.export import TensorReader
from holdfast.trainer.mesh import Mesh
from tests.builders.checkpoint_files import write_checkpoint

NAMES = [
    "os system",
    "builtins eval",
    "pathlib os.system",
    "torch load",
    "torch Size.__class__",
    "torch.serialization os.system",
    "torch.distributed.checkpoint.metadata os.system",
    "torch.distributed.checkpoint.filesystem FileSystem.rm_file",
]

Read = Callable[[Path], object]


def read_names(directory: Path) -> object:
    """List the tensors of the directory."""
    return IndexReader(directory).only_tensors()


def load_weights(directory: Path) -> object:
    """Fill a model from the directory."""
    return load_weights_only({"weight": torch.zeros(2)}, directory)


def calls(name: str, argument: str) -> list[bytes]:
    """Return pickles that call a function, as the old and the new protocols name it."""
    module, attribute = name.split(" ")
    given = b"(V" + argument.encode() + b"\ntR."
    return [
        f"c{module}\n{attribute}\n".encode() + given,
        b"\x80\x04" + f"V{module}\nV{attribute}\n".encode() + b"\x93" + given,
    ]


@pytest.mark.parametrize("read", [read_names, TensorReader, load_weights])
@pytest.mark.parametrize("name", NAMES)
def test_an_index_can_name_nothing_but_parts_of_an_index(name: str, read: Read, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "index").mkdir()
    for content in calls(name, f"touch {mark}"):
        (tmp_path / "index/.metadata").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: it names .* no part of an index"):
            read(tmp_path / "index")
    assert not mark.exists()


def test_an_index_must_be_one(tmp_path: Path) -> None:
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
    other, mine = RunDir(tmp_path / "other"), RunDir(tmp_path / "mine")
    directory = write_checkpoint(other, 1)
    listing = manifest.read_manifest(directory)
    listing.files[name] = FileEntry(0, "")
    with pytest.raises(CheckpointError, match="names a file outside of its directory"):
        decode_manifest(encode_manifest(listing), "it")
    manifest.write_manifest(directory, listing)
    with pytest.raises(CheckpointError, match="names a file outside"):
        manifest.verify(directory)
    with pytest.raises(CheckpointError, match="names a file outside"):
        copy_fork(find_fork(directory, mine, how="full"), mine, how="full")
    assert not mine.checkpoints.exists()


@pytest.fixture
def mixed(tmp_path: Path, mesh: Mesh) -> Path:
    """Return a directory with a tensor and an object."""
    torch_dcp.save({"weight": torch.ones(2, 3), "note": "of another loop"}, checkpoint_id=tmp_path / "mixed")
    return tmp_path / "mixed"


def test_tensors_are_found_among_other_objects(mixed: Path) -> None:
    found = IndexReader(mixed).tensors()
    assert {name: tuple(entry.size) for name, entry in found.items()} == {"weight": (2, 3)}


def test_a_checkpoint_with_other_objects_than_tensors_is_none_of_ours(mixed: Path) -> None:
    with pytest.raises(CheckpointError, match="mixed holds objects that are not tensors: note"):
        IndexReader(mixed).only_tensors()


def test_an_index_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"/\.metadata cannot be read"):
        IndexReader(tmp_path).tensors()
