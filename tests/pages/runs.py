"""A checkout in which the commands of a page are tried one after the other, and what must hold between them."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from examples.smollm2.make_model import TARGET
from holdfast.config import DpoConfig, OrchestratorConfig, RewardTrainingConfig, RlConfig, SftConfig, TrainerConfig
from holdfast.config.load import parse_command_line
from holdfast.config.rl import hand_down_shared
from tests.builders.toy import TOY
from tests.conftest import ROOT
from tests.forking.commands import Run, shared_commands
from tests.pages.documentation import Block, Command, blocks, shows
from tests.runs.processes import WITH_STUB_ENGINE, wait_until

TRAINING = {"sft": SftConfig, "dpo": DpoConfig, "reward-model": RewardTrainingConfig, "trainer": TrainerConfig}
# Not of holdfast: what they need is a network, another machine, or the suite that this is a part of.
NOT_OURS = {
    "pip", "uv", "export", "sha256sum", "mkdocs", "pytest", "pre-commit", "ruff", "basedpyright", "lint-imports",
}  # fmt: skip
# The suite that a started page is a part of.
_THE_SUITE = ["python", "-m", "tests.lanes"]
MAKE_MODEL = "python -m examples.smollm2.make_model"
_RESUMING = ("--ckpt.resume-step", "--ckpt.resume-dir", "--ckpt.init-from")
_FORKED = (*TRAINING, "rl", "evaluate", "ckpt", "rollouts", "environments")
_MODEL = "examples/reverse_text/model"
# So that there is less to sample and to train on: the pages show no number that a test would compare.
RL_STEPS = 10
_FEW_ROWS = ("--data.batch-size", "8", "--parallel.threads", "1")
_SMALLER = {
    "rl": ("--orchestrator.problems-per-step", "4", "--orchestrator.group-size", "4", "--max-steps", str(RL_STEPS)),
    "sft": _FEW_ROWS, "dpo": (*_FEW_ROWS, "--max-steps", "8"), "reward-model": (*_FEW_ROWS, "--max-steps", "8"),
    "evaluate": ("--num-tasks", "8"),
}  # fmt: skip


def is_run(command: Command) -> bool:
    """Whether a command of a page starts a run, which a kill interrupts."""
    return command.words[0] in (*TRAINING, "rl")


def can_be_started(command: Command) -> bool:
    """Whether a command of a page is one of ours, and not the one that starts this suite."""
    return command.words[0] not in NOT_OURS and command.words[:3] != _THE_SUITE


@dataclass
class Checkout:
    """What the examples need of a checkout, in `path`; `made` is what commands have left there, or would have. `made`:
    run directory -> the program that made it; the others join, resume or look into it."""

    path: Path
    made: dict[Path, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.path.mkdir(exist_ok=True)
        for name in ("configs", "examples"):
            shutil.copytree(ROOT / name, self.path / name)
        for name in ("benchmarks", "tests"):
            (self.path / name).symlink_to(ROOT / name)
        (self.path / "my_run.toml").write_text((ROOT / "configs/reverse_text/sft.toml").read_text())
        (self.path / "questions.jsonl").write_text('{"prompt": "two plus two", "solution": 4}\n')

    def save_files(self, page: Path) -> None:
        for block in blocks(page):
            if block.file is not None:
                (self.path / block.file).write_text(block.text)

    def dry_run(self, command: Command, run: Callable[..., tuple[int, str, str]]) -> None:
        """Check a command without starting anything, and note what it would have left."""
        program, flags = command.words[0], command.words[1:]
        if command.words[:2] == ["python", "-m"]:
            self._check_module(command)
        elif program == "python":
            assert (ROOT / command.words[1]).is_file(), f"{command.where}: there is no {command.words[1]}"
        elif program in ("ckpt", "rollouts"):
            self._check_reader(command)
        elif program == "monitor":
            looked_at = [Path(word) for word in command.words[1:] if not word.startswith("--")]
            assert looked_at and set(looked_at) <= self.made.keys(), f"{command.where}: {command.line}"
        elif program == "report":
            self._check_report(command)
        elif program == "track":
            assert self.made.get(Path(command.words[1])), f"{command.where}: nobody has made {command.words[1]}"
        elif program == "environments":
            self._check_environments(command)
        elif program == "evaluate":
            self._check_evaluation(command, run)
        elif program in (*TRAINING, "rl", "orchestrator", "inference"):
            output_dir = self._note(command)
            fresh = self.path / "dry" / f"{len(self.made)}_{output_dir.name}"
            words = [
                *(_without_start(flags) or TOY.get(program, ())),
                *_at_any_port(flags),
            ]  # a name alone is a mention
            code, out, err = run(program, *words, "--output-dir", fresh, "--dry-run")
            assert code == 0, f"{command.where}: {command.line}\n{out}{err}"
            assert "resolved configuration: " in out
        else:
            assert program in NOT_OURS, f"{command.where}: what is `{program}`?"

    def start(self, command: Command, *extra: str, timeout_s: float = 1200) -> str:
        """Run a command and check its exit code, and what the page says that it prints; return what it printed. Most
        commands are forked, with the stub engine: see `forking.popen`. A small model stands in for SmolLM2."""
        if command.program == MAKE_MODEL:
            shutil.copytree(self.path / _MODEL, self.path / TARGET)
            return f"made {TARGET}"
        extra = (*_smaller([*command.words, *extra]), *extra)
        code, printed = (self._fork if command.words[0] in _FORKED else self._run)(command, extra, timeout_s)
        refused = any(line.startswith("error: ") for line in command.output)
        assert code == (2 if refused else 0), f"{command.where}: {command.line}\n{printed}"
        missing = shows(command.output, printed)
        assert missing is None, f"{command.where}: the page shows\n{missing}\nbut printed was\n{printed}"
        return printed

    def start_and_kill(self, command: Command, *extra: str, printed: str) -> None:
        """Start a run, kill all of it when it has printed some of its lines, and give the same words again. `printed`:
        by the same run where nobody killed it: the moment is drawn from what it said before its last step."""
        extra = (*_smaller([*command.words, *extra]), *extra)
        last = max(number for number, line in enumerate(printed.splitlines()) if re.search(r"step \d+/\d+ ", line))
        moment = random.Random(command.where).randrange(1, last)
        run = self._begin(command, extra)
        wait_until(lambda: len(run.log.splitlines()) >= moment or run.has_ended, f"line {moment} of {command.line}")
        os.killpg(run.pid, signal.SIGKILL)
        code = run.wait().code
        again = self._begin(command, extra).wait()
        told = f"{command.where}: {command.line}\nkilled after {moment} of {last} lines:\n{run.log}\n{again.log}"
        assert code == -signal.SIGKILL and again.code == 0, told

    def _begin(self, command: Command, extra: tuple[str, ...]) -> Run:
        log = self.path / f"printed_{len(list(self.path.glob('printed_*')))}.out"
        here = f"import os; os.chdir({str(self.path)!r})"
        argv, variables = [*command.words[1:], *extra], {**os.environ, **WITH_STUB_ENGINE}
        return shared_commands().start(
            command.words[0], self.path / "unused", argv, log=log, environment=variables, fault=here
        )

    def _fork(self, command: Command, extra: tuple[str, ...], timeout_s: float) -> tuple[int, str]:
        run = self._begin(command, extra)
        code = run.wait(timeout_s).code
        assert code is not None
        return code, run.log

    def _run(self, command: Command, extra: tuple[str, ...], timeout_s: float) -> tuple[int, str]:
        program = str(Path(sys.executable).with_name(command.words[0]))
        done = subprocess.run(
            [program, *command.words[1:], *extra], cwd=self.path, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=timeout_s, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        return done.returncode, done.stdout

    def _note(self, command: Command) -> Path:
        """Check that the command may use its run directory, after those before it; return that."""
        program, flags = command.words[0], command.words[1:]
        where = f"{command.where}: {command.line}\n"
        if program == "inference":
            return self.path / (command.flag("output-dir") or "inference")
        if program == "orchestrator":
            config = parse_command_line(OrchestratorConfig, flags)
            assert config.output_dir in self.made, f"{where}nobody has made {config.output_dir}"
            return config.output_dir
        if program == "rl":
            config = hand_down_shared(parse_command_line(RlConfig, flags)).trainer
        else:
            config = parse_command_line(TRAINING[program], flags)
        wanted = config.ckpt.resume_step if config.ckpt else None
        is_dry = "--dry-run" in flags
        if config.output_dir in self.made:
            assert wanted is not None or config.clean or is_dry, f"{where}would be refused: it holds a run"
            assert self.made[config.output_dir] == program, f"{where}goes on from another program's run"
        else:
            assert wanted in (None, "auto"), f"{where}nothing to resume: no command before it made {config.output_dir}"
        if not is_dry:
            self.made[config.output_dir] = program
            weights = self.path / config.output_dir / "weights" / f"step_{config.max_steps}"
            shutil.copytree(self.path / _MODEL, weights, dirs_exist_ok=True)
        return config.output_dir

    def _check_reader(self, command: Command) -> None:
        from holdfast.commands.ckpt import parse
        from holdfast.commands.rollouts import parse as parse_rollouts

        arguments = (parse if command.words[0] == "ckpt" else parse_rollouts)(command.words[1:])
        maker = self.made.get(arguments.run)
        assert maker, f"{command.where}: {command.line}\nnobody has made {arguments.run}"
        assert command.words[0] == "ckpt" or maker == "rl"

    def _check_report(self, command: Command) -> None:
        from holdfast.view.report import parse

        for run in parse(command.words[1:]).runs:
            assert run in self.made, f"{command.where}: {command.line}\nnobody has made {run}"

    def _check_environments(self, command: Command) -> None:
        from holdfast.commands.environments import parse
        from holdfast.config.environments import EnvironmentConfig
        from holdfast.orchestrator.env.registry import find_environment

        arguments = parse(command.words[1:])
        if arguments.command == "check":
            find_environment(EnvironmentConfig(id=arguments.id, args=arguments.args), key="environments[0]")

    def _check_evaluation(self, command: Command, run: Callable[..., tuple[int, str, str]]) -> None:
        words = command.words[1:]
        if "--compare" in words:
            missing = [word for word in words[words.index("--compare") + 1 :][:2] if Path(word) not in self.made]
            assert not missing, f"{command.where}: {command.line}\nnobody has evaluated {missing}"
            return
        if (directory := command.flag("run")) is not None:
            words = [word for word in words if word != "--follow"]
            assert Path(directory) in self.made, f"{command.where}: {command.line}\nnobody has made {directory}"
            pairs = [words[place : place + 2] for place, word in enumerate(words) if word.startswith("--")]
            kept = [word for pair in pairs if pair[0] not in ("--run", "--step", "--interval") for word in pair]
            asked = () if "--environments" in kept else TOY["orchestrator"][2:]  # those of the run
            words = ["--model.name", _MODEL, *asked, *kept]
        code, out, err = run("evaluate", *words, "--output-dir", self.path / "dry" / "evaluation", "--dry-run")
        assert code == 0, f"{command.where}: {command.line}\n{out}{err}"
        self.made[Path(command.flag("output-dir") or "evaluation")] = "evaluate"

    def _check_module(self, command: Command) -> None:
        name = command.words[2]
        place = ROOT / name.replace(".", "/")
        program = place / "__main__.py" if place.is_dir() else place.with_suffix(".py")
        assert program.is_file(), f"{command.where}: there is no program {name}"
        source = program.read_text()
        assert '__name__ == "__main__"' in source, f"{command.where}: {name} is no program"
        for flag in (word for word in command.words[3:] if word.startswith("--")):
            assert f'"{flag}"' in source, f"{command.where}: {name} has no {flag}"
        if command.program == MAKE_MODEL:  # a small model in its place, for the commands that follow
            shutil.copytree(self.path / _MODEL, self.path / TARGET)


def _smaller(words: Sequence[str]) -> tuple[str, ...]:
    """Return flags with which a command has less to do, where its words do not say how much that is."""
    if "--compare" in words:
        return ()
    flags = _SMALLER.get(words[0], ())
    if words[:3] == ["rl", "@", "examples/smollm2/rl.toml"]:  # commands behind it name its last step
        flags = flags[: flags.index("--max-steps")]
    pairs = zip(flags[::2], flags[1::2], strict=True)
    return tuple(word for name, value in pairs if name not in words for word in (name, value))


def settings_file(block: Block, directory: Path) -> Path:
    path = directory / f"settings_{block.line}.toml"
    path.write_text(block.text)
    return path


def _without_start(flags: list[str]) -> list[str]:
    """Leave out where a run starts: in a dry run nothing is there to start from."""
    kept, skip = [], False
    for word in flags:
        if not skip and word not in (*_RESUMING, "--dry-run"):
            kept.append(word)
        skip = word in _RESUMING
    return kept


def _at_any_port(flags: list[str]) -> list[str]:
    """Return what has a run serve at free ports whatever port it is given: that may be one of somebody else's here."""
    return ["--dashboard.port", "0"] if any(w.partition(".")[0] == "--dashboard" for w in flags) else []
