"""Every removal of a run's files, killed at each of its calls and begun again: what it removes is there as before, or
not at all. A place in `src` that removes or renames files and has no row in `REMOVALS` fails the test."""

import ast
import asyncio
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest

from holdfast.commands.ckpt import prune
from holdfast.config.evaluation import EvaluateConfig
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.launcher.evaluation.follow import _clear_leftovers, _clear_other_evaluation
from holdfast.launcher.evaluation.policy import prepare_directory
from holdfast.launcher.resume.remote import fetch
from holdfast.launcher.resume.resume_step import clear_unpublished, set_aside_after, set_aside_damaged
from holdfast.orchestrator.evaluation.evaluator import HeldOutTasks, PolicyEvaluation, evaluate
from holdfast.orchestrator.evaluation.results import IDENTITY_NAME, ROLLOUTS_NAME, EvaluatedRollout, ResultsFile
from holdfast.orchestrator.generation_log import discard_generations
from holdfast.remote.checkpoints import RemoteCheckpoints
from holdfast.run.checkpoints import Retention
from holdfast.run.manifest import MANIFEST_NAME
from holdfast.run.run_dir import SUMMARY_NAME, RunDir
from holdfast.view.ckpt_dirs import CheckpointDirs
from tests.builders.checkpoint_files import write_checkpoint, write_weights
from tests.conftest import ROOT
from tests.faults.faulty_calls import deaths, in_faulty_child, read_trail

SOURCE = ROOT / "src" / "holdfast"
_REMOVING = frozenset(
    "rmtree unlink remove removedirs rmdir rename renames replace move truncate ftruncate remove_directory "  # noqa: SIM905
    "publish_directory clear_leftovers set_aside remove_run remove_tree".split()
)
_OF_FILES = {"os", "shutil", "atomic"}
OTHER_OBJECTS = {"self._saving", "self._loading", "rules", "hook", "handle", "surplus", "missing", "ended"}
"""What has methods of these names and is no file: tensor layouts, hooks and lists."""

ONE_CALL = "one call of the system removes one file, or gives it its name"
OWN = "names that begin with .tmp-, or places of a living process: nobody reads them"
CALLS = "only calls others that are named here"
_PLACES = {
    CALLS: "launcher/resume/remote.py fetch.bring, remote/uploader.py Uploader._failure_of, run/atomic.py _remove",
    ONE_CALL: (
        "launcher/launch.py with_evaluations, orchestrator/evaluation/results.py ResultsFile._write, "
        "run/atomic.py write_file, run/journal.py note_trained, run/record_log.py RecordLog.__init__, "
        "run/run_dir.py RunDir.note_early_end, "
        "trainer/model/weight_offers.py WeightOffers._withdraw, trainer/programs/rl.py run"
    ),
    OWN: (
        "commands/rollouts.py export, launcher/cluster/cluster.py check_shared, launcher/liveness.py "
        "LivenessMonitor.forget place_of_beats, process/heartbeat.py Heartbeat._write Heartbeat.end, "
        "process/scratch.py _remove hold, run/lock.py Holder.write, run/run_dir.py RunDir.require_writable, "
        "trainer/checkpoint/commit.py Commit.write _make_empty, trainer/export.py commit new_directory, "
        "trainer/exporting.py _write_dcp, trainer/model/safetensors_files.py SafetensorsWriter.close, "
        "trainer/model/publish.py WeightPublisher._describe_model, trainer/profiling.py Profiler._write"
    ),
    "a download over a damaged checkpoint": (
        "launcher/resume/remote.py fetch.bring.bring_rest, remote/checkpoints.py RemoteCheckpoints._download"
    ),
    "a step in a store": (
        "remote/checkpoints.py RemoteCheckpoints._remove RemoteCheckpoints._remove_directory "
        "RemoteCheckpoints.apply_retention RemoteCheckpoints.clear_leftovers, remote/object_store.py "
        "ObjectStore.remove_tree"
    ),
    "an evaluation of other weights": "orchestrator/evaluation/evaluator.py PolicyEvaluation._clear_others",
    "an evaluation that has ended": "orchestrator/evaluation/evaluator.py evaluate",
    "an evaluation with --clean": "launcher/evaluation/policy.py prepare_directory",
    "batches": "run/atomic.py remove_directory, run/run_dir.py RunDir.prune_batches",
    "pruned steps": "commands/ckpt.py prune, run/run_dir.py RunDir.remove",
    "evaluations that are followed": (
        "launcher/evaluation/follow.py _clear_leftovers _clear_other_evaluation, launcher/evaluation/policy.py "
        "remove_exports"
    ),
    "generations": "orchestrator/generation_log.py discard_generations",
    "later steps": "launcher/resume/resume_step.py set_aside set_aside_after set_aside_damaged",
    "leftovers": "launcher/resume/resume_step.py clear_unpublished, run/run_dir.py RunDir.clear_leftovers",
    "old attempts": "run/run_dir.py RunDir.remove_old_attempts",
    "published weights": "run/run_dir.py RunDir.remove_weights_after",
    "test_config_models.py": "config/chat_template.py _kept",
    "test_damaged_files.py": "launcher/evaluation/policy.py weights_of_step",
    "test_kill_during_start.py": (
        "launcher/resume/attempt.py _bring_directory, launcher/resume/prepare.py _make_room _remove_rest _settle, "
        "run/run_dir.py RunDir.remove_run _remove"
    ),
    "test_kill_in_commit.py": (
        "run/atomic.py publish_directory, trainer/checkpoint/commit.py Commit._after_commit "
        "Commit._claim_directory Commit._publish"
    ),
    "test_kill_orchestrator.py": "run/journal.py publish_batch",
    "test_search.py": (
        "trainer/model/publish.py WeightPublisher.prune WeightPublisher.publish, view/sending.py take_cursor"
    ),
    "test_remote.py": "remote/checkpoints.py RemoteCheckpoints._upload",
    "test_sft_evaluated.py": "launcher/evaluation/follow.py _evaluate_step",
    "test_token_cache.py": "trainer/data/tokenizing.py make_cached",
    "the next process of the tracker removes the rest": "view/backends.py WandB.begin",
}
"""What places are driven by here, the tests that kill them, or why there is nothing to kill -> the places."""
REMOVALS = {
    f"{file} {name}": how
    for how, places in _PLACES.items()
    for file, *names in map(str.split, places.split(", "))
    for name in names
}


def removals(source: Path) -> dict[str, set[str]]:
    """Return every function below `source` that removes or renames files, with the names of the calls."""
    found: dict[str, set[str]] = {}
    for path in sorted(source.rglob("*.py")):
        for name, call in calls(ast.parse(path.read_text())):
            if (what := _removes(call)) is not None:
                found.setdefault(f"{path.relative_to(source)} {name}", set()).add(what)
    return found


def calls(node: ast.AST, within: Sequence[str] = ()) -> Iterator[tuple[str, ast.Call]]:
    """Give every call with the name of the function that it stands in."""
    if isinstance(node, ast.Call):
        yield ".".join(within), node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        within = [*within, node.name]
    for child in ast.iter_child_nodes(node):
        yield from calls(child, within)


def _removes(call: ast.Call) -> str | None:
    match call.func:
        case ast.Name(id=name) if name in _REMOVING - {"replace", "truncate"}:  # those are not of files
            return name
        case ast.Attribute(value=owner, attr=name) if name in _REMOVING:
            whose = ast.unparse(owner)
            is_path = name != "replace" or (len(call.args) == 1 and not call.keywords)  # of texts, there are two
            others = {"dataclasses", "msgspec.structs", *OTHER_OBJECTS}
            is_list = name == "remove" and whose.endswith("children")
            return name if whose in _OF_FILES or (is_path and whose not in others and not is_list) else None
    return None


def test_every_removal_in_the_source_is_known() -> None:
    found = removals(SOURCE)
    assert found.keys() - REMOVALS.keys() == set(), "say in REMOVALS what comes of a kill in the middle of these"
    assert REMOVALS.keys() - found.keys() == set(), "these remove nothing any more"
    tests = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    known = {ONE_CALL, OWN, CALLS, *DRIVES, *tests, "the next process of the tracker removes the rest"}
    assert set(REMOVALS.values()) - known == set(), "neither driven here nor by a test"


@dataclass(frozen=True)
class Drive:
    """A removal. `clear`: what the next start clears beside that. `is_there`: whether a file counts, by its place;
    others are nobody's."""

    build: Callable[[Path], object]  # makes what is there
    act: Callable[[Path], object]  # removes of it; the next start does so again
    clear: Callable[[Path], object] = lambda case: RunDir(case).clear_leftovers()
    is_there: Callable[[Path, str], bool] = lambda case, place: ".tmp-" not in place


def _write(case: Path, *places: str) -> None:
    for place in places:
        (case / place).parent.mkdir(parents=True, exist_ok=True)
        (case / place).write_text(place)


def _batches(case: Path) -> None:
    """One of them is a link to where somebody has put it."""
    _write(case, *(f"rollouts/step_{step}/{name}" for step in (1, 3) for name in "ab"), "archive/a")
    (case / "rollouts/step_2").symlink_to(case / "archive")


def _prunable(case: Path) -> None:
    RunDir(case).create()
    for step in (1, 2, 3):
        write_checkpoint(RunDir(case), step, run_id=RunDir(case).run_id())
    _write(case, "discarded/attempt_2/rollouts/step_9/batch.msgpack")


def _prune(case: Path) -> None:
    prune(CheckpointDirs(case), keep=1, keep_interval=None, keep_best=None, discarded=True, dry_run=False)


def _later_steps(case: Path) -> None:
    run_dir = RunDir(case)
    for step in (1, 2):
        write_checkpoint(run_dir, step)
        write_weights(run_dir, step)
        _write(case, f"rollouts/step_{step}/batch.msgpack", f"rollouts/step_{step}/manifest.json")
        _write(case, f"evaluations/step_{step}/evaluation.json", f"evaluations/step_{step}/rollouts.jsonl")
    _write(case, "rollouts/generations_3.log")
    write_checkpoint(run_dir, 3)
    (run_dir.checkpoint(3) / MANIFEST_NAME).write_text("{")
    write_checkpoint(run_dir, 4, run_id="another")


def _set_aside(case: Path) -> None:
    # Checkpoints tell a start after a kill that batches are to be made again, see `last_kept_batch`.
    assert RunDir(case).checkpoint(2).exists() or not RunDir(case).batch(2).exists()
    set_aside_damaged(RunDir(case), 2)
    set_aside_after(RunDir(case), 1, 2)


_MODEL = {"name": "examples/reverse_text/model"}
_EVALUATION: dict[str, Any] = {"model": _MODEL, "environments": [{"id": "reverse_text"}]}
_FILES = (IDENTITY_NAME, ROLLOUTS_NAME, SUMMARY_NAME, "judgements.log", "rollouts/generations_0.log", "logs/a.log")


def _evaluation(case: Path, **settings: Any) -> EvaluateConfig:
    return EvaluateConfig.model_validate({**_EVALUATION, "output_dir": case, **settings})


def _evaluated(case: Path) -> None:
    prepare_directory(_evaluation(case), RunDir(case))
    _write(case, *_FILES, "model_step_3_ab/config.json", "model_step_3_ab/model.safetensors")


def _cleaned(case: Path) -> None:
    prepare_directory(_evaluation(case, clean=True, seed=8), RunDir(case))


def _followed(case: Path) -> None:
    for step in (2, 4):
        _evaluated(case / f"evaluations/step_{step}")


def _follow(case: Path) -> None:
    _clear_leftovers(case / "evaluations")
    _clear_other_evaluation(_evaluation(case / "evaluations/step_4", seed=8), RunDir(case / "evaluations/step_4"))


def _stored(case: Path) -> RemoteCheckpoints:
    return RemoteCheckpoints(f"file://{case}/store")


def _upload(case: Path) -> None:
    for step in (1, 2):
        write_checkpoint(RunDir(case / "of"), step)
    (case / "of/checkpoints").rename(case / "store")


def _damaged(case: Path) -> None:
    _upload(case)
    write_checkpoint(RunDir(case), 2)
    (case / "checkpoints/step_2/trainer/progress.json").write_text("{")


def _download(case: Path) -> None:
    fetch(f"file://{case}/store", RunDir(case), "latest")


def _tasks(case: Path) -> HeldOutTasks:
    section = {"id": "reverse_text"}
    config = OrchestratorConfig.model_validate(
        {"output_dir": case, "model": _EVALUATION["model"], "environments": [section], "group_size": 1}
    )
    return HeldOutTasks(config, {}, {}, {"reverse_text": 2}, seed=0)


_POLICY: dict[str, Any] = {"kind": "weights", "digest": "d", "version": 2}


def _played(case: Path) -> None:
    async def play() -> None:
        with closing(ResultsFile(case, _tasks(case).identity(_POLICY), samples_per_task=1)) as results:
            for task in range(2):
                await results.append([EvaluatedRollout(environment="reverse_text", task=task)])

    asyncio.run(play())
    _write(case, *(f"rollouts/generations_{number}.log" for number in (1, 2)))


def _summarize(case: Path) -> None:
    nobody = cast(Any, None)  # all is played
    played = evaluate(_tasks(case), _POLICY, nobody, tokenizer=nobody, directory=case, max_concurrency=1, tells=False)
    asyncio.run(played)


def _clear_others(case: Path) -> None:
    tasks, nobody = _tasks(case), cast(Any, None)
    online = PolicyEvaluation(tasks, nobody, interval=1, run_dir=RunDir(case), tokenizer=nobody, max_concurrency=1)
    online._clear_others(RunDir(case).evaluation(2), {**_POLICY, "digest": "another"})


DRIVES: dict[str, Drive] = {
    "batches": Drive(_batches, lambda case: RunDir(case).prune_batches(2)),
    "pruned steps": Drive(
        _prunable,
        _prune,
    ),
    "published weights": Drive(
        lambda case: [write_weights(RunDir(case), version) for version in range(4)],
        lambda case: RunDir(case).remove_weights_after(1),
    ),
    "old attempts": Drive(
        lambda case: _write(
            case, *(f"{kind}/attempt_{k}/{name}" for kind in ("logs", "configs") for k in (2, 3) for name in "ab"),
            "checkpoints/discarded/attempt_1/step_2/a",
        ),
        lambda case: RunDir(case).remove_old_attempts(2),
    ),
    "later steps": Drive(_later_steps, _set_aside),
    "generations": Drive(
        lambda case: _write(case, *(f"rollouts/generations_{step}.log" for step in (1, 2, 3))),
        lambda case: discard_generations(RunDir(case), up_to=2),
    ),
    "leftovers": Drive(
        lambda case: _write(
            case, "run.json", ".tmp-run.json-1", "rollouts/.tmp-step_5-1/a", "checkpoints/.tmp-step_2/b/c",
            "evaluations/.tmp-step_2-1/d", "weights/.tmp-step_2-1/e", "logs/attempt_1/.tmp-profile-1/f",
        ),
        lambda case: (clear_unpublished(RunDir(case)), RunDir(case).clear_leftovers()),
    ),
    "an evaluation with --clean": Drive(_evaluated, _cleaned),
    "evaluations that are followed": Drive(_followed, _follow, _follow),
    "an evaluation that has ended": Drive(
        _played, _summarize, is_there=lambda case, place: not place.startswith(("rollouts/", ".tmp-"))
    ),
    "an evaluation of other weights": Drive(lambda case: _played(case / "evaluations/step_2"), _clear_others),
    "a download over a damaged checkpoint": Drive(_damaged, _download),
    "a step in a store": Drive(
        _upload,
        lambda case: _stored(case).apply_retention(Retention(keep=1)),
        lambda case: _stored(case).clear_leftovers(),
        is_there=lambda case, place: (case / "/".join(place.split("/")[:2]) / MANIFEST_NAME).exists(),
    ),
}  # fmt: skip


_VARYING = re.compile(r"(^|/)(run\.(json|lock)|evaluate\.toml)$")
"""Ids, processes and paths."""


def _same(one: Mapping[str, bytes] | None, other: Mapping[str, bytes] | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.keys() == other.keys() and all(one[name] == other[name] for name in one if not _VARYING.search(name))


def _files(case: Path) -> dict[str, bytes]:
    """Return every file, behind links to other filesystems as well."""
    found = [Path(place) / name for place, _, names in os.walk(case, followlinks=True) for name in names]
    return {str(path.relative_to(case)): path.read_bytes() for path in found}


def _units(case: Path, drive: Drive) -> dict[str, dict[str, bytes]]:
    """Return what is there, by what must be there as a whole: a step, an attempt, a model, or else a file."""
    units: dict[str, dict[str, bytes]] = {}
    for place, content in _files(case).items():
        if drive.is_there(case, place):
            whole = re.match(r".*(?<=/)((model_)?step|attempt)_\w+(?=/)|model_step_\w+(?=/)", place)
            units.setdefault(whole[0] if whole else place, {})[place] = content
    return units


_LINKED = {"checkpoints", "rollouts", "weights", "evaluations", "store"}


def _copy(built: Path, case: Path, elsewhere: Path | None) -> None:
    shutil.copytree(built, case, symlinks=True)
    if elsewhere is None:
        return
    for path in sorted(case.iterdir()):
        if path.name in _LINKED:
            shutil.move(path, elsewhere / path.name)
            path.symlink_to(elsewhere / path.name)


def _act(drive: Drive, case: Path, elsewhere: Path | None, **fault: Any) -> int:
    return in_faulty_child(lambda: drive.act(case), case, linked=str(elsewhere or ""), **fault)


@pytest.fixture
def elsewhere(request: pytest.FixtureRequest) -> Iterator[Callable[[], Path] | None]:
    """A maker of directories on another filesystem than that of the run, or None."""
    if not request.param:
        yield None
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as home:
        yield lambda: Path(tempfile.mkdtemp(dir=home))


_HERE = {"generations", "leftovers", "an evaluation with --clean", "an evaluation that has ended"}
"""Drives that remove nothing behind a link."""


@pytest.mark.clock
@pytest.mark.parametrize(
    ("name", "elsewhere"),
    [(name, links) for name in DRIVES for links in (False, True) if not (links and name in _HERE)],
    indirect=["elsewhere"],
)
def test_killed_at_any_call_of_a_removal_all_is_as_before_or_gone(
    name: str, elsewhere: Callable[[], Path] | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    drive, built = DRIVES[name], tmp_path / "built"
    built.mkdir()
    drive.build(built)
    before = _units(built, drive)

    def made(case: Path) -> Path | None:
        other = elsewhere() if elsewhere is not None else None
        _copy(built, case, other)
        return other

    straight = tmp_path / "straight"
    other = made(straight)
    assert _act(drive, straight, other) == 0, capfd.readouterr().err
    after = _units(straight, drive)
    assert name == "leftovers" or before != after, "nothing is removed"
    drive.act(straight)
    drive.clear(straight)
    cleared = _files(straight).keys()
    for place, (number, instant) in enumerate(deaths(read_trail(straight.with_suffix(".trail")))):
        case = tmp_path / f"death_{place}"
        other = made(case)
        assert _act(drive, case, other, kill_at=number, instant=instant) == -signal.SIGKILL
        now = _units(case, drive)
        for unit in before.keys() | after.keys() | now.keys():
            old, new = before.get(unit), after.get(unit)
            # What is replaced is away in between, or lies beside.
            allowed = [old] if _same(old, new) and not _VARYING.search(unit) else [old, new, None]
            assert any(_same(now.get(unit), one) for one in allowed), f"{unit} is there in part after {number} calls"
        drive.act(case)
        drive.clear(case)
        assert _files(case).keys() == cleared, f"something is left of what was killed after {number} calls"
        assert all(_same(one, _units(straight, drive).get(unit)) for unit, one in _units(case, drive).items())
        shutil.rmtree(case)


def test_every_removal_that_is_driven_here_is_reached(tmp_path: Path) -> None:
    reached: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(str(SOURCE)):
            name = frame.f_code.co_qualname.replace(".<locals>", "")
            reached.add(f"{Path(file).relative_to(SOURCE)} {name}")

    for what, drive in DRIVES.items():
        case = tmp_path / what.replace(" ", "_")
        case.mkdir()
        drive.build(case)
        sys.setprofile(note)
        try:
            drive.act(case)
            drive.clear(case)
        finally:
            sys.setprofile(None)
    assert {place for place, how in REMOVALS.items() if how in DRIVES} - reached == set()
