"""The run directory: one owner, what a resume sets aside, and which step it goes on from."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

import pytest

from holdfast.errors import CheckpointError, RunDirError
from holdfast.launcher.resume.resume_step import resolve_resume_step, set_aside_after, set_aside_damaged
from holdfast.run import atomic, manifest
from holdfast.run.run_dir import RunDir
from tests.builders.checkpoint_files import write_checkpoint, write_weights
from tests.conftest import ROOT
from tests.faults.disks import Disk


def test_a_run_directory_touches_nothing_until_asked(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    assert not run_dir.holds_run() and run_dir.forked_from() is None
    assert run_dir.committed_steps() == [] and run_dir.next_attempt() == 1
    assert run_dir.clear_leftovers() == [] and set_aside_after(run_dir, 0, 1) == []
    assert not (tmp_path / "run").exists()
    for attempt in (2, 10):
        run_dir.configs(attempt).mkdir(parents=True)
    (run_dir.path / "configs" / "dry_run").mkdir()
    assert run_dir.next_attempt() == 11


def test_a_second_process_is_told_who_holds_the_directory(tmp_path: Path) -> None:
    hold = (
        "import sys; from pathlib import Path; from holdfast.run.run_dir import RunDir\n"
        "held = RunDir(Path(sys.argv[1])); held.lock(); print('held', flush=True); sys.stdin.read()"
    )
    argv = [sys.executable, "-c", hold, str(tmp_path)]
    holder = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(RunDirError, match=f"in use by another run \\(process {holder.pid}\\)") as caught:
            RunDir(tmp_path).lock()
        assert caught.value.exit_code == 2
    finally:
        holder.kill()
        holder.communicate()
    RunDir(tmp_path).lock()  # the kernel freed it


def test_the_step_to_resume_from_and_one_that_is_not_there(run_dir: RunDir) -> None:
    assert resolve_resume_step(run_dir, "auto") is None
    for wanted in ("latest", -1, 3):
        with pytest.raises(CheckpointError, match="no committed checkpoint"):
            resolve_resume_step(run_dir, wanted)  # type: ignore[arg-type]
    for committed in (5, 20):
        write_checkpoint(run_dir, committed)
    for wanted, step in ((None, None), ("latest", 20), (-1, 20), ("auto", 20), (5, 5), (20, 20)):
        assert resolve_resume_step(run_dir, wanted) == step  # type: ignore[arg-type]
    for wanted in (7, 0, -2, 21):
        with pytest.raises(CheckpointError, match=f"{wanted}.*5, 20") as caught:
            resolve_resume_step(run_dir, wanted)
        assert caught.value.exit_code == 2


def test_leftovers_of_writers_are_cleared_and_named(run_dir: RunDir) -> None:
    write_checkpoint(run_dir, 1)
    parents = (run_dir.checkpoints, run_dir.rollouts, run_dir.weights)
    leftovers = [atomic.temporary_sibling(parent / "step_3") for parent in parents]
    for path in leftovers:
        path.mkdir(parents=True)
        (path / "part").write_text("half")
    half_file = atomic.temporary_sibling(run_dir.metrics)
    half_file.write_text("half")
    run_dir.batch(4).mkdir(parents=True)
    assert sorted(run_dir.clear_leftovers()) == sorted([*leftovers, half_file])
    assert not any(path.exists() for path in [*leftovers, half_file])
    assert run_dir.checkpoint(1).exists() and run_dir.batch(4).exists() and run_dir.holds_run()


def test_setting_aside_moves_exactly_the_future(run_dir: RunDir) -> None:
    for step in (1, 2, 3, 10):
        write_checkpoint(run_dir, step)
        for directory in (run_dir.batch(step), run_dir.weights_of(step)):
            directory.mkdir(parents=True)
            (directory / "content").write_text(str(step))
    lines = [json.dumps({"step": step, "loss": step / 8}) + "\n" for step in (1, 2, 3, 10)]
    run_dir.metrics.write_text("".join(lines) + '{"step": 11, "lo')
    run_dir.generations(11).write_text("finished")
    moved = set_aside_after(run_dir, 2, attempt=4)

    assert run_dir.committed_steps() == run_dir.published_batches() == [1, 2]
    assert run_dir.published_weights() == [1], "the trainer publishes the resumed version again"
    assert run_dir.metrics.read_text() == "".join(lines[:2])
    aside = run_dir.discarded(4)
    assert (aside / "metrics.jsonl").read_text() == "".join(lines[2:]) + '{"step": 11, "lo'
    for step in (3, 10):
        assert manifest.verify(aside / "checkpoints" / f"step_{step}").step == step
        assert (aside / "weights" / f"step_{step}" / "content").read_text() == str(step)
        assert (aside / "rollouts" / f"step_{step}" / "content").read_text() == str(step)
    assert (aside / "rollouts" / "generations_11.log").read_text() == "finished"
    assert len(moved) == 8 and all(path.exists() for path in moved)
    assert set_aside_after(run_dir, 2, attempt=5) == []


def test_what_an_attempt_set_aside_that_died_of_it_is_not_written_over(run_dir: RunDir) -> None:
    for loss in (1, 2):
        (write_checkpoint(run_dir, 2) / "a_first.txt").write_bytes(b"%d" % loss)
        run_dir.metrics.write_text(json.dumps({"step": 2, "loss": loss}) + "\n")
        set_aside_after(run_dir, 1, attempt=2)
    aside = run_dir.discarded(2)
    first = [(aside / "checkpoints" / name / "a_first.txt").read_bytes() for name in ("step_2", "step_2.2")]
    assert first == [b"1", b"2"]
    assert [json.loads((aside / name).read_text())["loss"] for name in ("metrics.jsonl", "metrics.jsonl.2")] == [1, 2]


def test_what_lies_on_another_disk_is_set_aside_there_and_forgotten_with_its_attempt(run_dir: RunDir) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as disk:
        assert Path(disk).stat().st_dev != run_dir.path.stat().st_dev
        for parent in (run_dir.checkpoints, run_dir.weights):
            (Path(disk) / parent.name).mkdir()
            parent.symlink_to(Path(disk) / parent.name)
        for step in (1, 2):
            write_checkpoint(run_dir, step)
        (run_dir.weights / "step_9").mkdir()
        moved = set_aside_after(run_dir, 1, attempt=4)
        aside = {path.relative_to(run_dir.path).as_posix() for path in moved if path.is_dir()}
        assert aside >= {"checkpoints/discarded/attempt_4/step_2", "weights/discarded/attempt_4/step_9"}
        assert run_dir.committed_steps() == [1] and run_dir.published_weights() == []
        run_dir.remove_old_attempts(4)
        assert [*run_dir.path.rglob("*/discarded/*")] == []
        run_dir.remove_run()
        assert [*Path(disk).rglob("step_*")] == [] and run_dir.weights.is_symlink()


def test_pruning_removes_old_batches_and_cleaning_the_run_and_nothing_else(run_dir: RunDir) -> None:
    for step in (1, 2, 10):
        run_dir.batch(step).mkdir(parents=True)
    run_dir.prune_batches(2)
    assert run_dir.published_batches() == [10]
    write_checkpoint(run_dir, 1)
    run_dir.logs(1).mkdir(parents=True)
    run_dir.metrics.write_text("{}\n")
    (run_dir.path / "notes.txt").write_text("mine")
    run_dir.remove_run()
    assert [path.name for path in run_dir.path.iterdir()] == ["notes.txt"]


def test_a_disk_that_is_mounted_in_the_run_is_emptied_and_stays(run_dir: RunDir) -> None:
    script = f"mkdir {run_dir.checkpoints}; mount -t tmpfs t {run_dir.checkpoints}; mkdir {run_dir.checkpoints}/step_1"
    with Disk(script) as disk:
        if disk.problem:
            pytest.skip(f"no filesystem can be mounted here: {disk.problem}")
        run_dir.metrics.touch()
        code = (
            f"{disk.fault}from pathlib import Path\nfrom holdfast.run.run_dir import RunDir\n"
            f"run_dir = RunDir(Path({str(run_dir.path)!r}))\nrun_dir.remove_run()\n"
            "assert not run_dir.is_being_removed() and not run_dir.metrics.exists()\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
        assert list(disk.view(run_dir.checkpoints).iterdir()) == []


def test_a_damaged_step_that_was_asked_for_is_an_error(run_dir: RunDir) -> None:
    for step in (5, 10, 15):
        write_checkpoint(run_dir, step)
    (run_dir.checkpoint(10) / "a_first.txt").write_bytes(b"xx")
    with pytest.raises(CheckpointError, match="resume_step = 10: .*a_first.txt is damaged.*other committed steps: 5"):
        resolve_resume_step(run_dir, 10)
    (run_dir.checkpoint(15) / manifest.MANIFEST_NAME).unlink()
    with pytest.raises(CheckpointError, match="resume_step = 15: .*manifest.json is missing.*steps: 5, 10.$"):
        resolve_resume_step(run_dir, 15)
    shutil.rmtree(run_dir.checkpoint(10))
    shutil.copytree(run_dir.checkpoint(5), run_dir.checkpoint(10))
    with pytest.raises(CheckpointError, match="resume_step = 10: .*the manifest of step 5, not of step 10"):
        resolve_resume_step(run_dir, 10)
    write_weights(run_dir, 16).replace(run_dir.checkpoint(16))
    with pytest.raises(CheckpointError, match="holds weights, not a checkpoint"):
        resolve_resume_step(run_dir, 16)
    assert resolve_resume_step(run_dir, 5) == 5
    aside = run_dir.discarded(4) / "checkpoints"
    assert [path for path, _ in set_aside_damaged(run_dir, 4)] == [aside / f"step_{step}" for step in (10, 15)]
    assert [entry.step for entry in run_dir.entries()] == [5, 16]


@pytest.mark.parametrize("wanted", ["latest", "auto"])
@pytest.mark.parametrize("file", ["a_first.txt", manifest.MANIFEST_NAME])
def test_damaged_alone_is_no_fresh_start(run_dir: RunDir, wanted: Literal["latest", "auto"], file: str) -> None:
    (write_checkpoint(run_dir, 5) / file).unlink()
    with pytest.raises(CheckpointError, match=f"every checkpoint is damaged: .*{file} is missing"):
        resolve_resume_step(run_dir, wanted, say=lambda _: None)
