"""Writing durably, the old content or the new, whatever fails; and files whose damaged bytes are noticed."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli

from holdfast.errors import CheckpointError
from holdfast.run import atomic, checked
from holdfast.run.settings import read_settings


class Failing:
    """Stands for `os` and fails at the given call, as a full or broken disk does."""

    def __init__(self, name: str, nth: int = 1) -> None:
        self._name, self._left = name, nth

    def __getattr__(self, name: str) -> object:
        real = getattr(os, name)
        if name != self._name:
            return real

        def call(*args: object, **kwargs: object) -> object:
            self._left -= 1
            if self._left == 0:
                raise OSError(28, "No space left on device")
            return real(*args, **kwargs)

        return call


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_failed_write_leaves_the_old_file_only(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    atomic.write_file(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "os", Failing(call))
        with pytest.raises(OSError, match="No space"):
            atomic.write_file(path, b"new")
    assert path.read_bytes() == b"old" and names(tmp_path) == ["file"]


def make_tree(path: Path) -> None:
    (path / "sub").mkdir(parents=True)
    (path / "a").write_bytes(b"a")
    (path / "sub" / "b").write_bytes(b"b")


def test_everything_is_flushed_before_the_name_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary, final = atomic.temporary_sibling(tmp_path / "step_1"), tmp_path / "step_1"
    make_tree(temporary)
    happened: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        happened.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real_fsync(descriptor)

    def rename(source: Path, target: Path) -> None:
        happened.append("rename")
        real_rename(source, target)

    monkeypatch.setattr(atomic.os, "fsync", fsync)
    monkeypatch.setattr(atomic.os, "rename", rename)
    atomic.publish_directory(temporary, final)
    flushed, after = happened[: happened.index("rename")], happened[happened.index("rename") + 1 :]
    assert set(flushed) == {str(temporary / name) for name in ("", "a", "sub", "sub/b")} and after == [str(tmp_path)]


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_an_unflushed_directory_is_not_published(nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary, final = atomic.temporary_sibling(tmp_path / "step_1"), tmp_path / "step_1"
    make_tree(temporary)
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "os", Failing("fsync", nth))
        with pytest.raises(OSError, match="No space"):
            atomic.publish_directory(temporary, final)
    assert not final.exists()
    assert atomic.clear_leftovers(tmp_path) == [temporary] and names(tmp_path) == []


def test_a_published_directory_is_never_written_over(tmp_path: Path) -> None:
    make_tree(tmp_path / "step_1")
    other = atomic.temporary_sibling(tmp_path / "step_1")
    make_tree(other)
    (other / "a").write_bytes(b"changed")
    with pytest.raises(FileExistsError, match="step_1"):
        atomic.publish_directory(other, tmp_path / "step_1")
    assert (tmp_path / "step_1" / "a").read_bytes() == b"a"


def test_two_clear_the_same_place_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a run that starts and who follows it do: neither fails, and nothing is left."""
    real = os.unlink

    def second(*args: Any, **kwargs: Any) -> None:
        monkeypatch.setattr(os, "unlink", real)
        atomic.clear_leftovers(tmp_path)
        real(*args, **kwargs)

    monkeypatch.setattr(os, "unlink", second)
    (tmp_path / "step_5").mkdir()
    for name in ("a", "b"):
        (tmp_path / "step_5" / name).touch()
    atomic.remove_directory(tmp_path / "step_5")
    assert list(tmp_path.iterdir()) == [] and os.unlink is real


def test_an_unlistable_directory_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / ".tmp-step_1"
    (temporary / "sub").mkdir(parents=True)
    (temporary / "sub/file").write_bytes(b"content")
    scandir = os.scandir

    def fail(path: str | Path) -> object:
        if Path(path).name == "sub":
            raise OSError(5, "Input/output error", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(OSError, match="Input/output error"):
        atomic.publish_directory(temporary, tmp_path / "step_1")
    assert not (tmp_path / "step_1").exists()


def test_the_directory_is_opened_before_each_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is what makes NFS ask again."""
    opened, real = [], os.open

    def note(path: Path, flags: int, *rest: int) -> int:
        opened.append(path)
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", note)
    assert not atomic.is_visible(tmp_path / "file") and opened == [tmp_path]
    path = tmp_path / "a" / "b" / "file"
    assert not atomic.is_visible(path)
    path.parent.mkdir(parents=True)
    assert not atomic.is_visible(path)
    path.touch()
    assert atomic.is_visible(path) and not atomic.is_visible(path / "in a file")


VALUES = {"run_id": "0a1b", "created_unix_s": 1795640000, "rewinds": [2, 4], "lr": 1e-05, "nested": {"none": None}}
TEXT = 'seed = 3\n\n[optim]\nlr = 1e-05\nschedule = "cosine"\n'


def _toml(data: bytes) -> object:
    checked.check_toml(data)
    return tomli.loads(data.decode())


@pytest.mark.parametrize(
    ("data", "read"), [(checked.encode(VALUES), checked.decode), (checked.with_first_line(TEXT), _toml)]
)
def test_a_file_of_which_a_byte_is_damaged_says_nothing_else(data: bytes, read: Callable[[bytes], object]) -> None:
    """What says that there is a checksum may be damaged as well: then the file has none, and says the same."""
    written, unnoticed = read(data), 0
    for place in range(len(data)):
        for bit in range(8):
            damaged = data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]
            try:
                found = read(damaged)
            except ValueError:
                continue
            unnoticed += 1
            assert isinstance(found, dict) and isinstance(written, dict) and written.items() <= found.items()
    assert unnoticed < 160


def test_files_that_people_write_are_taken_as_they_are() -> None:
    assert checked.decode(b'{"run_id": "mine"}') == {"run_id": "mine"}
    assert _toml(TEXT.encode()) == _toml(checked.with_first_line(TEXT))
    with pytest.raises(ValueError, match="not an object"):
        checked.decode(b"[]")


def test_settings_that_are_cut_anywhere_are_damaged(tmp_path: Path) -> None:
    """At the end of a line, too, where what is left is TOML."""
    path, data = tmp_path / "sft.toml", checked.with_first_line(TEXT)
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"sft.toml is damaged: "):
            read_settings(path)
    path.write_bytes(data)
    assert read_settings(path) == tomli.loads(TEXT)
