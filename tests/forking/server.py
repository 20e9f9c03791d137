"""A process that imports what is heavy once, and forks a child for every request: `ForkServer(prepare).fork(function,
log, ...)`. A request is a line of JSON, answered by a line with the id of the process and one with its exit code. All
end with the process that asked for them. This file is also the server's program."""

import importlib
import importlib.util
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from holdfast.process.child import die_with_parent
from tests.runs.processes import HANG_S, end_with

ROOT = Path(__file__).resolve().parents[2]
IMPORT_TIMEOUT_S = 600.0
_answers = 1


class Fork:
    """One forked process. `code`: its exit code once somebody has waited; a signal's number is negative."""

    def __init__(self, log_path: Path) -> None:
        self.log_path = log_path
        self.pid = 0
        self.code: int | None = None
        self._log_begin = log_path.stat().st_size if log_path.exists() else 0
        self._answers: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    @property
    def log(self) -> str:
        data = self.log_path.read_bytes() if self.log_path.exists() else b""
        return data[self._log_begin :].decode(errors="replace")

    @property
    def has_ended(self) -> bool:
        return self.code is not None or not self._answers.empty()

    def poll(self) -> int | None:
        return self.wait(0) if self.has_ended else None

    def send_signal(self, number: int) -> None:
        if not self.has_ended:
            with suppress(ProcessLookupError):  # it has ended, and nobody has heard of it yet
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout_s: float = HANG_S) -> int:
        """Wait for its end, and return its exit code. Raises `TimeoutError`: it still runs."""
        if self.code is None:
            try:
                self.code = self._next_answer(timeout_s)
            except queue.Empty:
                raise TimeoutError(f"process {self.pid} still ran after {timeout_s} s:\n{self.log}") from None
        return self.code

    def _next_answer(self, timeout_s: float) -> int:
        answer = self._answers.get(timeout=timeout_s)
        if answer is None:
            raise RuntimeError("the fork server ended")
        return answer


class Started:
    """A command that is started as ever, with what a `Fork` has."""

    def __init__(self, argv: list[str], log_path: Path, environment: Mapping[str, str]) -> None:
        self.log_path = log_path
        with open(log_path, "wb") as log:
            self._process = subprocess.Popen(
                argv, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        self.pid = self._process.pid
        self.send_signal = self._process.send_signal

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self, timeout_s: float) -> int:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"process {self.pid} still ran after {timeout_s} s:\n{self.log}") from None


class ForkServer:
    """The server, for several threads. `prepare`: what it calls before it forks anything, as `module:function`."""

    def __init__(self, prepare: str) -> None:
        self._lock = threading.Lock()
        self._forks: dict[int, Fork] = {}
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, prepare],  # not by `-m`, see `popen.run_module`
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read_answers, daemon=True)
        self._reader.start()

    def prepare(self, function: str) -> None:
        """Have the server call one more function before it forks what is asked for after this."""
        with self._lock:
            self._write({"prepare": function})

    def fork(self, function: str, log: Path, *, environment: Mapping[str, str] | None = None, **arguments: Any) -> Fork:
        """Call `module:function` in a child with what JSON can say. `environment`: by default that of here."""
        wanted = os.environ if environment is None else environment
        gone: dict[str, str | None] = dict.fromkeys(self._environment.keys() - wanted.keys())
        changed = {name: value for name, value in wanted.items() if self._environment.get(name) != value}
        request = {"function": function, "arguments": arguments, "log": str(log), "environment": gone | changed}
        fork = Fork(log)
        with self._lock:
            number = len(self._forks)
            self._forks[number] = fork
            self._write({"id": number, **request})
        fork.pid = fork._next_answer(IMPORT_TIMEOUT_S)
        return fork

    def _write(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
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
            self._forks[answer["id"]]._answers.put(answer["value"])
        for fork in list(self._forks.values()):
            fork._answers.put(None)


def _serve() -> NoReturn:
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
                if "prepare" in request:
                    _prepare(request["prepare"])
                    continue
                pid = os.fork()
                if pid == 0:
                    _be_child(request)
                running[os.pidfd_open(pid)] = (request["id"], pid)
                _say(request["id"], pid)


def _prepare(function: str) -> None:
    _named(function)()
    sys.stdout.flush()  # every child has a copy of what is left


def _say(number: int, value: int) -> None:
    os.write(_answers, (json.dumps({"id": number, "value": value}) + "\n").encode())


def _be_child(request: dict[str, Any]) -> NoReturn:
    die_with_parent()
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(source, target)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    for name, value in request["environment"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value

    def call() -> int:
        _named(request["function"])(**request["arguments"])
        return 0

    end_with(call)


def _named(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


if __name__ == "__main__":
    die_with_parent()
    _answers = os.dup(1)
    os.dup2(2, 1)  # what imports print is no answer
    if importlib.util.find_spec("setproctitle"):  # comes with vLLM; finds its place only before the environment changes
        importlib.import_module("setproctitle").getproctitle()
    _prepare(sys.argv[1])
    _serve()
