"""The trainer of `rl`, killed at any instant of a save, resumes bit for bit: at one of its numbered calls that change
the run directory, or some time after one. That the state of the other programs is complete,
`tests/unit/trainer/programs` says."""

import random
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast.run import manifest
from holdfast.run.run_dir import RunDir
from tests.conftest import ModelFactory
from tests.faults.faulty_calls import Call, Instant, read_trail
from tests.faults.forked_programs import Program, run, trail_of
from tests.faults.run_states import differing, lost_batches, whole_steps
from tests.unit.trainer.programs import in_process

pytestmark = pytest.mark.launch

SEED = 16
LAST, KEEP = 3, 2
NUM_EVEN, NUM_TIMED = 8, 4


@dataclass(frozen=True)
class Trial:
    """One death: at call `number`, or `delay_s` after it."""

    number: int
    instant: Instant = "before"
    delay_s: float | None = None

    @property
    def name(self) -> str:
        return f"{self.number} {self.instant}" if self.delay_s is None else f"timed {self.number} {self.delay_s!r}"

    @property
    def fault(self) -> dict[str, Any]:
        if self.delay_s is None:
            return {"kill_at": self.number, "instant": self.instant}
        return {"killer_from": self.number, "killer_delay_s": self.delay_s}


@dataclass(frozen=True)
class Undisturbed:
    """A run that nothing happens to, and the calls that it makes."""

    program: Program
    run_dir: RunDir
    state: dict[str, Any]
    calls: list[Call]


@pytest.fixture(scope="module")
def undisturbed(tiny_model: ModelFactory, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    # The average is published behind the last save: whoever dies in between has nothing left to train.
    settings = {
        "model": {"name": str(tiny_model(attention_dropout=0.3))}, "optim": {"lr": 1e-3}, "mismatch_limit": "inf",
        "ckpt": {"resume_step": "auto", "keep": KEEP, "interval": 1}, "journal": {"keep": 0}, "ema": {},
    }  # fmt: skip
    program, output = Program("rl", settings, LAST), tmp_path_factory.mktemp("undisturbed") / "run"
    ended = run(program, output)
    assert ended.code == 0, ended.log
    run_dir = RunDir(output)
    return Undisturbed(program, run_dir, in_process.end_state(run_dir, last=LAST), read_trail(trail_of(output)))


def trials(calls: list[Call]) -> list[Trial]:
    """Choose instants: around commits and lines of metrics, in removals, evenly over others, and at random times. A
    commit is a rename that gives or takes a final name. Renames within a directory that has none yet are among the
    others: whatever such a directory holds, a resume ignores it. The state after a call is the state before the next.
    """
    lines = [call for call in calls if call.name == "write" and call.path == "metrics.jsonl"]
    commits = [call for call in calls if call.name == "rename" and "/.tmp-" not in f"/{Path(call.path).parent}"]
    found = [Trial(call.number, "half way") for call in lines]
    found += [Trial(call.number, when) for call in [*lines, *commits] for when in ("before", "after")]
    found += [Trial(call.number) for call in [call for call in calls if call.name in ("unlink", "rmdir")][1::6]]
    # A save writes thousands of small pieces: as many of them count as there are calls of other kinds.
    writes = [call for call in calls if call.name == "write" and call not in lines]
    others = [call for call in calls if call.name not in ("write", "unlink", "rmdir") and call not in commits]
    spread = sorted((*others, *writes[:: len(writes) // (len(others) // 4)]), key=lambda call: call.number)
    instants: tuple[Instant, ...] = ("before", "after")
    for place in range(NUM_EVEN):
        call = spread[place * len(spread) // NUM_EVEN]
        found.append(Trial(call.number, "half way" if call.name == "write" else instants[place % 2]))
    generator, seconds = random.Random(SEED), calls[-1].time_s - calls[0].time_s
    found += [Trial(1, delay_s=generator.uniform(0, seconds)) for _ in range(NUM_TIMED)]
    return list({trial.name: trial for trial in found}.values())


def committed_steps(calls: list[Call]) -> tuple[set[int], set[int]]:
    """Return the steps that certainly have their names by a trail, and those that may: the last call may be done."""
    certain, possible = set(), set()
    for call in calls:
        name = call.target.removeprefix("checkpoints/")
        if call.name == "rename" and name.startswith("step_"):
            possible.add(int(name.removeprefix("step_")))
            if call.is_done:
                certain |= possible
    return certain, possible


def check_trial(trial: Trial, undisturbed: Undisturbed, output: Path) -> str:
    """Die, look, resume, compare. Returns what is wrong, or nothing."""
    program, run_dir = undisturbed.program, RunDir(output)
    killed = run(program, output, **trial.fault)
    if trial.delay_s is not None and killed.code == 0:
        return ""  # the delay was longer than the run: it counts as one that nothing disturbed
    if killed.code != -signal.SIGKILL:
        return f"{trial.name}: not killed but ended with {killed.code}:\n{killed.log[-2000:]}"
    there = whole_steps(run_dir.checkpoints)
    certain, possible = committed_steps([call for call in read_trail(trail_of(output)) if "weights" not in call.path])
    if not set(there) <= possible or (certain and max(there, default=0) < max(certain)):
        return f"{trial.name}: {sorted(there)} are there, {sorted(certain)} were committed"
    if len(there) < min(KEEP, len(certain)):
        return f"{trial.name}: only {sorted(there)} are left of {sorted(certain)}"
    for version in run_dir.published_weights():
        manifest.verify(run_dir.weights_of(version))
    if lost := lost_batches(run_dir, LAST):  # `run` would make them again
        return f"{trial.name}: batches {lost} are gone, and no checkpoint of {sorted(there)} is behind them"
    resumed = run(program, output)
    if resumed.code != 0 or "Traceback" in resumed.log:
        return f"{trial.name}: the resume ended with {resumed.code}:\n{resumed.log[-3000:]}"
    if there and f"from step {max(there)} " not in resumed.log:
        return f"{trial.name}: it did not resume from step {max(there)}:\n{resumed.log[-3000:]}"
    # The step that was resumed from stays; and where nothing was left to save, nothing was removed either.
    expected = set(there) if LAST in there else {LAST - 1, LAST, *sorted(there)[-1:]}
    if set(run_dir.committed_steps()) != expected:
        return f"{trial.name}: {run_dir.committed_steps()} are left after a resume from {max(there, default=0)}"
    differs = differing(in_process.end_state(run_dir, last=LAST), undisturbed.state)
    shutil.rmtree(output)
    return f"{trial.name}: {differs} differ" if differs else ""


@pytest.mark.timeout(1800)
def test_killed_at_any_instant_of_a_save_it_goes_on_bit_for_bit(undisturbed: Undisturbed, tmp_path: Path) -> None:
    deaths = trials(undisturbed.calls)
    assert len(deaths) >= 35 and len({trial.number for trial in deaths}) >= 25
    assert {trial.instant for trial in deaths} == {"before", "after", "half way"}
    wrong = [check_trial(trial, undisturbed, tmp_path / f"trial_{place}") for place, trial in enumerate(deaths)]
    assert not any(wrong), "\n".join(filter(None, wrong))


def test_the_calls_that_are_counted_are_those_of_saves_and_removals(undisturbed: Undisturbed) -> None:
    """Otherwise the test above could miss the instants that matter."""
    renamed = [(call.path, call.target.rsplit("-", 1)[0]) for call in undisturbed.calls if call.name == "rename"]
    assert [names for names in renamed if names[0].startswith("checkpoints/") and names[0].count("/") == 1] == [
        *((f"checkpoints/.tmp-step_{step}", f"checkpoints/step_{step}") for step in (1, 2, 3)),
        ("checkpoints/step_1", "checkpoints/.tmp-step_1"),
    ]
    assert {target.split("/")[0] for _, target in renamed} == {"weights", "checkpoints", "rollouts"}
    assert undisturbed.run_dir.committed_steps() == [LAST - 1, LAST]
    assert {"mkdir", "open", "write", "fsync", "rename", "unlink", "rmdir"} <= {call.name for call in undisturbed.calls}
