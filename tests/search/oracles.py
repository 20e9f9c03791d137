"""What must hold of every run, by the names of docs/guarantees.md."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.errors import CheckpointError
from holdfast.launcher.resume.attempt import CONFIG_NAME
from holdfast.orchestrator.judge_client import Replied
from holdfast.run.manifest import verify
from holdfast.run.metrics import read_metrics
from holdfast.run.record_log import read_records
from holdfast.run.run_dir import RunDir
from holdfast.view.follow import Tail
from tests.runs.rl import checkpoint_tensors, exact_metrics
from tests.search.grammar import Case
from tests.search.players import JudgeProcess
from tests.search.witness import Witness

_OF_A_START = ("run.lock", "orchestrator.lock", "logs/", "configs/dry_run")


@dataclass(frozen=True)
class Finding:
    """A promise that was broken. `promise`: its name; `what`: how."""

    promise: str
    what: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.what}"


def files_of(run: Path) -> dict[str, str]:
    """Return a digest of every file of a run, except what any start may touch."""
    found = {}
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
        if path.is_symlink():
            found[name] = f"link to {path.readlink()}"
        elif path.is_file() and not name.startswith(_OF_A_START):
            found[name] = hashlib.sha1(path.read_bytes()).hexdigest()
    return found


def check_console(said: str, code: int) -> list[Finding]:
    found = [] if "Traceback (most recent" not in said else [Finding("no traceback", said[-3000:])]
    if code in (1, 2, 3) and "error: " not in said:
        found.append(Finding("exit codes", f"a start ended with {code} and without an error:\n{said[-1000:]}"))
    return found


def check_run(
    run: RunDir,
    reference: RunDir,
    case: Case,
    *,
    witness: Witness | None,
    has_changed: bool,
    has_moved: bool,
    tracked: Path,
) -> list[Finding]:
    """Return the promises that a run has broken which has ended well."""
    found: list[Finding] = []
    try:
        if not has_changed:
            found += _check_bits(run, reference, case, has_moved=has_moved)
        found += _check_committed(run, case)
        found += _check_left(run)
        if (
            witness is not None
            and not has_changed
            and (case.features["store"], case.features["begins"]) == ("none", "from scratch")
        ):
            found += _check_journal(witness, case)
        if witness is not None and has_changed and case.program == "rl":
            found += _check_mixed(witness)
        if case.features["tracker"] == "own":
            found += _check_tracker(run, tracked, has_moved=has_moved)
        if case.features.get("evaluation") == "beside" and not has_changed:
            found += _check_evaluations(run, reference)
    except (CheckpointError, AssertionError, OSError, ValueError, KeyError) as error:
        found.append(Finding("whole", f"{type(error).__name__}: {error}"))
    return found


def _state(run: RunDir, step: int) -> dict[str, bytes]:
    """Return all that the run amounts to at a step: files of its weights, tensors, counters and random generators."""
    checkpoint = run.checkpoint(step)
    places = [run.weights_of(step), run.weights / f"ema_step_{step}"]
    files = [path for one in places for path in one.glob("*.safetensors")]
    found = {f"{path.parent.name}/{path.name}": path.read_bytes() for path in files}
    parts = [path for name in ("trainer", "orchestrator") for path in (checkpoint / name).rglob("*") if path.is_file()]
    return found | {str(path.relative_to(checkpoint)): path.read_bytes() for path in parts}


def _differing(run: RunDir, reference: RunDir, step: int) -> list[str]:
    mine, theirs = _state(run, step), _state(reference, step)
    names = [name for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)]
    names = [name for name in names if not name.endswith(CONFIG_NAME)]  # it has the place of the run
    if not any(name.endswith((".distcp", ".metadata")) for name in names):
        return names
    places = [one.checkpoint(step) / "trainer" for one in (run, reference)]
    tensors, others = (checkpoint_tensors(place) for place in places)  # files may differ in what does not count
    differing = [name for name in sorted(tensors.keys() | others.keys()) if tensors.get(name) != others.get(name)]
    return [*(name for name in names if not name.endswith((".distcp", ".metadata"))), *differing]


def _check_bits(run: RunDir, reference: RunDir, case: Case, *, has_moved: bool) -> list[Finding]:
    other = _differing(run, reference, case.steps)
    found = [Finding("final bits", f"{len(other)} parts differ: {', '.join(other[:5])}")] if other else []
    first = 2 if case.features["begins"] == "as a fork" else 1
    lines = [int(line["step"]) for line in read_metrics(run.metrics)]
    if has_moved:  # what was trained on the lost machine has no line here
        first = lines[0] if lines else case.steps + 1
    steps = range(first, case.steps + 1)
    if lines != list(steps):
        return [*found, Finding("metrics", f"the steps of metrics.jsonl are {lines}")]
    for mine_line, their_line in zip(exact_metrics(run, steps), exact_metrics(reference, steps), strict=True):
        keys = sorted(key for key in mine_line.keys() | their_line.keys() if mine_line.get(key) != their_line.get(key))
        if keys:
            found.append(Finding("metrics", f"step {mine_line['step']} differs in {', '.join(keys[:5])}"))
    return found[:2]


def _check_committed(run: RunDir, case: Case) -> list[Finding]:
    found = []
    for entry in run.entries():
        if entry.status != "committed":
            found.append(Finding("whole", f"{entry.path.name} is {entry.status}: {entry.reason}"))
            continue
        verify(entry.path, step=entry.step)
    for version in run.published_weights():
        verify(run.weights_of(version), step=version)
    keep = case.features["keep"]
    steps = [entry.step for entry in run.entries()]
    # The step that was resumed stays as well; so do steps that wait for their evaluation, also after the training.
    if keep != "all" and case.features.get("evaluation") != "beside" and len(steps) > int(keep) + 1:
        found.append(Finding("bounded disk", f"ckpt.keep is {keep}, and there are the steps {steps}"))
    if case.steps not in steps:
        found.append(Finding("whole", f"the last step {case.steps} is not saved: {steps}"))
    return found


def _check_left(run: RunDir) -> list[Finding]:
    left = [str(path.relative_to(run.path)) for path in run.path.rglob(".tmp-*")]
    left += [path.name for path in run.path.glob("removal.mark")]
    return [Finding("nothing is left behind", f"{', '.join(sorted(left)[:5])}")] if left else []


def _check_journal(witness: Witness, case: Case) -> list[Finding]:
    if case.program != "rl":
        return []
    batches = witness.batches()
    found = []
    if remade := [step for step, made in batches.items() if len(made) > 1]:
        found.append(Finding("a journaled batch stays", f"batches {remade} were made again"))
    trained: Counter[tuple[str, int, int]] = Counter(
        (rollout.environment, rollout.task_id, rollout.sample_index)
        for made in batches.values()
        for rollout in made[-1].rollouts
    )
    if twice := [task for task, count in trained.items() if count > 1]:
        found.append(Finding("no task is trained twice", f"{twice[:4]}"))
    logged = witness.generations()
    if twice_logged := {
        step: sum(one.values()) - len(one) for step, one in logged.items() if sum(one.values()) > len(one)
    }:
        found.append(Finding("no finished answer is generated twice", f"by batch: {twice_logged}"))
    return found


def _check_mixed(witness: Witness) -> list[Finding]:
    """No batch is scored by an environment before and after it was edited, which adds 100."""
    for step, made in witness.batches().items():
        rewards = [rollout.reward for batch in made[-1:] for rollout in batch.rollouts]
        if rewards and min(rewards) < 50 < max(rewards):
            return [Finding("inputs are known by content", f"batch {step} is scored by two versions of the code")]
    return []


def _check_tracker(run: RunDir, tracked: Path, *, has_moved: bool) -> list[Finding]:
    """The newest history of the run has the steps of metrics.jsonl, each once, with its value."""
    ours = {int(line["step"]): line["loss"] for line in read_metrics(run.metrics)}
    histories = sorted(tracked.glob(f"{run.run_id()}*.txt"), key=lambda path: (len(path.name), path.name))
    if not histories:
        return [Finding("trackers", f"no tracked run of {run.run_id()}")]
    lines = histories[-1].read_text().splitlines()
    others = {line.split()[1] for line in lines if line.startswith("begin")} - {str(run.path)}
    if others and run.path.name != "moved":
        return [Finding("trackers", f"one tracked run has steps of {others} and of {run.path}")]
    sent = [(int(line.split()[1]), float(line.split()[2])) for line in lines if line.startswith("step")]
    theirs = dict(sent)
    twice = [step for step, count in Counter(step for step, _ in sent).items() if count > 1]
    if any(
        theirs[step] != dict(sent[:place])[step] for place, (step, _) in enumerate(sent) if step in dict(sent[:place])
    ):
        return [Finding("trackers", f"steps {twice} were sent with two values")]
    theirs = {step: loss for step, loss in theirs.items() if not has_moved or step in ours}
    told = "".join(path.read_text() for path in histories)
    if silent := [text for text in _alarms(run) if text not in told]:
        return [Finding("trackers", f"not sent: {silent[0]}")]
    if theirs != ours:
        other = [step for step in sorted(ours.keys() | theirs.keys()) if ours.get(step) != theirs.get(step)]
        return [Finding("trackers", f"steps {other} differ from metrics.jsonl (histories: {len(histories)})")]
    return []


def _alarms(run: RunDir) -> list[str]:
    """Return the warnings of all attempts; a line that a power cut has torn is none."""
    found = [event.get("phase", "") for _, path in run.logged("events.jsonl") for event in Tail(path)]
    return [text.removeprefix("WARNING: ") for text in found if text.startswith("WARNING: ")]


def check_judge(run: RunDir, judge: JudgeProcess, *, at_most: int) -> list[Finding]:
    """No reply is kept twice, and only what was in flight at a hit is asked again."""
    payloads, _ = read_records(run.judgements)
    kept = [msgspec.msgpack.decode(payload, type=Replied).request for payload in payloads]
    if len(kept) > len(set(kept)):
        return [Finding("no reply is paid twice", f"{len(kept) - len(set(kept))} replies were kept twice")]
    if (again := judge.questions("asked").total() - len(kept)) > at_most:
        return [
            Finding("no reply is paid twice", f"{again} questions were asked again; at most {at_most} were in flight")
        ]
    return []


def check_stopped(run: RunDir) -> list[Finding]:
    """A run that says that it stopped with its last step saved has saved it."""
    steps = [int(line["step"]) for line in read_metrics(run.metrics)] if run.metrics.exists() else []
    saved = max((entry.step for entry in run.entries() if entry.status == "committed"), default=0)
    if steps and saved != steps[-1]:
        return [Finding("a stop saves", f"the last step is {steps[-1]}, the newest checkpoint {saved}")]
    return []


def _check_evaluations(run: RunDir, reference: RunDir) -> list[Finding]:
    def of(one: RunDir) -> dict[str, list[bytes]]:
        places = sorted(one.evaluations.glob("step_*/rollouts.jsonl"))
        return {place.parent.name: sorted(place.read_bytes().splitlines()) for place in places}

    mine, theirs = of(run), of(reference)
    other = [name for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)]
    summaries = [json.loads(place.read_text()) for place in run.evaluations.glob("step_*/summary.json")]
    if other or len(summaries) != len(mine):
        return [Finding("evaluations", f"{other} differ; {len(summaries)} of {len(mine)} have ended")]
    return []
