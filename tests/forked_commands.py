"""The commands, less the start of Python: what the launcher would start anew is forked from it instead.

`training_zygote` runs this in a process that has imported torch. Launcher, trainer and ranks are processes of their
own as ever, with the same parents, sessions, environments and logs; the imports alone are not made again.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, BinaryIO, NoReturn

from holdfast.shared.process.import_path import module_command
from tests.processes import end_with

_FORKED = ("holdfast.trainer.launch", "holdfast.orchestrator.main")


def run_command(program: str, argv: list[str]) -> NoReturn:
    """Be the console script `program`."""
    import holdfast.commands.launcher.supervise
    from holdfast.commands import cli

    replaced = {name: getattr(subprocess, name) for name in ("DEVNULL", "STDOUT", "TimeoutExpired")}
    holdfast.commands.launcher.supervise.subprocess = SimpleNamespace(Popen=_start, **replaced)  # type: ignore[assignment]
    sys.argv = [program, *argv]
    getattr(cli, program.replace("-", "_"))()
    raise AssertionError("a command ends by sys.exit")


def _start(argv: list[str], **options: Any) -> ForkedModule | subprocess.Popen[bytes]:
    """Fork what is imported already; an engine is started as ever."""
    return (ForkedModule if argv[3] in _FORKED else subprocess.Popen)(argv, **options)


class ForkedModule:
    """A forked process that runs one of our modules; what the launcher uses of `subprocess.Popen`."""

    def __init__(
        self,
        argv: list[str],
        *,
        stdin: int,
        stdout: BinaryIO,
        stderr: int,
        env: Mapping[str, str],
        start_new_session: bool,
    ) -> None:
        begin = module_command(argv[3])
        assert argv[: len(begin)] == begin and start_new_session, argv
        assert (stdin, stderr) == (subprocess.DEVNULL, subprocess.STDOUT)
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _be_module(argv[3:], stdout.fileno(), env)

    def poll(self) -> int | None:
        """Return the exit code of a process that has ended."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
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


def _be_module(argv: list[str], output: int, env: Mapping[str, str]) -> NoReturn:
    """The child: as after `exec`, then what `run_module` does."""

    def run() -> int:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
            os.dup2(source, target)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.environ.clear()
        os.environ.update(env)
        logging.getLogger().handlers.clear()
        sys.argv = argv
        _take_name(argv)
        return _main_of(argv[0])

    end_with(run)


def _take_name(argv: list[str]) -> None:
    """Show the command line that a start would have, by which tests look for what is left of a run of `rl`."""
    if importlib.util.find_spec("setproctitle"):  # comes with vLLM, without which there is no `rl`
        importlib.import_module("setproctitle").setproctitle(" ".join(module_command(*argv)))


def _main_of(name: str) -> int:
    import holdfast.trainer.launch
    from holdfast.shared.process.child import exit_code_of

    # A page of memory that its ranks share, and not the one that all forks would share.
    holdfast.trainer.launch.STOP_REQUEST.__init__()
    return exit_code_of(importlib.import_module(name).main)
