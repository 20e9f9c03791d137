"""Processes on hosts: one interface for this machine and for hosts that the launcher reaches over SLURM, Ray or TCP.

`RemoteHost` talks to a `RemoteAgent` on another host, over one of `holdfast.launcher.cluster.channels`. An agent is a
Ray actor, a SLURM step that runs this module as a program, or the command of another node (`holdfast.launcher.nodes`).
It starts one process after the other, watches it and ends it. Everything that it starts dies with it.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from holdfast.errors import STORAGE_FAILED, ConfigError, HoldfastError, ProcessDied, is_storage_failure
from holdfast.launcher.cluster import channels
from holdfast.launcher.cluster.channels import HostLost, LineChannel
from holdfast.process.child import LAUNCHER_ENV
from holdfast.process.heartbeat import awake_s, show_stacks
from holdfast.process.imports import module_command

if TYPE_CHECKING:
    from holdfast.launcher.server_choice import Reservation

# Variables of each host. The rest of the launcher's environment goes to other hosts, as with `srun`.
_OWN = ("PATH", "HOME", "HOSTNAME", "LD_LIBRARY_PATH", "PWD", "OLDPWD", "SHLVL", "TMPDIR", "_", "VIRTUAL_ENV")
_OWN_PREFIXES = ("RAY_", "SLURM_", "SLURMD_", "PMI", "CUDA_VISIBLE_", "ROCR_VISIBLE_", "XDG_", "SSH_", "KUBERNETES_")
_POLL_S = 0.02
_LOOK_S = 0.1
_CONNECT_S = 5.0
_LOST = -signal.SIGKILL


class LocalProcess:
    """A child of this process, in a session of its own, with all that it starts."""

    loss = None
    """How its host was lost, for processes elsewhere; None if the process ended by itself."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Its process id on its host, which is also the id of its group; 0 before it has started."""
        return self._process.pid

    @property
    def returncode(self) -> int | Any:
        """Its exit code as in `subprocess`; None until `poll` or `wait` has seen its end."""
        return self._process.returncode

    def poll(self) -> int | None:
        """Return its exit code without waiting; None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for its end; return its exit code, None if it still runs."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def signal(self, number: int) -> None:
        """Send a signal to the process only, if it runs."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill its process group, also after its own end."""
        # No process has the id of a dead one while others are in its group: such a process is of somebody else.
        if self.returncode is not None and Path(f"/proc/{self.pid}").exists():
            return
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def clear(self, timeout_s: float) -> None:
        """Kill its process group, and wait until ports and memory are free."""
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
        """Have its processes `pids` write the stacks of their threads into `log`."""
        show_stacks(pids, of=self.pid, log=log)


class LocalHost:
    """This machine."""

    name = "this machine"

    def start(self, argv: list[str], log: Path, environment: Mapping[str, str]) -> LocalProcess:
        """Start a process in a group of its own, which dies with the launcher; append its output to `log`, and add
        `environment` to the launcher's."""
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
    """Starts and ends one process on its host for the launcher. Arguments and results are plain values. `environment`:
    of its processes, added to this host's."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = environment or {}
        self._process: LocalProcess | None = None
        self._reservations: list[Reservation] = []

    @property
    def has_started(self) -> bool:
        """Whether it has started a process."""
        return self._process is not None

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

        Raise ConfigError if the directory is not there.
        """
        try:
            os.chdir(directory)
        except OSError as error:
            raise ConfigError(
                f"{socket.gethostname()} has no directory {directory} ({error.strerror}), from which the run was "
                "started: start it from a directory that all hosts share"
            ) from None
        own = {**os.environ, **self._environment, **environment}
        self._process = start_here(module_command(*module), Path(log), own)
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

    def end(self, timeout_s: float) -> None:
        """Kill what it has started, if anything, and wait until that is gone."""
        if self._process is not None:
            self._process.clear(timeout_s)

    def _started(self) -> LocalProcess:
        if self._process is None:
            raise ConfigError("nothing was started here")
        return self._process


def _is_there(path: Path) -> bool:
    try:
        return path.name in os.listdir(path.parent)  # noqa: PTH208 - names are all that is asked for
    except OSError:
        return False


class RemoteProcess:
    """A process on another host. No method waits for an answer, except `clear`: the host may be mute."""

    def __init__(self, channel: LineChannel, *, host: str, started: Future[int]) -> None:
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
        if futures.wait([cleared], max(channels.CALL_TIMEOUT_S, timeout_s)).not_done:
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

    def __init__(self, name: str, address: str, channel: LineChannel) -> None:
        self.name = name
        self.address = address
        self.channel = channel

    def start(self, argv: list[str], log: Path, environment: Mapping[str, str]) -> RemoteProcess:
        """Start one of our modules, without waiting; `argv` is from `module_command`."""
        return self._start(argv, log, {**travelling(dict(os.environ)), **environment}, str(Path.cwd()))

    def _start(self, argv: list[str], log: Path, environment: Mapping[str, str], directory: str) -> RemoteProcess:
        started = self.channel.post("start", argv[3:], str(log.absolute()), dict(environment), directory)
        return RemoteProcess(self.channel, host=self.name, started=started)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the agent; return its result, or raise its error, or `ProcessDied` for a lost host."""
        try:
            return self.channel.call(method, *arguments)
        except HostLost as lost:
            raise ProcessDied(f"{self.name} is lost: {lost}") from None


Process = LocalProcess | RemoteProcess
Host = LocalHost | RemoteHost


def agent_command() -> list[str]:
    """Return the command line of an agent."""
    return module_command("holdfast.launcher.cluster.hosts")


def main() -> None:
    """Be an agent until stdin ends: the launcher has ended, or is out of reach. Processes of this agent end, too."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        # A scheduler may send them; the launcher decides. Not SIG_IGN, which children would inherit.
        signal.signal(number, lambda *_: None)
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else may come between the lines
    lock = threading.Lock()

    def say(line: str) -> None:
        with lock:
            channel.write(line)
            channel.flush()

    serve(RemoteAgent(), sys.stdin, say)
    os._exit(0)  # the kernel ends what was started


class AgentConnection:
    """An agent's connection to the launcher that listens at `address`; a context manager. The first line is `greeting`.

    Attributes:
        was_heard: whether the launcher has sent anything.

    Raise OSError if nobody listens there.
    """

    def __init__(self, address: tuple[str, int], greeting: str) -> None:
        self._socket = socket.create_connection(address, timeout=_CONNECT_S)
        self._lock = threading.Lock()
        self.was_heard = False
        self._socket.settimeout(None)
        if self._socket.getsockname() == self._socket.getpeername():  # TCP may connect a port with itself
            self._socket.close()
            raise ConnectionRefusedError
        self.say(f"{greeting}\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def say(self, line: str) -> None:
        """Send a line, unless the launcher is gone."""
        with self._lock, suppress(OSError):
            self._socket.sendall(line.encode())

    def lines(self, came: Sequence[int] = ()) -> Iterator[str]:
        """Yield the lines until the launcher is gone. Send heartbeats, and the first signal of `came`, meanwhile."""
        rest, heard_s, sent_s, has_told = b"", awake_s(), 0.0, False
        while (now := awake_s()) - heard_s < channels.SILENT_S:
            if came and not has_told:
                self.say(f"{json.dumps({'signal': came[0]})}\n")
                has_told = True
            if now - sent_s >= channels.PERIOD_S:
                self.say("\n")
                sent_s = now
            if not select.select([self._socket], [], [], _LOOK_S)[0]:
                continue
            try:
                part = self._socket.recv(1 << 16)
            except OSError:
                return
            if not part:
                return
            heard_s, self.was_heard = awake_s(), True
            *lines, rest = (rest + part).split(b"\n")
            yield from (line.decode() for line in lines if line)


def serve(agent: RemoteAgent, lines: Iterable[str], say: Callable[[str], object]) -> dict[str, Any] | None:
    """Do what the launcher's `lines` ask of `agent`; return the first line that is not a call, None at their end."""

    def answer(**message: Any) -> None:
        say(f"{json.dumps(message)}\n")

    for line in lines:
        call = json.loads(line)
        if "method" not in call:
            return call
        try:
            result = getattr(agent, call["method"])(*call["arguments"])
        except (OSError, HoldfastError) as error:
            answer(error=str(error), errno=getattr(error, "errno", None) if is_storage_failure(error) else None)
            continue
        answer(result=result)
        if call["method"] == "start":
            # In a thread: the next call may end the process.
            threading.Thread(target=lambda pid=result: answer(ended=agent.wait(), pid=pid), daemon=True).start()
    return None


if __name__ == "__main__":
    main()
