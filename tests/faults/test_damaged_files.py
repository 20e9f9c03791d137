"""Every file that a killed run of each program has left is damaged, and the same command is given again. It heals that,
says it, or refuses it with a way out, and never goes on to other bits. A kind of file without a row in `KINDS` fails
the test."""

import json
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from fastapi import Response

from holdfast.errors import DataError
from holdfast.run.manifest import read_manifest
from holdfast.run.run_dir import RunDir
from holdfast.trainer.data.tokenizing import FEW_ROWS
from tests.faults.held_steps import NEVER, held_after
from tests.faults.run_states import checkpoint_state, differing
from tests.forking.commands import Run, shared_commands, wait_for
from tests.runs.processes import WITH_STUB_ENGINE
from tests.runs.rl import CONFIG, MODEL, exact_metrics, last_step, survivors
from tests.runs.training import PAIRS
from tests.servers.judge import Body, FakeJudge, completion, judge_serving, score_of

pytestmark = [pytest.mark.launch, pytest.mark.timeout(1800)]

LAST, SAVED, HELD = 6, 4, 5
"""Steps of a run, the newest that is saved when it is killed, and the newest that is trained then."""
KINDS = (
    # Who the run is, and by which settings it was begun.
    (r"run/run\.json", "refused"),
    (r"run/configs/attempt_N/inputs\.json", "told"),
    (r"run/configs/attempt_N/rl\.toml", "same"),
    (r"run/configs/attempt_N/(trainer|orchestrator|inference)\.toml", "refused"),
    (r"run/configs/attempt_N/\w+\.toml", "refused"),
    # What the next attempt continues from: an older step is taken, a batch is made again.
    (r"run/checkpoints/step_N/trainer/reference_logprobs\.npz", "told"),
    (r"run/checkpoints/step_N/orchestrator/.*", "told"),
    (r"run/checkpoints/step_N/.*", "told"),
    (r"run/rollouts/step_N/trained\.json", "shown"),
    (r"run/rollouts/step_N/.*", "told"),
    (r"run/rollouts/generations_N\.log", "same"),
    (r"run/judgements\.log", "same"),
    (r"run/evaluations/step_N/rollouts/generations_N\.log", "same"),
    (r"run/evaluations/step_N/(evaluation|run)\.json", "same"),
    (r"run/evaluations/step_N/config/.*", "same"),
    (r"run/evaluations/step_N/model_step_N_H/.*", "same"),
    (r"run/evaluations/step_N/rollouts\.jsonl", "same"),
    # What is made again without a word.
    (r"run/weights/step_N/.*", "same"),
    (r"run/reference_logprobs\.npz", "same"),
    (r"run/(evaluations/)?(run|orchestrator)\.lock", "shown"),
    (r"cache/.*", "same"),
    # What is shown, and read by no process that trains.
    (r"run/metrics\.jsonl", "shown"),
    (r"run/evaluations/step_N/summary\.json", "shown"),
    (r"run/(evaluations/step_N/)?logs/.*", "shown"),
    (r"run/tensorboard/.*", "shown"),
    (r"run/tracking/.*", "shown"),
)
"""Kinds of files, numbers as N, and what comes of their damage:

`same`      the run ends with the bits of one that nothing disturbed
`told`      the same, and a line names the file
`shown`     the same, but for what is shown of the run
`refused`   exit code 2; the message names the file and a way out, by which the run ends with those bits
"""


def _flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "flipped": _flip, "cut": lambda content: content[: len(content) // 2], "emptied": lambda content: b"",
}  # fmt: skip


@dataclass(frozen=True)
class Program:
    """A run that is killed. `flags`: of its command, where `CASE` stands for the directory that is damaged, and `HOME`
    for that of all cases."""

    name: str
    flags: tuple[str, ...]
    fault: str  # source that runs in its trainer
    is_held: Callable[[Path], bool]  # whether it has done all that it does before it is killed

    def start(self, case: Path, *flags: str, fault: str = "") -> Run:
        words = [word.replace("CASE", str(case)).replace("HOME", str(case.parent)) for word in (*self.flags, *flags)]
        environment = {**os.environ, **WITH_STUB_ENGINE}
        argv = [*words, "--output-dir", str(case / "run")]
        return shared_commands().start(
            self.name, case / "run", argv, log=case.with_suffix(".out"), environment=environment, trainer_fault=fault
        )

    def killed(self, case: Path) -> None:
        """Leave in `case` what there is when the run is killed."""
        run = self.start(case, fault=self.fault)
        wait_for(lambda: self.is_held(case), f"the middle of {self.name}", run)
        run.kill()
        assert not survivors(RunDir(case / "run"), set())
        (case.parent / "released").touch()


_SMALL = ("--max-steps", str(LAST), "--ckpt.interval", "2")
_TRAINS = ("--model.name", str(MODEL), "--optim.lr", "1e-3", "--parallel.threads", "1", *_SMALL)
_TEXT = ("--data.batch-size", "8", "--data.micro-batch-size", "4", "--data.seq-len", "64")
_VALIDATED = ("--data.validation-fraction", "0.1", "--val-interval", "2")
_COUNTED = {"home": "HOME"}  # no file: those are known by content


def _has_trained(case: Path) -> bool:
    run_dir = RunDir(case / "run")
    return last_step(run_dir) == HELD and SAVED in run_dir.committed_steps()


def _groups(case: Path) -> int:
    counted = case.parent / "counted"
    return counted.stat().st_size if counted.exists() else 0


DPO = Program(
    "dpo", (*_TRAINS, "--data.name", str(PAIRS), *_TEXT, *_VALIDATED), held_after(HELD, until=NEVER), _has_trained
)
_EVALUATED = 5
SFT = Program(
    "sft",
    (
        *_TRAINS, "--data.name", "HOME/rows.jsonl", "--data.cache-dir", "CASE/cache", *_TEXT, *_VALIDATED,
        "--model.lora.rank", "2", "--model.lora.alpha", "8", "--tracking.backends", "tensorboard",
        "--eval.interval", "4", "--eval.num-tasks", str(_EVALUATED), "--eval.samples-per-task", "2",
        "--eval.seq-len", "64", "--eval.sampling.max-tokens", "8", "--eval.environments",
        json.dumps([{
            "id": "tests.runs.environments:HeldReverse", "args": {**_COUNTED, "after": _EVALUATED + 2}
        }]),
    ),
    held_after(HELD, until=NEVER),
    lambda case: _has_trained(case) and _groups(case) == 2 * _EVALUATED,
)  # fmt: skip
_PROBLEMS = 4


def _rl(judge: str) -> Program:
    section = {"url": judge, "model": "judge", "prompt": "{first} and {second}", "max_score": 10.0}
    args = {"judge": section, **_COUNTED, "after": _PROBLEMS * HELD + 1}
    return Program(
        "rl",
        (
            "@", CONFIG, *_SMALL, "--ckpt.keep", "null", "--trainer.parallel.threads", "1",
            "--orchestrator.environments",
            json.dumps([{"id": "tests.runs.environments:HeldJudged", "args": args}]),
            "--orchestrator.problems-per-step", str(_PROBLEMS), "--orchestrator.group-size", "4",
            "--orchestrator.sampling.max-tokens", "8", "--orchestrator.eval.interval", "2",
            "--orchestrator.eval.num-tasks", "3", "--orchestrator.eval.samples-per-task", "2",
            "--orchestrator.eval.environments", json.dumps([{"id": "reverse_text"}]),
        ),
        "",
        lambda case: _has_trained(case) and _groups(case) == _PROBLEMS * (HELD + 1),
    )  # fmt: skip


def _kind(place: str) -> str:
    return re.sub(r"\d+", "N", re.sub(r"[0-9a-f]{12,}", "H", place))


def _files(case: Path) -> dict[str, tuple[str, ...]]:
    """Return the newest file of each kind with all its links, by its place below `case`."""
    links: dict[int, list[str]] = {}
    newest: dict[str, tuple[list[int], str]] = {}
    for path in case.rglob("*"):
        place = str(path.relative_to(case))
        if not path.is_file() or not path.stat().st_size:
            continue
        links.setdefault(path.stat().st_ino, []).append(place)
        rank = [int(number) for number in re.findall(r"\d+", place)]
        newest[_kind(place)] = max(newest.get(_kind(place), (rank, place)), (rank, place))
    return {place: tuple(links[(case / place).stat().st_ino]) for _, place in newest.values()}


def _row(place: str) -> tuple[str, str]:
    found = [row for row in KINDS if re.fullmatch(row[0], _kind(place))]
    assert found, f"a new writer without a case: say in KINDS what comes of a damaged {place}"
    return found[0]


def _state(case: Path) -> dict[str, object]:
    """Return what a run amounts to: its last checkpoint, weights and evaluations, and what is shown of it."""
    run_dir = RunDir(case / "run")
    state: dict[str, object] = dict(checkpoint_state(run_dir.checkpoint(LAST)))
    for path in run_dir.weights_of(LAST).rglob("*.safetensors"):
        state[f"weights {path.name}"] = path.read_bytes()
    for path in run_dir.evaluations.glob("step_*/rollouts.jsonl"):
        state[f"evaluation {path.parent.name}"] = sorted(path.read_bytes().splitlines())
    try:
        state["shown"] = exact_metrics(run_dir, range(1, LAST + 1))
    except (AssertionError, DataError):
        state["shown"] = "lines are missing"
    return state


def _fix(case: Path, place: str) -> tuple[str, ...]:
    """Take the way out that the refusal names; return the flags of the next start."""
    path, run_dir = case / place, RunDir(case / "run")
    if path.name == "run.json":
        path.write_text(json.dumps({"run_id": read_manifest(run_dir.checkpoint(SAVED)).run_id}))
        return ()
    path.unlink()
    return ("--ckpt.resume-step", "auto")


def _come_of(program: Program, case: Path, place: str, expected: dict[str, object]) -> str:
    """Give the command again; return what comes of it, in the words of `KINDS` if it may."""
    run = program.start(case).wait()
    if is_refused := run.code == 2:
        if "Traceback" in run.log or str(case / place) not in run.log:
            return f"refused without naming the file: {run.log}"
        run = program.start(case, *_fix(case, place)).wait()
    logs = RunDir(case / "run").newest_logs()
    said = run.log + "".join(path.read_text(errors="replace") for path in logs.glob("*.log"))
    if "Traceback" in said or run.code != 0:
        return f"exit code {run.code}: {said}"
    if different := differing(_state(case), expected):
        return "shown" if different == ["shown"] else f"other bits: {different}"
    if is_refused:
        return "refused"
    return "told" if str(case / place) in said else "same"


def _cases(killed: Path, done: set[str]) -> list[tuple[str, str]]:
    """Return places of files and what is done to them, for each row that is not `done`; its files take turns. A flipped
    bit counts most: what is only shown has one damage, and what ends the same two."""
    places: dict[tuple[str, str], list[str]] = {}
    for place in sorted(_files(killed)):
        places.setdefault(_row(place), []).append(place)
    cases: list[tuple[str, str]] = []
    for turn, ((pattern, expects), found) in enumerate(places.items()):
        if pattern not in done:
            most = {"shown": 1, "same": 2}.get(expects, 3)
            damages = ["flipped", "cut", "emptied"] if turn % 2 else ["flipped", "emptied", "cut"]
            damages = [damages[turn % 3]] if most == 1 else damages[:most]
            cases += [(found[place * len(found) // len(damages)], damage) for place, damage in enumerate(damages)]
            done.add(pattern)
    return cases


def _wrong(program: Program, home: Path, done: set[str]) -> list[str]:
    """Damage the files of a run one by one; return what came of it and should not."""
    killed, straight = home / "killed", home / "straight"
    home.mkdir()
    _write_rows(home / "rows.jsonl")
    program.killed(killed)
    program.start(straight).succeed()
    expected, links, cases = _state(straight), _files(killed), _cases(killed, done)

    def come_of(number: int) -> str:
        place, damage = cases[number]
        case = home / f"case_{number}"
        shutil.copytree(killed, case)
        for link in links[place]:
            content = (case / link).read_bytes()
            with (case / link).open("r+b") as file:  # in place, as a disk does it
                file.write(DAMAGES[damage](content))
                file.truncate()
        came = _come_of(program, case, place, expected)
        shutil.rmtree(case)
        wanted = _row(place)[1]
        is_right = came == wanted or (wanted in ("same", "shown") and came in ("same", "told"))
        return "" if is_right else f"{program.name}: {place}, {damage}, is to be {wanted}, and: {came}"

    with ThreadPoolExecutor(2) as pool:
        return [wrong for wrong in pool.map(come_of, range(len(cases))) if wrong]


def test_no_damage_to_a_file_of_a_run_changes_its_end_unnoticed(tmp_path: Path, in_root: Path) -> None:
    done: set[str] = set()
    with judge_serving(FakeJudge(_scored)) as judge:
        wrong = [one for made in (DPO, SFT, _rl(judge.url)) for one in _wrong(made, tmp_path / made.name, done)]
    assert not wrong, "\n\n".join(wrong)
    assert done == {pattern for pattern, _ in KINDS}, "a row is of files that no run writes"


async def _scored(body: Body) -> Response:
    return completion(score_of(body))


def _write_rows(path: Path) -> None:
    with path.open("w") as file:
        for number in range(FEW_ROWS + 100):
            file.write(json.dumps({"prompt": f"{number}>", "completion": str(number)[::-1]}) + "\n")
