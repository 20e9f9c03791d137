"""The disk under an rl run fills up: the run waits, and goes on by itself, or gives up after its time."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import STORAGE_FAILED
from tests.faults.disks import SmallDisk
from tests.integration.conftest import REFERENCE_STEPS, UsedServer
from tests.runs.ports import free_port
from tests.runs.rl import CompletedRun, RlRun, assert_same_end, complete

pytestmark = pytest.mark.launch

_STEPS = ("--max-steps", str(REFERENCE_STEPS), "--ckpt.interval", "2")
_WAITING = re.compile(
    r"waiting for storage: (trainer|orchestrator): .*No space left on device.* has 0 bytes free: make"
)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with SmallDisk(tmp_path / "small", size_mib=128) as disk:
        if disk.problem:
            pytest.skip(f"no filesystem can be mounted here: {disk.problem}")
        yield disk


def keep_full_until(run: RlRun, disk: SmallDisk, text: str) -> None:
    """Leave no room, also not what the run itself removes, until the launcher has printed `text`."""
    while text not in run.output:
        assert not run.ended(), run.output
        disk.fill()


def test_a_run_that_waits_for_room_ends_alike(rl_server: UsedServer, reference: CompletedRun, disk: SmallDisk) -> None:
    """Also where crashes are not forgiven: a full disk is none."""
    with RlRun(disk.path, *rl_server.flags, *_STEPS, "--max-restarts", "0") as run:
        run.wait_for_step(5)
        keep_full_until(run, disk, "(next try in 2 s)")
        disk.release()
        healed = complete(run)
    assert _WAITING.search(healed.output) and "(next try in 1 s)" in healed.output, healed.output
    assert_same_end(healed, reference, REFERENCE_STEPS)
    left = [path for path in healed.run_dir.path.rglob(".tmp-*") if "discarded" not in path.parts]
    assert not left, "what was torn is cleared away"


def test_a_disk_that_stays_full_ends_the_run_with_what_was_committed(rl_server: UsedServer, disk: SmallDisk) -> None:
    with RlRun(disk.path, *rl_server.flags, *_STEPS, "--storage-timeout-s", "2") as run:
        run.wait_for_step(5)
        run.wait_for(lambda: run.run_dir.committed_steps()[-1:] >= [4], "the checkpoint of step 4")
        while not run.ended():
            disk.fill()
        ended = complete(run)
    assert ended.exit_code == STORAGE_FAILED, ended.output
    assert not ended.survivors
    report = ended.output[ended.output.index("\nerror: ") :]
    # The log of a process, which says "No space left on device", has no room there either.
    assert re.search(r"the storage was waited for in vain for 2 s: \S+ has [0-9,]+ bytes free", report), report
    assert ended.output.count("\nerror: ") == 1 and "Traceback" not in ended.output, ended.output
    assert ended.run_dir.committed_steps()[-1] >= 4


def test_a_start_by_hand_on_a_full_disk_is_refused(disk: SmallDisk) -> None:
    """Nothing runs yet that would be lost."""
    disk.fill()
    with RlRun(disk.path, "--inference.server.port", str(free_port()), "--max-steps", "1") as run:
        refused = complete(run)
    assert refused.exit_code == 2, refused.output
    assert "No space left on device" in refused.output and "Traceback" not in refused.output
    assert "waiting for storage" not in refused.output and not refused.run_dir.holds_run()
