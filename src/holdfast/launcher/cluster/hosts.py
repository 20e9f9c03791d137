"""Processes on hosts: one interface for this machine and for hosts that the launcher reaches over SLURM or Ray.

`RemoteHost` talks to a `RemoteAgent` on another host, over an `RpcChannel`. An agent is a Ray actor, or a SLURM step
that runs this module as a program. It starts one process after the other, watches it and ends it. Everything that it
starts dies with it. `PipeChannel` is the launcher's end of a command such as `srun`: one line of JSON for each call and
answer.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from holdfast.errors import STORAGE_FAILED, ConfigError, HoldfastError, ProcessDied, is_storage_failure
from holdfast.process.child import LAUNCHER_ENV
from holdfast.process.heartbeat import awake_s, show_stacks
from holdfast.process.imports import module_command

if TYPE_CHECKING:
    from holdfast.launcher.server_choice import Reservation

# Variables of each host. The rest of the launcher's environment goes to other hosts, as with `srun`.
_OWN = ("PATH", "HOME", "HOSTNAME", "LD_LIBRARY_PATH", "PWD", "OLDPWD", "SHLVL", "TMPDIR", "_", "VIRTUAL_ENV")
_OWN_PREFIXES = ("RAY_", "SLURM_", "SLURMD_", "PMI", "CUDA_VISIBLE_", "ROCR_VISIBLE_", "XDG_", "SSH_", "KUBERNETES_")
_POLL_S = 0.02
_LOST = -signal.SIGKILL
CALL_TIMEOUT_S = 60.0
"""For one answer; the first one waits for a scheduler and the imports of the agent."""
_CLOSE_TIMEOUT_S = 10.0


class Process(Protocol):
    """One process with all that it starts."""

    @property
    def pid(self) -> int:
        """Its process id on its host, which is also the id of its group; 0 before it has started."""
        ...

    @property
    def returncode(self) -> int | Any:
        """Its exit code as in `subprocess`; None until `poll` or `wait` has seen its end."""
        ...

    @property
    def loss(self) -> str | None:
        """How its host was lost; None if the process ended by itself."""
        ...

    def poll(self) -> int | None:
        """Return its exit code without waiting; None while it runs."""
        ...

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for its end; return its exit code, None if it still runs."""
        ...

    def signal(self, number: int) -> None:
        """Send a signal to the process only, if it runs."""
        ...

    def kill(self) -> None:
        """Kill its process group, also after its own end."""
        ...

    def clear(self, timeout_s: float) -> None:
        """Kill its process group, and wait until ports and memory are free."""
        ...

    def show_stacks(self, pids: Iterable[int], log: Path) -> None:
        """Have its processes `pids` write the stacks of their threads into `log`."""
        ...


class Host(Protocol):
    """A machine that can start processes."""

    @property
    def name(self) -> str:
        """Its name in messages."""
        ...

    def start(self, argv: list[str], log: Path, environment: Mapping[str, str]) -> Process:
        """Start a process in a group of its own, which dies with the launcher.

        Args:
            log: its output is appended here.
            environment: added to the launcher's.
        """
        ...


class LocalProcess:
    """A child of this process, in a session of its own."""

    loss = None

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | Any:
        return self._process.returncode

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout_s: float | None = None) -> int | None:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        # No process has the id of a dead one while others are in its group: such a process is of somebody else.
        if self.returncode is not None and Path(f"/proc/{self.pid}").exists():
            return
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def clear(self, timeout_s: float) -> None:
        import psutil  # takes 0.03 s

        self.kill()
        self._process.wait()
        deadline = time.monotonic() + timeout_s
        pids = psutil.pids()
        for pid in pids if self.pid not in pids else ():
            try:
                if os.getpgid(pid) != self.pid:
                    continue
                # They are not our children. A descriptor is safe from a reused id.
                descriptor = os.pidfd_open(pid)
            except (ProcessLookupError, PermissionError):
                continue
            try:
                # A large process takes seconds to die.
                select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            finally:
                os.close(descriptor)

    def show_stacks(self, pids: Iterable[int], log: Path) -> None:
        show_stacks(pids, of=self.pid, log=log)


class LocalHost:
    """This machine."""

    name = "this machine"

    def start(self, argv: list[str], log: Path, environment: Mapping[str, str]) -> LocalProcess:
        return start_here(argv, log, {**os.environ, **environment})


def start_here(argv: list[str], log: Path, environment: Mapping[str, str]) -> LocalProcess:
    """Start a child in a session of its own, with exactly this `environment`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as output:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, LAUNCHER_ENV: str(os.getpid())},
            start_new_session=True,  # Ctrl-C reaches only the launcher
        )
    return LocalProcess(process)


THIS_MACHINE = LocalHost()


def travelling(environment: dict[str, str]) -> dict[str, str]:
    """Return the part of the launcher's environment that goes to other hosts."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _OWN and not name.startswith(_OWN_PREFIXES) and name.isprintable()
    }


class RemoteAgent:
    """Starts and ends one process on its host for the launcher. Arguments and results are plain values."""

    def __init__(self) -> None:
        self._process: LocalProcess | None = None
        self._reservations: list[Reservation] = []

    def missing(self, paths: list[str]) -> list[str]:
        """Return the `paths` that do not exist on this host."""
        # By its directory: network filesystems cache that a file is missing.
        return [path for path in paths if not _is_there(Path(path))]

    def reserve(self, first: int) -> int:
        """Return the first free port from `first` on; it is held until the agent ends."""
        # Not at the top: the agent must handle signals before long imports.
        from holdfast.launcher.server_choice import reserve_first_free

        (reservation,) = reserve_first_free("0.0.0.0", first)
        self._reservations.append(reservation)
        return reservation.port

    def start(self, module: list[str], log: str, environment: dict[str, str], directory: str) -> int:
        """Start one of our modules; return its process id.

        Args:
            module: its name and its arguments.
            environment: added to this host's.
            directory: its working directory.

        Raises:
            ConfigError: the directory is not there.
        """
        try:
            os.chdir(directory)
        except OSError as error:
            raise ConfigError(
                f"{socket.gethostname()} has no directory {directory} ({error.strerror}), from which the run was "
                "started: start it from a directory that all hosts share"
            ) from None
        self._process = start_here(module_command(*module), Path(log), {**os.environ, **environment})
        return self._process.pid

    def wait(self) -> int:
        """Wait for the end of the process; return its exit code."""
        code = self._started().wait()
        assert code is not None
        return code

    def signal(self, number: int) -> None:
        self._started().signal(number)

    def kill(self) -> None:
        self._started().kill()

    def clear(self, timeout_s: float) -> None:
        self._started().clear(timeout_s)

    def show_stacks(self, pids: Iterable[int], log: str) -> None:
        self._started().show_stacks(pids, Path(log))

    def _started(self) -> LocalProcess:
        if self._process is None:
            raise ConfigError("nothing was started here")
        return self._process


def _is_there(path: Path) -> bool:
    try:
        return path.name in os.listdir(path.parent)  # noqa: PTH208 - names are all that is asked for
    except OSError:
        return False


class HostLost(Exception):
    """An agent is out of reach: what it started is dead, or will be soon."""


class RpcChannel(Protocol):
    """The connection to one `RemoteAgent`."""

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the agent; return its result, or raise its error, or `HostLost`."""
        ...

    def post(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method of the agent without waiting; without an answer in time, `ended` raises an error."""
        ...

    def ended(self) -> int | None:
        """Return the exit code of the process without waiting; None while it starts or runs.

        Raises:
            HostLost: the agent is out of reach.
            OSError, HoldfastError: the process could not be started.
        """
        ...

    def lose(self) -> HostLost:
        """Give the agent up, without waiting; return why."""
        ...


class RemoteProcess:
    """A process on another host. No method waits for an answer, except `clear`: the host may be mute."""

    def __init__(self, channel: RpcChannel, *, host: str, started: Future[int]) -> None:
        self.loss: str | None = None
        self.returncode: Any = None
        self._channel = channel
        self._host = host
        self._started = started

    @property
    def pid(self) -> int:
        return self._started.result() if self._started.done() and self._started.exception() is None else 0

    def poll(self) -> int | None:
        """Return its exit code; SIGKILL for a lost host. Raise once if the process could not be started."""
        if self.returncode is None:
            try:
                self.returncode = self._channel.ended()
            except HostLost as lost:
                self._lose(lost)
            except (OSError, HoldfastError) as error:
                self.returncode = STORAGE_FAILED if isinstance(error, OSError) else error.exit_code
                raise
        return self.returncode

    def wait(self, timeout_s: float | None = None) -> int | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self.poll() is None and (deadline is None or time.monotonic() < deadline):
            time.sleep(_POLL_S)  # neither Ray nor a pipe has an event that a signal interrupts
        return self.returncode

    def signal(self, number: int) -> None:
        if self.poll() is None:
            self._channel.post("signal", int(number))

    def kill(self) -> None:
        self._post("kill")

    def clear(self, timeout_s: float) -> None:
        """Kill its group and wait until it is gone; a host without an answer in time is lost."""
        cleared = self._post("clear", timeout_s)
        if cleared is None:
            return
        if futures.wait([cleared], max(CALL_TIMEOUT_S, timeout_s)).not_done:
            self._lose(self._channel.lose())
        self.wait(timeout_s)

    def show_stacks(self, pids: Iterable[int], log: Path) -> None:
        self._post("show_stacks", list(pids), str(log))

    def _post(self, method: str, *arguments: Any) -> Future[Any] | None:
        return self._channel.post(method, *arguments) if self.loss is None else None

    def _lose(self, lost: HostLost) -> None:
        self.loss = f"{self._host} is lost: {lost}"
        if self.returncode is None:
            self.returncode = int(_LOST)


class RemoteHost:
    """The host of one process; `address` is for other hosts."""

    def __init__(self, name: str, address: str, channel: RpcChannel) -> None:
        self.name = name
        self.address = address
        self.channel = channel

    def start(self, argv: list[str], log: Path, environment: Mapping[str, str]) -> RemoteProcess:
        """Start one of our modules, without waiting; `argv` is from `module_command`."""
        arguments = (argv[3:], str(log.absolute()), {**travelling(dict(os.environ)), **environment}, str(Path.cwd()))
        return RemoteProcess(self.channel, host=self.name, started=self.channel.post("start", *arguments))

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the agent; return its result, or raise its error, or `ProcessDied` for a lost host."""
        try:
            return self.channel.call(method, *arguments)
        except HostLost as lost:
            raise ProcessDied(f"{self.name} is lost: {lost}") from None


def agent_command() -> list[str]:
    """Return the command line of an agent."""
    return module_command("holdfast.launcher.cluster.hosts")


class PipeChannel:
    """The connection to an agent that `argv` starts. Only `call` and `close` wait for it."""

    def __init__(self, argv: list[str]) -> None:
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._calls: deque[tuple[Future[Any], float]] = deque()  # and by when an answer is due
        self._started: Future[int] | None = None
        self._ends: dict[int, int] = {}
        self._lost: HostLost | None = None
        threading.Thread(target=self._write, daemon=True).start()
        threading.Thread(target=self._read, daemon=True).start()

    def call(self, method: str, *arguments: Any) -> Any:
        try:
            return self.post(method, *arguments).result(CALL_TIMEOUT_S)
        except TimeoutError:
            raise self.lose() from None

    def post(self, method: str, *arguments: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        with self._lock:
            if method == "start":
                self._started = answer
            if self._lost is not None:
                answer.set_exception(self._lost)
                return answer
            self._calls.append((answer, awake_s() + CALL_TIMEOUT_S))
            self._lines.put(f"{json.dumps({'method': method, 'arguments': arguments})}\n")
        return answer

    def ended(self) -> int | None:
        assert self._started is not None
        if self._started.done() and (code := self._ends.get(self._started.result())) is not None:
            return code
        if self._lost is not None:
            raise self._lost
        with self._lock:
            is_mute = bool(self._calls) and awake_s() > self._calls[0][1]
        if is_mute:
            raise self.lose()
        return None

    @property
    def is_lost(self) -> bool:
        """Whether the agent is out of reach."""
        return self._lost is not None

    def close(self) -> None:
        """End the agent and its process."""
        # By the end of its stdin: a killed `srun` would not end it.
        self._lines.put(None)
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def lose(self) -> HostLost:
        """Give the agent up: a late answer would be taken for the answer of a later call."""
        threading.Thread(target=self.close, daemon=True).start()
        return self._lose("it does not answer")

    def _lose(self, reason: str) -> HostLost:
        with self._lock:
            self._lost = lost = self._lost or HostLost(reason)
            calls, self._calls = self._calls, deque()
        for answer, _ in calls:
            answer.set_exception(lost)
        return lost

    def _write(self) -> None:
        # In a thread: an agent may read nothing.
        assert self._process.stdin is not None
        with suppress(OSError), self._process.stdin as stdin:
            while (line := self._lines.get()) is not None:
                stdin.write(line)
                stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None and self._process.stderr is not None
        with self._process.stdout as stdout, self._process.stderr as stderr:
            for line in stdout:
                message = json.loads(line)
                if "ended" in message:
                    self._ends[message["pid"]] = message["ended"]
                    continue
                with self._lock:
                    if not self._calls:
                        continue
                    answer, _ = self._calls.popleft()
                if answer is self._started:  # its id may be an earlier process's
                    self._ends.clear()
                if "error" in message:
                    number, said = message.get("errno"), message["error"]
                    answer.set_exception(ConfigError(said) if number is None else OSError(number, said))
                else:
                    answer.set_result(message["result"])
            errors = [line for line in stderr if "error" in line]
        self._lose(errors[0].strip() if errors else f"its connection has ended (exit code {self._process.wait()})")


def close_all(channels: Iterable[PipeChannel]) -> None:
    """End all agents at once, as a mute one takes its time."""
    threads = [threading.Thread(target=channel.close) for channel in channels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    """Be an agent until stdin ends: the launcher has ended, or is out of reach. Processes that were started here end,
    too."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        # A scheduler may send them; the launcher decides. Not SIG_IGN, which children would inherit.
        signal.signal(number, lambda *_: None)
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else may come between the lines
    lock, place = threading.Lock(), RemoteAgent()

    def say(**message: Any) -> None:
        with lock:
            channel.write(f"{json.dumps(message)}\n")
            channel.flush()

    for line in sys.stdin:
        call = json.loads(line)
        try:
            result = getattr(place, call["method"])(*call["arguments"])
        except (OSError, HoldfastError) as error:
            say(error=str(error), errno=getattr(error, "errno", None) if is_storage_failure(error) else None)
            continue
        say(result=result)
        if call["method"] == "start":
            # In a thread: the next call may end the process.
            threading.Thread(target=lambda pid=result: say(ended=place.wait(), pid=pid), daemon=True).start()
    os._exit(0)  # the kernel ends what was started


if __name__ == "__main__":
    main()
