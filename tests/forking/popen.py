"""What the launcher starts, forked from it: processes of their own as ever; the imports alone are not made again."""

import importlib
import importlib.util
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, BinaryIO, Literal, NoReturn

from holdfast.process.imports import module_command
from holdfast.process.run_module import pythonpath
from tests.runs.processes import end_with

_TRAINER = "holdfast.trainer.launch"
_ENGINE = "holdfast.inference.main"
_FORKED = (
    _TRAINER, "holdfast.launcher.evaluation.follow", "holdfast.orchestrator.main",
    "holdfast.orchestrator.evaluation.main",
)  # fmt: skip
STUB_ENGINE = "tests.servers.stub_engine"

Engine = Literal["stub", "vllm"]


def fork_children(trainer_fault: str, *, engine: Engine) -> None:
    """Make this launcher fork what it starts. `trainer_fault`: Python that runs first in a trainer."""
    import holdfast.launcher.cluster.hosts
    import holdfast.launcher.preflight

    def start(argv: list[str], **options: Any) -> ForkedModule | subprocess.Popen[bytes]:
        if len(argv) < 4 or argv[3] not in (*_FORKED, _ENGINE):
            return subprocess.Popen(argv, **options)
        fault = trainer_fault if argv[3] == _TRAINER else ""
        return ForkedModule(argv, **options, fault=fault, engine=engine)

    kept = {name: getattr(subprocess, name) for name in ("DEVNULL", "PIPE", "STDOUT", "TimeoutExpired")}
    holdfast.launcher.cluster.hosts.subprocess = SimpleNamespace(Popen=start, **kept)  # type: ignore[assignment]
    holdfast.launcher.preflight.subprocess = SimpleNamespace(run=_run, **kept)  # type: ignore[assignment]


def begin() -> None:
    """Do what a new Python does by its environment: take in the paths of a user, and a fault of `at_start`."""
    sys.path += [entry for entry in pythonpath() if entry not in sys.path]
    exec(os.environ.get("FAULT_AT_START", ""), {})


def run_module(argv: list[str]) -> None:
    """Do what `python -m` does with `argv`. Not by `runpy`: it makes torch's rendezvous look through all imports."""
    spec = importlib.util.find_spec(argv[0])
    assert spec is not None and isinstance(spec.loader, SourceFileLoader), argv
    main = ModuleType("__main__")
    main.__spec__, main.__file__ = spec, spec.origin
    code = spec.loader.get_code(argv[0])
    assert code is not None
    sys.argv, sys.modules["__main__"] = argv, main
    exec(code, main.__dict__)


class ForkedModule:
    """A forked process that runs one of our modules; what the launcher uses of `subprocess.Popen`."""

    def __init__(
        self, argv: list[str], *, stdin: int, stdout: BinaryIO, stderr: int, env: Mapping[str, str],
        start_new_session: bool, fault: str, engine: Engine,
    ) -> None:  # fmt: skip
        begin = module_command(argv[3])
        assert argv[: len(begin)] == begin and start_new_session, argv
        assert (stdin, stderr) == (subprocess.DEVNULL, subprocess.STDOUT)
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            words = [STUB_ENGINE, *argv[4:]] if (argv[3], engine) == (_ENGINE, "stub") else argv[3:]
            nothing = os.open(os.devnull, os.O_RDONLY)
            _be_module(argv[3:], words, (nothing, stdout.fileno(), stdout.fileno()), env, fault, new_session=True)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            descriptor = os.pidfd_open(self.pid)
            try:
                ended, _, _ = select.select([descriptor], [], [], timeout)
            finally:
                os.close(descriptor)
            if not ended:
                raise subprocess.TimeoutExpired("a forked module", timeout or 0)
        code = self.poll()
        assert code is not None
        return code


def _run(
    argv: list[str], *, input: bytes, stdout: int, stderr: BinaryIO, env: Mapping[str, str]
) -> subprocess.CompletedProcess[bytes]:
    assert argv[: len(begin := module_command(argv[3]))] == begin and stdout == subprocess.DEVNULL, argv
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as given:
        given.write(input)
        given.seek(0)
        pid = os.fork()
        if pid == 0:
            nothing = os.open(os.devnull, os.O_WRONLY)
            _be_module(argv[3:], argv[3:], (given.fileno(), nothing, stderr.fileno()), env, "", new_session=False)
        _, status = os.waitpid(pid, 0)
    return subprocess.CompletedProcess(argv, os.waitstatus_to_exitcode(status))


def _be_module(
    argv: list[str], words: list[str], streams: tuple[int, int, int], env: Mapping[str, str], fault: str, *,
    new_session: bool,
) -> NoReturn:  # fmt: skip
    """The child, as after `exec` of `argv`: run the module that `words` begin with."""

    def run() -> int:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if new_session:
            os.setsid()
        for target, source in enumerate(streams):
            os.dup2(source, target)
        _cut_off_descriptors()
        os.environ.clear()
        os.environ.update(env)
        logging.getLogger().handlers.clear()
        _take_name(argv)
        begin()
        exec(fault, {})
        run_module(words)
        return 0

    end_with(run)


def _cut_off_descriptors() -> None:
    """Take the launcher's open files, but keep their numbers in use: its objects close them when they are freed."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if number > 2 and number != nothing:
            os.dup2(nothing, number)
    os.close(nothing)


def _take_name(argv: list[str]) -> None:
    """Show the command line that a start would have, by which tests look for what is left of a run of `rl`."""
    if importlib.util.find_spec("setproctitle"):  # comes with vLLM, without which there is no `rl`
        importlib.import_module("setproctitle").setproctitle(" ".join(module_command(*argv)))
