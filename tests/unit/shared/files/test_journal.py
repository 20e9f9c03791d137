"""The journal: batches come out as they went in, whole or not at all."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.shared.errors import CheckpointError
from holdfast.shared.files import durable, journal
from holdfast.shared.files.journal import BATCH_NAME, STATE_NAME, publish_batch, read_batch, wait_for
from holdfast.shared.files.manifest import describe_files, read_manifest, write_manifest
from holdfast.shared.files.run_dir import RunDir
from holdfast.shared.wire.arrays import Logprobs, LossMask, Rewards, TokenIds
from holdfast.shared.wire.rollouts import Batch, Rollout, StepRewards, VersionSpan, decode_batch, encode_batch
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


def test_a_batch_comes_out_as_it_went_in(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    directory = publish_batch(run_dir, make_batch(), b'{"next": 4}')
    assert directory == run_dir.batch(3) and run_dir.published_batches() == [3]
    assert read_batch(run_dir, 3) == make_batch()
    assert (directory / STATE_NAME).read_bytes() == b'{"next": 4}'
    manifest = read_manifest(directory)
    assert (manifest.kind, manifest.step, manifest.policy_version) == ("batch", 3, 2)


@given(
    logprobs=st.lists(st.floats(max_value=0, allow_nan=False, width=32), min_size=1, max_size=5),
    reward=st.floats(allow_nan=False),
    metrics=st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=3),
)
@settings(max_examples=25)
def test_numbers_survive_bit_for_bit(
    logprobs: list[float], reward: float, metrics: dict[str, float], tmp_path: Path
) -> None:
    batch = make_batch()
    batch.rollouts[0].logprobs, batch.rollouts[0].reward, batch.metrics = Logprobs(logprobs), reward, metrics
    encoded = encode_batch(batch)
    assert encode_batch(decode_batch(encoded)) == encoded
    assert list(decode_batch(encoded).rollouts[0].logprobs) == logprobs


@pytest.mark.parametrize("call", ["write_manifest", "publish_directory"])
def test_a_batch_that_cannot_be_written_does_not_appear(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal if call == "write_manifest" else durable, call, full)
    with pytest.raises(OSError, match="No space"):
        publish_batch(run_dir, make_batch(), b"{}")
    assert run_dir.published_batches() == [] and not run_dir.batch(3).exists()
    assert len(run_dir.clear_leftovers()) == 1


@pytest.mark.parametrize("name", [BATCH_NAME, STATE_NAME])
def test_a_damaged_batch_is_refused_and_named(name: str, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    path = publish_batch(run_dir, make_batch(), b"{}") / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        read_batch(run_dir, 3)


def test_a_batch_is_never_replaced(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    publish_batch(run_dir, make_batch(), b"{}")
    with pytest.raises(FileExistsError):
        publish_batch(run_dir, make_batch(), b"{}")


def rewrite(directory: Path, batch: bytes) -> None:
    """Put other content into a published batch, with a manifest that fits it."""
    (directory / BATCH_NAME).write_bytes(batch)
    manifest = read_manifest(directory)
    manifest.files = describe_files(directory)
    write_manifest(directory, manifest)


def test_the_batch_of_another_step_or_format_is_refused(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    directory = publish_batch(run_dir, make_batch(), b"{}")
    rewrite(directory, encode_batch(make_batch(step=4)))
    with pytest.raises(CheckpointError, match="expected batch 3"):
        read_batch(run_dir, 3)
    other = make_batch()
    other.format = 99
    rewrite(directory, encode_batch(other))
    with pytest.raises(
        CheckpointError, match=r"batch\.msgpack cannot be read: it has format 99; this version reads format 7"
    ):
        read_batch(run_dir, 3)
    rewrite(directory, b"\xc1 no msgpack")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_batch(run_dir, 3)


def test_a_batch_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="step_3"):
        read_batch(RunDir(tmp_path), 3)


def test_waiting_ends_when_the_batch_appears(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    looked = threading.Event()
    writer = threading.Thread(target=lambda: looked.wait(HANG_S) and publish_batch(run_dir, make_batch(), b"{}"))
    writer.start()
    assert wait_for(run_dir.batch(3), timeout_s=HANG_S, check=looked.set)
    writer.join()
    assert read_batch(run_dir, 3) == make_batch(), "what appears is complete"


def test_waiting_gives_up_and_passes_on_what_the_check_raises(tmp_path: Path) -> None:
    assert not wait_for(tmp_path / "never", timeout_s=0.0)

    def check() -> None:
        raise KeyError("the orchestrator died")

    with pytest.raises(KeyError):
        wait_for(tmp_path / "never", timeout_s=HANG_S, check=check)


def test_a_batch_of_the_format_before_is_refused_by_its_number(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    directory = publish_batch(run_dir, make_batch(), b"{}")
    rollout = {"environment": "a", "task_id": 1, "sample_index": 0, "token_ids": [1], "logprobs": [0.0]}
    rewrite(directory, msgspec.msgpack.encode({"format": 1, "step": 3, "rollouts": [rollout]}))
    with pytest.raises(CheckpointError, match="it has format 1; this version reads format 7"):
        read_batch(run_dir, 3)


@pytest.mark.parametrize("data", [b"\1\2\3", "text"])
def test_numbers_that_are_no_whole_items_are_refused(data: bytes | str, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    directory = publish_batch(run_dir, make_batch(), b"{}")
    batch = msgspec.msgpack.decode(encode_batch(make_batch()))
    batch["rollouts"][0]["token_ids"] = data
    rewrite(directory, msgspec.msgpack.encode(batch))
    with pytest.raises(CheckpointError, match=r"batch\.msgpack cannot be read: .*token_ids"):
        read_batch(run_dir, 3)


def test_the_example_of_the_documentation_reads_a_batch(tmp_path: Path) -> None:
    example = (ROOT / "docs" / "journal.md").read_text().split("```python file=print_batch.py\n")[1].split("```")[0]
    path = publish_batch(RunDir(tmp_path), make_batch(), b"{}") / BATCH_NAME
    printed = subprocess.run([sys.executable, "-c", example, str(path)], check=True, capture_output=True, text=True)
    *head, mean = printed.stdout.split()
    assert head == ["reverse_text", str(2**40), "0.7"]
    assert float(mean) == pytest.approx(-0.05, abs=1e-6)
