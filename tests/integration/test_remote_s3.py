"""Remote checkpoints against a real S3 API server on loopback; those of a run are in test_continued.py."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.errors import CheckpointError, StorageError
from holdfast.launcher.resume.remote import fetch
from holdfast.remote import object_store
from holdfast.remote.checkpoints import RemoteCheckpoints
from holdfast.remote.uploader import Uploader
from holdfast.run import manifest
from holdfast.run.run_dir import RunDir
from tests.builders.checkpoint_files import contents, write_checkpoint, write_weights
from tests.runs.processes import HANG_S
from tests.servers.s3 import BUCKET, S3Server

OBJECTS = 7
"""Files of a checkpoint and its manifest."""
URL = f"s3://{BUCKET}/runs/one"


@pytest.fixture(scope="module")
def shared_server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def server(shared_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """An empty server, with the environment that a user would set, and short pauses."""
    shared_server.reset()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", shared_server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setattr(object_store, "FIRST_DELAY_S", 0.01)
    return shared_server


@pytest.fixture
def remote(server: S3Server) -> RemoteCheckpoints:
    return RemoteCheckpoints(URL)


@pytest.fixture
def here(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "here")


@pytest.fixture
def empty(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "empty")


def fail_from(server: S3Server, number: int, methods: tuple[str, ...] = ("PUT",)) -> None:
    """Refuse the request of that number, from 1, that changes something, and all after it: the writer was killed."""
    seen = 0

    def spoil(method: str, path: str) -> str | None:
        nonlocal seen
        seen += method in methods
        return "403" if seen >= number and method in methods else None

    server.spoil = spoil


@contextmanager
def hanging(server: S3Server, method: str = "", path: str = "", *, times: int = 10**9) -> Iterator[threading.Event]:
    """Answer such requests, the first `times` of them, only behind this; give what is set when the first is there."""
    entered, release, left = threading.Event(), threading.Event(), iter(range(times))

    def spoil(asked: str, of: str) -> str | None:
        if method in asked and path in of:
            entered.set()
            if next(left, None) is not None:
                release.wait(2 * HANG_S)
        return None

    server.spoil = spoil
    try:
        yield entered
    finally:
        release.set()


def uploading(here: RunDir, *, first: str = "", at_end: str) -> subprocess.CompletedProcess[str]:
    """Run a process that uploads step 1 in a thread, and does something at its end."""
    program = (
        f"{first}\nimport random, sys; from pathlib import Path\n"
        "from holdfast.remote.checkpoints import RemoteCheckpoints\n"
        "from holdfast.remote.uploader import Uploader\n"
        "random.seed(1); before = random.getstate()\n"
        f"uploader = Uploader(RemoteCheckpoints(sys.argv[1])); uploader.submit(Path(sys.argv[2]), 1)\n{at_end}"
    )
    words = [sys.executable, "-c", program, URL, str(here.checkpoint(1))]
    return subprocess.run(words, capture_output=True, text=True, timeout=2 * HANG_S)


def test_the_manifest_goes_last_and_a_resume_on_an_empty_machine_gets_all(
    server: S3Server, remote: RemoteCheckpoints, here: RunDir, empty: RunDir
) -> None:
    weights = [write_weights(here, version) for version in (1, 2)]
    remote.upload(write_checkpoint(here, 3), 3, weights=weights)
    puts = [path for method, path in server.requests if method == "PUT"]
    assert puts[-1] == f"/{BUCKET}/runs/one/step_3/manifest.json" and len(puts) == 11
    assert puts[1] == f"/{BUCKET}/runs/one/weights/step_1/manifest.json"
    assert fetch(URL, empty, "auto", older_weights=2) == 3
    assert contents(empty.checkpoint(3)) == contents(here.checkpoint(3))
    assert contents(empty.weights) == contents(here.weights)


@pytest.mark.clock
def test_a_large_file_goes_in_parts(server: S3Server, remote: RemoteCheckpoints, here: RunDir, empty: RunDir) -> None:
    directory = write_checkpoint(here, 1)
    with open(directory / "trainer/__0.distcp", "wb") as file:
        for number in range(105):
            file.write(bytes([number]) * 2**20)
    listing = manifest.read_manifest(directory)
    listing.files.update(manifest.describe_files(directory))
    manifest.write_manifest(directory, listing)
    remote.upload(directory, 1)
    assert sum(method == "PUT" and path.endswith("__0.distcp") for method, path in server.requests) == 3
    remote.download(1, empty.checkpoint(1))
    manifest.verify(empty.checkpoint(1), step=1)


@pytest.mark.clock
@pytest.mark.parametrize("number", range(1, OBJECTS + 1))
def test_an_upload_torn_at_any_object_commits_nothing_and_the_next_one_heals(
    server: S3Server, remote: RemoteCheckpoints, here: RunDir, empty: RunDir, number: int
) -> None:
    """At each of them a listing shows whole steps only."""
    remote.upload(write_checkpoint(here, 1), 1)
    directory = write_checkpoint(here, 3)
    fail_from(server, number)
    with pytest.raises(StorageError, match=r"s3://bucket/runs/one: writing step_3/.* failed: PermissionError"):
        remote.upload(directory, 3)
    server.spoil = lambda method, path: None
    assert len(server.names()) == OBJECTS + number - 1
    assert remote.steps() == [1] and RemoteCheckpoints(URL).steps() == [1]
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        remote.download(3, empty.checkpoint(3))
    server.write("runs/one/step_3/trainer/__9.distcp", b"of another world")
    assert remote.upload(directory, 3)
    remote.download(3, empty.checkpoint(3))
    assert contents(empty.checkpoint(3)) == contents(directory) and len(server.names()) == 2 * OBJECTS


@pytest.mark.clock
@pytest.mark.parametrize("number", [2, OBJECTS, OBJECTS + 1, OBJECTS + 2, 2 * OBJECTS, 2 * OBJECTS + 1])
def test_a_replacement_torn_anywhere_is_neither_step(
    server: S3Server, remote: RemoteCheckpoints, here: RunDir, empty: RunDir, number: int
) -> None:
    """Removals, the manifest's first, then puts: after the first of them the old step is gone."""
    remote.upload(write_checkpoint(here, 3), 3)
    other = write_checkpoint(empty, 3, content="rewritten")
    fail_from(server, number, ("PUT", "DELETE"))
    if number > 2 * OBJECTS:
        assert remote.upload(other, 3)
    else:
        with pytest.raises(StorageError):
            remote.upload(other, 3)
        server.spoil = lambda method, path: None
        assert remote.steps() == [] and remote.upload(other, 3)
    remote.download(3, empty.checkpoint(4))
    assert contents(empty.checkpoint(4)) == contents(other)


@pytest.mark.clock
@pytest.mark.parametrize("number", [2, 4, OBJECTS])
def test_a_torn_removal_is_no_step(server: S3Server, remote: RemoteCheckpoints, here: RunDir, number: int) -> None:
    remote.upload(write_checkpoint(here, 3), 3)
    fail_from(server, number, ("DELETE",))
    with pytest.raises(StorageError, match="removing step_3/"):
        remote.remove(3)
    server.spoil = lambda method, path: None
    assert remote.steps() == []
    assert len(remote.clear_leftovers()) == OBJECTS + 1 - number and server.names() == []


def test_parts_of_a_cut_off_upload_are_given_up(server: S3Server, remote: RemoteCheckpoints) -> None:
    of_others = [f"runs/{place}/step_2/trainer/__0.distcp" for place in ("one/below", "other")]
    for key in ("runs/one/step_2/trainer/__0.distcp", "runs/one/weights/step_2/model.safetensors", *of_others):
        server.client.create_multipart_upload(Bucket=BUCKET, Key=key)
    remote.clear_leftovers()
    left = server.client.list_multipart_uploads(Bucket=BUCKET)["Uploads"]
    assert [upload["Key"] for upload in left] == of_others


def test_a_store_that_kept_another_size_is_no_commit(server: S3Server, remote: RemoteCheckpoints, here: RunDir) -> None:
    """Between put and check somebody else writes the object."""
    has_begun = threading.Event()

    def replace(method: str, path: str) -> str | None:
        if method == "GET" and has_begun.is_set():
            server.spoil = lambda method, path: None
            server.write("runs/one/step_3/trainer/__1.distcp", b"short")
        elif method == "PUT":
            has_begun.set()
        return None

    server.spoil = replace
    with pytest.raises(StorageError, match=r"__1\.distcp has 5 bytes, the manifest says .* cannot be trusted"):
        remote.upload(write_checkpoint(here, 3), 3)
    assert remote.steps() == []


def test_a_missing_bucket_is_no_empty_store(server: S3Server, here: RunDir, empty: RunDir) -> None:
    with pytest.raises(StorageError, match=r"s3://buckett/runs: listing .* Create the bucket, or correct ckpt\.dir"):
        fetch("s3://buckett/runs", empty, "auto")
    with pytest.raises(StorageError, match="Create the bucket"):
        RemoteCheckpoints("s3://buckett/runs").upload(write_checkpoint(here, 3), 3)


def test_refused_credentials_fail_at_once(server: S3Server, remote: RemoteCheckpoints, empty: RunDir) -> None:
    server.spoil = lambda method, path: "403"
    with pytest.raises(StorageError, match="PermissionError.*Check AWS_ACCESS_KEY_ID"):
        fetch(URL, empty, "auto")
    assert len(server.requests) == 1


def test_missing_credentials_are_named(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    with pytest.raises(StorageError, match="Unable to locate credentials.*Check AWS_ACCESS_KEY_ID"):
        RemoteCheckpoints(URL).steps()


def test_a_server_that_never_answers_runs_into_the_deadline(
    server: S3Server, remote: RemoteCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "STALLED_S", 0.3)
    monkeypatch.setattr(object_store, "TRIES", 2)
    with hanging(server), pytest.raises(StorageError, match="TimeoutError: nothing moved for 0 s"):
        remote.steps()


@pytest.mark.clock
def test_a_transfer_that_hung_once_is_tried_again(
    server: S3Server, remote: RemoteCheckpoints, here: RunDir, empty: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.upload(write_checkpoint(here, 3), 3)
    monkeypatch.setattr(object_store, "STALLED_S", 2.0)
    monkeypatch.setattr(object_store, "TRIES", 2)
    server.requests.clear()
    with hanging(server, "GET", "progress", times=1):
        remote.download(3, empty.checkpoint(3))
    assert sum(method == "GET" and "progress" in path for method, path in server.requests) == 2
    assert manifest.verify(empty.checkpoint(3)).step == 3


def test_closing_gives_up_a_transfer_that_hangs(server: S3Server, here: RunDir) -> None:
    uploader = Uploader(RemoteCheckpoints(URL))
    with hanging(server, "PUT") as entered:
        for step in (5, 6):
            uploader.submit(write_checkpoint(here, step), step)
        assert entered.wait(HANG_S)
        with pytest.raises(CheckpointError, match=f"uploading step 5, 6 was given up.*whole in {here.checkpoints}"):
            uploader.close(timeout_s=0.1)
        uploader._thread.join(HANG_S)
        assert not uploader._thread.is_alive(), "the transfer was cancelled, not left behind"


@pytest.mark.clock
def test_uploads_that_are_tried_again_leave_the_generator_of_the_process_alone(server: S3Server, here: RunDir) -> None:
    """Its state is in checkpoints; the libraries draw from it for their pauses. The driver tries a request three times
    by itself, so some of the refusals are for us."""
    write_checkpoint(here, 1)
    left = iter(["503", *["500"] * 7])
    server.spoil = lambda method, path: next(left, None) if method == "PUT" else None
    done = uploading(
        here,
        first="import botocore.retries.standard  # as peft does",
        at_end="uploader.close(120); print(random.getstate() == before)",
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    assert next(left, None) is None and RemoteCheckpoints(URL).steps() == [1]


@pytest.mark.clock
def test_a_process_ends_at_once_with_a_store_that_hangs(server: S3Server, here: RunDir) -> None:
    """The thread is a daemon and so is the driver's loop: nothing waits for the network at exit."""
    write_checkpoint(here, 1)
    with hanging(server):
        done = uploading(here, at_end="print('submitted', uploader.wait(timeout_s=1))")
    assert (done.returncode, done.stdout) == (0, "submitted False\n"), done.stderr
