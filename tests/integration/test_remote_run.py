"""The `sft` command with `--ckpt.dir s3://...` against a real S3 API server on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.shared.files import manifest
from holdfast.shared.remote.checkpoints import RemoteCheckpoints
from tests.builders.checkpoint_files import contents
from tests.conftest import ModelFactory
from tests.runs.training import run_sft
from tests.servers.s3 import BUCKET, S3Server

URL = f"s3://{BUCKET}/run"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    server = S3Server()
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    yield server
    server.close()


@pytest.mark.slow
def test_a_run_goes_on_on_an_empty_machine_as_if_nothing_had_happened(
    server: S3Server, tmp_path: Path, tiny_model: ModelFactory, sft_data: Path
) -> None:
    """Four steps and two more on another machine equal six in one go, bit for bit."""
    model = tiny_model(weights=False)
    straight = run_sft(tmp_path / "straight", model, sft_data, "--max-steps", "6", "--ckpt")
    assert straight.code == 0, straight.output
    saved = ("--ckpt.interval", "2", "--ckpt.keep", "1", "--ckpt.dir", URL)
    first = run_sft(tmp_path / "first", model, sft_data, "--max-steps", "4", *saved)
    assert first.code == 0, first.output
    remote = RemoteCheckpoints(URL)
    assert remote.steps() == [4]
    resume = ("--ckpt.resume-step", "latest")
    second = run_sft(tmp_path / "second", model, sft_data, "--max-steps", "6", *saved, *resume)
    assert second.code == 0, second.output
    assert f"copied the checkpoint of step 4 from {URL}" in second.output
    assert second.run_dir.run_id() == first.run_dir.run_id()
    assert second.weights(6) == straight.weights(6)
    assert second.column("loss") == straight.column("loss")[4:]
    assert 6 in remote.steps()
    remote.download(6, tmp_path / "six")
    assert contents(tmp_path / "six") == contents(second.run_dir.checkpoint(6))
    manifest.verify(tmp_path / "six", step=6)


def test_a_store_that_fails_ends_the_run_with_its_reason(
    server: S3Server, tmp_path: Path, tiny_model: ModelFactory, sft_data: Path
) -> None:
    server.spoil = lambda method, path: "403" if method == "PUT" else None
    flags = ("--max-steps", "4", "--ckpt.interval", "2", "--ckpt.dir", URL)
    run = run_sft(tmp_path / "run", tiny_model(weights=False), sft_data, *flags)
    assert run.code != 0 and f"{URL}: writing step_2/" in run.output and "PermissionError" in run.output, run.output
    assert 2 in run.run_dir.committed_steps(), "the checkpoint on this machine is whole"


def test_a_missing_bucket_is_told_before_anything_is_started(
    server: S3Server, tmp_path: Path, tiny_model: ModelFactory, sft_data: Path
) -> None:
    flags = ("--max-steps", "4", "--ckpt.interval", "2", "--ckpt.dir", "s3://buckett/run")
    run = run_sft(tmp_path / "run", tiny_model(weights=False), sft_data, *flags)
    assert run.code == 2 and "Create the bucket, or correct ckpt.dir" in run.output and "Traceback" not in run.output
