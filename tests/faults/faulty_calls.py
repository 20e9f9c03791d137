"""Faults at the boundary to the filesystem: calls of `os` and `open` beneath a directory are numbered from 1, and one
of them kills the process or fails. A file, the trail, gets a line before and after each: `17 rename .tmp-step_4
step_4`, `17 done`."""

import builtins
import functools
import io
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.runs.processes import in_a_child

Instant = Literal["before", "after", "half way"]
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True)
class Call:
    number: int
    name: str  # the function
    path: str  # what it was called on, relative to the watched directory
    target: str  # of a rename or link
    is_done: bool  # whether it returned
    time_s: float  # when it began, by the monotonic clock


def read_trail(path: Path) -> list[Call]:
    lines = [line.split("\t") for line in path.read_text().splitlines()] if path.exists() else []
    done = {int(number) for number, *rest in lines if rest == ["done"]}
    return [
        Call(int(line[0]), line[1], line[2], line[3], int(line[0]) in done, float(line[4]))
        for line in lines
        if line[1:] != ["done"]
    ]


def deaths(calls: list[Call], *, halves: bool = False) -> list[tuple[int, Instant]]:
    """Return every state of the directory once: before each call, and after the last one. The state after a call is the
    state before the next, and `fsync` makes no new one. `halves`: half way of each write as well."""
    before = [call for last, call in zip([None, *calls], calls, strict=False) if last is None or last.name != "fsync"]
    found: list[tuple[int, Instant]] = [*((call.number, "before") for call in before), (calls[-1].number, "after")]
    return found + [(call.number, "half way") for call in calls if halves and call.name == "write"]


def install(
    directory: str, trail: str, *, kill_at: int | None = None, instant: Instant = "before",
    killer_from: int | None = None, killer_delay_s: float = 0.0, fail: str = "", nth: int = 1,
    until_nth: int | None = None, error: int = 0, rank: int | None = None, linked: str = "",
) -> None:  # fmt: skip
    """Watch `directory` in this process, and cause at most one kind of fault. `linked`: another directory that links in
    it lead to: what is called there counts as well. `kill_at`: number of the call at which the process dies by SIGKILL,
    before it, after it, or half way: of a write, half of the bytes are written. `killer_from`: at this call another
    process is told to kill this one `killer_delay_s` later. `fail`: `NAME PATH`: calls of the function NAME (`*`: any)
    on a path that begins with PATH (that is PATH, if it ends with $); the `nth` of them fails with the errno `error`,
    and those after it until `until_nth`. `rank`: only in the process with this RANK in its environment."""
    watch = _Watch((directory, linked or directory), os.open(trail, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))
    watch.kill_at, watch.instant = kill_at, instant
    watch.fail, watch.fails, watch.error = fail.split(), range(nth, (until_nth or nth) + 1), error
    watch.rank = rank
    if killer_from is not None:
        watch.killer_from, watch.killer = killer_from, _fork_killer(killer_delay_s)
    for name in ("mkdir", "rename", "replace", "link", "unlink", "remove", "rmdir", "write", "fsync"):
        setattr(os, name, watch.wrapped(name, getattr(os, name)))
    os.open = watch.wrapped("open", os.open)
    builtins.open = io.open = watch.wrapped("open", io.open)


def installing(directory: Path, trail: Path, **fault: Any) -> str:
    """Return source that installs a fault."""
    words = ", ".join(f"{name}={value!r}" for name, value in fault.items())
    return f"from tests.faults.faulty_calls import install\ninstall({str(directory)!r}, {str(trail)!r}, {words})\n"


def in_faulty_child(function: Callable[[], object], directory: Path, **fault: Any) -> int:
    """Call a function in a process of its own, with a fault, or none, beneath `directory`; return the exit code, a
    signal's negative. The trail is `directory` with the suffix `.trail`."""
    trail = directory.with_suffix(".trail")
    trail.unlink(missing_ok=True)

    def call() -> None:
        install(str(directory), str(trail), **fault)
        function()

    return os.waitstatus_to_exitcode(os.waitpid(in_a_child(call), 0)[1])


def _fork_killer(delay_s: float) -> int:
    """Start a process that kills the writer of an id into the returned pipe `delay_s` later, whatever it does then."""
    wake, alarm = os.pipe()
    if os.fork() == 0:
        os.closerange(3, wake)  # the lock of the run among them
        os.closerange(wake + 1, os.sysconf("SC_OPEN_MAX"))
        victim = os.read(wake, 64)
        deadline = time.monotonic() + delay_s
        while victim and (left_s := deadline - time.monotonic()) > 0:
            if select.select([wake], [], [], left_s)[0] and not os.read(wake, 64):  # the end of all who held the pipe
                victim = b""
        if victim:
            os.kill(int(victim.split()[0]), signal.SIGKILL)
        os._exit(0)
    os.close(wake)
    return alarm


class _Watch:
    def __init__(self, directories: tuple[str, str], trail: int) -> None:
        self._directories = directories
        self._directory = directories[0]
        self._trail = trail
        self._lock = threading.RLock()
        self._number = 0
        self._matched = 0
        self._write = os.write
        self.kill_at: int | None = None
        self.instant: Instant = "before"
        self.killer_from = 0
        self.killer = -1
        self.fail: list[str] = []
        self.fails = range(0)
        self.error = 0
        self.rank: int | None = None

    def wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does what `real` does, watched."""

        @functools.wraps(real)
        def call(*arguments: Any, **options: Any) -> Any:
            path = self._path_of(name, arguments, options)
            if path is None or (self.rank is not None and os.environ.get("RANK") != str(self.rank)):
                return real(*arguments, **options)
            target = os.path.relpath(arguments[1], self._directory) if name in ("rename", "replace", "link") else ""
            with self._lock:
                number = self._begin(name, path, target)
                if number == self.kill_at and self.instant == "half way":
                    if name == "write":
                        real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
                try:
                    self._maybe_fail(name, path, arguments)
                    result = real(*arguments, **options)
                finally:  # a directory that is there already makes mkdir raise, which is an instant as well
                    if number == self.kill_at:
                        os.kill(os.getpid(), signal.SIGKILL)
                self._write(self._trail, f"{number}\tdone\n".encode())
                return result

        return call

    def _begin(self, name: str, path: str, target: str) -> int:
        self._number += 1
        line = f"{self._number}\t{name}\t{path}\t{target}\t{time.monotonic()}\n"
        self._write(self._trail, line.encode())
        if self._number == self.killer_from:
            self._write(self.killer, f"{os.getpid()}\n".encode())
        if self._number == self.kill_at and self.instant == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        return self._number

    def _maybe_fail(self, name: str, path: str, arguments: tuple[Any, ...]) -> None:
        if not self.fail or self.fail[0] not in (name, "*"):
            return
        wanted = self.fail[1]
        if not (path == wanted[:-1] if wanted.endswith("$") else path.startswith(wanted)):
            return
        self._matched += 1
        if self._matched in self.fails:
            # As the system reports it: functions of descriptors know no path.
            where = [] if isinstance(arguments[0], int) else [str(arguments[0])]
            raise OSError(self.error, os.strerror(self.error), *where)

    def _path_of(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> str | None:
        """Return the path relative to the directory of a call that changes something in it."""
        subject = arguments[0]
        if name == "open" and not _is_writing(arguments, options):
            return None
        if isinstance(subject, int) and name == "open":
            return None
        path = path_of(subject, options)
        is_inside = any(path == one or path.startswith(f"{one}/") for one in self._directories)
        return os.path.relpath(path, self._directory) if is_inside else None


def path_of(subject: Any, options: dict[str, Any]) -> str:
    """Return the whole path of what a function of `os` is called on."""
    if isinstance(subject, int):
        path = Path(f"/proc/self/fd/{subject}").readlink()
    else:
        path = Path(os.fsdecode(subject))
        if options.get("dir_fd") is not None:
            path = Path(f"/proc/self/fd/{options['dir_fd']}").readlink() / path
    return os.path.normpath(Path.cwd() / path)


def _is_writing(arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
    how = arguments[1] if len(arguments) > 1 else options.get("mode", options.get("flags", "r"))
    return bool(how & _WRITING) if isinstance(how, int) else bool(set(how) & set("wax+"))
