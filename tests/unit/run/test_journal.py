"""The journal: batches come out as they went in, whole or not at all."""

import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import msgspec
import pytest

from holdfast.errors import CheckpointError
from holdfast.protocol.rollouts import (
    Batch,
    Logprobs,
    LossMask,
    Rewards,
    Rollout,
    StepRewards,
    TokenIds,
    VersionSpan,
    encode_batch,
)
from holdfast.run.journal import BATCH_NAME, STATE_NAME, publish_batch, read_batch, wait_for
from holdfast.run.manifest import describe_files, read_manifest, write_manifest
from holdfast.run.run_dir import RunDir
from tests.conftest import ROOT
from tests.runs.processes import HANG_S


def make_batch(step: int = 3) -> Batch:
    rollout = Rollout(
        environment="reverse_text", task_id=2**40, sample_index=1, token_ids=TokenIds([1, 7, 9]),
        loss_mask=LossMask([False, True, True]), logprobs=Logprobs([0.0, -0.1, -1e-7]),
        versions=[VersionSpan(version=2, start=1, end=3)], reward=0.7, truncated=True, metrics={"exact": 0.0},
        step_rewards=StepRewards(TokenIds([1, 2]), Rewards([0.1, -1 / 3])),
    )  # fmt: skip
    return Batch(
        step=step,
        policy_version=2,
        weights_digest="d" * 32,
        rollouts=[rollout],
        metrics={"reward/mean": 0.7},
    )


def rewrite(directory: Path, batch: bytes) -> None:
    """Put other content into a published batch, with a manifest that fits it."""
    (directory / BATCH_NAME).write_bytes(batch)
    manifest = read_manifest(directory)
    manifest.files = describe_files(directory)
    write_manifest(directory, manifest)


def test_the_batch_of_another_step_or_format_is_refused(run_dir: RunDir) -> None:
    directory = publish_batch(run_dir, make_batch(), b"{}")
    rewrite(directory, encode_batch(make_batch(step=4)))
    with pytest.raises(CheckpointError, match="expected batch 3"):
        read_batch(run_dir, 3)
    rollout = {"environment": "a", "task_id": 1, "sample_index": 0, "token_ids": [1], "logprobs": [0.0]}
    rewrite(directory, msgspec.msgpack.encode({"format": 1, "step": 3, "rollouts": [rollout]}))
    with pytest.raises(CheckpointError, match=r"batch\.msgpack cannot be read: it has format 1; this .* format 7"):
        read_batch(run_dir, 3)
    rewrite(directory, b"\xc1 no msgpack")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_batch(run_dir, 3)
    batch = msgspec.msgpack.decode(encode_batch(make_batch()))
    for no_whole_items in (b"\1\2\3", "text"):
        batch["rollouts"][0]["token_ids"] = no_whole_items
        rewrite(directory, msgspec.msgpack.encode(batch))
        with pytest.raises(CheckpointError, match=r"batch\.msgpack cannot be read: .*token_ids"):
            read_batch(run_dir, 3)


def test_waiting_ends_when_the_batch_appears_by_its_time_or_by_the_check(run_dir: RunDir, tmp_path: Path) -> None:
    looked = threading.Event()
    publish = partial(publish_batch, run_dir, make_batch(), b'{"next": 4}')
    writer = threading.Thread(target=lambda: looked.wait(HANG_S) and publish())
    writer.start()
    assert wait_for(run_dir.batch(3), timeout_s=HANG_S, check=looked.set)
    writer.join()
    assert read_batch(run_dir, 3) == make_batch() and run_dir.published_batches() == [3], "what appears is complete"
    assert (run_dir.batch(3) / STATE_NAME).read_bytes() == b'{"next": 4}'
    manifest = read_manifest(run_dir.batch(3))
    assert (manifest.kind, manifest.step, manifest.policy_version) == ("batch", 3, 2)
    assert not wait_for(tmp_path / "never", timeout_s=0.0)

    def check() -> None:
        raise KeyError("the orchestrator died")

    with pytest.raises(KeyError):
        wait_for(tmp_path / "never", timeout_s=HANG_S, check=check)


def test_the_example_of_the_documentation_reads_a_batch(tmp_path: Path) -> None:
    example = (ROOT / "docs" / "files.md").read_text().split("```python file=print_batch.py\n")[1].split("```")[0]
    path = publish_batch(RunDir(tmp_path), make_batch(), b"{}") / BATCH_NAME
    printed = subprocess.run([sys.executable, "-c", example, str(path)], check=True, capture_output=True, text=True)
    *head, mean = printed.stdout.split()
    assert head == ["reverse_text", str(2**40), "0.7"]
    assert float(mean) == pytest.approx(-0.05, abs=1e-6)
