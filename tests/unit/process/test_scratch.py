"""Directories of temporary files: in use they stay, and what a killed process left is removed by the next one."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.process import scratch
from holdfast.process.scratch import LOCK_NAME, hold, make_scratch, remove_abandoned, scratch_directory

_HOLDER = (
    "import os, sys, time; from pathlib import Path\n"
    "from holdfast.process.scratch import make_scratch\n"
    "print(make_scratch(Path(sys.argv[1])), flush=True); {then}"
)


def _holder(home: Path, then: str = "time.sleep(600)") -> tuple[subprocess.Popen[str], Path]:
    argv = [sys.executable, "-c", _HOLDER.format(then=then), str(home)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().rstrip())


def test_a_directory_lives_as_long_as_its_process_however_it_ends(tmp_path: Path) -> None:
    process, theirs = _holder(tmp_path)
    (theirs / "full").mkdir()
    (theirs / "full" / "file").touch()
    with scratch_directory(tmp_path) as own:
        assert own.stat().st_mode & 0o777 == 0o700
        remove_abandoned(tmp_path)
        assert theirs.is_dir() and own.is_dir(), "both are in use"
        remove_abandoned(tmp_path)
        subprocess.run([sys.executable, "-c", _HOLDER.format(then=""), str(tmp_path)], check=True, stdout=-3)
        assert own.is_dir(), "looking did not let go of the lock"
        process.kill()
        process.communicate()
        remove_abandoned(tmp_path)
        assert not theirs.exists() and own.is_dir()
    remove_abandoned(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_directory_a_child_wrote_to_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove = shutil.rmtree

    def written_meanwhile(path: Path, ignore_errors: bool) -> None:
        remove(path, ignore_errors)
        path.mkdir()

    with scratch_directory(tmp_path) as left:
        (left / "bytecode").mkdir()
        monkeypatch.setattr(shutil, "rmtree", written_meanwhile)
    monkeypatch.undo()
    assert (left / "bytecode").is_dir()
    remove_abandoned(tmp_path)
    assert not left.exists()


def test_a_lock_is_closed_before_its_directory_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS a file that is removed while it is open stays in its directory, under another name."""
    rmdir = Path.rmdir

    def rmdir_of_nfs(path: Path) -> None:
        for descriptor in Path("/proc/self/fd").iterdir():
            if descriptor.is_symlink() and str(descriptor.readlink()).startswith(f"{path}/"):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        rmdir(path)

    monkeypatch.setattr(Path, "rmdir", rmdir_of_nfs)
    with scratch_directory(tmp_path):
        process, _ = _holder(tmp_path)
        process.kill()
        process.communicate()
        remove_abandoned(tmp_path)
        assert len(list(tmp_path.iterdir())) == 1, "its own"
    assert not list(tmp_path.iterdir())


def test_what_is_not_ours_or_of_another_host_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process, theirs = _holder(tmp_path, "pass")
    process.communicate()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("socket.gethostname", lambda: "elsewhere")
        remove_abandoned(tmp_path)
        assert theirs.is_dir()
    others, target = tmp_path / "other", tmp_path / "target"
    for path in (others, target):
        path.mkdir()
        (path / LOCK_NAME).touch()
    unmarked, link = tmp_path / f"{scratch.scratch_name()}unmarked", tmp_path / f"{scratch.scratch_name()}link"
    unmarked.mkdir()
    link.symlink_to(target)
    remove_abandoned(tmp_path)
    assert all(path.is_dir() for path in (others, target, unmarked, link)) and not theirs.exists()


def test_a_directory_that_another_removes_this_moment_is_not_taken(tmp_path: Path) -> None:
    assert not hold(tmp_path / "gone")
    place = tmp_path / "place"
    place.mkdir()
    argv = "import fcntl, os, shutil, sys, time; from pathlib import Path\nplace = Path(sys.argv[1])\n" + (
        "lock = os.open(place / '.lock', os.O_RDWR | os.O_CREAT); fcntl.lockf(lock, fcntl.LOCK_EX)\n"
        "print('held', flush=True); sys.stdin.readline(); shutil.rmtree(place.rename(place.with_name('gone')))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", argv, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdout.readline()
    process.stdin.write("\n")
    process.stdin.flush()
    assert not hold(place), "it waited for the other, and found nothing"
    process.communicate()


def test_where_no_directory_takes_temporary_files_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", none)
    monkeypatch.setattr(scratch, "SHORT_HOME", Path("/nowhere"))
    remove_abandoned()


def test_without_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    path = make_scratch(tmp_path)
    remove_abandoned(tmp_path)
    assert path.is_dir() and not (path / LOCK_NAME).exists()
    scratch.drop(path)
    assert not path.exists()
