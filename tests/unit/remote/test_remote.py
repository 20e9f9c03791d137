"""Remote checkpoints, the part that every store has in common: on a directory, through fsspec."""

import asyncio
import errno
import json
import logging
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import botocore.exceptions
import msgspec
import pytest
from fsspec.exceptions import FSTimeoutError

from holdfast.config import SftConfig
from holdfast.errors import CheckpointError, ConfigError, ReadError, RunDirError, StorageError
from holdfast.launcher.resume.prepare import prepare
from holdfast.launcher.resume.remote import fetch, set_aside_remote_after
from holdfast.remote.checkpoints import RemoteCheckpoints
from holdfast.remote.object_store import ObjectStore, is_transient
from holdfast.remote.uploader import Uploader
from holdfast.run import atomic, manifest
from holdfast.run.checkpoints import BestMetric, Retention
from holdfast.run.run_dir import RunDir, directory_name
from holdfast.view.sending import take_cursor
from tests.builders.checkpoint_files import contents, flip, write_checkpoint, write_weights
from tests.runs.ports import free_port
from tests.runs.processes import HANG_S
from tests.runs.trackers import note_sent


@pytest.fixture
def here(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "here")


@pytest.fixture
def empty(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "empty")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "store [a]*"  # names are names, not patterns


@pytest.fixture
def remote(place: Path) -> RemoteCheckpoints:
    return RemoteCheckpoints(f"file://{place}")


def test_an_equal_step_is_not_sent_again(here: RunDir, empty: RunDir, remote: RemoteCheckpoints, place: Path) -> None:
    directory = write_checkpoint(here, 3)
    assert remote.upload(directory, 3)
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    assert not remote.upload(directory, 3) and {path: path.stat().st_mtime_ns for path in place.rglob("*")} == before
    (place / "step_3/trainer/.metadata").unlink()
    assert remote.upload(directory, 3) and contents(place / "step_3") == contents(directory)
    (place / "step_3/trainer/__2.distcp").write_bytes(b"of a run with three ranks")
    other = write_checkpoint(empty, 3, content="rewritten")
    assert remote.upload(other, 3) and contents(place / "step_3") == contents(other)


def test_a_checkpoint_of_another_step_is_not_uploaded(here: RunDir, remote: RemoteCheckpoints) -> None:
    with pytest.raises(CheckpointError, match="is the checkpoint of step 3, not of step 4"):
        remote.upload(write_checkpoint(here, 3), 4)
    assert remote.steps() == []


def test_a_step_set_aside_keeps_its_files(here: RunDir, remote: RemoteCheckpoints, place: Path) -> None:
    for step in (1, 2, 3):
        remote.upload(write_checkpoint(here, step), step)
    manifest_3 = (place / "step_3/manifest.json").read_bytes()
    assert remote.set_aside_after(1) == [2, 3]
    assert remote.steps() == [1] and remote.clear_leftovers() == []
    assert (place / "step_3/discarded.json").read_bytes() == manifest_3
    assert remote.upload(here.checkpoint(3), 3) and contents(place / "step_3") == contents(here.checkpoint(3))


def test_files_of_another_step_are_refused(here: RunDir, remote: RemoteCheckpoints, place: Path, empty: RunDir) -> None:
    for step in (3, 4):
        remote.upload(write_checkpoint(here, step), step)
    (place / "step_3/manifest.json").write_bytes((place / "step_4/manifest.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"step_3/manifest\.json is the manifest of checkpoint 4"):
        remote.download(3, empty.checkpoint(3))


def test_a_manifest_cannot_name_files_outside(here: RunDir, remote: RemoteCheckpoints, place: Path) -> None:
    remote.upload(write_checkpoint(here, 3), 3)
    listing = manifest.read_manifest(place / "step_3")
    listing.files["../../../evil"] = listing.files["orchestrator/empty"]
    manifest.write_manifest(place / "step_3", listing)
    with pytest.raises(CheckpointError, match=r"names a file outside of its directory: '\.\./\.\./\.\./evil'"):
        remote.download(3, here.checkpoint(4))


def test_retention_goes_by_the_metrics_of_the_manifests(here: RunDir, remote: RemoteCheckpoints, place: Path) -> None:
    for step, loss in ((1, 0.1), (2, 0.9), (3, 0.8), (4, 0.7), (5, 0.6)):
        remote.upload(write_checkpoint(here, step, metrics={"loss": loss}), step)
    (place / "step_3/manifest.json").write_bytes(b"{")  # damaged: somebody should look at it
    assert remote.apply_retention(Retention(keep=1, keep_best=BestMetric.parse("loss")), protected=[4]) == [2]
    assert remote.steps() == [1, 3, 4, 5]


def test_retention_stops_at_errors(here: RunDir, remote: RemoteCheckpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        remote.upload(write_checkpoint(here, step), step)
    _fail_once(monkeypatch, "cat_file", "step_2/manifest.json", nth=2)
    with pytest.raises(StorageError, match="not yours"):
        remote.apply_retention(Retention(keep=1))
    assert remote.steps() == [1, 2]


def test_other_or_damaged_weights_are_copied_again(here: RunDir, remote: RemoteCheckpoints, place: Path) -> None:
    checkpoint, weights = write_checkpoint(here, 2), write_weights(here, 1)
    remote.upload(checkpoint, 2, weights=[weights])
    there = place / "weights/step_1"
    listing = manifest.read_manifest(weights)
    for content, is_kept in (
        (manifest.encode_manifest(msgspec.structs.replace(listing, run_id="fork")), True),  # the same files
        (b"{", False),
    ):
        (there / "manifest.json").write_bytes(content)
        remote.upload(checkpoint, 2, weights=[weights])
        assert ((there / "manifest.json").read_bytes() == content) is is_kept
    assert contents(there) == contents(weights)
    (weights / "manifest.json").unlink()
    with pytest.raises(ReadError, match=r"weights/step_1/manifest\.json cannot be read: No such file"):
        remote.upload(checkpoint, 2, weights=[weights])


def test_a_vain_removal_is_an_error(here: RunDir, remote: RemoteCheckpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    remote.upload(write_checkpoint(here, 1), 1)
    remote.remove(7)  # which is not there
    monkeypatch.setattr(remote._store._fs, "rm_file", lambda path: None)
    with pytest.raises(StorageError, match=r"step_1/manifest\.json is still there after it was removed"):
        remote.remove(1)


def test_a_key_that_may_not_give_up_unfinished_uploads_clears_the_rest(
    place: Path, remote: RemoteCheckpoints, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (place / "step_7").mkdir(parents=True)
    (place / "step_7/torn").touch()
    monkeypatch.setattr(remote._store._fs, "list_multipart_uploads", None, raising=False)
    _fail_once(monkeypatch, "call_s3", "list_multipart_uploads")
    assert remote.clear_leftovers() == ["step_7/torn"]
    assert "parts of unfinished uploads may be left" in caplog.text and "not yours" in caplog.text


def test_faults_of_this_machine(tmp_path: Path, remote: RemoteCheckpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    store, file = remote._store, tmp_path / "file"
    with pytest.raises(FileNotFoundError):
        store.put(file, "name")
    file.write_bytes(b"x")
    store.put(file, "name")
    with pytest.raises(IsADirectoryError):
        store.get("name", tmp_path)
    _fail_once(monkeypatch, "get_file", "name", error=ValueError("driver"))
    with pytest.raises(StorageError, match="reading name failed: ValueError: driver"):
        store.get("name", tmp_path / "copy")
    _fail_once(monkeypatch, "put_file", "name", error=FileNotFoundError("404"))
    with pytest.raises(StorageError, match="writing name failed: FileNotFoundError: 404"):
        store.put(file, "name")
    _fail_once(monkeypatch, "pipe_file", "name", error=FileNotFoundError("404"))
    with pytest.raises(StorageError, match="writing name failed: FileNotFoundError: 404"):
        store.write("name", b"x")


def test_weights_go_when_no_kept_step_needs_them(here: RunDir, remote: RemoteCheckpoints, place: Path) -> None:
    for step in (2, 4, 6):
        weights = [write_weights(here, version) for version in (step - 2, step - 1)]
        remote.upload(write_checkpoint(here, step), step, weights=weights)
    (place / "step_4/manifest.json").write_bytes(b"{")  # damaged, not given up
    assert remote.apply_retention(Retention(keep=1), older_weights=2) == [2]
    assert sorted(path.name for path in (place / "weights").iterdir()) == ["step_2", "step_3", "step_4", "step_5"]
    remote.remove(4)
    assert remote.apply_retention(Retention(keep=1)) == [] and len(list((place / "weights").iterdir())) == 4


@pytest.mark.parametrize(("url", "message"), [
    ("nowhere://bucket/prefix", "Protocol not known"),
    ("abfs://container/prefix", "Install it: `pip install` the driver of abfs"), ("s3://", "names no place"),
    ("", "names no place"), (__file__, "is a file: name a directory"),
])  # fmt: skip
def test_a_url_that_cannot_be_used_is_an_input_error(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        RemoteCheckpoints(url)
    assert caught.value.exit_code == 2
    with pytest.raises(ConfigError, match=message):
        prepare(SftConfig.model_validate({"max_steps": 5, "ckpt": {"dir": url}}), clean=False, dry_run=True)


def test_messages_hide_passwords(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    away, hidden = f"ftp://me:PW@127.0.0.1:{free_port()}/x?a=1&api_key=KEY", "ftp://***@127.0.0.1:"
    with pytest.raises(StorageError, match="connecting failed: ConnectionRefusedError") as caught:
        ObjectStore(away)
    said = str(caught.value)
    settings = {"output_dir": tmp_path / "new", "max_steps": 5, "ckpt": {"dir": away}}
    prepare(SftConfig.model_validate(settings), clean=False, dry_run=True)  # does not connect
    for text in (said, capsys.readouterr().out):
        assert hidden in text and "/x?a=1&api_key=***" in text and not re.search("PW|KEY", text)
    failure = str(ObjectStore("s3://me:PW@b/x?token=KEY")._failure("listing it", ValueError("no bucket 'me:PW@b'")))
    assert failure == "s3://***@b/x?token=***: listing it failed: ValueError: no bucket '***@b'."
    with pytest.raises(ConfigError, match=r"'nowhere://\*\*\*@b': Protocol not known"):
        RemoteCheckpoints("nowhere://me:PW@b")


def test_a_missing_driver_names_the_extra() -> None:
    program = (
        "import sys; sys.modules['s3fs'] = None  # as if it were not installed\n"
        "from holdfast.errors import ConfigError\n"
        "from holdfast.remote.checkpoints import RemoteCheckpoints\n"
        "try: RemoteCheckpoints('s3://bucket/prefix')\n"
        "except ConfigError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "ckpt.dir = 's3://bucket/prefix'" in done.stdout and "uv sync --inexact --extra s3" in done.stdout, done
    assert "pip install 'holdfast[s3]'" in done.stdout, done


_SLOW = [ConnectionResetError("reset"), TimeoutError("slow"), FSTimeoutError("slow"), OSError(errno.EBUSY, "slow down")]
_OF_BOTO = (botocore.exceptions.EndpointConnectionError, botocore.exceptions.ReadTimeoutError)
_PASSES = [*_SLOW, OSError(errno.EREMOTEIO, "internal error"), *(kind(endpoint_url="http://x") for kind in _OF_BOTO)]
_REFUSED = [botocore.exceptions.NoCredentialsError(), PermissionError("no"), FileNotFoundError("no"), ValueError("no")]


@pytest.mark.parametrize("error", [*_PASSES, *_REFUSED, OSError(errno.ENOSPC, "full")], ids=repr)
def test_what_may_pass(error: Exception, place: Path) -> None:
    assert is_transient(error) is (error in _PASSES)
    failure = ObjectStore(f"file://{place}")._failure("reading", error)
    assert failure.may_pass is (error in _PASSES or "full" in str(error))
    assert ("It was tried 4 times. Check the network" in str(failure)) is (error in _PASSES)


class TestFetch:
    @pytest.fixture
    def url(self, here: RunDir, remote: RemoteCheckpoints) -> str:
        for step in (1, 2, 3):
            remote.upload(write_checkpoint(here, step), step, weights=[write_weights(here, step - 1)])
        return remote.url

    @pytest.mark.parametrize(("wanted", "step"), [("latest", 3), ("auto", 3), (-1, 3), (2, 2)])
    def test_an_empty_machine_gets_all(self, url: str, here: RunDir, empty: RunDir, wanted: int, step: int) -> None:
        assert fetch(url, empty, wanted) == step
        assert contents(empty.checkpoint(step)) == contents(here.checkpoint(step))
        assert empty.run_id() == "run" and empty.committed_steps() == [step]
        assert fetch(url, empty, wanted) is None

    def test_a_damaged_step_asked_for_by_number_is_an_error(self, url: str, place: Path, empty: RunDir) -> None:
        flip(place / "step_3/trainer/__1.distcp")
        with pytest.raises(CheckpointError, match=r"resume_step = 3: .*__1\.distcp is damaged.*1, 2, 3"):
            fetch(url, empty, 3)
        assert not empty.holds_run() and contents(empty.path) == {}

    def test_what_is_here_and_newer_stays(self, url: str, empty: RunDir) -> None:
        write_checkpoint(empty, 4)
        assert fetch(url, empty, "latest") is None
        assert fetch(url, empty, 4) is None and empty.committed_steps() == [4]

    def test_a_step_that_is_nowhere_is_an_error_that_lists_both(self, url: str, empty: RunDir) -> None:
        write_checkpoint(empty, 7)
        with pytest.raises(CheckpointError, match=r"= 5 is neither in .*\(committed steps: 7\).*steps: 1, 2, 3\)"):
            fetch(url, empty, 5)

    def test_an_empty_store_leaves_everything_to_this_machine(self, remote: RemoteCheckpoints, empty: RunDir) -> None:
        assert fetch(remote.url, empty, "auto") is fetch(remote.url, empty, "latest") is None
        assert fetch(remote.url, empty, None) is None

    def test_a_fresh_start_does_not_mix_with_another_run(self, url: str, empty: RunDir) -> None:
        with pytest.raises(RunDirError, match="holds the checkpoints of steps 1, 2, 3 of an earlier run"):
            fetch(url, empty, None)

    def test_a_fork_may_hold_the_checkpoint_that_it_began_with(self, url: str, empty: RunDir) -> None:
        empty.create(forked_from={"run_id": "run", "step": 3, "path": "/elsewhere/checkpoints/step_3"})
        assert fetch(url, empty, "latest") == 3

    def test_a_fork_stays_itself_on_another_machine(self, url: str, empty: RunDir, tmp_path: Path) -> None:
        forked_from = {"run_id": "run", "step": 3, "path": "/elsewhere"}
        (there := RunDir(tmp_path / "there")).create(forked_from=forked_from, created_unix_s=1)
        RemoteCheckpoints(url).write_identity(there)
        assert fetch(url, empty, "latest") == 3
        assert empty.identity() | {"directory": directory_name(there)} == there.identity()

    def test_another_machine_is_the_same_run_for_trackers(self, url: str, empty: RunDir, tmp_path: Path) -> None:
        there = RunDir(tmp_path / "there")
        there.create(forked_from={"run_id": "other", "step": 7, "path": "/elsewhere"})
        identity = there.identity() | {"run_id": "run"}
        (there.path / "run.json").write_text(json.dumps(identity))
        note_sent(there, "wandb", 3)
        there.note_rewind(2, by_attempt=2)
        note_sent(there, "trackio", 1)
        (there.tracking / "unreadable.json").mkdir()
        write_checkpoint(there, 4, run_id="run")
        uploader = Uploader(RemoteCheckpoints(url), run_dir=there)
        uploader.submit(there.checkpoint(4), 4)
        uploader.close()
        assert fetch(url, empty, "latest") == 4
        assert (empty.run_id(), empty.origin(), empty.rewinds()) == ("run", "other:7", [2])
        cursor = take_cursor(empty, "wandb")
        assert (cursor.tracked_id, cursor.step) == ("run-2", 0), "what was sent of steps behind 2 is another way"
        assert take_cursor(empty, "trackio").step == 1
        empty.note_rewind(1, by_attempt=2)  # of this machine
        set_aside_remote_after(url, 1, empty)
        assert fetch(url, third := RunDir(tmp_path / "third"), "latest") == 1 and third.rewinds() == [2, 1]

    @pytest.mark.parametrize("damage", [b"{", b'{"run_id": "another"}', b'{"run_id": "run", "check": "0"}'])
    def test_an_identity_of_somebody_else_is_left_out_loud(
        self, url: str, empty: RunDir, tmp_path: Path, damage: bytes, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (there := RunDir(tmp_path / "there")).create()
        (there.path / "run.json").write_bytes(damage)
        RemoteCheckpoints(url).write_identity(there)
        assert fetch(url, empty, "latest") == 3 and empty.run_id() == "run"
        assert f"WARNING: {RemoteCheckpoints(url).url}/run is left out" in capsys.readouterr().out

    def test_the_launcher_asks_the_store(self, url: str, empty: RunDir) -> None:
        settings = {"output_dir": empty.path, "max_steps": 5, "ckpt": {"dir": url, "resume_step": 2}}
        attempt = prepare(SftConfig.model_validate(settings), clean=False, dry_run=False)
        assert (attempt.resume_step, attempt.checkpoint, empty.run_id()) == (2, empty.checkpoint(2), "run")
        assert RemoteCheckpoints(url).steps() == [1, 2]

    def test_a_newer_step_of_another_run_is_refused_with_a_store_too(self, url: str, empty: RunDir) -> None:
        fetch(url, empty, "latest")
        write_checkpoint(empty, 9, run_id="other")
        settings = {"output_dir": empty.path, "max_steps": 5, "ckpt": {"dir": url, "resume_step": "latest"}}
        with pytest.raises(CheckpointError, match=r"step_9 is a checkpoint of another run \(other\)"):
            prepare(SftConfig.model_validate(settings), clean=False, dry_run=False)

    def test_a_newer_step_of_another_run_in_the_store_is_refused_on_an_empty_machine(
        self, url: str, empty: RunDir, tmp_path: Path
    ) -> None:
        assert fetch(url, empty, "latest") == 3
        RemoteCheckpoints(url).write_identity(empty)
        RemoteCheckpoints(url).upload(write_checkpoint(RunDir(tmp_path / "other"), 9, run_id="other"), 9)
        third = RunDir(tmp_path / "third")
        with pytest.raises(RunDirError, match=r"step_9 is a checkpoint of another run \(other\).*--ckpt.resume-step 3"):
            fetch(url, third, "latest")
        assert fetch(url, third, 3) == 3 and third.run_id() == "run"
        write_checkpoint(imported := RunDir(tmp_path / "imported"), 3, run_id="")
        with pytest.raises(RunDirError, match="of run other, .*/imported holds a checkpoint of another run"):
            fetch(url, imported, 3)

    def test_a_rewind_cut_off_has_not_happened(self, url: str, empty: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
        """The store goes first: a later step there would come back."""
        fetch(url, empty, 2)
        fetch(url, empty, 3)

        def start(wanted: int | str) -> int | None:
            settings = {"output_dir": empty.path, "max_steps": 5, "ckpt": {"dir": url, "resume_step": wanted}}
            return prepare(SftConfig.model_validate(settings), clean=False, dry_run=False, is_locked=True).resume_step

        for place in ("remote.set_aside_remote_after", "resume_step.set_aside_after"):
            with monkeypatch.context() as killing:
                killing.delattr(f"holdfast.launcher.resume.{place}")
                with pytest.raises((AttributeError, ImportError)):
                    start(2)
            assert empty.committed_steps() == [2, 3]
        assert RemoteCheckpoints(url).steps() == [1, 2] and start("auto") == 3
        assert start(2) == 2 == start("auto") and empty.committed_steps() == [2]

    def test_a_dry_run_leaves_it_alone(self, url: str, empty: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
        settings = {"output_dir": empty.path, "max_steps": 5, "ckpt": {"dir": url, "resume_step": "auto"}}
        assert prepare(SftConfig.model_validate(settings), clean=False, dry_run=True).resume_step is None
        assert f"a dry run does not look for checkpoints at {url}" in capsys.readouterr().out
        assert contents(empty.path) == {}

    def test_damaged_weights_are_done_without_out_loud(self, url: str, place: Path, empty: RunDir) -> None:
        flip(place / "weights/step_1/model.safetensors")
        said: list[str] = []
        assert fetch(url, empty, 3, older_weights=2, say=said.append) == 3
        assert empty.published_weights() == [2] and "continuing without the weights of version 1" in "".join(said)

    @pytest.mark.parametrize(("method", "name", "nth", "wanted"), [
        ("cat_file", "step_3/manifest.json", 2, "latest"),  # whose run it is
        ("get_file", "step_3/trainer/.metadata", 1, "latest"),
        ("get_file", "step_3/trainer/.metadata", 1, 3),
        ("get_file", "weights/step_1/model.safetensors", 1, 3),
    ])  # fmt: skip
    def test_a_store_that_fails_is_not_taken_for_damage(
        self, url: str, empty: RunDir, monkeypatch: pytest.MonkeyPatch, method: str, name: str, nth: int, wanted: Any
    ) -> None:
        """Else the run would go on from an older step, or without weights, for a broken connection."""
        empty.create(forked_from={"run_id": "run", "step": 0, "path": "/elsewhere"})
        _fail_once(monkeypatch, method, name, nth=nth)
        said: list[str] = []
        with pytest.raises(StorageError, match=f"reading {name} failed: PermissionError: not yours") as caught:
            fetch(url, empty, wanted, older_weights=2, say=said.append)
        assert "Choose another step" not in str(caught.value) and "WARNING" not in "".join(said)

    @pytest.mark.parametrize(
        ("method", "name"), [("cat_file", "run/run.json"), ("get_file", "weights/step_1/model.safetensors")]
    )
    def test_a_fetch_that_was_cut_off_is_completed_by_the_next(
        self, url: str, empty: RunDir, monkeypatch: pytest.MonkeyPatch, method: str, name: str
    ) -> None:
        """Else the next start would take the checkpoint for all, and be another run that samples with other weights."""
        _fail_once(monkeypatch, method, name, nth=2 if "run" in name else 1)  # the first reads whose steps these are
        (killed := empty.checkpoints / ".tmp-step_3-0").mkdir(parents=True)
        with pytest.raises(StorageError, match=f"reading {name} failed"):
            fetch(url, empty, "auto", older_weights=2)
        assert not killed.exists(), "it takes the room of what is fetched"
        assert fetch(url, empty, "auto", older_weights=2) == 3
        assert empty.run_id() == "run" and empty.published_weights() == [1, 2] and empty.committed_steps() == [3]

    def test_damaged_manifests_say_nothing_of_whose_run_it_is(self, url: str, place: Path, empty: RunDir) -> None:
        empty.create()
        (place / "step_3/manifest.json").write_text("{")
        with pytest.raises(RunDirError, match=f"of run run, .* holds run {empty.run_id()}"):
            fetch(url, empty, "latest")
        for step in (1, 2):
            (place / f"step_{step}/manifest.json").write_text("{")
        with pytest.raises(CheckpointError, match="every checkpoint at .* is damaged"):
            fetch(url, empty, "latest", say=lambda text: None)

    def test_weights_that_are_here_or_nowhere_are_passed_over(self, url: str, place: Path, empty: RunDir) -> None:
        own = contents(write_weights(empty, 2, content="own"))
        shutil.rmtree(place / "weights/step_1")
        said: list[str] = []
        assert fetch(url, empty, 3, older_weights=3, say=said.append) == 3
        assert empty.published_weights() == [0, 2] and contents(empty.weights_of(2)) == own
        assert sum("copied the weights" in line for line in said) == 1


def _fail_once(
    monkeypatch: pytest.MonkeyPatch, method: str, name: str, *, nth: int = 1, error: Exception | None = None
) -> None:
    """Let the nth call of a method of stores that is about `name` fail."""
    once, found = ObjectStore._once, []

    def fail(self: ObjectStore, called: str, *arguments: Any, **options: Any) -> Any:
        if called == method and any(str(argument).endswith(name) for argument in arguments):
            found.append(called)
            if len(found) == nth:
                raise error or PermissionError("not yours")
        return once(self, called, *arguments, **options)

    monkeypatch.setattr(ObjectStore, "_once", fail)


class _Slow(RemoteCheckpoints):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.entered = threading.Event()
        self.allowed = threading.Event()

    def upload(self, directory: Path, step: int, **options: object) -> bool:
        self.entered.set()
        assert self.allowed.wait(HANG_S)
        return super().upload(directory, step)


def _submit(uploader: Uploader, here: RunDir, *steps: int) -> None:
    for step in steps:
        uploader.submit(write_checkpoint(here, step), step)


class TestUploader:
    def test_steps_arrive_and_old_ones_go(self, here: RunDir, remote: RemoteCheckpoints, place: Path) -> None:
        (place / "step_7/trainer").mkdir(parents=True)
        (place / "step_7/trainer/__0.distcp").write_bytes(b"torn")
        uploader = Uploader(remote, retention=Retention(keep=2), protected=[1])
        _submit(uploader, here, 1, 2, 3, 4)
        uploader.close()
        assert remote.steps() == [1, 3, 4] and not (place / "step_7").exists()

    def test_a_step_below_stale_ones_is_not_pruned(self, here: RunDir, remote: RemoteCheckpoints) -> None:
        for step in (8, 9):
            remote.upload(write_checkpoint(here, step), step)
        uploader = Uploader(remote, retention=Retention(keep=2))
        _submit(uploader, here, 3)
        uploader.close()
        assert remote.steps() == [3, 8, 9]

    def test_a_store_that_is_away_loses_nothing_and_is_asked_again(
        self, here: RunDir, remote: RemoteCheckpoints, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        away = _Away(remote, monkeypatch)
        uploader = Uploader(remote)
        _submit(uploader, here, 1, 2)
        assert away.asked.wait(HANG_S)
        uploader.poll()
        away.is_over.set()
        assert uploader.wait(timeout_s=HANG_S)
        uploader.close()
        assert remote.steps() == [1, 2]
        for event in (away.is_over, away.asked):
            event.clear()
        uploader = Uploader(remote)
        _submit(uploader, here, 3)
        assert away.asked.wait(HANG_S) and not uploader.wait(timeout_s=0.01)
        with pytest.raises(CheckpointError, match=r"step 3 was given up after .* \(.*no route.*whole in"):
            uploader.close(timeout_s=0.05)

    def test_who_refuses_the_first_upload_has_something_to_correct(
        self, here: RunDir, remote: RemoteCheckpoints, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        away = _Away(remote, monkeypatch, error=PermissionError("not yours"))
        uploader = Uploader(remote)
        _submit(uploader, here, 1)
        with pytest.raises(StorageError, match="not yours"):
            uploader.wait(timeout_s=HANG_S)
        away.is_over.set()
        _submit(uploader, here, 2)
        assert uploader.wait(timeout_s=HANG_S)
        away.is_over.clear()
        _submit(uploader, here, 3)
        assert not uploader.wait(timeout_s=0.01), "credentials that were good may be renewed"
        away.is_over.set()
        assert uploader.wait(timeout_s=HANG_S)
        uploader.close()
        assert remote.steps() == [2, 3]

    def test_what_is_gone_here_is_an_upload_that_failed(self, here: RunDir, remote: RemoteCheckpoints) -> None:
        """Which `ckpt.on_failure` decides about, as about others."""
        uploader = Uploader(remote)
        uploader.submit(write_checkpoint(here, 1), 1, weights=[here.weights_of(0)])
        with pytest.raises(CheckpointError, match="weights/step_0/manifest.json cannot be read: No such file"):
            uploader.close()

    def test_no_step_comes_before_whose_it_is(
        self, here: RunDir, remote: RemoteCheckpoints, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        here.create()
        _fail_once(monkeypatch, "pipe_file", "run/run.json")
        uploader = Uploader(remote, run_dir=here)
        _submit(uploader, here, 1)
        with pytest.raises(StorageError, match="not yours"):
            uploader.close()
        assert remote.steps() == [] and remote.read_identity() == {}

    def test_what_is_read_is_in_use(self, here: RunDir, place: Path, caplog: pytest.LogCaptureFixture) -> None:
        remote = _Slow(f"file://{place}")
        uploader = Uploader(remote)
        _submit(uploader, here, 1, 2, 3, 4)
        assert remote.entered.wait(HANG_S) and not uploader.release(1)
        assert not uploader.wait(timeout_s=0.01)
        assert uploader.release(2), "retention takes it"
        atomic.remove_directory(here.checkpoint(3))
        with caplog.at_level(logging.WARNING):
            remote.allowed.set()
            assert uploader.wait(timeout_s=HANG_S) and uploader.release(1) and uploader.release(4)
            uploader.close()
        assert remote.steps() == [1, 4]
        assert f"step 3 is not uploaded: {here.checkpoint(3)} was removed meanwhile" in caplog.text

    def test_the_first_of_several_failures_is_told_once_and_later_steps_are_uploaded(
        self, here: RunDir, remote: RemoteCheckpoints, caplog: pytest.LogCaptureFixture
    ) -> None:
        uploader = Uploader(remote)
        for step in (1, 2):
            flip(write_checkpoint(here, step) / "trainer/__0.distcp")
            uploader.submit(here.checkpoint(step), step)
        with pytest.raises(CheckpointError, match=f"{here.checkpoint(1)}/trainer"):
            uploader.wait(timeout_s=HANG_S)
        uploader.poll()
        _submit(uploader, here, 3)
        uploader.close()
        assert remote.steps() == [3]
        assert "uploading step 1 failed" in caplog.text and "uploading step 2 failed" in caplog.text


class _Away:
    def __init__(
        self, remote: RemoteCheckpoints, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None
    ) -> None:
        self.asked, self.is_over = threading.Event(), threading.Event()
        error = error or ConnectionError("no route to it")
        once = remote._store._once

        def fail(*arguments: Any, **options: Any) -> object:
            if self.is_over.is_set():
                return once(*arguments, **options)
            self.asked.set()
            raise error

        monkeypatch.setattr(remote._store, "_once", fail)
        for module, name in (("object_store", "FIRST_DELAY_S"), ("uploader", "_FIRST_PAUSE_S")):
            monkeypatch.setattr(f"holdfast.remote.{module}.{name}", 0.001)
        monkeypatch.setattr("holdfast.remote.uploader._LONGEST_PAUSE_S", 0.05)


def test_cancelled_calls_fail_and_none_outlasts_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.remote.object_store.STALLED_S", HANG_S)
    store = ObjectStore("s3://bucket/prefix")

    async def cancelled(*_: object) -> bytes:
        raise asyncio.CancelledError

    monkeypatch.setattr(store._fs, "_cat_file", cancelled)
    with pytest.raises(StorageError, match="reading name failed: CancelledError"):
        store.read("name")

    def begin(*_: object) -> Coroutine[None, None, bool]:
        store.abort()
        return asyncio.Event().wait()

    monkeypatch.setattr(store._fs, "_cat_file", begin)
    began = time.monotonic()
    with pytest.raises(StorageError, match="reading name was given up, as the run ends"):
        store.read("name")
    assert time.monotonic() - began < HANG_S
