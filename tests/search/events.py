"""Events of the processes of a run: calls of `os` beneath its directory, and samples of an engine. Each process counts
them; at a planned event something happens, once in all starts of the run. A process that only records writes what it
counted when it ends, and often before.
"""

from __future__ import annotations

import builtins
import errno
import functools
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CALLS = ("rename", "replace", "link", "unlink", "remove", "rmdir", "mkdir", "write", "fsync", "fdatasync", "truncate")
_RANDOM = re.compile(r"^\.tmp-(.*)-[0-9a-f]{8}$")
_ERRORS_IN_A_ROW = 2
_PAUSE_S = 1.0
_ANSWER_S = 20.0
"""A process that stands still for longer goes on: the one that was to answer has died."""


def part_of(path: str) -> str:
    """Return the part of a run directory that a relative path is of: `checkpoints`, `checkpoints/tmp`, `run.json`."""
    words = path.split("/")
    named = [match[1] if (match := _RANDOM.match(word)) else word for word in words]
    is_temporary = named != words
    name = re.sub(r"\d+", "N", named[0])
    if name == "rollouts" and len(named) > 1 and named[1].startswith("generations"):
        name += "/generations"
    return f"{name}/tmp" if is_temporary else name


def variables(folder: Path) -> dict[str, str]:
    """Return the variables with which processes are watched, as the plan in `folder` says."""
    root = Path(__file__).resolve().parents[2]
    source = f"from tests.search.events import install; install({str(folder)!r})"
    return {"FAULT_AT_START": source, "PYTHONPATH": f"{root / 'tests' / 'faults' / 'at_start'}:{root}"}


def install(folder: str) -> None:
    """Watch this process. Called in every process of a run before it does anything else."""
    if os.environ.get("SEARCH_CLOCK_S"):
        offset, real = float(os.environ["SEARCH_CLOCK_S"]), time.time
        time.time = lambda: real() + offset
    plan = json.loads(Path(folder, "plan.json").read_text())
    watch = _Watch(folder, plan)
    for name in _CALLS:
        setattr(os, name, watch.wrapped(name, getattr(os, name)))
    os.open = watch.wrapped("open", os.open)
    builtins.open = io.open = watch.wrapped("open", io.open)
    if (os.environ.get("HOLDFAST_PROCESS") or "").startswith("inference"):
        watch.follow_samples()


def started(pid: int) -> str:
    """Return when a process was started, which tells it from a later one of the same number; empty if it has ended."""
    try:
        with io.open_code(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(b") ")[2].split()[19].decode()
    except OSError:
        return ""


def send(folder: Path, number: int, *, role: str = "", but: int = 0) -> None:
    """Send a signal to the watched processes of a role, or to all; this process comes last."""
    for place in sorted((folder / "pids").iterdir(), key=lambda place: place.name.endswith(f"-{os.getpid()}")):
        name, _, pid = place.name.rpartition("-")
        if name.startswith(role) and int(pid) != but and (began := started(int(pid))) and place.read_text() == began:
            try:
                os.kill(int(pid), number)
            except ProcessLookupError:  # it has just ended
                continue


def kill_players(folder: Path) -> None:
    """Kill what plays, scores or tells for the run that `folder` watches, by the variables that all of it inherits."""
    words = ("orchestrator.worker", "light_mcp_server", "noted_end", "math_answers", "sandbox_inside", "view.track")
    for place in Path("/proc").iterdir():
        try:
            is_player = any(word.encode() in (place / "cmdline").read_bytes() for word in words)
            if place.name.isdecimal() and is_player and str(folder).encode() in (place / "environ").read_bytes():
                os.kill(int(place.name), signal.SIGKILL)
        except OSError:  # it has just ended, or is another user's
            continue


def _role() -> str:
    if "holdfast.orchestrator.worker" in sys.orig_argv:
        return "worker"
    name = re.sub(r"\d+", "N", os.environ.get("HOLDFAST_PROCESS") or "launcher")
    if ":" in name:
        return "tracker"
    return "rank" if name == "trainer" and "RANK" in os.environ else name


class _Watch:
    def __init__(self, folder: str, plan: dict[str, Any]) -> None:
        self._folder, self._faults = Path(folder), plan["faults"]
        self._run = plan["run"]
        self._counts: Counter[str] = Counter()
        self._lock = threading.RLock()
        self._real_write, self._real_open = os.write, os.open
        self._failing: tuple[str, int] | None = None
        self._flushed: dict[str, int] = {}  # how much of a file that was written here is durable
        self._renamed: list[tuple[str, str, str | None]] = []  # not durable: from, to, a link to what was there
        self._links = {name: getattr(os, name) for name in ("link", "rename", "unlink")}
        self._pids: set[int] = set()

    def wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def call(*arguments: Any, **options: Any) -> Any:
            path = self._path_of(name, arguments, options)
            if path is None:
                return real(*arguments, **options)
            with self._lock:
                self._happen(f"{_role()} {name} {part_of(path)}", path)
                self._note_before(name, path, arguments)
            result = real(*arguments, **options)
            with self._lock:
                self._note_after(name, path, arguments)
            return result

        return call

    def follow_samples(self) -> None:
        from tests.servers import stub_sampler

        real = stub_sampler.StubSampler.sample

        async def sample(sampler: Any, request: Any, index: int, seed: int) -> Any:
            with self._lock:
                self._happen(f"{_role()} sample engine", "")
            return await real(sampler, request, index, seed)

        stub_sampler.StubSampler.sample = sample  # type: ignore[method-assign]

    def _path_of(self, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> str | None:
        subject = arguments[0] if arguments else options.get("path", "")
        if name == "open":
            how = arguments[1] if len(arguments) > 1 else options.get("mode", options.get("flags", "r"))
            writes = how & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) if isinstance(how, int) else {*how} & {*"wax+"}
            if isinstance(subject, int) or not writes:
                return None
        try:
            path = os.readlink(f"/proc/self/fd/{subject}") if isinstance(subject, int) else os.fsdecode(subject)
            path = os.path.abspath(path)
        except (OSError, TypeError, ValueError):
            return None
        is_inside = path == self._run or path.startswith(f"{self._run}/")
        return os.path.relpath(path, self._run) if is_inside else None

    def _happen(self, key: str, path: str) -> None:
        self._pids.add(os.getpid())
        self._register(key.split()[0])
        self._counts[key] += 1
        if not self._faults:
            self._record(key)
            return
        if self._failing is not None and self._failing[0] == key:
            left = self._failing[1] - 1
            self._failing = (key, left) if left else None
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        for number, fault in enumerate(self._faults):
            if fault["key"] == key and fault["nth"] == self._counts[key] and self._is_first(number, key, path):
                self._do(fault["effect"], key, path)

    def _record(self, key: str) -> None:
        file = self._real_open(self._folder / "trail", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._real_write(file, f"{os.getpid()} {key}\n".encode())
        os.close(file)

    def _register(self, role: str) -> None:
        """Let others find this process: a fork is another one."""
        place = f"{self._folder}/pids/{role}-{os.getpid()}"
        if not Path(place).exists():
            file = self._real_open(place, os.O_WRONLY | os.O_CREAT, 0o644)
            self._real_write(file, started(os.getpid()).encode())
            os.close(file)

    def _is_first(self, number: int, key: str, path: str) -> bool:
        try:
            file = self._real_open(f"{self._folder}/hits/{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        self._real_write(file, f"{key} ({path})".encode())
        os.close(file)
        return True

    def _do(self, effect: str, key: str, path: str) -> None:
        me = os.getpid()
        if effect == "kill":
            os.kill(me, signal.SIGKILL)
        elif effect == "error":
            self._failing = (key, _ERRORS_IN_A_ROW)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        elif effect == "pause":
            subprocess.Popen(["/bin/sh", "-c", f"sleep {_PAUSE_S}; kill -CONT {me}"], env={}, start_new_session=True)
            os.kill(me, signal.SIGSTOP)
        elif effect in ("second start", "look", "edit"):
            self._wait_for_answer(effect)
        elif effect == "kill player":
            kill_players(self._folder)
        elif effect == "power":
            self._cut_power(me)
        else:
            number = signal.SIGTERM if effect == "term" else signal.SIGKILL
            roles = {"term": "launcher", "kill launcher": "launcher", "kill rank": "rank", "kill engine": "inference"}
            self._signal(roles[effect], number)

    def _signal(self, role: str, number: int) -> None:
        send(self._folder, number, role=role)

    def _wait_for_answer(self, effect: str) -> None:
        """Stand still while the searching process does something beside the run."""
        deadline = time.monotonic() + _ANSWER_S
        while not os.path.exists(f"{self._folder}/answered {effect}") and time.monotonic() < deadline:
            time.sleep(0.01)

    # A power cut: what this process has not flushed is gone.

    def _note_before(self, name: str, path: str, arguments: tuple[Any, ...]) -> None:
        if name in ("rename", "replace"):
            target, kept = os.path.abspath(os.fsdecode(arguments[1])), None
            if Path(target).is_file():
                kept = f"{self._folder}/kept-{os.getpid()}-{len(self._renamed)}-{time.monotonic_ns()}"
                self._links["link"](target, kept)
            self._renamed.append((os.path.join(self._run, path), target, kept))

    def _note_after(self, name: str, path: str, arguments: tuple[Any, ...]) -> None:
        whole = os.path.normpath(os.path.join(self._run, path))
        if name == "open":
            self._flushed.setdefault(whole, Path(whole).stat().st_size if Path(whole).is_file() else 0)
        elif name in ("fsync", "fdatasync"):
            if Path(whole).is_dir():
                self._renamed = [one for one in self._renamed if os.path.dirname(one[1]) != whole]
            else:
                self._flushed.pop(whole, None)
        elif name in ("rename", "replace"):
            target = os.path.abspath(os.fsdecode(arguments[1]))
            moved = {
                one: target + one[len(whole) :] for one in self._flushed if one == whole or one.startswith(f"{whole}/")
            }
            for before, after in moved.items():
                self._flushed[after] = self._flushed.pop(before)

    def _cut_power(self, me: int) -> None:
        send(self._folder, signal.SIGKILL, but=me)
        for path, length in self._flushed.items():
            if Path(path).is_file() and Path(path).stat().st_size > length:
                os.truncate.__wrapped__(path, length + (Path(path).stat().st_size - length) // 2)  # type: ignore[attr-defined]
        for source, target, kept in reversed(self._renamed):
            if Path(target).exists() and Path(os.path.dirname(source)).is_dir() and not Path(source).exists():
                self._links["rename"](target, source)
                if kept is not None:
                    self._links["rename"](kept, target)
        os.kill(me, signal.SIGKILL)
