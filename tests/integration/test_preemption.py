"""Preemption: a signal has the current step saved within the grace, and the exit code says whether it landed."""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.commands.launcher.supervise import ECHO_S
from holdfast.shared.errors import NOT_SAVED
from holdfast.shared.files import manifest
from holdfast.shared.files.journal import publish_batch
from holdfast.shared.files.run_dir import RunDir
from holdfast.shared.wire.rollouts import Batch, Rollout, VersionSpan
from tests.conftest import ROOT
from tests.faults.held_steps import ASKED_TO_STOP, held_after
from tests.runs.processes import HANG_S
from tests.runs.training import LiveSft, SftRun, run_sft

MAX_STEPS = "120"

Models = Callable[..., Path]


class Runs:
    """Runs of `sft` with dropout, in directories by name."""

    def __init__(self, home: Path, model: Path, data: Path) -> None:
        self._home = home
        self._model = model
        self._data = data

    def whole(self, name: str, *flags: str) -> SftRun:
        """Run to the end."""
        done = run_sft(self._home / name, self._model, self._data, "--max-steps", MAX_STEPS, *flags)
        assert done.code == 0, done.output
        return done

    def live(self, name: str, *flags: str, model: Path | None = None) -> LiveSft:
        """Start; it is not over before it has been asked to stop."""
        flags, held = ("--max-steps", MAX_STEPS, "--ckpt", *flags), held_after(60, until=ASKED_TO_STOP)
        return LiveSft(self._home / name, model or self._model, self._data, *flags, fault=held)

    def interrupted(self, name: str, number: int, ends: Callable[..., bool], *flags: str) -> tuple[int, str, int]:
        """Run until step 5, send a signal to the launcher; return exit code, output and the step that was saved."""
        with self.live(name, *flags) as run:
            run.wait_for("step   5/")
            run.process.send_signal(number)
            code = run.wait(within_s=HANG_S)
            (step,) = run.run_dir.committed_steps()
            assert all(ends(pid, within_s=0) for pid in run.descendants), run.output
            return code, run.output, step


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Models, sft_data: Path) -> Runs:
    return Runs(tmp_path_factory.mktemp("preempted"), tiny_model(weights=False, attention_dropout=0.3), sft_data)


TWO = ("--parallel.num-ranks", "2")


@pytest.fixture(scope="module")
def straight(runs: Runs) -> Callable[[int], SftRun]:
    """The runs that nobody interrupts, by number of ranks; they save nothing."""
    return functools.cache(lambda ranks: runs.whole(f"straight_on_{ranks}", *(TWO if ranks == 2 else ())))


@pytest.mark.parametrize(
    ("ranks", "number"),
    [
        pytest.param(1, signal.SIGTERM, id="SIGTERM"),
        pytest.param(2, signal.SIGUSR1, id="SIGUSR1 on two ranks", marks=pytest.mark.slow),
        pytest.param(1, signal.SIGINT, id="SIGINT", marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_the_current_step_and_a_resume_goes_on_bit_for_bit(
    ranks: int, number: int, runs: Runs, straight: Callable[[int], SftRun], ends: Callable[..., bool]
) -> None:
    name, flags = f"{number}_on_{ranks}", TWO if ranks == 2 else ()
    code, output, step = runs.interrupted(name, number, ends, *flags)
    assert code == 128 + number
    assert f"{signal.Signals(number).name}: saving the current step" in output
    assert f"stopped at step {step} of {MAX_STEPS}, which is saved" in output and "NOT saved" not in output
    assert 5 <= step < int(MAX_STEPS), "it did not wait for the end"
    resumed = runs.whole(name, *flags, "--ckpt.resume-step", "latest")
    reference = straight(ranks)
    assert f"resuming from step {step}" in resumed.output
    assert resumed.weights(int(MAX_STEPS)) == reference.weights(int(MAX_STEPS))
    for column in ("step", "loss", "samples"):
        assert resumed.column(column) == reference.column(column) and len(reference.column(column)) == int(MAX_STEPS)


def test_a_signal_during_the_start_ends_before_the_first_step(runs: Runs) -> None:
    with runs.live("start") as run:
        run.wait_for("importing torch")
        run.process.send_signal(signal.SIGUSR1)
        assert run.wait(within_s=HANG_S) == 128 + signal.SIGUSR1
        assert "stopped at step 0" in run.output and "before anything was trained" in run.output
        assert run.run_dir.committed_steps() == []


def test_a_signal_to_one_rank_saves_on_all(runs: Runs) -> None:
    """As from a scheduler that signals every process of a job by itself."""
    with runs.live("direct", *TWO) as run:
        run.wait_for("step   5/")
        run.ranks()[1].send_signal(signal.SIGUSR1)
        code = run.wait(within_s=HANG_S)
        (step,) = run.run_dir.committed_steps()
        assert manifest.verify(run.run_dir.checkpoint(step)).world_size == 2
        assert code == 128 + signal.SIGUSR1 and f"stopped at step {step} of" in run.output
        assert "which is saved" in run.output and "finished step" not in run.output


@pytest.fixture(scope="module")
def large_model(tiny_model: Models) -> Path:
    """A state of 200 MB, which no disk takes within the grace below."""
    return tiny_model(weights=False, hidden_size=512, intermediate_size=2048, num_hidden_layers=4)


def test_a_grace_that_is_too_short_is_told_by_the_exit_code(runs: Runs, large_model: Path) -> None:
    with runs.live("short", "--ckpt.grace-s", "0.02", model=large_model) as run:
        run.wait_for("step   1/")
        run.process.send_signal(signal.SIGTERM)
        assert run.wait(within_s=HANG_S) == NOT_SAVED
        assert "was NOT saved" in run.output and "there is no checkpoint" in run.output
        assert run.run_dir.committed_steps() == []


def test_a_second_signal_does_not_wait_for_the_grace(runs: Runs, ends: Callable[..., bool]) -> None:
    with runs.live("twice", "--ckpt.grace-s", "600") as run:
        run.wait_for("step   2/")
        (rank,) = run.ranks()
        rank.suspend()  # so the save never comes
        run.process.send_signal(signal.SIGTERM)
        run.wait_for("for at most 600 s")
        time.sleep(ECHO_S)  # sooner it would be the same signal
        run.process.send_signal(signal.SIGTERM)
        assert run.wait(within_s=HANG_S) == NOT_SAVED
        assert "was NOT saved" in run.output and all(ends(pid) for pid in run.descendants)


def make_batch(step: int) -> Batch:
    """Two rollouts of opposite advantage, sampled by the version before the step."""
    rollouts = [
        Rollout(
            environment="reverse_text",
            task_id=step - 1,
            sample_index=index,
            token_ids=[5, 6, 7 + index, 8, 3],
            loss_mask=[False, False, True, True, True],
            logprobs=[0.0, 0.0, -1.0, -1.0, -1.0],
            versions=[VersionSpan(step - 1, 2, 5)],
            reward=float(index),
        )
        for index in (0, 1)
    ]
    return Batch(step=step, policy_version=step - 1, weights_digest="d" * 32, rollouts=rollouts)


def state_after(step: int) -> bytes:
    """The orchestrator's state after the batches up to `step`."""
    counts = {"step": step, "problems": step, "rollouts": 2 * step, "tokens": 10 * step}
    return json.dumps(counts | {"environments": {"reverse_text": {"next_task": step, "group_size": 2}}}).encode()


def test_a_trainer_that_waits_for_a_batch_saves_at_once(
    command: Callable[[str], str], tiny_model: Models, tmp_path: Path
) -> None:
    """No orchestrator runs: the third batch never comes."""
    run_dir = RunDir(tmp_path / "run")
    flags = (
        "--output-dir", str(run_dir.path), "--model.name", str(tiny_model()), "--max-steps", "10",
        "--parallel.threads", "1", "--ckpt", "--mismatch-limit", "inf",
    )  # fmt: skip
    process = subprocess.Popen(
        [command("trainer"), *flags], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    output = ""
    try:
        for line in process.stdout:
            output += line
            if "waiting for batches" in line:
                publish_batch(run_dir, make_batch(1), state_after(1))
                publish_batch(run_dir, make_batch(2), state_after(2))
            if "step  2/" in line:
                break
        process.send_signal(signal.SIGTERM)
        output += process.stdout.read()
        assert process.wait(HANG_S) == 128 + signal.SIGTERM, output
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert "stopped at step 2 of 10, which is saved" in output
    assert run_dir.committed_steps() == [2]
    manifest.verify(run_dir.checkpoint(2))
    assert (run_dir.checkpoint(2) / "orchestrator" / "orchestrator.json").read_bytes() == state_after(2)
    assert (run_dir.weights_of(2) / "model.safetensors").exists()
