"""A process that is killed at any instant of a save goes on as if nothing had happened, bit for bit.

The killed process is the real program on one rank. Calls that change the directory of checkpoints
are numbered (three saves, one removal); a trial dies at one of them, or some time after one.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.shared.files.run_dir import RunDir
from tests.conftest import ModelFactory
from tests.faults.faulty_calls import Call, Instant, read_trail
from tests.faults.run_states import FLAGS, KEEP, LAST, differing, end_state, whole_steps
from tests.forking.commands import Run, shared_commands
from tests.runs.processes import HANG_S
from tests.runs.training import LiveSft

SEED = 16
NUM_EVEN, NUM_TIMED = 36, 12
LONG = 30

Start = Callable[..., Run]


@dataclass(frozen=True)
class Trial:
    """One death: at call `number`, or `delay_s` after it."""

    number: int
    instant: Instant = "before"
    delay_s: float | None = None

    @property
    def name(self) -> str:
        return (
            f"{self.number}-{self.instant.replace(' ', '-')}"
            if self.delay_s is None
            else f"timed-{self.number}-{self.delay_s!r}"
        )

    @property
    def fault(self) -> str:
        if self.delay_s is None:
            return f"kill_at={self.number}, instant={self.instant!r}"
        return f"killer_from={self.number}, killer_delay_s={self.delay_s}"


@pytest.fixture(scope="module")
def start(tiny_model: ModelFactory, sft_data: Path) -> Start:
    """Return a start of `sft` with a fault in the calls on its checkpoints."""
    model = tiny_model(weights=False, attention_dropout=0.3)

    def run(output: Path, *flags: str, fault: str = "", **options: Any) -> Run:
        watch = f"{str(output / 'checkpoints')!r}, {str(trail_of(output))!r}, {fault}"
        source = f"from tests.faults.faulty_calls import install\ninstall({watch})" if fault else ""
        return shared_commands().sft(output, model, sft_data, *FLAGS, *flags, trainer_fault=source, **options).wait()

    return run


def trail_of(output: Path) -> Path:
    return output.with_name(f"{output.name}.trail")


@dataclass(frozen=True)
class Undisturbed:
    """A run that nothing happens to, and the calls that it makes."""

    checkpoints: Path
    state: dict[str, Any]
    calls: list[Call]


@pytest.fixture(scope="module")
def undisturbed(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Undisturbed]:
    output = tmp_path_factory.mktemp("undisturbed") / "run"
    run = start(output, fault="kill_at=None")
    assert run.code == 0, run.log
    yield Undisturbed(output / "checkpoints", end_state(output), read_trail(trail_of(output)))


def trials(calls: list[Call]) -> list[Trial]:
    """Choose instants: around renames, in the removal, evenly over others, and at random times in the saves."""
    found = [Trial(call.number, when) for call in calls if call.name == "rename" for when in ("before", "after")]
    found += [Trial(call.number) for call in [call for call in calls if call.name in ("unlink", "rmdir")][1::3]]
    # A save writes thousands of small pieces: as many of them count as there are calls of other kinds.
    writes = [call for call in calls if call.name == "write"]
    others = [call for call in calls if call.name not in ("write", "rename", "unlink", "rmdir")]
    spread = sorted((*others, *writes[:: len(writes) // (len(others) // 4)]), key=lambda call: call.number)
    chosen = [spread[place * len(spread) // NUM_EVEN] for place in range(NUM_EVEN)]
    instants: tuple[Instant, ...] = ("before", "after")
    found += [
        Trial(call.number, "half way" if call.name == "write" else instants[place % 2])
        for place, call in enumerate(chosen)
    ]
    generator = random.Random(SEED)
    for step in (2, 4, 6):
        begin = next(call for call in calls if f".tmp-step_{step}" in call.path)
        end = [call for call in calls if call.path.startswith(f".tmp-step_{step}/")][-1]
        for _ in range(NUM_TIMED // 3):
            found.append(Trial(begin.number, delay_s=generator.uniform(0, end.time_s - begin.time_s)))
    return found


def committed_steps(calls: list[Call]) -> tuple[set[int], set[int]]:
    """Return the steps that certainly have their names by a trail, and those that may: the last call may be done."""
    certain, possible = set(), set()
    for call in calls:
        if call.name == "rename" and call.target.startswith("step_"):
            possible.add(int(call.target.removeprefix("step_")))
            if call.is_done:
                certain |= possible
    return certain, possible


def check_trial(trial: Trial, start: Start, output: Path, wanted: dict[str, Any]) -> str:
    """Die, look, go on, compare. Returns what is wrong, or nothing."""
    killed = start(output, fault=trial.fault)
    if trial.delay_s is not None and killed.code == 0:
        return ""  # the delay was longer than the run: it counts as one that nothing disturbed
    if not killed.was_killed:
        return f"{trial.name}: not killed but ended with {killed.code}:\n{killed.log[-2000:]}"
    calls = read_trail(trail_of(output))
    there = whole_steps(output / "checkpoints")
    certain, possible = committed_steps(calls)
    if not set(there) <= possible or (certain and max(there, default=0) < max(certain)):
        return f"{trial.name}: {sorted(there)} are there, {sorted(certain)} were committed"
    if len(there) < min(KEEP, len(certain)):
        return f"{trial.name}: only {sorted(there)} are left of {sorted(certain)}"
    resumed = start(output)
    if resumed.code != 0 or "Traceback" in resumed.log:
        return f"{trial.name}: the resume ended with {resumed.code}:\n{resumed.log[-3000:]}"
    if there and f"from step {max(there)} " not in resumed.log:
        return f"{trial.name}: it did not go on from step {max(there)}:\n{resumed.log[-3000:]}"
    kept = {path.name for path in (output / "checkpoints").iterdir()}
    # The step that was resumed from stays; and where nothing was left to save, nothing was removed either.
    expected = set(there) if LAST in there else {4, LAST, *sorted(there)[-1:]}
    if kept != {f"step_{step}" for step in expected}:
        return f"{trial.name}: {sorted(kept)} are left after a resume from {max(there, default=0)}"
    differs = differing(end_state(output), wanted)
    shutil.rmtree(output)
    return f"{trial.name}: {differs} differ" if differs else ""


@pytest.mark.timeout(1800)
def test_killed_at_any_instant_of_a_save_it_goes_on_bit_for_bit(
    start: Start, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    deaths = trials(undisturbed.calls)
    assert len(deaths) >= 60 and len({(trial.number, trial.instant) for trial in deaths if not trial.delay_s}) >= 25
    assert {trial.instant for trial in deaths} == {"before", "after", "half way"}
    # Two at a time: equal names would be two runs in one directory.
    deaths = list({trial.name: trial for trial in deaths}.values())
    with ThreadPoolExecutor(max_workers=2) as pool:
        wrong = list(
            pool.map(lambda trial: check_trial(trial, start, tmp_path / trial.name, undisturbed.state), deaths)
        )
    assert not any(wrong), "\n".join(filter(None, wrong))


def test_the_calls_that_are_counted_are_those_of_three_saves_and_one_removal(undisturbed: Undisturbed) -> None:
    """Otherwise the test above could miss the instants that matter."""
    renames = [
        (call.path, call.target.rsplit("-", 1)[0])
        for call in undisturbed.calls
        if call.name == "rename" and "/" not in call.path
    ]
    assert renames == [
        (".tmp-step_2", "step_2"),
        (".tmp-step_4", "step_4"),
        (".tmp-step_6", "step_6"),
        ("step_2", ".tmp-step_2"),
    ]
    assert sorted(path.name for path in undisturbed.checkpoints.iterdir()) == ["step_4", "step_6"]
    assert {call.name for call in undisturbed.calls} >= {"mkdir", "open", "write", "fsync", "rename", "unlink", "rmdir"}


def wait_for_saving(checkpoints: Path, process: psutil.Process) -> None:
    """Wait until a save has begun whose directory is not yet complete."""
    while not any(checkpoints.glob(".tmp-step_*/trainer/*")):
        assert process.is_running() and process.status() != psutil.STATUS_ZOMBIE, "the run ended before it saved"


@pytest.mark.timeout(1800)
@pytest.mark.slow
def test_a_rank_that_is_killed_during_saves_ends_the_run_which_goes_on_bit_for_bit(
    start: Start, tiny_model: ModelFactory, sft_data: Path, tmp_path: Path, ends: Callable[..., bool]
) -> None:
    """Two ranks of the real command; rank 1 dies in three attempts, one after the other, of the same run."""
    straight = start(tmp_path / "straight", "--ckpt.interval", "1", "--max-steps", str(LONG), ranks=2)
    assert straight.code == 0, straight.log
    model = tiny_model(weights=False, attention_dropout=0.3)
    flags = (*FLAGS, "--ckpt.interval", "1", "--max-steps", str(LONG), "--parallel.num-ranks", "2")
    output, generator = tmp_path / "killed", random.Random(SEED)
    run_dir = RunDir(output)
    for _ in range(3):
        before = max(whole_steps(run_dir.checkpoints), default=0)
        with LiveSft(output, model, sft_data, *flags) as run:
            run.wait_for(f"step {before + generator.randint(1, 2):>2}/{LONG}")
            rank_0, rank_1 = sorted(run.ranks(), key=lambda process: process.pid)
            wait_for_saving(run_dir.checkpoints, rank_0)
            time.sleep(generator.uniform(0, 0.02))  # any instant of the save will do
            os.kill(rank_1.pid, signal.SIGKILL)
            assert run.wait(within_s=HANG_S) == 1
            assert "killed by signal 9" in run.output and "log: " in run.output, run.output
            assert ends(rank_0.pid, within_s=0)
        assert max(whole_steps(run_dir.checkpoints), default=0) >= before
    resumed = start(output, "--ckpt.interval", "1", "--max-steps", str(LONG), ranks=2)
    assert resumed.code == 0, resumed.log
    assert differing(end_state(output, last=LONG), end_state(tmp_path / "straight", last=LONG)) == []
