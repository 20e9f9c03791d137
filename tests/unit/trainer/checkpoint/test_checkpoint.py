"""Checkpoints: bit-equal after loading, refused when they do not fit or are damaged, kept here and in stores."""

import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from holdfast.errors import CheckpointError
from holdfast.remote.checkpoints import RemoteCheckpoints
from holdfast.run import atomic, manifest
from holdfast.run.checkpoints import ORCHESTRATOR_DIR, TRAINER_DIR, BestMetric, Retention, list_entries
from holdfast.run.journal import STATE_NAME
from holdfast.run.metrics import MetricsWriter
from holdfast.run.run_dir import RunDir
from holdfast.trainer.checkpoint.checkpointer import Checkpointer
from holdfast.trainer.checkpoint.commit import Identity, ObjectStorage, fingerprint_tensors
from holdfast.trainer.checkpoint.state import capture_random_state, seed_everything
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.state import TrainState
from tests.builders.checkpoint_files import flip, write_checkpoint, write_weights
from tests.builders.train_states import MakeState, NotifyingStorage, copied, draw, same, train
from tests.runs.processes import HANG_S


def save(run_dir: RunDir, state: TrainState, **options: Any) -> Path:
    with Checkpointer(run_dir.checkpoints, state) as checkpointer:
        checkpointer.save(state.progress.step, **options)
    return run_dir.checkpoint(state.progress.step)


def load(run_dir: RunDir, state: TrainState, step: int) -> None:
    with Checkpointer(run_dir.checkpoints, state) as checkpointer:
        assert checkpointer.load(step) == step


@pytest.mark.parametrize("save_async", [False, True], ids=["sync", "async"])
def test_all_state_comes_back_bit_for_bit(make_state: MakeState, run_dir: RunDir, save_async: bool) -> None:
    seed_everything(5, step=0, rank=0)
    state = make_state(steps=3)
    random.gauss(0, 1)  # leaves the second of a pair behind, which is state too
    checkpointer = Checkpointer(run_dir.checkpoints, state, save_async=save_async)
    checkpointer.save(3)
    saved, progress = copied(state.tensors()), (state.progress.step, state.progress.samples, state.progress.tokens)
    next_numbers = draw()
    train(state, 2)
    straight = copied(state.tensors())
    checkpointer.close()
    assert run_dir.committed_steps() == [3]
    resumed = make_state(seed=1, weights=False)
    seed_everything(99, step=7, rank=3)
    load(run_dir, resumed, 3)
    assert same(copied(resumed.tensors()), saved)
    assert (resumed.progress.step, resumed.progress.samples, resumed.progress.tokens) == progress == (3, 24, 300)
    assert draw() == next_numbers
    train(resumed, 2)
    assert same(copied(resumed.tensors()), straight), "the next steps are the same steps"


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [({"num_hidden_layers": 3}, {}), ({"intermediate_size": 48}, {}), ({"tied": False}, {"tied": True})],
    ids=["more layers", "other width", "untied"],
)
def test_another_model_is_refused_and_nothing_is_touched(
    saved: dict[str, Any], loaded: dict[str, Any], make_state: MakeState, run_dir: RunDir
) -> None:
    save(run_dir, make_state(steps=1, **saved))
    state = make_state(seed=3, **loaded)
    before, generators = copied(state.tensors()), capture_random_state()
    with pytest.raises(CheckpointError, match="step_1.* does not fit this model") as caught:
        load(run_dir, state, 1)
    assert caught.value.exit_code == 2 and state.progress.step == 0
    assert same(copied(state.tensors()), before) and capture_random_state() == generators


def test_another_dtype_is_refused(make_state: MakeState, run_dir: RunDir) -> None:
    save(run_dir, make_state(steps=1))

    class Half(TrainState):
        def tensors(self) -> dict[str, Tensor]:
            return {name: tensor.bfloat16() for name, tensor in super().tensors().items()}

    state = make_state()
    with pytest.raises(CheckpointError, match="float32 there, .* torch.bfloat16 here"):
        load(run_dir, Half(state.policy, state.optimizer, state.progress), 1)


def test_latest_falls_back_past_damage_and_auto_starts_afresh_only_where_there_is_nothing(
    make_state: MakeState, run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    def damage(step: int) -> None:
        flip(run_dir.checkpoint(step) / TRAINER_DIR / "progress.json")  # which sizes alone would not show

    state = make_state(steps=1)
    before = copied(state.tensors())
    with Checkpointer(run_dir.checkpoints, state) as checkpointer:
        assert checkpointer.load("auto") == 0
        with pytest.raises(CheckpointError, match="there is no checkpoint in .*auto"):
            checkpointer.load()
        assert same(copied(state.tensors()), before)
    for steps in (1, 2, 3):
        save(run_dir, make_state(steps=steps))
    damage(3)
    with Checkpointer(run_dir.checkpoints, state) as checkpointer:
        assert checkpointer.load("latest") == 2 == state.progress.step
        assert "skipping the checkpoint of step 3" in caplog.text and "progress.json is damaged" in caplog.text
        for step, said in ((3, "progress.json is damaged"), (9, "step_9")):
            with pytest.raises(CheckpointError, match=said):
                checkpointer.load(step)
        damage(1)
        damage(2)
        for choice in ("latest", "auto"):
            with pytest.raises(CheckpointError, match="every checkpoint is damaged"):
                checkpointer.load(choice)
    assert state.progress.step == 2


def test_retention_spares_the_best_every_third_the_loaded_and_the_used(make_state: MakeState, run_dir: RunDir) -> None:
    state = make_state()
    save(run_dir, state)
    retention = Retention(keep=1, keep_interval=3, keep_best=BestMetric.parse("min:loss"))
    options = {"retention": retention, "may_remove": lambda step: step != 4}
    with Checkpointer(run_dir.checkpoints, state, **options) as checkpointer:
        checkpointer.load(0)
        for step, loss in enumerate((5.0, 2.0, 9.0, 7.0, float("inf"), 8.0, 7.0), start=1):
            checkpointer.save(step, metrics={"loss": loss, "nothing": float("nan"), "worse": float("-inf")})
    assert run_dir.committed_steps() == [0, 2, 3, 4, 6, 7]
    assert manifest.verify(run_dir.checkpoint(2)).metrics == {"loss": 2.0}, "it holds no numbers without bounds"


def test_a_damaged_step_or_one_of_another_run_is_not_one_of_the_kept(make_state: MakeState, run_dir: RunDir) -> None:
    write_checkpoint(run_dir, 9, run_id="other")
    identity = Identity(run_id="mine", run_ids={"mine"})
    options = {"save_async": False, "retention": Retention(keep=2), "identity": identity}
    checkpointer = Checkpointer(run_dir.checkpoints, make_state(), **options)
    for step in (1, 2, 3):
        checkpointer.save(step)
        if step == 2:
            (run_dir.checkpoint(2) / manifest.MANIFEST_NAME).write_text("{")
    found = {entry.step: entry.status for entry in list_entries(run_dir.checkpoints, {"mine"})}
    assert found == {1: "committed", 2: "damaged", 3: "committed", 9: "foreign"}


def test_attachments_are_part_of_the_commit(make_state: MakeState, run_dir: RunDir, tmp_path: Path) -> None:
    content = b'{"next_task": 17}'
    state = make_state(steps=1)
    name = f"{ORCHESTRATOR_DIR}/{STATE_NAME}"
    written = save(run_dir, state, attachments={name: content, "a/b.json": lambda: b"{}"}) / name
    assert written.read_bytes() == content and (run_dir.checkpoint(1) / "a/b.json").read_bytes() == b"{}"
    assert {name, "a/b.json"} <= manifest.verify(run_dir.checkpoint(1)).files.keys()
    written.write_bytes(b'{"next_task": 18}')
    with pytest.raises(CheckpointError, match=STATE_NAME):
        load(run_dir, state, 1)


def test_what_the_disk_makes_of_a_file_while_it_is_written_is_not_signed(
    make_state: MakeState, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file of a checkpoint but the shards, which `_DigestStream` hashes, is damaged behind its write once."""
    places = {f"{ORCHESTRATOR_DIR}/{STATE_NAME}", *(f"{TRAINER_DIR}/{name}" for name in ("progress.json", ".metadata"))}
    describe = manifest.describe_files
    for step, place in enumerate(sorted(places), start=1):

        def damaging(directory: Path, place: str = place, **known: Any) -> Any:
            (directory / place).write_bytes((directory / place).read_bytes()[::-1])
            return describe(directory, **known)

        monkeypatch.setattr(manifest, "describe_files", damaging)
        save(run_dir, make_state(steps=step), attachments={f"{ORCHESTRATOR_DIR}/{STATE_NAME}": b"{}"})
        with pytest.raises(CheckpointError, match=f"{re.escape(place)} is damaged"):
            manifest.verify(run_dir.checkpoint(step))


def test_the_manifest_says_who_wrote_it(make_state: MakeState, run_dir: RunDir) -> None:
    files = {f"{TRAINER_DIR}/config.toml": b"lr = 1", "model/config.json": b"{}"}
    identity = Identity("a run", "sft", "data", "config", files)
    state = make_state(steps=2)
    with Checkpointer(run_dir.checkpoints, state, identity=identity) as checkpointer:
        checkpointer.save(2)
    listing = manifest.verify(run_dir.checkpoint(2))
    assert (listing.kind, listing.step, listing.policy_version, listing.world_size) == ("checkpoint", 2, 2, 1)
    assert (listing.run_id, listing.fingerprints.data, listing.fingerprints.config) == ("a run", "data", "config")
    assert "torch" in listing.libraries and files.keys() <= listing.files.keys()
    assert (run_dir.checkpoint(2) / "model" / "config.json").read_bytes() == b"{}"
    other = fingerprint_tensors(make_state(num_hidden_layers=3).tensors())
    assert listing.fingerprints.model == fingerprint_tensors(state.tensors()) != other


def test_a_rank_new_to_the_checkpoint_derives_its_generator(make_state: MakeState, run_dir: RunDir, mesh: Mesh) -> None:
    state = make_state(steps=1)
    directory = save(run_dir, state)
    listing = manifest.read_manifest(directory)
    listing.world_size = 2
    manifest.write_manifest(directory, listing)
    load(run_dir, state, 1)
    got = draw()
    seed_everything(0, step=1, rank=mesh.rank)
    assert draw() == got
    drawn = []
    for seed, step, rank in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)):
        seed_everything(seed, step=step, rank=rank)
        drawn.append(draw())
    assert drawn[0] == drawn[-1] and len(set(drawn)) == 4


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"file://{tmp_path / 'there'}"


def test_a_loop_of_ones_own_keeps_its_steps_in_a_store(tmp_path: Path, store: str) -> None:
    storage = ObjectStorage(store, retention=Retention(keep=2))
    with Checkpointer(tmp_path / "here", {"progress": {"step": 0}}, storage=storage) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step)
    storage.close(HANG_S)
    assert RemoteCheckpoints(store).steps() == [2, 3]


def test_a_step_takes_the_weights_along_that_a_resume_needs(tmp_path: Path, run_dir: RunDir, store: str) -> None:
    storage = ObjectStorage(store, older_weights=2, weights_of=run_dir.weights_of)
    for version in (0, 3, 4):
        write_weights(run_dir, version)
    storage.publish(write_checkpoint(run_dir, 4))
    storage.close(HANG_S)
    there = RemoteCheckpoints(store)
    assert there.steps() == [4]
    found = [version for version in range(6) if there.download_weights(version, tmp_path / f"weights_{version}")]
    assert found == [3], "of the two before it, version 2 was never published"


def test_what_follows_a_commit_comes_before_any_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    remove = atomic.remove_directory
    monkeypatch.setattr(atomic, "remove_directory", lambda path: (happened.append(f"- {path.name}"), remove(path)))
    storage = NotifyingStorage(lambda path: happened.append(f"+ {path.name}"))
    options = {"save_async": False, "retention": Retention(keep=1), "storage": storage}
    with Checkpointer(tmp_path, {"counter": {"step": 0}}, **options) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step)
    assert happened == ["+ step_1", "+ step_2", "- step_1"]


def test_what_a_step_needs_is_flushed_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    fsync, publish = os.fsync, atomic.publish_directory

    def noted(descriptor: int) -> None:
        happened.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def published(temporary: Path, final: Path) -> None:
        happened.append("published")
        publish(temporary, final)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(atomic, "publish_directory", published)
    metrics = MetricsWriter(tmp_path / "metrics.jsonl")
    metrics.write(1, {"loss": 0.5})
    state = {"counter": {"step": 1}}
    with Checkpointer(tmp_path / "checkpoints", state, save_async=False, before_commit=metrics.flush) as checkpointer:
        checkpointer.save(1)
    before = happened[: happened.index("published")]
    assert "metrics.jsonl" in before and "random_rank_0.json" in before, before
    metrics.close()
