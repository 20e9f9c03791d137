"""The log of records and the journal: whole ones are found whatever happened to the others; one sync covers many."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import CheckpointError
from holdfast.orchestrator.generation_log import GenerationLog
from holdfast.protocol import rollouts
from holdfast.protocol.inference import Completion
from holdfast.protocol.rollouts import PLAIN_SAMPLING, Batch, Logprobs, TokenIds, VersionSpan, encode_batch
from holdfast.run import atomic, record_log
from holdfast.run.journal import BATCH_NAME, STATE_NAME, publish_batch, read_batch, wait_for
from holdfast.run.manifest import describe_files, read_manifest, write_manifest
from holdfast.run.record_log import MARKER, RecordLog, read_records
from holdfast.run.run_dir import RunDir
from tests.runs.processes import HANG_S

PAYLOADS = [bytes([number]) * (50 * number + 1) for number in range(6)]


def write(path: Path, payloads: list[bytes], *, valid_bytes: int = 0) -> None:
    log = RecordLog(path, valid_bytes=valid_bytes)
    for payload in payloads:
        log.append(payload)
    log.close(wait=True)


def starts(payloads: list[bytes]) -> list[int]:
    found = [0]
    for payload in payloads:
        found.append(found[-1] + 16 + len(payload))
    return found


def test_records_come_out_as_they_went_in_and_more_can_follow(tmp_path: Path) -> None:
    path = tmp_path / "new" / "one.log"
    write(path, PAYLOADS[:3])
    assert read_records(path) == (PAYLOADS[:3], [])
    write(path, PAYLOADS[3:], valid_bytes=path.stat().st_size)
    assert read_records(path) == (PAYLOADS, [])
    path.write_bytes(path.read_bytes() + bytes(4096))  # as a filesystem leaves it
    found, (torn,) = read_records(path)
    assert found == PAYLOADS and str(torn) == "4096 bytes at record 6 (offset 852): the torn end is cut"


def test_every_torn_end_is_found_and_told(tmp_path: Path) -> None:
    path = tmp_path / "one.log"
    write(path, PAYLOADS)
    whole, ends = path.read_bytes(), starts(PAYLOADS)
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        payloads, damages = read_records(path)
        count = max(number for number, end in enumerate(ends) if end <= cut)
        assert payloads == PAYLOADS[:count]
        told = [(damage.record, damage.start, damage.num_bytes, damage.is_tail) for damage in damages]
        assert told == ([(count, ends[count], cut - ends[count], True)] if cut > ends[count] else [])


@given(data=st.data())
@settings(max_examples=60)
def test_damage_costs_only_the_record_that_it_hit(data: st.DataObject, tmp_path: Path) -> None:
    path = tmp_path / "one.log"
    payloads = [MARKER + payload for payload in PAYLOADS]  # what looks like a record inside of one is none
    write(path, payloads)
    content, ends = bytearray(path.read_bytes()), starts(payloads)
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    hit = max(number for number, start in enumerate(ends) if start <= place)
    found, damages = read_records(path)
    assert found == payloads[:hit] + payloads[hit + 1 :]
    assert [(damage.record, damage.start, damage.is_tail) for damage in damages] == [(hit, ends[hit], hit == 5)]
    assert damages[0].num_bytes == 16 + len(payloads[hit])


def test_one_sync_covers_all_that_came_and_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs: list[int] = []
    begun, go_on = threading.Event(), threading.Event()
    sync = os.fdatasync

    def slow_disk(descriptor: int) -> None:
        syncs.append(os.fstat(descriptor).st_size)
        begun.set()
        assert go_on.wait(HANG_S)
        sync(descriptor)

    monkeypatch.setattr(record_log.os, "fdatasync", slow_disk)
    log = RecordLog(tmp_path / "one.log", valid_bytes=0)
    log.append(b"first")
    assert begun.wait(HANG_S)
    for number in range(1000):
        log.append(b"%d" % number)
    assert len(read_records(log.path)[0]) == 1001 and syncs == [21]
    go_on.set()
    log.close(wait=True)
    assert syncs == [21, log.path.stat().st_size]


def test_the_name_of_a_new_log_is_durable_before_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(atomic, "fsync_directory", lambda path: calls.append(f"directory {path.name}"))
    monkeypatch.setattr(record_log.os, "fdatasync", lambda _: calls.append("file"))
    for _ in range(2):
        write(tmp_path / "run" / "rollouts" / "one.log", PAYLOADS[:1])
    synced = ["directory rollouts", "file"]
    assert calls == [f"directory {tmp_path.name}", "directory run", *synced, *synced]


def test_a_failed_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(record_log.os, "fdatasync", broken)
    log = RecordLog(tmp_path / "one.log", valid_bytes=0)
    log.append(b"first")
    with pytest.raises(OSError, match="Input/output"):
        log.close(wait=True)
    with pytest.raises(OSError, match="Input/output"):
        log.append(b"second")
    assert "one.log cannot be made durable" in caplog.text


KILLED = """
import sys
from pathlib import Path
from holdfast.run.record_log import RecordLog
log = RecordLog(Path(sys.argv[1]), valid_bytes=0)
number = 0
while True:
    log.append(b"%d" % number * 400)
    number += 1
    if number % 100 == 0:
        print(number, flush=True)
"""


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_process_loses_nothing_that_it_appended(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "one.log"
    with subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(random.Random(seed).randrange(5, 50)):
            told = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        told = max([told, *map(int, process.stdout.read().split())])
    payloads, damages = read_records(path)
    assert len(payloads) >= told and len(damages) <= 1
    assert payloads == [b"%d" % number * 400 for number in range(len(payloads))]


def completion(number: int) -> Completion:
    return Completion(TokenIds([10 + number, 3]), Logprobs([-1.0, -0.5]), "stop", [VersionSpan(0, 0, 2)])


def make_log(run_dir: RunDir, answers: int = 0) -> GenerationLog:
    log = GenerationLog(run_dir, 7, weights_digest="d", stop_token_ids=[3])
    for number in range(answers):
        log.append([1, 2], sampling=PLAIN_SAMPLING, max_tokens=4, seeds=[number], completions=[completion(number)])
    log.close()
    return log


def found(log: GenerationLog) -> list[int]:
    answers = (log.find([1, 2], sampling=PLAIN_SAMPLING, max_tokens=4, seed=number) for number in range(5))
    return [number for number, answer in enumerate(answers) if answer == completion(number)]


@pytest.mark.parametrize(("place", "left", "message"), [
    (-1, [0, 1, 2, 3], r"generations_7\.log: \d+ bytes at record 5 \(offset \d+\): the torn end is cut"),
    (600, [0, 1, 3, 4], r"\d+ bytes at record 3 \(offset \d+\): they are damaged and passed over"),
    (20, [], r"generations_7\.log has no header, or one of other weights"),
])  # fmt: skip
def test_a_damaged_log_of_generations_is_said_and_the_rest_used(
    place: int, left: list[int], message: str, run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_log(run_dir, answers=5).path
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    assert found(make_log(run_dir)) == left and re.search(message, caplog.text)
    caplog.clear()
    assert found(make_log(run_dir)) == left
    assert ("passed over" in caplog.text) is (place == 600), "what was cut is gone, what was passed over is not"
    assert "torn" not in caplog.text and "header" not in caplog.text


def make_batch(step: int = 3) -> Batch:
    rollout = rollouts.Rollout(
        environment="reverse_text", task_id=2**40, sample_index=1, token_ids=TokenIds([1, 7, 9]),
        loss_mask=rollouts.LossMask([False, True, True]), logprobs=Logprobs([0.0, -0.1, -1e-7]),
        versions=[VersionSpan(version=2, start=1, end=3)], reward=0.7, truncated=True, metrics={"exact": 0.0},
        step_rewards=rollouts.StepRewards(TokenIds([1, 2]), rollouts.Rewards([0.1, -1 / 3])),
    )  # fmt: skip
    return Batch(step=step, policy_version=2, weights_digest="d" * 32, rollouts=[rollout], metrics={"reward/mean": 0.7})


def rewrite(directory: Path, batch: bytes) -> None:
    """Put other content into a published batch, with a manifest that fits it."""
    (directory / BATCH_NAME).write_bytes(batch)
    manifest = read_manifest(directory)
    manifest.files = describe_files(directory)
    write_manifest(directory, manifest)


def test_the_batch_of_another_step_or_format_is_refused(run_dir: RunDir) -> None:
    directory = publish_batch(run_dir, make_batch(), b"{}")
    rollout = {"environment": "a", "task_id": 1, "sample_index": 0, "token_ids": [1], "logprobs": [0.0]}
    old = {"format": 1, "step": 3, "rollouts": [rollout]}
    cases = [
        (encode_batch(make_batch(step=4)), "expected batch 3"),
        (msgspec.msgpack.encode(old), r"batch\.msgpack cannot be read: it has format 1; this .* format 8"),
        (b"\xc1 no msgpack", "cannot be read"),
    ]
    batch = msgspec.msgpack.decode(encode_batch(make_batch()))
    for no_whole_items in (b"\1\2\3", "text"):
        batch["rollouts"][0]["token_ids"] = no_whole_items
        cases.append((msgspec.msgpack.encode(batch), r"batch\.msgpack cannot be read: .*token_ids"))
    for content, said in cases:
        rewrite(directory, content)
        with pytest.raises(CheckpointError, match=said):
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
