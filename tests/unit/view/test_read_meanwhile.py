"""Whoever shows a run while the run writes: at each moment between two looks at its files, something has gone or come.

Each reader sees the run of before, or the run of after, or parts of both; nothing is damaged, and no number is another.
"""

import itertools
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.commands import ckpt, rollouts
from holdfast.launcher.resume.resume_step import set_aside_after
from holdfast.run.atomic import remove_directory
from holdfast.run.run_dir import RunDir
from holdfast.view.ckpt_dirs import CheckpointDirs
from holdfast.view.follow import ObservedRun
from holdfast.view.monitor import document_of
from holdfast.view.report import sample_rollouts
from holdfast.view.run_data import read_run
from tests.builders.checkpoint_files import write_checkpoint
from tests.builders.evaluations import evaluated
from tests.builders.shown_runs import make_run
from tests.unit.commands.test_rollouts_cli import publish

pytestmark = pytest.mark.clock


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _report(path: Path) -> dict[str, Any]:
    run = read_run(path)
    samples, (_, *notes) = sample_rollouts(run)  # the first one names where a tokenizer was looked for
    columns = {name: run.metrics.values[name].tolist() for name in ("reward/mean", "loss")}
    parts = ("attempts", "alarms", "spans", "estimates", "settings", "max_steps")
    found = {part: getattr(run, part) for part in parts}
    lines = zip(run.metrics.steps.tolist(), *columns.values(), strict=True)
    return found | {"metrics": list(lines), "samples": samples, "notes": [*run.notes, *notes]}


def _monitor(path: Path) -> dict[str, Any]:
    run = ObservedRun(RunDir(path), "run")
    run.look()
    found = document_of(run)
    names = ("attempt", "restarts", "step", "max_steps", "metrics", "status")
    return {name: found[name] for name in names} | {name: found["checkpoint"][name] for name in ("good", "damaged")}


READERS: dict[str, Callable[[Path], Any]] = {
    "report": _report,
    "monitor": _monitor,
    "ckpt ls": lambda path: ckpt.ls(CheckpointDirs(path), steps=[], metric=None).document,
    "ckpt verify": lambda path: ckpt.verify(CheckpointDirs(path), steps=[], how="full").document,
    "rollouts stats": lambda path: rollouts.stats(RunDir(path), steps=[]).document,
}


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = make_run(tmp_path / "run", steps=6, resumed_from=(2,))
    for step in (2, 3, 4):
        write_checkpoint(run_dir, step)
        publish(run_dir, step)
    for step in (2, 4):
        evaluated(run_dir, step)
    return run_dir


def _goes_on(run_dir: RunDir) -> None:
    """Do what a start and a save do: set aside what follows a step, and remove what is too old."""
    set_aside_after(run_dir, 3, 3)
    run_dir.remove_old_attempts(1)
    remove_directory(run_dir.checkpoint(2))
    run_dir.prune_batches(2)


_change: list[Any] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    """Make the change at the look at a file of the run that it is due at; it cannot be taken out of Python again."""
    if _change and event in ("open", "os.listdir", "os.scandir"):
        place, left, change = _change
        if str(arguments[0]).startswith(place):
            _change[1] -= 1
            if left == 0:
                _change.clear()
                change()


@pytest.fixture(scope="module", autouse=True)
def _looks() -> None:
    sys.addaudithook(_hook)


_MAY_DIFFER = ("age_s", "seconds", "size_bytes", "best", "ledger", "num_checkpoints")


def _told(found: Any) -> set[tuple[str, str]]:
    """Return all that a document says, entry by entry."""
    told: set[tuple[str, str]] = set()
    for name, value in found.items():
        for entry in (value if isinstance(value, list) else [value]) if name not in _MAY_DIFFER else ():
            if isinstance(entry, dict):
                entry = {key: item for key, item in entry.items() if key not in _MAY_DIFFER}
            told.add((name, json.dumps(entry, sort_keys=True)))
    return told


@pytest.mark.parametrize("name", READERS)
def test_what_goes_away_meanwhile_is_not_there(name: str, run_dir: RunDir, tmp_path: Path) -> None:
    read = READERS[name]
    case = tmp_path / "case"
    before = _plain(read(Path(shutil.copytree(run_dir.path, case))))
    _goes_on(RunDir(case))
    after = _plain(read(case))
    known = _told(before) | _told(after)
    for number in itertools.count():
        shutil.rmtree(case)
        shutil.copytree(run_dir.path, case)
        _change[:] = [str(case), number, lambda: _goes_on(RunDir(case))]
        told = _told(_plain(read(case)))
        if _change:
            _change.clear()
            break
        assert not told - known, number
    assert number > 3  # pyright: ignore[reportPossiblyUnboundVariable]


@pytest.mark.parametrize("name", ["report", "monitor"])
def test_half_a_line_is_none(name: str, run_dir: RunDir) -> None:
    for path in (run_dir.metrics, run_dir.logs(2) / "events.jsonl", run_dir.logs(2) / "timeline_trainer.jsonl"):
        whole = path.read_bytes()
        *_, last, half = whole.split(b"\n")
        start = len(whole) - len(last) - len(half) - 1
        path.write_bytes(whole[:start])
        expected = _plain(READERS[name](run_dir.path))
        for size in range(start, start + len(last)):
            path.write_bytes(whole[:size])
            assert _plain(READERS[name](run_dir.path)) == expected, (path, size)
        path.write_bytes(whole)
