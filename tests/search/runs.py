"""Plays a case: the run that nothing disturbs, kept for later cases of the same features, and the run that is hit."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from holdfast.run import atomic
from holdfast.run.run_dir import RunDir
from tests.conftest import ROOT
from tests.forking.commands import Run, shared_commands
from tests.models.chat_templates import FORGETFUL
from tests.runs.ports import free_port
from tests.runs.rl import MODEL, survivors
from tests.search import events
from tests.search.grammar import Case, plain
from tests.search.oracles import Finding, check_console, check_judge, check_run, check_stopped, files_of
from tests.search.players import AT_ONCE, JudgeProcess
from tests.search.witness import Witness

START_TIMEOUT_S = 90.0
"""Longer than any start of a searched run takes on a busy machine; what takes longer hangs."""
_MOST_STARTS = 6
_LOOK_S = 0.01
_DOCUMENTED = (0, 1, 3, 4, 5, 6, -signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM)
_KEPT_REFERENCES = 6
_CONFIGS = {"sft": "sft", "dpo": "dpo", "reward-model": "reward_model", "rl": "rl"}
_SMALL = {
    "sft": ("--data.batch-size", "8", "--optim.warmup-steps", "1", "--optim.schedule", "constant"),
    "dpo": ("--data.batch-size", "8", "--optim.warmup-steps", "1"),
    "reward-model": ("--data.batch-size", "8", "--optim.warmup-steps", "1"),
    "rl": (
        *("--orchestrator.problems-per-step", "3", "--orchestrator.group-size", "2", "--max-restarts", "1000"),
        *("--restart-window-s", "1", "--orchestrator.sampling.max-tokens", "6", "--heartbeat-timeout-s", "30"),
    ),
}
_CHILDREN = ("orchestrator", "rank", "inference")
_TAKEN_BACK = ("--ckpt.interval", "null", "--ckpt.keep", "null")
_REFUSED = {"sft": ("--seed", "9"), "dpo": ("--seed", "9"), "reward-model": ("--seed", "9"), "rl": ("--seed", "9")}


class Refused(Exception):
    """The dry run refuses the features of a case."""


@dataclass
class Reference:
    """The undisturbed run of some features. `trail`: how often a process met each event, at most."""

    place: Path
    trail: dict[str, int] = field(default_factory=dict)


@dataclass
class Played:
    """What became of a case. `hits`: what each fault that happened met."""

    case: Case
    hits: list[str]
    findings: list[Finding]
    num_runs: int
    seconds: dict[str, float]


class Player:
    """Plays cases below `folder`, one after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._references: dict[str, Reference] = {}
        self.num_runs = 0
        self.seconds: Counter[str] = Counter()

    def play(self, case: Case) -> Played:
        """Raises Refused: there is no such run."""
        before = self.num_runs
        reference = self._reference(case)
        case = self._with_events(case, reference)
        world = World(self._folder / "hit", case)
        with self._timed("disturbed runs"):
            world.make(parent=reference.place / "parent")
            if case.features["begins"] == "clean":
                shutil.copytree(world.folder / "parent", world.run, symlinks=True)
            self.num_runs += 1
            world.live()
        with self._timed("comparisons"):
            world.compare(reference.place)
        hits = world.hits()
        return Played(case, hits, world.findings, self.num_runs - before, dict(self.seconds))

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self.seconds[what] += time.monotonic() - begin

    def _reference(self, case: Case) -> Reference:
        key = json.dumps([case.program, sorted(case.features.items()), case.steps])
        if key in self._references:
            return self._references[key]
        while len(self._references) >= _KEPT_REFERENCES:
            shutil.rmtree(self._references.pop(next(iter(self._references))).place)
        undisturbed = dataclasses.replace(case, faults=(), at_rest="nothing")
        world = World(self._folder / f"undisturbed-{time.monotonic_ns()}", undisturbed)
        world.make()
        with self._timed("dry runs"):
            code, said = world.start("--dry-run", case=plainly_begun(undisturbed))
        if code:
            raise Refused(said)
        if case.features["begins"] != "from scratch":
            with self._timed("parents"):
                world.make_parent()
        with self._timed("undisturbed runs"):
            self.num_runs += 1
            code, said = world.start()
        if code:
            raise AssertionError(f"an undisturbed run failed after its dry run passed ({code}): {said[-1500:]}")
        lines = Counter((world.folder / "watched" / "trail").read_text().splitlines())
        trail: dict[str, int] = {}
        for line, count in lines.items():
            name = line.partition(" ")[2]
            trail[name] = max(count, trail.get(name, 0))
        self._references[key] = Reference(world.folder, trail)
        return self._references[key]

    @staticmethod
    def _with_events(case: Case, reference: Reference) -> Case:
        """Choose the events of the faults: those of a share of all kinds of events, so that rare ones come as often."""
        keys = sorted(reference.trail)
        found = []
        for fault in case.faults:
            if not fault.key:
                place = fault.share * len(keys)
                key = keys[int(place)]
                fault = dataclasses.replace(fault, key=key, nth=1 + int((place % 1) ** 2 * reference.trail[key]))
            found.append(fault)
        return dataclasses.replace(case, faults=tuple(found))


class World:
    """The directory of one case: `run`, `parent`, `store`, trackers, temporary files, and what watches."""

    def __init__(self, folder: Path, case: Case) -> None:
        self.folder, self.case = folder, case
        self.run = folder / "run"
        self.findings: list[Finding] = []
        self.extra: dict[str, str] = {}
        self.consoles: list[str] = []
        self.copies: list[Path] = []
        self.ended_early = False
        self.has_changed = False  # an input: the end is another one
        self._noted = 0  # attempts that had noted the input before it changed
        self.has_moved = False  # to an empty machine, which has no earlier lines of metrics
        self._seen: set[psutil.Process] = set()
        self._port = free_port(2) if case.program == "rl" else 0
        is_judged = case.features.get("environment") == "judged"
        self._judge = JudgeProcess(folder.with_name(f"asked-{time.monotonic_ns()}")) if is_judged else None

    def make(self, parent: Path | None = None) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        for name in ("watched/pids", "watched/hits", "tracked", "tmp", "cache"):
            (self.folder / name).mkdir(parents=True)
        if parent is not None and parent.exists():
            shutil.copytree(parent, self.folder / "parent", symlinks=True)
        shutil.copy(ROOT / "examples" / "reverse_text" / "sft.jsonl", self.folder / "rows.jsonl")
        shutil.copy(Path(__file__).with_name("parts.py"), self.folder / "own_letters.py")
        (self.folder / "tokenizer").mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(MODEL / name, self.folder / "tokenizer")
        (self.folder / "tokenizer" / "chat_template.jinja").write_text(FORGETFUL)
        faults = [dataclasses.asdict(fault) for fault in self.case.faults]
        self._plan(faults)

    def _plan(self, faults: list[dict[str, object]]) -> None:
        plan = {"run": str(self.run), "faults": faults}
        (self.folder / "watched" / "plan.json").write_text(json.dumps(plan))

    def make_parent(self) -> None:
        run, self.run = self.run, self.folder / "parent"
        features = {**plainly_begun(self.case).features, "tracker": "none", "store": "none", "keep": "all"}
        code, said = self.start("--ckpt.interval", "1", case=dataclasses.replace(self.case, features=features, steps=2))
        assert code == 0, f"the parent of a fork failed:\n{said[-3000:]}"
        self.run = run
        (self.folder / "watched" / "trail").unlink(missing_ok=True)

    def argv(self, *flags: str, case: Case | None = None) -> list[str]:
        case = case or self.case
        config = f"configs/reverse_text/{_CONFIGS[case.program]}.toml"
        section = "trainer." if case.program == "rl" else ""
        words = ["@", config, "--output-dir", str(self.run), *_SMALL[case.program], *_TAKEN_BACK]
        words += ["--max-steps", str(case.steps), f"--{section}parallel.threads", "1"]
        if case.program == "rl":
            words += ["--inference.server.port", str(self._port)]
        if case.program == "sft":
            words += ["--data.name", str(self.folder / "rows.jsonl")]
        flags = (*case.flags(str(self.folder)), *flags)
        port = self._judge.port if self._judge is not None else 0
        return [*words, *(flag.replace("JUDGE_PORT", str(port)) for flag in flags)]

    def environment(self) -> dict[str, str]:
        own = {
            "SEARCH_TRACKED": str(self.folder / "tracked"), "TMPDIR": str(self.folder / "tmp"), "OMP_NUM_THREADS": "1",
            "HOLDFAST_CACHE": str(self.folder / "cache"),
        }  # fmt: skip
        watched = events.variables(self.folder / "watched")
        watched["PYTHONPATH"] += f":{self.folder}"
        return {**os.environ, **own, **watched, **self.extra, "PYTHONDONTWRITEBYTECODE": "1"}

    def start(self, *flags: str, case: Case | None = None, program: str = "") -> tuple[int, str]:
        """Start the command, and wait for its end; return its exit code and what it printed."""
        with self._judge or contextlib.nullcontext():
            return self._start(*flags, case=case, program=program)

    def _start(self, *flags: str, case: Case | None, program: str) -> tuple[int, str]:
        log = self.folder / f"console-{time.monotonic_ns()}"
        argv = self.argv(*flags, case=case)
        run = shared_commands().start(
            program or self.case.program, self.run, argv, log=log, environment=self.environment()
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not run.fork.has_ended and time.monotonic() < deadline:
            self._answer(run)
            with contextlib.suppress(psutil.NoSuchProcess):
                self._seen.update(psutil.Process(run.fork.pid).children(recursive=True))
            time.sleep(_LOOK_S)
        if not run.fork.has_ended:
            self.find("waiting", f"a start did not end within {START_TIMEOUT_S:g} s:\n{run.fork.log[-2000:]}")
            for process in self._seen:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            run.fork.kill()
        code = run.fork.wait()
        if left := survivors(RunDir(self.run), self._seen, timeout_s=20):
            self.find("no orphans", f"{left} outlived the launcher, which ended with {code}")
            for process in left:
                process.kill()
        self._seen = set()
        return code, run.fork.log

    def _answer(self, run: Run) -> None:
        """Do beside the run what a process of it stands still for."""
        for place in (self.folder / "watched" / "hits").iterdir():
            effect = self.case.faults[int(place.name)].effect
            answered = self.folder / "watched" / f"answered {effect}"
            if effect not in ("second start", "look", "edit") or answered.exists():
                continue
            if effect == "second start":
                self._start_second(run)
            elif effect == "look":
                self._commands()
            else:
                self._edit()
                events.kill_players(self.folder / "watched")
                events.send(
                    self.folder / "watched", signal.SIGKILL, role=random.Random(str(self.case)).choice(_CHILDREN)
                )
            answered.touch()

    def _start_second(self, run: Run) -> None:
        log = self.folder / f"console-{time.monotonic_ns()}"
        words, environment = self.argv(), self.environment() | {"FAULT_AT_START": ""}
        second = shared_commands().start(self.case.program, self.run, words, log=log, environment=environment)
        code = second.fork.wait(START_TIMEOUT_S)
        if code != 2 and not run.fork.has_ended:
            self.find("one writer", f"a second start ended with {code}:\n{second.fork.log[-1500:]}")
        self.findings += check_console(second.fork.log, code)

    def _edit(self) -> None:
        """Edit the rows of `sft`, or the environment of `rl`, so that what follows is another training."""
        rows, code = self.folder / "rows.jsonl", self.folder / "own_letters.py"
        if self.case.program == "sft":
            replaced = "".join(reversed(rows.read_text().splitlines(keepends=True)))
            atomic.write_file(rows, replaced.encode())
        elif self.case.program == "rl" and self.case.features["environment"] != "judged":
            atomic.write_file(code, code.read_text().replace("edited = 0.0", "edited = 100.0").encode())
        else:
            return
        self.has_changed = True
        self._noted = self._noted or self._attempts_with_inputs()

    def _attempts_with_inputs(self) -> int:
        return len(list(self.run.glob("configs/attempt_*/inputs.json")))

    def find(self, promise: str, what: str) -> None:
        self.findings.append(Finding(promise, what))

    def live(self) -> None:
        """Start the command until it succeeds; between the first two starts the case's `at_rest` happens."""
        with Witness(RunDir(self.run), self.folder / "seen") as witness:
            self._live()
        self.witness = witness

    def _live(self) -> None:
        flags: tuple[str, ...] = ()
        for number in range(_MOST_STARTS):
            known = len(self.hits())
            code, said = self.start(*flags)
            self.consoles.append(said)
            self.findings += check_console(said, code)
            if code == 0:
                return
            if code == 2 and "holds a run that is finished" in said and number:
                # Trained to its end, and killed while trackers or evaluations had not ended.
                self.ended_early = True
                if self.case.features["tracker"] == "own":
                    self._look("track", [str(self.run)])
                return
            if code == 2 and any("error at launcher" in hit for hit in self.hits()[known:]):
                continue  # a start by hand on a storage that fails is refused
            if code == 128 + signal.SIGTERM:
                self.findings += check_stopped(RunDir(self.run))
            if code not in _DOCUMENTED:
                self.find("exit codes", f"start {number + 1} ended with {code}:\n{said[-2000:]}")
            if code in (2, 3, 4, 5, 6, 1) and len(self.hits()) == known:
                self.find("same command", f"start {number + 1} met no fault and ended with {code}:\n{said[-2500:]}")
                return
            if number == 0 and (self.run / "run.json").exists():
                flags = self._at_rest()
        self.find("same command", f"{_MOST_STARTS} starts did not end the run:\n{self.consoles[-1][-2000:]}")

    def hits(self) -> list[str]:
        """Return what the faults that happened met."""
        places = sorted((self.folder / "watched" / "hits").iterdir())
        return [f"{self.case.faults[int(place.name)].effect} at {place.read_text()}" for place in places]

    def _at_rest(self) -> tuple[str, ...]:
        """Do what happens between two starts; return flags that the next start needs."""
        kept = (self.folder / "watched" / "plan.json").read_text()
        self._plan([{"effect": "none", "key": "", "nth": 0}])
        try:
            return getattr(self, "_" + self.case.at_rest.replace(" ", "_"))()
        finally:
            plan = json.loads(kept)
            (self.folder / "watched" / "plan.json").write_text(json.dumps(plan | {"run": str(self.run)}))

    def _nothing(self) -> tuple[str, ...]:
        return ()

    def _must_refuse(self, *flags: str, program: str = "", what: str) -> None:
        if self.case.features["begins"] == "clean":  # it removes what is there
            return
        before = files_of(self.run)
        code, said = self.start(*flags, program=program)
        if code not in (2, 5):
            self.find("refusals", f"{what} was not refused, but ended with {code}:\n{said[-2000:]}")
            return
        self.findings += check_console(said, code)
        after = files_of(self.run)
        if changed := sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)):
            self.find("refusals", f"{what} was refused, and changed {', '.join(changed[:6])}:\n{said[-600:]}")

    def _refused(self) -> tuple[str, ...]:
        if RunDir(self.run).has_work() and (self.run / "configs").exists():
            self._must_refuse(*_REFUSED[self.case.program], what="a start with another seed")
        return ()

    def _other_program(self) -> tuple[str, ...]:
        others = {"sft": "dpo", "dpo": "reward-model", "reward-model": "dpo"}
        if (other := others.get(self.case.program)) and RunDir(self.run).has_work():
            case = dataclasses.replace(self.case, program=other, features=plain(other).features)
            mine, self.case = self.case, case
            self._must_refuse(what=f"a start of {other}")
            self.case = mine
        return ()

    def _links_away(self) -> tuple[str, ...]:
        place = self.run / "checkpoints"
        if place.is_dir() and any(place.glob("step_*")):
            place.rename(self.folder / "elsewhere")
            place.symlink_to(self.folder / "away")
            self._must_refuse(what="a start whose checkpoints are away")
            place.unlink()
            (self.folder / "elsewhere").rename(place)
        return ()

    def _new_machine(self) -> tuple[str, ...]:
        """The machine is lost, and the run goes on from its store in an empty directory of the same name."""
        if self.case.features["store"] == "none":
            return ()
        self.run.rename(self.folder / "lost")
        self.has_moved = True
        return ("--ckpt.resume-step", "auto")

    def _moved(self) -> tuple[str, ...]:
        self.run = self.run.rename(self.folder / "moved")
        return ()

    def _copied(self) -> tuple[str, ...]:
        copy = self.folder / "copy"
        shutil.copytree(self.run, copy, symlinks=True)
        run, self.run = self.run, copy
        if self.case.features["store"] == "none":
            code, said = self.start()
            self.findings += check_console(said, code)
            if code:
                self.find("a copy is a run", f"the copy ended with {code}:\n{said[-2000:]}")
            else:
                self.copies.append(copy)
        self.run = run
        return ()

    def _clock_back(self) -> tuple[str, ...]:
        self.extra["SEARCH_CLOCK_S"] = "-7200"
        return ()

    def _clock_ahead(self) -> tuple[str, ...]:
        self.extra["SEARCH_CLOCK_S"] = "7200"
        return ()

    def _parent_moved(self) -> tuple[str, ...]:
        parent = self.folder / "parent"
        if not parent.exists() or not RunDir(self.run).has_work():
            return ()
        parent.rename(self.folder / "parent_moved")
        return ("--ckpt.resume-dir", str(self.folder / "parent_moved" / "checkpoints" / "step_1"))

    def _temporary_left(self) -> tuple[str, ...]:
        for parent in (self.run, self.run / "checkpoints", self.run / "weights", self.run / "rollouts"):
            if parent.is_dir():
                (parent / ".tmp-step_2-0123abcd").mkdir(exist_ok=True)
                (parent / ".tmp-step_2-0123abcd" / "half").write_bytes(b"half")
        return ()

    def _edited(self) -> tuple[str, ...]:
        self._edit()
        return ()

    def _commands(self) -> tuple[str, ...]:
        """What looks at a run that was killed works, says so, and changes nothing of the run."""
        for words in (["ls"], ["verify"]):
            self._look("ckpt", [*words, str(self.run)])
        self._look("report", [str(self.run)])
        if self.case.program == "rl":
            self._look("rollouts", ["stats", str(self.run)])
        return ()

    def _look(self, program: str, words: list[str]) -> None:
        log = self.folder / f"console-{time.monotonic_ns()}"
        environment = self.environment() | {"FAULT_AT_START": ""}
        run = shared_commands().start(program, self.run, words, log=log, environment=environment)
        code = run.fork.wait(START_TIMEOUT_S)
        self.findings += check_console(run.fork.log, code)
        if code not in (0, 1, 2):
            self.find("exit codes", f"{program} {' '.join(words)} ended with {code}:\n{run.fork.log[-1500:]}")

    def compare(self, reference: Path) -> None:
        """Compare the end of the run, and of its copy, with the undisturbed run, unless something was found before."""
        if self.findings:
            return
        if self.ended_early:
            self.case = dataclasses.replace(self.case, features={**self.case.features, "evaluation": "none"})
        for run in (self.run, *self.copies):
            self.findings += check_run(
                RunDir(run), RunDir(reference / "run"), self.case, witness=self.witness if run == self.run else None,
                has_changed=self.has_changed, has_moved=self.has_moved, tracked=self.folder / "tracked",
            )  # fmt: skip
        if left := sorted((self.folder / "tmp").iterdir()):
            self.find("nothing is left behind", f"temporary files: {', '.join(place.name for place in left)}")
        if self._judge is not None:
            self.findings += check_judge(RunDir(self.run), self._judge, at_most=AT_ONCE * (1 + len(self.hits())))
        said = "".join(self.consoles)
        # Without a start after the edit nobody read the edited file.
        is_read_again = 0 < self._noted < self._attempts_with_inputs()
        if is_read_again and "changes what is computed" not in said and "saved no step" not in said:
            self.find("inputs are known by content", f"no word about other rows:\n{said[:2000]}")


def plainly_begun(case: Case) -> Case:
    return dataclasses.replace(case, features={**case.features, "begins": "from scratch"})
