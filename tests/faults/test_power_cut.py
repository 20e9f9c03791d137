"""The power goes at any moment: whatever part of the unflushed writes is lost, what has a final name is whole, and the
next start goes on to the same end."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.run import journal
from holdfast.run.manifest import verify
from holdfast.run.record_log import read_records
from holdfast.run.run_dir import RunDir
from tests.conftest import ModelFactory
from tests.faults.forked_programs import Program, run
from tests.faults.orchestrators import record_orchestrator, run_orchestrator
from tests.faults.power_cut import SURVIVALS, Recording, Survival
from tests.faults.run_states import differing, lost_batches, whole_steps
from tests.servers.orchestrator_fakes import FakeEngine, FakeTrainer, make_config, serving
from tests.unit.trainer.programs.in_process import end_state

_RESTARTS = 1  # of every way of losing things
_MOST_CRASHES = 120
STEPS = 3


def _crashed(recorded_as: Path, folder: Path) -> Iterator[tuple[str, Survival, RunDir, bool]]:
    """Give ways of losing what was not flushed, in the order of time; if they are many, some of them: which it is, the
    run directory after it, and whether the run is to be started again, some times for every way."""
    recording, generator = Recording.load(recorded_as), random.Random(0)
    ways: tuple[Survival, ...] = (*SURVIVALS, "torn")
    crashes = [(instant, survival) for instant in recording.instants for survival in ways]
    chosen = sorted(generator.sample(range(len(crashes)), min(_MOST_CRASHES, len(crashes))))
    crashes = [crashes[number] for number in chosen]
    again: set[int] = set()
    for wanted in SURVIVALS:
        numbers = [number for number, (_, survival) in enumerate(crashes) if survival == wanted]
        again.update(generator.sample(numbers, _RESTARTS))
    for number, (instant, survival) in enumerate(crashes):
        run_dir = RunDir(folder / f"crash_{number}")
        recording.crash(instant, survival, run_dir.path, generator)
        yield f"before {instant.call}, {survival}, crash {number}", survival, run_dir, number in again
        shutil.rmtree(run_dir.path)


def _assert_whole(run_dir: RunDir, where: str) -> None:
    """Everything that others find by its final name is there with every byte."""
    try:
        whole_steps(run_dir.checkpoints)
        for version in run_dir.published_weights():
            verify(run_dir.weights_of(version), how="full")
        for step in run_dir.published_batches():
            journal.read_batch(run_dir, step)
            journal.read_accepted(run_dir.batch(step) / journal.STATE_NAME, step=step)
        for path in run_dir.rollouts.glob("generations_*.log"):
            read_records(path)
    except Exception as error:
        raise AssertionError(f"{where}: {error}") from error


@pytest.mark.launch
@pytest.mark.timeout(1800)
def test_a_trainers_state_after_a_power_cut_ends_in_the_same_bits(tiny_model: ModelFactory, tmp_path: Path) -> None:
    ckpt = {"interval": 1, "keep": 2, "resume_step": "auto"}
    model = {"model": {"name": str(tiny_model())}, "optim": {"lr": 1e-3}}
    settings = model | {"mismatch_limit": "inf", "ckpt": ckpt, "journal": {"keep": 0}}
    trainer, straight, recorded_as = Program("rl", settings, STEPS), tmp_path / "straight", tmp_path / "recording"
    ended = run(trainer, straight, recording=recorded_as)
    assert ended.code == 0, ended.log
    expected = end_state(RunDir(straight), last=STEPS)
    for where, _, run_dir, is_again in _crashed(recorded_as, tmp_path):
        _assert_whole(run_dir, where)
        assert not lost_batches(run_dir, STEPS), where  # `run` would make them again
        newest = max(run_dir.committed_steps(), default=0)
        lines = run_dir.metrics.read_bytes().splitlines()[:newest] if newest else []
        assert [json.loads(line)["step"] for line in lines] == [*range(1, newest + 1)], where
        if is_again:
            again_ended = run(trainer, run_dir.path)
            assert again_ended.code == 0, f"{where}\n{again_ended.log}"
            assert differing(end_state(run_dir, last=STEPS), expected) == [], where


@pytest.mark.launch
@pytest.mark.timeout(1800)
def test_what_the_orchestrator_leaves_in_a_power_cut_is_whole_and_ends_in_the_same_journal(tmp_path: Path) -> None:
    engine, steps, recorded_as = FakeEngine(), 3, tmp_path / "recording"
    with serving(engine):

        def make(run_dir: RunDir, recording: Path | None = None) -> list[bytes]:
            """Run with a trainer of its own; return what the journal says, without what depends on the clock."""
            config = make_config(run_dir.path, engine, max_steps=steps)
            with FakeTrainer(run_dir, start=0, max_steps=steps):
                code = record_orchestrator(config, recording) if recording else run_orchestrator(config)
            assert code == 0, run_dir.path.with_suffix(".log").read_text()
            return [(run_dir.batch(step) / journal.STATE_NAME).read_bytes() for step in range(1, steps + 1)]

        straight = RunDir(tmp_path / "straight")
        straight.create()
        expected = make(straight, recorded_as)
        safe: set[int] = set()
        for where, survival, run_dir, is_again in _crashed(recorded_as, tmp_path):
            # Answers that were safe once stay so, in their log or in their batch.
            found = {step for step in range(1, steps + 1) if run_dir.weights_of(step).exists()}
            found.update(run_dir.published_batches())
            assert safe <= found, f"{where}: of batches {safe - found} nothing is left"
            if survival == "synced":
                safe |= found
            # The stand-in for the trainer is in another process, which nobody recorded.
            shutil.rmtree(run_dir.weights, ignore_errors=True)
            _assert_whole(run_dir, where)
            if is_again:
                assert make(run_dir) == expected, where
