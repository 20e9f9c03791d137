"""`sft` with trackers beside it: what they get, and that nothing they do is felt by the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.run.metrics import read_metrics
from holdfast.run.run_dir import RunDir
from holdfast.view.trackers.main import main as track
from tests.conftest import ModelFactory
from tests.runs.trackers import TrackedDirectory
from tests.runs.training import SftRun, refused, run_sft, succeeded

pytestmark = pytest.mark.launch

Tracked = Callable[..., SftRun]
_OWN = "tests.runs.own_tracker:InFile"
_BROKEN = "tests.runs.own_tracker:OutOfOrder"
_PATIENT = ("--tracking.finish-timeout-s", "600")  # on a busy machine the imports of a tracker take long


@pytest.fixture
def run_tracked(tmp_path: Path, tiny_model: ModelFactory, sft_data: Path, in_root: Path) -> Tracked:
    """Return a function that makes a run in one directory."""

    def run(*flags: str) -> SftRun:
        return run_sft(tmp_path / "run", tiny_model(weights=False), sft_data, *flags)

    return run


def _lines(run_dir: RunDir) -> list[list[str]]:
    return [line.split() for line in (run_dir.path / "own.txt").read_text().splitlines()]


def _steps(run_dir: RunDir) -> list[tuple[int, float]]:
    return [(int(words[1]), float(words[2])) for words in _lines(run_dir) if words[0] == "step"]


def _trained(run_dir: RunDir) -> list[tuple[int, float]]:
    return [(int(line["step"]), line["loss"]) for line in read_metrics(run_dir.metrics)]


def test_a_run_its_resume_and_another_way(run_tracked: Tracked) -> None:
    tracked = ("--tracking.backends", f"tensorboard,{_OWN}", *_PATIENT, "--ckpt.interval", "2")
    first = succeeded(run_tracked("--max-steps", "4", *tracked))
    run_dir = first.run_dir
    assert _steps(run_dir) == _trained(run_dir)
    succeeded(run_tracked("--max-steps", "6", "--ckpt.resume-step", "latest", *tracked))
    assert run_dir.rewinds() == [] and _steps(run_dir) == _trained(run_dir)
    begun = [words[1:] for words in _lines(run_dir) if words[0] == "begin"]
    name, run_id = run_dir.path.name, run_dir.run_id()
    assert begun == [
        [run_id, name, "attempt", "1", "after", "0", "lr", "0.001", "None"],
        [run_id, name, "attempt", "2", "after", "4", "lr", "0.001", "None"],
    ]
    scalars = TrackedDirectory.of(run_dir).steps("tensorboard")["history_1"]
    assert [step for step, _ in scalars] == [1, 2, 3, 4, 5, 6]
    # An older step than the newest, with another rate: what was sent stays, and the new way is a run of its own.
    (run_dir.path / "own.txt").unlink()
    succeeded(run_tracked("--max-steps", "6", "--ckpt.resume-step", "4", "--optim.lr", "1e-2", *tracked))
    assert run_dir.rewinds() == [4]
    assert _lines(run_dir)[0][1:] == [f"{run_id}-2", name, "(2)", "attempt", "3", "after", "0", "lr", "0.01", run_id]
    assert _steps(run_dir) == _trained(run_dir) and len(_trained(run_dir)) == 6


@pytest.mark.parametrize("how", ["raise", "die"])
def test_a_tracker_that_fails_costs_one_warning_and_is_sent_to_later(
    how: str, run_tracked: Tracked, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRACKER_FAILS", how)
    run = succeeded(
        run_tracked("--max-steps", "2", "--tracking.backends", _BROKEN, "--tracking.finish-timeout-s", "20")
    )
    assert "finished step 2 of 2" in run.output
    assert f"`track {run.run_dir.path} --to {_BROKEN}` sends what is missing" in run.output
    assert "Traceback" not in run.output
    assert not (run.run_dir.path / "own.txt").exists()
    monkeypatch.setenv("TRACKER_FAILS", "")
    assert track([str(run.run_dir.path)]) == 0
    assert f"{_BROKEN} has everything up to step 2" in capsys.readouterr().out
    assert _steps(run.run_dir) == _trained(run.run_dir)


def test_a_tracker_that_cannot_be_is_refused_before_anything_starts(run_tracked: Tracked) -> None:
    refused(run_tracked("--tracking.backends", "wandbb"), "Did you mean 'wandb'?")
    refused(run_tracked("--tracking.backends", "wandb,wandb"), "names 'wandb' twice")
    refused(
        run_tracked("--tracking.backends", "tests.runs.own_tracker:NoTracker"), "derive a class from holdfast.Tracker"
    )
    run = run_tracked("--tracking.backends", "tests.runs.own_tracker:Unfinished")
    refused(run, "lacks begin, close, flush, log")
    assert not run.run_dir.path.exists()
