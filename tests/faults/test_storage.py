"""Storage that is full, broken or forbidden: it is said, what was committed is whole, and the run goes on later."""

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import STORAGE_FAILED
from holdfast.run.metrics import read_metrics
from holdfast.run.run_dir import RunDir
from tests.conftest import ModelFactory
from tests.faults.disks import Disk, SmallDisk
from tests.faults.faulty_calls import Call, installing
from tests.faults.held_steps import exists, held_after
from tests.faults.orchestrators import journaled, run_orchestrator, run_undisturbed
from tests.faults.run_states import FLAGS, LAST, differing, end_state, whole_steps
from tests.forking.commands import Run, shared_commands
from tests.servers.orchestrator_fakes import FakeEngine, FakeTrainer, make_config, serving

pytestmark = pytest.mark.launch

Start = Callable[..., Run]

LONG = 60
ROOM_BYTES = 900_000
"""More than one checkpoint of the tiny model (470 kB) and less than two."""


@pytest.fixture(scope="module")
def start(tiny_model: ModelFactory, sft_data: Path) -> Start:
    """Return a start of `sft` on the tiny model: three saves of which the last removes the first."""
    model = tiny_model(weights=False, attention_dropout=0.3)
    return lambda output, *flags, **options: shared_commands().sft(output, model, sft_data, *FLAGS, *flags, **options)


@pytest.fixture(scope="module")
def wanted(start: Start, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return end_state(start(tmp_path_factory.mktemp("undisturbed") / "run").succeed().output)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Return a run directory with an empty directory of checkpoints, to be mounted over."""
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    return tmp_path / "run"


@pytest.fixture
def small(output: Path) -> Iterator[SmallDisk]:
    """Return a filesystem at `checkpoints/` on which a ballast leaves room for one save and not for two."""
    with SmallDisk(output / "checkpoints", size_bytes=5_000_000 + ROOM_BYTES) as disk:
        if disk.problem:
            pytest.skip(f"no filesystem can be mounted here: {disk.problem}")
        disk.ballast.write_bytes(bytes(5_000_000))
        yield disk


def failed_steps(log: str) -> list[int]:
    return [int(step) for step in re.findall(r"the checkpoint of step (\d+) could not be saved", log)]


def saved_steps(log: str) -> list[int]:
    return [int(step) for step in re.findall(r"checkpoint saved \(step=(\d+)", log)]


def check_message(run: Run, reason: str, *, step: int = 4) -> None:
    """The last words say which step, where, why and what to do, once and without a traceback."""
    assert run.code == STORAGE_FAILED, run.log
    assert "Traceback" not in run.log + run.trainer_log, run.log
    (message,) = [line for line in run.log.splitlines() if line.startswith("error: ")]
    where = f"the checkpoint of step {step} could not be saved in {run.output}/checkpoints"
    assert where in message and reason in message, message
    assert "Those before it are whole. Make room or mend the storage, then resume with latest." in message


def steps_without_ballast(checkpoints: Path) -> list[int]:
    names = {path.name for path in checkpoints.iterdir()} - {"ballast"}
    assert not any(name.startswith(".") for name in names), names
    ballast = checkpoints / "ballast"
    if ballast.exists():
        ballast.rename(checkpoints / ".tmp-ballast")  # no step, for the moment of the look
    steps = sorted(whole_steps(checkpoints))
    if (checkpoints / ".tmp-ballast").exists():
        (checkpoints / ".tmp-ballast").rename(ballast)
    return steps


@pytest.mark.parametrize("mode", ["--ckpt.save-async", "--no-ckpt.save-async"])
def test_a_full_disk_ends_the_run_keeps_what_is_there_and_gives_the_space_back(
    start: Start, wanted: dict[str, Any], small: SmallDisk, output: Path, mode: str
) -> None:
    first = start(output, "--max-steps", "3", "--ckpt.interval", "2", mode, fault=small.fault).wait()
    # The final step of a run is saved as well, and does not fit: the space is that before the save.
    check_message(first, "No space left on device", step=3)
    before = shutil.disk_usage(small.path).free
    assert steps_without_ballast(small.path) == [2]
    full = start(output, "--ckpt.keep", "1", mode, fault=small.fault).wait()
    check_message(full, f"No space left on device: {output}/checkpoints/.tmp-step_4/")
    assert steps_without_ballast(small.path) == [2] and shutil.disk_usage(small.path).free == before
    assert RunDir(output).published_weights() in ([], [3]) and len(read_metrics(output / "metrics.jsonl")) < LAST + 1
    small.release()
    resumed = start(output, mode, fault=small.fault).wait()
    assert resumed.code == 0 and "from step 2 " in resumed.log, resumed.log
    shutil.copytree(small.path, output / "checkpoints", dirs_exist_ok=True)
    assert differing(end_state(output), wanted) == []


def test_a_save_that_fails_stops_at_the_next_boundary(start: Start, small: SmallDisk, output: Path) -> None:
    """Saves every 20 steps: the run ends long before the next would notice."""
    flags = ("--max-steps", str(LONG), "--ckpt.interval", "20", "--ckpt.keep", "1")
    # It trains some steps meanwhile, but not all that are left, however long the save takes to fail.
    is_over = f"not {exists(output / 'checkpoints/.tmp-step_40')}"
    full = start(output, *flags, fault=small.fault, trainer_fault=held_after(45, until=is_over)).wait()
    check_message(full, "No space left on device", step=40)
    assert 40 <= read_metrics(output / "metrics.jsonl")[-1]["step"] < LONG
    assert steps_without_ballast(small.path) == [20]


def test_told_to_warn_it_says_every_failure_and_saves_with_room(start: Start, small: SmallDisk, output: Path) -> None:
    flags = ("--max-steps", str(LONG), "--ckpt.interval", "2", "--ckpt.keep", "1", "--ckpt.on-failure", "warn")
    has_room = output.with_name("has_room")
    run = start(output, *flags, fault=small.fault, trainer_fault=held_after(30, until=exists(has_room)))
    while not failed_steps(run.trainer_log):
        assert not run.has_ended, f"it ended before a save failed:\n{run.log}"
    small.release()
    has_room.touch()
    run.wait()
    log = run.log + run.trainer_log
    assert run.code == 0 and "Traceback" not in log and "error: " not in log, log
    failed, saved = failed_steps(run.trainer_log), saved_steps(run.trainer_log)
    assert failed[0] == 4 and saved[0] == 2 and saved[-1] == LONG
    assert sorted({*failed, *saved}) == list(range(2, LONG + 1, 2)) and len(failed) + len(saved) == LONG // 2
    assert run.trainer_log.count("No space left on device") == len(failed)
    assert steps_without_ballast(small.path) == [LONG] and len(read_metrics(output / "metrics.jsonl")) == LONG


def test_told_to_warn_a_final_save_that_fails_is_still_a_failure(start: Start, small: SmallDisk, output: Path) -> None:
    flags = ("--ckpt.keep", "1", "--ckpt.on-failure", "warn")
    run = start(output, *flags, fault=small.fault).wait()
    check_message(run, "No space left on device", step=LAST)
    assert 4 in failed_steps(run.trainer_log) and steps_without_ballast(small.path) == [2]
    assert read_metrics(output / "metrics.jsonl")[-1]["step"] == LAST


def test_a_disk_that_breaks_for_good(start: Start, output: Path, tmp_path: Path) -> None:
    """A real disk, of an image in a filesystem too small for it: writing it back fails, and then it is read-only."""
    if os.geteuid() != 0:
        pytest.skip("mounting an image of a disk takes root")
    host, place = tmp_path / "host", output / "checkpoints"
    host.mkdir()
    script = f"""
        mount -t tmpfs -o size=1700k tmpfs {host}
        truncate -s 64M {host}/image
        mkfs.ext4 -q -E lazy_itable_init=0,nodiscard {host}/image
        mount -o loop {host}/image {place}
        rmdir {place}/lost+found
    """
    with Disk(script, needs_root=True) as disk:
        if disk.problem:
            pytest.skip(f"no image of a disk can be mounted here: {disk.problem}")
        run = start(output, "--max-steps", str(LONG), "--ckpt.keep", "20", fault=disk.fault).wait()
        step = failed_steps(run.trainer_log)[-1]
        assert step > 2, run.trainer_log
        reason = "Input/output error" if "Input/output error" in run.trainer_log else "Read-only file system"
        check_message(run, reason, step=step)
        copied = tmp_path / "rescued"
        shutil.copytree(output, copied, ignore=shutil.ignore_patterns("checkpoints"))
        for name in [path.name for path in disk.view(place).iterdir() if path.name.startswith("step_")]:
            shutil.copytree(disk.view(place) / name, copied / "checkpoints" / name)
    assert sorted(whole_steps(copied / "checkpoints"))[-1] == step - 2
    resumed = start(copied, "--max-steps", str(step + 2), "--ckpt.keep", "20").wait()
    assert resumed.code == 0 and f"from step {step - 2} " in resumed.log, resumed.log


_EIO = "Input/output error"
FAILURES = {
    "first shard write": ("write .tmp-step_4/trainer/__0_0.distcp", 1),
    "later shard write": ("write .tmp-step_4/trainer/__0_0.distcp", 60),
    "shard opened": ("open .tmp-step_4/trainer/__0_0.distcp", 1),
    "shard fsync": ("fsync .tmp-step_4/trainer/__0_0.distcp", 1),
    "index write": ("write .tmp-step_4/trainer/.metadata", 1),
    "index rename": ("rename .tmp-step_4/trainer/.metadata", 1),
    "random state": ("open .tmp-step_4/trainer/random_rank_0.json", 1),
    "counters": ("open .tmp-step_4/trainer/progress.json", 1), "directory": ("mkdir .tmp-step_4/model", 1),
    "tree fsync": ("fsync .tmp-step_4/trainer/progress.json", 1), "directory fsync": ("fsync .tmp-step_4/trainer$", 1),
    "manifest fsync": ("fsync .tmp-step_4/.tmp-manifest.json", 1),
    "manifest rename": ("rename .tmp-step_4/.tmp-manifest.json", 1), "last rename": ("rename .tmp-step_4$", 1),
}  # fmt: skip


def failing(output: Path, call: str, *, nth: int = 1, until_nth: int | None = None, rank: int | None = None) -> str:
    """Source of a fault: calls fail as on a disk that gives I/O errors."""
    fault = {"fail": call, "nth": nth, "until_nth": until_nth, "error": errno.EIO, "rank": rank}
    return installing(output / "checkpoints", output.with_name("trail"), **fault)


@pytest.mark.parametrize("case", FAILURES)
def test_an_io_error_anywhere_in_a_save_fails_it_whole(start: Start, output: Path, case: str) -> None:
    call, nth = FAILURES[case]
    check_message(start(output, trainer_fault=failing(output, call, nth=nth)).wait(), _EIO)
    assert sorted(whole_steps(output / "checkpoints")) == [2]
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == ["step_2"]


def test_told_to_warn_the_next_save_commits_in_the_same_run(start: Start, wanted: dict[str, Any], output: Path) -> None:
    call, nth = FAILURES["later shard write"]
    run = start(output, "--ckpt.on-failure", "warn", trainer_fault=failing(output, call, nth=nth)).succeed()
    assert failed_steps(run.trainer_log) == [4] and saved_steps(run.trainer_log) == [2, 6], run.trainer_log
    assert differing(end_state(output), wanted) == []


def test_a_disk_that_dies_in_a_save_takes_nothing_committed(start: Start, wanted: dict[str, Any], output: Path) -> None:
    """Every call fails from then on, also those that would clear up: the next start does that."""
    check_message(start(output, trainer_fault=failing(output, "* .tmp-step_4", nth=60, until_nth=10**9)).wait(), _EIO)
    assert sorted(whole_steps(output / "checkpoints")) == [2] and (output / "checkpoints/.tmp-step_4").exists()
    resumed = start(output).wait()
    assert resumed.code == 0 and "removed checkpoints/.tmp-step_4: it was never committed" in resumed.log
    assert differing(end_state(output), wanted) == []


@pytest.mark.parametrize("call", ["rename step_2$", "rmdir .tmp-step_2-"])
def test_what_cannot_be_removed_is_said_and_the_new_step_stays(start: Start, output: Path, call: str) -> None:
    """The save succeeded, so the run does; the next commit tries again."""
    run = start(output, "--max-steps", "8", trainer_fault=failing(output, call)).wait()
    assert run.code == 0 and "Traceback" not in run.trainer_log, run.log
    (message,) = [line for line in run.trainer_log.splitlines() if "ERROR" in line]
    assert f"{output}/checkpoints/step_6 is saved, but older ones could not be removed: {_EIO}" in message
    assert sorted(whole_steps(output / "checkpoints")) == [6, 8]
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == ["step_6", "step_8"]


def test_a_step_whose_name_is_not_flushed_counts_as_failed_and_may_be_used(start: Start, output: Path) -> None:
    """The last flush of a save: the step is whole and has its name, but a power cut could take that away."""
    check_message(start(output, trainer_fault=failing(output, "fsync .$", nth=2)).wait(), _EIO)
    assert sorted(whole_steps(output / "checkpoints")) == [2, 4]


@pytest.mark.ranks
def test_an_io_error_on_one_rank_fails_the_save_of_all(start: Start, output: Path) -> None:
    call = "open .tmp-step_4/trainer/random_rank_1"
    run = start(output, trainer_fault=failing(output, call, rank=1), ranks=2).wait()
    assert run.code == STORAGE_FAILED, run.log
    messages = [line for line in run.log.splitlines() if line.startswith("error: ")]
    assert messages and all("step 4 could not be saved" in line and f"rank 1: {_EIO}" in line for line in messages)
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == ["step_2"]
    assert sorted(whole_steps(output / "checkpoints")) == [2]


_STEPS = 2
_FAILING = ("mkdir", "open", "write", "rename", "fsync")


def _first_and_last_of_each_kind(calls: list[Call]) -> list[int]:
    """Return numbers of calls, from 1, that fail on a full disk: two of every function and kind of file."""
    kinds: dict[tuple[str, str], list[int]] = {}
    for number, call in enumerate(calls, start=1):
        if call.name in _FAILING:
            kinds.setdefault((call.name, re.sub(r"\d+", "N", call.path)), []).append(number)
    return sorted({number for numbers in kinds.values() for number in (numbers[0], numbers[-1])})


def test_wherever_the_disk_is_full_it_says_so_and_the_journal_comes_out_the_same(tmp_path: Path) -> None:
    engine = FakeEngine()
    with serving(engine):
        expected, made = run_undisturbed(tmp_path / "straight", engine, _STEPS)
        calls = [call for call in made if call.path.startswith("rollouts")]
        assert {call.name for call in calls} >= set(_FAILING)
        told = tried = 0
        for number in _first_and_last_of_each_kind(calls):
            call = calls[number - 1]
            run_dir = RunDir(tmp_path / f"full_{number}")
            run_dir.path.mkdir()
            config = make_config(run_dir.path, engine, max_steps=_STEPS)
            log = run_dir.path.with_suffix(".log")
            with FakeTrainer(run_dir, start=0, max_steps=_STEPS):
                code = run_orchestrator(config, fail="* rollouts", nth=number, until_nth=10**9, error=errno.ENOSPC)
                said = log.read_text()
                assert code in (STORAGE_FAILED, 0), said  # 0: this time there were fewer calls
                assert "Traceback" not in said, said
                tried, told = tried + 1, told + (code == STORAGE_FAILED)
                assert run_orchestrator(config) == 0, log.read_text()
            assert journaled(run_dir, _STEPS) == expected, f"call {number}: {call}"
        assert told > 0.8 * tried
