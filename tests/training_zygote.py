"""Real `sft` runs for tests of faults, started in a fraction of a second instead of several.

A helper process, the zygote, imports torch and the trainer once. For every run it forks a child that
does what the launcher does (read flags, take the run directory, decide where to start) and then what
the trainer does, on one rank in the child itself or on several through the trainer's own launcher.

    run = shared_zygote().run(output, model, data, "--max-steps", "6", "--ckpt.interval", "2")
    assert run.code == 0, run.log

A fault is Python source that runs in the child before anything else: the product has no hooks.
Zygote and children end with the process that asked for them. This file is also the zygote's program
(`python -m tests.training_zygote`): it reads one JSON request per line and answers with JSON lines.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

from holdfast.shared.process.child import die_with_parent
from tests.faults.forking import import_trainer
from tests.forked_commands import run_command
from tests.processes import end_with
from tests.training_runs import sft_command

ROOT = Path(__file__).resolve().parents[1]
IMPORT_TIMEOUT_S = 180.0
RUN_TIMEOUT_S = 120.0
Until = Literal["trained", "prepared"]

_IMPORTED = (
    "datasets",
    "datasets.packaged_modules.json.json",
    "pandas",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.launcher.api",
    "holdfast.orchestrator.main",
    "holdfast.trainer.programs.dpo",
    "holdfast.trainer.launch",
    "holdfast.trainer.programs.reward_model",
    "holdfast.trainer.programs.rl",
    "holdfast.trainer.programs.sft",
    "transformers.models.qwen3.modeling_qwen3",
    "holdfast.commands.launcher.launch",
)


@dataclass
class Run:
    """One child; `code` and `log` are there when it has ended."""

    output: Path
    log_path: Path
    log_begin: int
    answers: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)
    pid: int = 0
    code: int | None = None

    @property
    def log(self) -> str:
        """What it wrote so far, without what earlier runs wrote into the same file."""
        data = self.log_path.read_bytes() if self.log_path.exists() else b""
        return data[self.log_begin :].decode(errors="replace")

    def wait(self, timeout_s: float = RUN_TIMEOUT_S) -> Run:
        """Wait for its end; a signal's number is a negative code, as in subprocess.

        Raises:
            TimeoutError: it still runs.
        """
        try:
            self.code = self.answers.get(timeout=timeout_s)
        except queue.Empty:
            os.killpg(self.pid, signal.SIGKILL)
            raise TimeoutError(f"process {self.pid} still ran after {timeout_s} s:\n{self.log}") from None
        return self


class Zygote:
    """A process that has imported the trainer and forks runs. Several threads may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[int, Run] = {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.training_zygote"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read_answers, daemon=True)
        self._reader.start()

    def start(
        self,
        output: Path,
        model: Path,
        data: Path,
        *flags: str,
        log: Path | None = None,
        fault: str = "",
        until: Until = "trained",
        ranks: int = 1,
    ) -> Run:
        """Fork `sft` with the flags of `training_runs.sft_command`; return when the child is there.

        Args:
            log: where its output goes; unset: `output` with the suffix `.log`.
            fault: Python source that runs in the child first.
            until: stop when the run directory is prepared, or go on and train.
            ranks: more than one are started by the trainer's own launcher.
        """
        argv = sft_command(output, model, data, "--parallel.num-ranks", str(ranks), *flags)[1:]
        return self._fork(output, log, {"argv": argv, "fault": fault, "until": until})

    def command(
        self,
        program: str,
        output: Path,
        argv: list[str],
        *,
        environment: Mapping[str, str],
        timeout_s: float = RUN_TIMEOUT_S,
    ) -> Run:
        """Run a command to its end, launcher and all, see `forked_commands`.

        Args:
            program: its name, such as `dpo`.
            output: the directory of the run, which `argv` names as well.
        """
        log = output.with_name(f"{output.name}.out")
        return self._fork(output, log, {"argv": argv, "program": program, "env": dict(environment)}).wait(timeout_s)

    def program(self, module: str, directory: Path, *argv: Path) -> None:
        """Run a program of two ranks, `python -m tests.… ARGV DIRECTORY`, which must end well."""
        words = [*map(str, argv), str(directory)]
        run = self._fork(directory, None, {"argv": words, "module": module}).wait()
        assert run.code == 0, run.log

    def _fork(self, output: Path, log: Path | None, request: dict[str, Any]) -> Run:
        log = log or output.with_name(f"{output.name}.log")
        run = Run(output, log, log.stat().st_size if log.exists() else 0)
        with self._lock:
            number = len(self._runs)
            self._runs[number] = run
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"id": number, "log": str(log), **request}) + "\n")
            self._process.stdin.flush()
        run.pid = run.answers.get(timeout=IMPORT_TIMEOUT_S)
        return run

    def run(self, output: Path, model: Path, data: Path, *flags: str, **options: Any) -> Run:
        """As `start`, and wait for the end."""
        return self.start(output, model, data, *flags, **options).wait()

    def close(self) -> None:
        """End the zygote and every child."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            self._runs[answer["id"]].answers.put(answer["value"])


@functools.cache
def shared_zygote() -> Zygote:
    """Return the one zygote of this process; it starts importing at the first call."""
    zygote = Zygote()
    atexit.register(zygote.close)
    return zygote


def _main() -> NoReturn:
    die_with_parent()
    import_trainer(_IMPORTED)
    running: dict[int, tuple[int, int]] = {}  # pidfd -> (request, pid)
    buffer = b""
    while True:
        readable, _, _ = select.select([0, *running], [], [])
        for descriptor in readable:
            if descriptor in running:
                number, pid = running.pop(descriptor)
                os.close(descriptor)
                _, status = os.waitpid(pid, 0)
                _say(number, os.waitstatus_to_exitcode(status))
        if 0 in readable:
            chunk = os.read(0, 65536)
            if not chunk:
                os._exit(0)
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                request = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    _run(request)
                running[os.pidfd_open(pid)] = (request["id"], pid)
                _say(request["id"], pid)


def _say(number: int, value: int) -> None:
    os.write(1, (json.dumps({"id": number, "value": value}) + "\n").encode())


def _run(request: dict[str, Any]) -> NoReturn:
    """The child: launcher and trainer in one process."""
    die_with_parent()
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)

    def run() -> int:
        if "program" in request:
            os.environ.clear()
            os.environ.update(request["env"])
            run_command(request["program"], request["argv"])
        if "module" in request:
            sys.argv = [request["module"], *request["argv"]]
            importlib.import_module(request["module"]).main()
            raise AssertionError("the program ends by os._exit")
        exec(request["fault"], {})
        _launch(request["argv"], request["until"])
        raise AssertionError("a command ends by sys.exit")

    end_with(run)


def _launch(argv: list[str], until: Until) -> None:
    """What `holdfast.commands.launcher.launch.launch_training` does, but for the processes between it and the ranks."""
    import holdfast.trainer.launch
    from holdfast.commands import cli
    from holdfast.commands.launcher.preflight import check_training
    from holdfast.commands.resume.attempt import with_resume, write_config
    from holdfast.commands.resume.plan import prepare
    from holdfast.shared.config import SftConfig
    from holdfast.shared.config.load import parse_command_line

    paths: list[Path] = []

    def prepared() -> int:
        config = parse_command_line(SftConfig, argv, program="sft")
        check_training(config)
        attempt = prepare(config, clean=config.clean, dry_run=config.dry_run)
        config = with_resume(config, attempt.resume_step)
        paths.append(write_config(attempt, "sft", config, dry_run=config.dry_run))
        if until == "prepared":
            return 0
        # A page of memory that its ranks share, and not the zygote's, which all runs would share.
        holdfast.trainer.launch.STOP_REQUEST.__init__()
        if config.parallel.num_ranks > 1:
            return holdfast.trainer.launch.main(["sft", str(paths[0])])
        # One rank needs no launcher; the store takes any free port.
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        holdfast.trainer.launch._worker("sft", str(paths[0]), os.getppid())
        raise AssertionError("a rank ends by sys.exit")

    cli._exit(prepared)


if __name__ == "__main__":
    _main()
