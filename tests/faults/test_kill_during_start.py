"""A launcher killed at any call that prepares the run directory loses nothing: the next start finds the same."""

import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import SftConfig
from holdfast.launcher.resume.attempt import with_resume, write_config
from holdfast.launcher.resume.prepare import prepare
from holdfast.run.manifest import MANIFEST_NAME
from holdfast.run.run_dir import RunDir, directory_name
from holdfast.trainer.mesh import Mesh
from tests.builders.checkpoint_files import contents
from tests.conftest import ModelFactory
from tests.faults.faulty_calls import deaths, in_faulty_child, read_trail
from tests.faults.run_states import differing, whole_steps
from tests.unit.trainer.programs.in_process import end_state, train

pytestmark = pytest.mark.clock

LAST = 6


@dataclass(frozen=True)
class Case:
    directory: Path  # the run directory before it
    settings: dict[str, Any]  # of the run, without `ckpt`
    ckpt: dict[str, Any]  # how it starts
    other: Path | None = None  # a run that must not change

    def prepare(self, output: Path, *, clean: bool = False, **fault: Any) -> int:
        """Prepare `output` in a process of its own; return the exit code, a signal as a negative number."""
        given = self.settings | {"output_dir": output, "max_steps": LAST, "ckpt": self.ckpt | {"interval": 2}}
        config = SftConfig.model_validate(given)

        def start() -> None:
            log = os.open(output.with_suffix(".out"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            attempt = prepare(config, clean=clean, dry_run=False)
            write_config(attempt, "sft", with_resume(config, attempt.resume_step), dry_run=False)

        return in_faulty_child(start, output, **fault)


@pytest.fixture(scope="module")
def settings(tiny_model: ModelFactory, sft_data: Path) -> dict[str, Any]:
    data = {"name": str(sft_data), "batch_size": 8, "micro_batch_size": 2, "seq_len": 32}
    optim = {"lr": 1e-3, "schedule": "constant"}
    return {"model": {"name": str(tiny_model(attention_dropout=0.3))}, "optim": optim, "data": data, "seed": 3}


@pytest.fixture(scope="module")
def finished(settings: dict[str, Any], mesh: Mesh, tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert mesh.world_size == 1
    output = tmp_path_factory.mktemp("finished") / "run"
    return train("sft", output, settings | {"ckpt": {"interval": 2}}, until=LAST).path


@pytest.fixture(params=["after a torn save, with a damaged step", "an older step", "a fork"])
def case(request: pytest.FixtureRequest, settings: dict[str, Any], finished: Path, tmp_path: Path) -> Iterator[Case]:
    directory = tmp_path / "before"
    if request.param == "a fork":
        directory.mkdir()
        (directory / "notes.txt").write_text("mine")
        yield Case(directory, settings, {"resume_dir": finished / "checkpoints/step_4"}, finished)
        return
    shutil.copytree(finished, directory)
    if request.param == "an older step":
        yield Case(directory, settings, {"resume_step": 2})
        return
    checkpoints = directory / "checkpoints"
    (checkpoints / "step_6").rename(checkpoints / ".tmp-step_6")
    (checkpoints / ".tmp-step_6" / MANIFEST_NAME).unlink()
    manifest = checkpoints / "step_4" / MANIFEST_NAME
    manifest.write_bytes(manifest.read_bytes()[:-9])
    yield Case(directory, settings, {"resume_step": "auto"})


def possessions(directory: Path) -> Counter[tuple[str, bytes]]:
    """Return what nobody may lose: files of steps and lines of metrics, wherever in the run they are."""
    found: Counter[tuple[str, bytes]] = Counter()
    for place, data in contents(directory).items():
        if ".tmp-" in place or "/trainer.log" in place:
            continue
        name = place.split("checkpoints/")[-1] if "checkpoints/" in place else place.rsplit("/", 1)[-1]
        lines = data.splitlines() if "metrics.jsonl" in name else [data]
        kind = "metrics" if "metrics.jsonl" in name else name
        if "checkpoints/" in place or kind in ("metrics", "notes.txt"):
            found.update((kind, line) for line in lines)
    return found


def in_place(directory: Path) -> dict[str, bytes]:
    """Return what the attempt starts from: everything but what it set aside and what names the attempt."""
    return {
        place: data
        for place, data in contents(directory).items()
        if not place.startswith(("discarded/", "configs/", "run.json", "run.lock"))
    }


def check_death(number: int, instant: str, case: Case, output: Path, expected: dict[str, bytes]) -> None:
    """Die, look, start again, compare."""
    shutil.copytree(case.directory, output)
    owned, log = possessions(case.directory), output.with_suffix(".out")
    assert case.prepare(output, kill_at=number, instant=instant) == -signal.SIGKILL, log.read_text()
    assert not owned.keys() - possessions(output).keys()
    assert case.prepare(output) == 0, log.read_text()
    assert not owned.keys() - possessions(output).keys() and differing(in_place(output), expected) == []
    whole_steps(output / "checkpoints")
    shutil.rmtree(output)


def test_killed_at_any_call_of_a_start_the_next_goes_on_bit_for_bit(case: Case, finished: Path, tmp_path: Path) -> None:
    untouched = contents(case.other) if case.other else {}
    undisturbed = tmp_path / "undisturbed"
    shutil.copytree(case.directory, undisturbed)
    assert case.prepare(undisturbed) == 0, undisturbed.with_suffix(".out").read_text()
    calls, state = read_trail(undisturbed.with_suffix(".trail")), in_place(undisturbed)
    assert differing(state, in_place(case.directory)), "this start changes nothing"
    instants = deaths(calls)
    assert len(instants) >= 15
    for place, (number, instant) in enumerate(instants):
        check_death(number, instant, case, tmp_path / f"death {place}", state)
    assert not case.other or contents(case.other) == untouched
    resume = max(RunDir(undisturbed).committed_steps())
    train("sft", undisturbed, case.settings | {"ckpt": {"interval": 2}}, until=LAST, resume=resume)
    assert differing(*[end_state(RunDir(path), last=LAST, first=resume + 1) for path in (undisturbed, finished)]) == []


def test_killed_at_any_call_of_clean_no_rest_resumes(settings: dict[str, Any], finished: Path, tmp_path: Path) -> None:
    """The run is there as it was, or the next start, which asks to go on with it, removes the rest and is a new run."""
    before = tmp_path / "before"
    shutil.copytree(finished, before)
    (before / "rollouts").mkdir()
    (before / "rollouts" / "generations_7.log").write_bytes(b"of the old run")
    (before / "notes.txt").write_text("mine")
    weights = tmp_path / "other disk"
    (before / "weights").rename(weights)
    cleaning, going_on = Case(before, settings, {}), Case(before, settings, {"resume_step": "auto"})

    def copy(name: str) -> Path:
        output = tmp_path / name
        shutil.copytree(before, output)
        shutil.copytree(weights, tmp_path / f"{name} weights")
        (output / "weights").symlink_to(tmp_path / f"{name} weights")
        identity = RunDir(output).identity() | {"directory": directory_name(RunDir(output))}  # else it is a copy
        (output / "run.json").write_text(json.dumps(identity))
        return output

    undisturbed = copy("undisturbed")
    assert cleaning.prepare(undisturbed, clean=True) == 0, undisturbed.with_suffix(".out").read_text()
    instants = deaths(read_trail(undisturbed.with_suffix(".trail")))
    new = {"notes.txt", "run.json", "run.lock", "configs/attempt_1/sft.toml", "configs/attempt_1/inputs.json"}
    assert contents(undisturbed).keys() == new and (undisturbed / "weights").is_symlink()
    old, resumed = RunDir(before).run_id(), 0
    for place, (number, instant) in enumerate(instants):
        output = copy(f"death {place}")
        log = output.with_suffix(".out")
        assert cleaning.prepare(output, clean=True, kill_at=number, instant=instant) == -signal.SIGKILL, log.read_text()
        assert going_on.prepare(output) == 0, log.read_text()
        if RunDir(output).run_id() == old:
            resumed += 1
            assert [*whole_steps(output / "checkpoints")] == [2, 4, 6]
        else:
            named = {place for place in contents(output) if ".tmp-" not in place}
            assert named <= {*new, "configs/attempt_2/sft.toml", "configs/attempt_2/inputs.json"}
        assert (output / "weights").is_symlink() and (output / "notes.txt").read_text() == "mine"
        shutil.rmtree(output)
    assert 1 <= resumed <= 12 < len(instants)  # only up to the mark; before it, a start tries what it can write
