"""Hooks: they see each step of a run once, and change no bit, whatever is killed or fails."""

import json
import os
from pathlib import Path

import pytest

from holdfast.run.metrics import read_metrics
from holdfast.run.run_dir import RunDir
from tests.conftest import ROOT
from tests.forking.commands import Run, shared_commands
from tests.runs.processes import HANG_S
from tests.runs.rl import exact_metrics, succeeded

pytestmark = pytest.mark.launch

TRAINS = (
    "--model.name", str(ROOT / "examples" / "reverse_text" / "model"), "--data.batch-size", "8",
    "--data.name", str(ROOT / "examples" / "reverse_text" / "sft.jsonl"), "--data.micro-batch-size", "4",
    "--data.seq-len", "64", "--data.validation-fraction", "0.02", "--val-interval", "2", "--max-steps", "8",
    "--optim.schedule", "constant", "--parallel.threads", "1",
)  # fmt: skip


def hooks(**args: str) -> tuple[str, str]:
    return "--hooks", json.dumps([{"type": "tests.runs.own_hooks:Counting", "args": args}])


def started(directory: Path, *flags: str) -> Run:
    path = directory.with_name(f"{directory.name}_{len([*directory.parent.iterdir()])}.out")
    argv = ["--output-dir", str(directory), *TRAINS, *flags]
    return shared_commands().start("sft", directory, argv, log=path, environment={**os.environ}).wait(2 * HANG_S)


def calls(run_dir: RunDir) -> dict[str, list[str]]:
    """The last call of each name: what it got."""
    found = dict(line.split(" ", 1) for line in (run_dir.path / "calls.txt").read_text().splitlines())
    return {name: found[name].split() for name in sorted(found)}


def end_of(run_dir: RunDir, last: int) -> tuple[object, ...]:
    weights = (run_dir.weights_of(last) / "model.safetensors").read_bytes()
    return exact_metrics(run_dir, range(1, last + 1)), calls(run_dir), weights


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "kills"),
    [("1", "after_step:1 after_save:3 after_evaluation:4"), ("2", "after_save:4 after_step:8 after_save:8")],
)
def test_hooks_of_a_killed_run_see_each_step_once(ranks: str, kills: str, tmp_path: Path) -> None:
    flags = ("--parallel.num-ranks", ranks, "--ckpt.interval", "3", "--ckpt.keep", "2")
    whole, killed, plain = (RunDir(tmp_path / name) for name in ("whole", "killed", "plain"))
    assert started(whole.path, *flags, *hooks(save="after_step:4")).code == 0
    assert [*calls(whole)] == sorted([
        *(f"after_step:{step}" for step in range(1, 9)), *(f"after_evaluation:{step}" for step in (2, 4, 6, 8)),
        *(f"after_save:{step}" for step in (3, 4, 6, 8)),
    ])  # fmt: skip
    assert read_metrics(whole.metrics)[-1]["hooks/Counting/after_step_calls"] == 15, "the save of step 8 comes later"
    flags = (*flags, *hooks(save="after_step:4", kill=kills, own_kill="after_step:5"))
    for name in kills.split():
        run = started(killed.path, *flags)
        assert run.code not in (0, 2, 3) and (killed.path / f"was_{name}").exists(), run.log
    assert started(killed.path, *flags).code == 0
    assert end_of(killed, 8) == end_of(whole, 8)
    assert len((killed.path / "calls.txt").read_text().splitlines()) > 19, "steps were trained again"
    assert (killed.path / "was_after_step:5").exists(), "the process of the hooks was killed, and the run went on"
    assert started(plain.path, *flags[:6]).code == 0
    weights = [one.weights_of(8) / "model.safetensors" for one in (whole, plain)]
    assert weights[0].read_bytes() == weights[1].read_bytes(), "without hooks the bits are the same"


def test_a_hook_that_fails_ends_the_run_and_nothing_is_lost(tmp_path: Path) -> None:
    whole, failed = RunDir(tmp_path / "whole"), RunDir(tmp_path / "failed")
    flags = ("--ckpt.interval", "3", *hooks(fail="after_step:6"))
    whole.path.mkdir()
    (whole.path / "was_after_step:6").touch()
    assert started(whole.path, *flags).code == 0
    run = started(failed.path, *flags)
    told = "after_step at step 6 of hook Counting = 'tests.runs.own_hooks:Counting' failed: ValueError: out of order ("
    assert run.code == 3 and told in run.log and "Step 6 is saved" in run.log and "Traceback" not in run.log, run.log
    assert failed.committed_steps() == [3, 6] and len(read_metrics(failed.metrics)) == 5
    again = started(failed.path, *flags)
    assert again.code == 0 and "resuming from step 6" in again.log, again.log
    assert end_of(failed, 8) == end_of(whole, 8)
    # Without the hook, too, the line of its step comes.
    left_out = RunDir(tmp_path / "left_out")
    assert started(left_out.path, *flags).code == 3 and started(left_out.path, *flags[:2]).code == 0
    assert [line["step"] for line in read_metrics(left_out.metrics)] == [*range(1, 9)]


def test_a_hook_ends_the_run(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    flags = ("--ckpt.interval", "3", *hooks(stop="after_step:4"))
    run = started(run_dir.path, *flags)
    assert run.code == 0 and "early end: Counting: it is far enough" in run.log, run.log
    assert "finished step 4 of 8" in run.log and "and other hooks" in run.log
    assert run_dir.committed_steps() == [3, 4] and run_dir.published_weights() == [4]
    refused = started(run_dir.path, *flags)
    assert refused.code == 2 and "change hooks and add --ckpt.resume-step latest" in refused.log, refused.log
    other = started(run_dir.path, "--ckpt.interval", "3", "--ckpt.resume-step", "latest", *hooks(stop="after_save:6"))
    assert other.code == 0 and "hooks[0].args.stop: 'after_step:4' -> 'after_save:6'" in other.log, other.log
    assert [line["step"] for line in read_metrics(run_dir.metrics)] == [1, 2, 3, 4, 5, 6]
    assert calls(run_dir)["after_save:6"][0] == "12", "the state came along"


@pytest.mark.parametrize(
    "hook, said",
    [
        ("tests.runs.own_hooks:Countin", "has no function 'Countin'. Did you mean 'Counting'?"),
        ("tests.runs.own_hooks:Plain", "is not a hook: derive a class from holdfast.Hook"),
        ('[{"type": "tests.runs.own_hooks:Counting", "args": {"x": 1}}]', "does not take them: got an unexpected"),
        ("Counting", "should be 'module:Class'"),
        ("a:B,c:B", "two hooks with the name 'B'"),
        ("tests.runs.own_hooks:Tuples", "Allowed: numbers, texts, None, and lists and dicts"),
    ],
)
def test_a_hook_that_cannot_be_used_is_refused(hook: str, said: str, tmp_path: Path) -> None:
    run = started(tmp_path / "run", "--hooks", hook)
    assert run.code == (3 if "Tuples" in hook else 2) and said in " ".join(run.log.split()), run.log
    assert "Traceback" not in run.log


def test_rl_ends_early_with_hooks_at_the_same_step_after_kills(tmp_path: Path) -> None:
    ends = ("--stop.metric", "min:samples", "--stop.patience", "2", "--max-steps", "6", "--ckpt.interval", "2")
    whole = succeeded(tmp_path / "whole", *ends, *hooks())
    assert "early end: samples has not been better" in whole.output
    assert whole.run_dir.early_end() == 3 and whole.run_dir.committed_steps()[-1] == 3
    killed = succeeded(tmp_path / "killed", *ends, *hooks(kill="after_step:1 after_save:2 after_step:3"))
    assert all((killed.run_dir.path / f"was_{name}").exists() for name in ("after_step:1", "after_step:3"))
    assert exact_metrics(killed.run_dir, range(1, 4)) == exact_metrics(whole.run_dir, range(1, 4))
    assert calls(killed.run_dir) == calls(whole.run_dir) and killed.run_dir.early_end() == 3
    weights = [one.run_dir.weights_of(3) / "model.safetensors" for one in (whole, killed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
