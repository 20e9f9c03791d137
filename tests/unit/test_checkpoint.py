"""Checkpoints: bit-equal after loading, refused when they do not fit or are damaged, never half there."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trainer import checkpoint
from trainer.checkpoint import ORCHESTRATOR_DIR, TRAINER_DIR, Checkpointer
from trainer.model import build_policy
from trainer.optim import build_optimizer, clip_gradients, update_parameters
from trainer.parallel import Parallel
from trainer.state import (
    Progress,
    TrainState,
    capture_random_state,
    local_part,
    restore_random_state,
    seed_everything,
)
from triad import durable, manifest
from triad.config import CkptConfig
from triad.config.trainer import OptimConfig, TrainedModelConfig
from triad.errors import CheckpointError
from triad.journal import STATE_NAME
from triad.run_dir import RunDir

Models = Callable[..., Path]
MakeState = Callable[..., TrainState]


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    return made


@pytest.fixture
def make_state(tiny_model: Models, parallel: Parallel) -> MakeState:
    def make(*, seed: int = 0, steps: int = 0, weights: bool = True, **model: Any) -> TrainState:
        config = TrainedModelConfig(name=str(tiny_model(**model)), init="random")
        policy = build_policy(config, parallel, seed=seed, weights=weights)
        state = TrainState(policy, build_optimizer(policy, OptimConfig(lr=0.01)), Progress())
        train(state, steps)
        return state

    return make


@pytest.fixture
def make_checkpointer(run_dir: RunDir, parallel: Parallel) -> Callable[..., Checkpointer]:
    def make(**config: Any) -> Checkpointer:
        return Checkpointer(run_dir, CkptConfig(**config), parallel, seed=0, fingerprint="f" * 32)

    return make


def train(state: TrainState, steps: int) -> None:
    """Steps with random gradients: they use torch's generator, as dropout does."""
    for _ in range(steps):
        for parameter in state.policy.parameters():
            parameter.grad = torch.zeros_like(parameter)
            local_part(parameter.grad).copy_(torch.randn(local_part(parameter).shape))
        clip_gradients(state.policy, 1.0)
        update_parameters(state.optimizer, lr=0.01)
        state.progress.step += 1
        state.progress.samples += 8
        state.progress.tokens += 100


def snapshot(state: TrainState) -> dict[str, Tensor]:
    return {name: local_part(tensor).clone() for name, tensor in state.tensors().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def draw() -> tuple[float, float, float, float]:
    return random.random(), random.gauss(0, 1), float(np.random.rand()), float(torch.rand(()))


def test_all_state_comes_back_bit_for_bit(
    make_state: MakeState, make_checkpointer: Callable[..., Checkpointer], run_dir: RunDir
) -> None:
    seed_everything(5, step=0, rank=0)
    state = make_state(steps=3)
    random.gauss(0, 1)  # leaves the second of a pair behind, which is state too
    checkpointer = make_checkpointer()
    directory = checkpointer.save(state)
    saved, progress = snapshot(state), (state.progress.step, state.progress.samples, state.progress.tokens)
    next_numbers = draw()
    train(state, 2)
    straight = snapshot(state)

    assert directory == run_dir.checkpoint(3) and run_dir.committed_steps() == [3]
    resumed = make_state(seed=1, weights=False)
    seed_everything(99, step=7, rank=3)
    checkpointer.load(resumed, 3)
    assert same(snapshot(resumed), saved)
    assert (resumed.progress.step, resumed.progress.samples, resumed.progress.tokens) == progress == (3, 24, 300)
    assert draw() == next_numbers
    train(resumed, 2)
    assert same(snapshot(resumed), straight), "the next steps are the same steps"


def test_the_state_has_every_parameter_with_both_moments(make_state: MakeState) -> None:
    state = make_state(steps=1, tied=True)
    names = state.tensors().keys()
    parameters = [name for name, _ in state.policy.causal_lm.named_parameters()]
    assert "lm_head.weight" not in parameters and len(parameters) > 20
    assert set(names) == {f"model.{name}" for name in parameters} | {
        f"optim.{name}.{key}" for name in parameters for key in ("step", "exp_avg", "exp_avg_sq")
    }
    moments = [tensor for name, tensor in state.tensors().items() if name.endswith("exp_avg")]
    assert all(torch.count_nonzero(local_part(tensor)) for tensor in moments)


def test_state_made_for_loading_is_what_adamw_would_make(make_state: MakeState) -> None:
    empty, stepped = make_state(), make_state(steps=1)
    for (name, made), real in zip(empty.tensors().items(), stepped.tensors().values(), strict=True):
        assert (made.shape, made.dtype, type(made)) == (real.shape, real.dtype, type(real)), name
        assert made.stride() == real.stride(), name


def test_a_resume_before_the_first_step(make_state: MakeState, make_checkpointer: Callable[..., Checkpointer]) -> None:
    seed_everything(0, step=0, rank=0)
    state, checkpointer = make_state(), make_checkpointer()
    checkpointer.save(state)
    train(state, 2)
    resumed = make_state(seed=1)
    checkpointer.load(resumed, 0)
    train(resumed, 2)
    assert same(snapshot(resumed), snapshot(state))


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ({"num_hidden_layers": 3}, {}),
        ({}, {"num_hidden_layers": 3}),
        ({"intermediate_size": 48}, {}),
        ({"tied": False}, {"tied": True}),
        ({"kind": "llama"}, {"kind": "qwen3"}),
    ],
    ids=["more layers", "fewer layers", "other width", "untied", "other kind"],
)
def test_another_model_is_refused_and_nothing_is_touched(
    saved: dict[str, Any], loaded: dict[str, Any], make_state: MakeState, make_checkpointer: Callable[..., Checkpointer]
) -> None:
    checkpointer = make_checkpointer()
    checkpointer.save(make_state(steps=1, **saved))
    state = make_state(seed=3, **loaded)
    before = snapshot(state)
    with pytest.raises(CheckpointError, match="does not fit this model") as caught:
        checkpointer.load(state, 1)
    assert caught.value.exit_code == 2 and "step_1" in str(caught.value)
    assert same(snapshot(state), before) and state.progress.step == 0


def test_another_dtype_is_refused(make_state: MakeState, make_checkpointer: Callable[..., Checkpointer]) -> None:
    checkpointer = make_checkpointer()
    checkpointer.save(make_state(steps=1))

    class Half(TrainState):
        def tensors(self) -> dict[str, Tensor]:
            return {name: tensor.bfloat16() for name, tensor in super().tensors().items()}

    state = make_state()
    with pytest.raises(CheckpointError, match="float32 there, .* torch.bfloat16 here"):
        checkpointer.load(Half(state.policy, state.optimizer, state.progress), 1)


@pytest.mark.parametrize("kind", ["flipped", "truncated", "missing", "swapped"])
def test_damage_to_any_file_is_found_before_a_byte_is_used(
    kind: str, make_state: MakeState, make_checkpointer: Callable[..., Checkpointer], run_dir: RunDir
) -> None:
    checkpointer = make_checkpointer()
    checkpointer.save(make_state(steps=1))
    checkpointer.save(other := make_state(steps=2))
    files = sorted(manifest.verify(run_dir.checkpoint(2)).files)
    assert len(files) == 4 and f"{TRAINER_DIR}/__0_0.distcp" in files
    before = snapshot(other)
    for name in files:
        path = run_dir.checkpoint(2) / name
        whole = path.read_bytes()
        if kind == "flipped":
            path.write_bytes(
                whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 4]) + whole[len(whole) // 2 + 1 :]
            )
        elif kind == "truncated":
            path.write_bytes(whole[:-1])
        elif kind == "missing":
            path.unlink()
        else:
            shutil.copyfile(run_dir.checkpoint(1) / name, path)
            if path.read_bytes() == whole:
                continue
        with pytest.raises(CheckpointError) as caught:
            checkpointer.load(other, 2)
        assert str(path) in str(caught.value)
        path.write_bytes(whole)
    assert same(snapshot(other), before)
    checkpointer.load(other, 2)


def test_only_the_newest_are_kept(
    make_state: MakeState, make_checkpointer: Callable[..., Checkpointer], run_dir: RunDir
) -> None:
    state, checkpointer = make_state(), make_checkpointer(interval=1, keep=2)
    for step in range(1, 5):
        train(state, 1)
        checkpointer.save(state)
        assert run_dir.committed_steps() == list(range(max(1, step - 1), step + 1))
    assert sorted(path.name for path in run_dir.checkpoints.iterdir()) == ["step_3", "step_4"]


def test_a_damaged_step_does_not_count_as_one_of_the_kept(
    make_state: MakeState, make_checkpointer: Callable[..., Checkpointer], run_dir: RunDir
) -> None:
    state, checkpointer = make_state(), make_checkpointer(interval=1, keep=2)
    for _ in range(2):
        train(state, 1)
        checkpointer.save(state)
    (run_dir.checkpoint(2) / manifest.MANIFEST_NAME).write_text("{")
    train(state, 1)
    checkpointer.save(state)
    assert run_dir.committed_steps() == [1, 3]


@pytest.mark.parametrize(
    ("config", "due"),
    [(None, []), ({}, [7]), ({"interval": 3}, [3, 6, 7]), ({"interval": 7}, [7]), ({"interval": 1}, list(range(1, 8)))],
)
def test_when_a_checkpoint_is_due(
    config: dict[str, int] | None, due: list[int], run_dir: RunDir, parallel: Parallel
) -> None:
    section = None if config is None else CkptConfig(**config)
    checkpointer = Checkpointer(run_dir, section, parallel, seed=0, fingerprint="")
    assert [step for step in range(1, 8) if checkpointer.is_due(step, 7)] == due


def fails(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "writing tensors": lambda patch: patch.setattr(torch, "save", fails),
    "writing the manifest": lambda patch: patch.setattr(manifest, "write_manifest", fails),
    "flushing": lambda patch: patch.setattr(durable, "fsync_tree", fails),
    "renaming": lambda patch: patch.setattr(durable, "publish_directory", fails),
    "linking": lambda patch: patch.setattr(checkpoint, "_link_or_copy", fails),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_save_that_fails_leaves_nothing_visible_and_the_old_steps_alone(
    fault: str, make_state: MakeState, make_checkpointer: Callable[..., Checkpointer], run_dir: RunDir,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    state, checkpointer = make_state(steps=1), make_checkpointer(interval=1, keep=1)
    orchestrator_state = tmp_path / STATE_NAME
    orchestrator_state.write_text("{}")
    checkpointer.save(state, orchestrator_state=orchestrator_state)
    train(state, 1)
    with monkeypatch.context() as patch:
        FAULTS[fault](patch)
        with pytest.raises((OSError, CheckpointError), match="No space left"):
            checkpointer.save(state, orchestrator_state=orchestrator_state)
    assert run_dir.committed_steps() == [1]
    assert [path.name for path in run_dir.checkpoints.iterdir() if path.name.startswith("step_")] == ["step_1"]
    manifest.verify(run_dir.checkpoint(1))
    checkpointer.save(state, orchestrator_state=orchestrator_state)  # and the next try is not in its way
    assert run_dir.committed_steps() == [2]
    checkpointer.load(make_state(), 2)
    assert run_dir.clear_leftovers() == []


def test_tensors_that_a_writer_loses_fail_the_save(
    make_state: MakeState,
    make_checkpointer: Callable[..., Checkpointer],
    run_dir: RunDir,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch swallows an I/O error in a writer thread and reports success with items missing."""
    writer = checkpoint.FileSystemWriter
    whole = writer.write_data

    def lossy(self: Any, plan: Any, planner: Any) -> Any:
        future = whole(self, plan, planner)
        future.value().pop()
        return future

    monkeypatch.setattr(writer, "write_data", lossy)
    with pytest.raises(CheckpointError, match="1 of .* tensors were not written"):
        make_checkpointer().save(make_state(steps=1))
    assert run_dir.committed_steps() == []


def test_the_state_of_the_orchestrator_is_part_of_the_commit(
    make_state: MakeState, make_checkpointer: Callable[..., Checkpointer], run_dir: RunDir, tmp_path: Path
) -> None:
    source = tmp_path / STATE_NAME
    source.write_bytes(b'{"next_task": 17}')
    checkpointer, state = make_checkpointer(), make_state(steps=1)
    linked = checkpointer.save(state, orchestrator_state=source) / ORCHESTRATOR_DIR / STATE_NAME
    assert linked.read_bytes() == source.read_bytes()
    source.unlink()
    listing = manifest.verify(run_dir.checkpoint(1))
    assert f"{ORCHESTRATOR_DIR}/{STATE_NAME}" in listing.files
    linked.write_bytes(b'{"next_task": 18}')
    with pytest.raises(CheckpointError, match=STATE_NAME):
        checkpointer.load(state, 1)


def test_state_on_another_filesystem_is_copied(
    make_state: MakeState,
    make_checkpointer: Callable[..., Checkpointer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = tmp_path / STATE_NAME
    source.write_bytes(b"{}")

    def no_link(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(checkpoint.os, "link", no_link)
    directory = make_checkpointer().save(make_state(steps=1), orchestrator_state=source)
    assert (directory / ORCHESTRATOR_DIR / STATE_NAME).read_bytes() == b"{}"


def test_the_manifest_says_who_wrote_it(
    make_state: MakeState, make_checkpointer: Callable[..., Checkpointer], run_dir: RunDir
) -> None:
    make_checkpointer().save(make_state(steps=2))
    listing = manifest.verify(run_dir.checkpoint(2))
    assert (listing.kind, listing.step, listing.policy_version, listing.world_size) == ("checkpoint", 2, 2, 1)
    assert (
        listing.run_id == run_dir.run_id() and listing.fingerprints.config == "f" * 32 and "torch" in listing.libraries
    )


def test_a_rank_that_the_checkpoint_does_not_know_derives_its_generator(
    make_state: MakeState, make_checkpointer: Callable[..., Checkpointer], run_dir: RunDir, parallel: Parallel
) -> None:
    checkpointer, state = make_checkpointer(), make_state(steps=1)
    directory = checkpointer.save(state)
    shutil.copyfile(directory / TRAINER_DIR / "random_rank_0.json", directory / TRAINER_DIR / "random_rank_1.json")
    listing = manifest.read_manifest(directory)
    listing.files = manifest.describe_files(directory)
    manifest.write_manifest(directory, listing)
    checkpointer.load(state, 1)
    got = draw()
    seed_everything(0, step=1, rank=parallel.rank)
    assert draw() == got


def test_random_state_is_restored_exactly() -> None:
    seed_everything(3, step=0, rank=0)
    draw()
    state = capture_random_state()
    expected = [draw() for _ in range(3)]
    assert [draw() for _ in range(3)] != expected
    restore_random_state(state)
    assert [draw() for _ in range(3)] == expected


def test_seeds_differ_by_seed_step_and_rank() -> None:
    drawn = []
    for seed, step, rank in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)):
        seed_everything(seed, step=step, rank=rank)
        drawn.append(draw())
    assert drawn[0] == drawn[-1] and len(set(drawn)) == 4
