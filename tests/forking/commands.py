"""Real commands and modules, forked: `shared_commands().sft(output, model, data, …).wait()` has `code` and `log`."""

import atexit
import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from holdfast.process.child import heavy_imports
from holdfast.run.run_dir import RunDir
from tests.forking.engines import shared_engines
from tests.forking.popen import STUB_ENGINE, Engine, begin, fork_children, run_module
from tests.forking.server import Fork, ForkServer
from tests.lanes.marks import require
from tests.runs.processes import HANG_S, wait_until
from tests.runs.training import sft_command

RUN_TIMEOUT_S = 4 * HANG_S
Until = Literal["trained", "prepared"]

_IMPORTED = (
    "datasets", "datasets.packaged_modules.json.json", "httpx", "pandas", "psutil", "rich.console", "rich.table",
    "torch.distributed.elastic.multiprocessing.api", "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.distributed.launcher.api", "holdfast.launcher.evaluation.follow", "holdfast.orchestrator.evaluation.main",
    "holdfast.orchestrator.main", "holdfast.trainer.programs.dpo", "holdfast.trainer.launch",
    "holdfast.trainer.programs.reward_model", "holdfast.trainer.programs.rl", "holdfast.trainer.programs.sft",
    "transformers.models.qwen3.modeling_qwen3", "holdfast.launcher.launch", "holdfast.launcher.resume.remote",
    "uvicorn", STUB_ENGINE, "tests.unit.trainer.programs.in_process",
)  # fmt: skip


@dataclass
class Run:
    """One command, with what its process has; `code` is there when somebody has waited for its end."""

    output: Path
    fork: Fork

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fork, name)

    @property
    def trainer_log(self) -> str:
        """What the trainer of the newest attempt wrote so far into its log."""
        run_dir = RunDir(self.output)
        path = run_dir.logs(run_dir.next_attempt() - 1) / "trainer.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, timeout_s: float = RUN_TIMEOUT_S) -> Self:
        """Wait for its end. Raises `TimeoutError`: it still runs."""
        self.fork.wait(timeout_s)
        return self

    def succeed(self, timeout_s: float = RUN_TIMEOUT_S) -> Self:
        self.wait(timeout_s)
        assert self.code == 0, self.log
        return self

    def kill(self) -> None:
        if not self.has_ended:
            self.fork.kill()
            self.wait()


def wait_for(condition: Callable[[], object], what: str, *runs: Run) -> None:
    """Return as soon as `condition` holds; all `runs` must be there until then. `what` names it in the error."""
    wait_until(lambda: condition() or any(run.has_ended for run in runs), what)
    assert not any(run.has_ended for run in runs), "\n".join([f"ended before {what}:", *(run.log for run in runs)])


def wait_for_step(step: int, *runs: Run) -> None:
    from tests.runs.rl import last_step

    run_dir = RunDir(runs[0].output)
    wait_for(lambda: last_step(run_dir) >= step, f"step {step}", *runs)


class Commands:
    """Starts commands and modules. Several threads may use it."""

    def __init__(self) -> None:
        self._server = ForkServer("tests.forking.commands:prepare")

    def sft(self, output: Path, model: Path, data: Path, *flags: str, ranks: int = 1, **options: Any) -> Run:
        """Start `sft` with the flags of `training_runs.sft_command`; see `start`."""
        argv = sft_command(output, model, data, "--parallel.num-ranks", str(ranks), *flags)[1:]
        return self.start("sft", output, argv, **options)

    def start(
        self, program: str, output: Path, argv: list[str], *, log: Path | None = None,
        environment: Mapping[str, str] | None = None, fault: str = "", trainer_fault: str = "",
        until: Until = "trained", engine: Engine = "stub",
    ) -> Run:  # fmt: skip
        """Start a command; return when its process is there. `program`: its name, such as `dpo`. `output`: the
        directory of the run, which `argv` names as well. `log`: where its output goes; unset: `output` with the suffix
        `.out`. `environment`: its variables, by default those of this process. `fault`: Python source that runs in the
        command first. `trainer_fault`: the same in its trainer, before the ranks are forked. `until`: stop when the run
        directory is prepared, or go on and train. `engine`: what the inference servers of `rl` sample with."""
        require("launch")
        log = log or output.with_name(f"{output.name}.out")
        words = {"fault": fault, "trainer_fault": trainer_fault, "until": until, "engine": engine}
        called = "tests.forking.commands:be_command"
        server = self._server if engine == "stub" else shared_engines().server_of_launchers()
        return Run(output, server.fork(called, log, environment=environment, program=program, argv=argv, **words))

    def module(self, log: Path, *argv: str | Path, fault: str = "", at_end: str = "", is_ranks: bool = False) -> Fork:
        """Start `python -m ARGV`. `fault`, `at_end`: Python source that runs in it first and last."""
        require("ranks" if is_ranks else "launch")
        words = [str(word) for word in argv]
        return self._server.fork("tests.forking.commands:be_module", log, argv=words, fault=fault, at_end=at_end)

    def call(self, function: str, log: Path, **arguments: str) -> Fork:
        require("launch")
        return self._server.fork(function, log, **arguments)

    def two_ranks(self, module: str, directory: Path, *argv: Path) -> list[Any]:
        """Run a program of ranks, `python -m tests.ranks.… ARGV DIRECTORY`; return what each rank saw."""
        import torch

        fork = self.module(directory.with_name(f"{directory.name}.log"), module, *argv, directory, is_ranks=True)
        assert fork.wait(RUN_TIMEOUT_S) == 0, fork.log
        return [torch.load(path) for path in sorted(directory.glob("rank_*.pt"))]

    def close(self) -> None:
        self._server.close()


@functools.cache
def shared_commands() -> Commands:
    commands = Commands()
    atexit.register(commands.close)
    return commands


def prepare() -> None:
    """In the server: import, and make what every trainer would make anew: a quarter of the time of a short run."""
    with heavy_imports():
        for name in _IMPORTED:
            importlib.import_module(name)
        if mapping := sys.modules.get("transformers.conversion_mapping"):
            mapping.get_checkpoint_conversion_mapping("qwen3")  # kept in a cache


def be_command(program: str, argv: list[str], fault: str, trainer_fault: str, until: Until, engine: Engine) -> None:
    import holdfast.launcher.launch
    from holdfast import cli

    begin()
    exec(fault, {})
    fork_children(trainer_fault, engine=engine)
    if until == "prepared":
        holdfast.launcher.launch.watch = lambda *_, **__: 0  # it is prepared, and no more
    sys.argv = [program, *argv]
    getattr(cli, program.replace("-", "_"))()
    raise AssertionError("a command ends by sys.exit")


def be_module(argv: list[str], fault: str, at_end: str) -> None:
    names: dict[str, Any] = {}
    exec(fault, names)
    try:
        run_module(argv)
    finally:
        exec(at_end, names)
