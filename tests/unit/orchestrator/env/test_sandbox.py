"""Programs in the sandbox do what they like, and nothing of it is seen outside but what they print."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from examples.environments import python_code
from examples.environments.python_code import Limits, Outcome, PythonCode, code_of, require_sandbox, run_python
from holdfast.errors import ConfigError, EnvironmentFailure, ProcessKilled
from holdfast.orchestrator.env.interface import Task, TaskSeed
from tests.runs.processes import HANG_S, wait_until
from tests.unit.orchestrator.env.test_environment_loading import scores


@pytest.fixture(scope="module", autouse=True)
def _needs_a_sandbox() -> None:
    try:
        require_sandbox()
    except ConfigError as error:
        pytest.skip(str(error))


# Nobody's time is over on a busy machine but for those that are meant to take forever.
PATIENT = Limits(cpu_s=60)


# What a program has for what it may not do: it returns the reason.
TRIED = """
def tried(what, *arguments):
    try:
        return what(*arguments)
    except OSError as error:
        return error.strerror
"""


def ran(program: str, limits: Limits = PATIENT) -> Outcome:
    return asyncio.run(run_python(TRIED + program, limits))


def inside(pid: int) -> list[psutil.Process]:
    """Return the processes of the sandboxes that process `pid` started, wherever they hang in the tree."""
    mark = f'"parent": {pid},'
    return [one for one in psutil.process_iter(["cmdline"]) if any(mark in word for word in one.info["cmdline"] or ())]


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that are meant to take forever have less time by the clock."""
    monkeypatch.setattr(python_code, "_WALL_PER_CPU", 1)


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Any:
    yield
    _, living = psutil.wait_procs(inside(os.getpid()), timeout=HANG_S)  # killed ones end when the kernel comes to it
    assert not living


def test_a_program_sees_the_standard_library_and_none_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_SECRET", "token")
    program = """
import json, os, sys
print(json.dumps({"name": "é"}, ensure_ascii=False), os.getuid(), os.getcwd(), "HOLDFAST_SECRET" in os.environ)
try:
    import numpy
except ModuleNotFoundError as error:
    print(error)
print(sorted({entry for entry in os.listdir("/dev")}), os.path.exists("/proc/1"), os.path.exists("/home"))
print(list({'a', 'b', 'c', 'd', 'e', 'f'}))
"""
    first, again = ran(program), ran(program)
    assert first == again, "also the order of a set"
    there = "['full', 'null', 'random', 'urandom', 'zero'] False False"
    seen = ['{"name": "é"} 65534 /tmp False', "No module named 'numpy'", there]
    assert first.output.decode().splitlines()[:-1] == seen


def test_nothing_is_written_outside(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("before")
    program = f"""
import os
os.symlink({str(target)!r}, "/tmp/link")
os.symlink("/", "/tmp/root")
for path in ({str(target)!r}, "/tmp/link", "/tmp/root{target}", "/usr/x", "/x", "/dev/x", {sys.base_prefix + "/x"!r}):
    try:
        open(path, "w").write("after")
        print("written", path)
    except OSError as error:
        print(type(error).__name__)
open("/tmp/own", "w").write("mine")
print(open("/tmp/own").read())
"""
    lines = ran(program).output.decode().splitlines()
    assert not [line for line in lines if line.startswith("written")] and lines[-1] == "mine"
    assert target.read_text() == "before" and list(tmp_path.iterdir()) == [target]
    assert not Path("/tmp/own").exists()


def test_there_is_no_network_and_no_socket_of_others() -> None:
    # One in this process that would answer, as the metadata services of clouds do.
    program = """
import socket
for family, address in ((socket.AF_INET, ("127.0.0.1", {port})), (socket.AF_UNIX, "\\0{name}")):
    print(tried(socket.socket(family, socket.SOCK_STREAM).connect, address))
# VSOCK (40) reaches the host of a virtual machine, whatever the namespace.
for family, kind in ((1, 1), (2, 1), (10, 1), (40, 1), (16, 3)):
    print(tried(lambda: socket.socket(family, kind).close()))
"""
    name = f"holdfast-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as unix:
        unix.bind(f"\0{name}")
        unix.listen()
        output = ran(program.format(port=tcp.getsockname()[1], name=name)).output.decode()
    refused = ["Network is unreachable", "Connection refused"]
    assert output.splitlines() == [*refused, *["None"] * 3, *["Address family not supported by protocol"] * 2]


def test_signals_reach_nobody_outside() -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        program = f"""
import os, signal
for pid in (1, os.getppid(), {os.getpid()}, {bystander.pid}, -1):
    tried(os.kill, pid, signal.SIGKILL)
print("alive")
"""
        assert ran(program).output.decode().splitlines()[-1] == "alive" and bystander.poll() is None
    finally:
        bystander.communicate(b"\n")


def test_forks_are_bounded_and_end_with_their_program() -> None:
    program = """
import os, time
number = 0
while True:
    try:
        if os.fork() == 0:
            os.setsid()
            time.sleep(1000)
    except OSError:
        break
    number += 1
print(number)
"""
    outcome = ran(program, replace(PATIENT, processes=8))
    assert outcome.ending == "ended" and 1 <= int(outcome.output) < 8


@pytest.mark.clock
def test_a_loop_without_an_end_is_ended_by_the_kernel_and_sleep_by_the_clock(hasty: None) -> None:
    loop = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nprint('begun', flush=True)\nwhile True: pass"
    assert ran(loop, replace(PATIENT, cpu_s=1)).output in (b"begun\n", b"")  # the clock, where the machine is busy
    assert ran("import time; time.sleep(1000)", Limits(cpu_s=1)) == Outcome(b"", "too long")
    stopped = "import os, signal\nprint('begun', flush=True)\nos.kill(os.getpid(), signal.SIGSTOP)"
    assert ran(stopped, Limits(cpu_s=1)) == Outcome(b"", "too long")
    silent = "import os, time\nfor fd in range(16):\n    try: os.close(fd)\n    except OSError: pass\ntime.sleep(1000)"
    assert ran(silent, Limits(cpu_s=1)) == Outcome(b"", "too long")


def test_rights_namespaces_and_memory_beyond_the_limits_cannot_be_had() -> None:
    # A user namespace would give all rights inside, and file systems in memory as large as the machine's; segments,
    # files in memory and messages stay without counting for a process that has let go of them.
    program = """
import ctypes, os, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
print(libc.unshare(0x10000000), os.strerror(ctypes.get_errno()))
number = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
print(libc.syscall(number, 0x10000000 | 17, 0, 0, 0, 0), os.strerror(ctypes.get_errno()))
print(libc.syscall(435, 0, 0), os.strerror(ctypes.get_errno()))
print(libc.mount(b"none", b"/usr", None, 32 | 4096, None), libc.umount2(b"/usr", 2), libc.chroot(b"/tmp"))
print(libc.unshare(0x20000), libc.sethostname(b"x", 1))
print(tried(os.setuid, 0))
print(libc.shmget(0, 4096, 0o1600), libc.msgget(0, 0o1600), libc.semget(0, 1, 0o1600))
print(tried(os.memfd_create, "x"))
print(libc.syscall({"x86_64": 250, "aarch64": 219}[os.uname().machine], 0, -3, 0))
thread = threading.Thread(target=print, args=("thread",))
thread.start()
thread.join()
sys.stdout.flush()
if os.fork() == 0:
    os.write(2, b"child\\n")
    os._exit(0)
os.wait()
"""
    # Root inside is a user that there may not be.
    user = "Operation not permitted" if os.geteuid() == 0 else "Invalid argument"
    refused = ["-1 Operation not permitted", "-1 Operation not permitted", "-1 Function not implemented"]
    rest = ["-1 -1 -1", "-1 -1", user, "-1 -1 -1", "Operation not permitted", "-1", "thread", "child"]
    assert ran(program).output.decode().splitlines() == refused + rest


def test_the_process_that_holds_a_sandbox_cannot_be_touched() -> None:
    # It has the user of the program, and the end of a pipe that leads outside.
    program = """
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4
print([libc.ptrace(request, 1, 0, 0) for request in (16, 0x4206)])
class Stretch(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("length", ctypes.c_size_t)]
buffer = ctypes.create_string_buffer(8)
own, its = Stretch(ctypes.addressof(buffer), 8), Stretch(0x400000, 8)
print(libc.process_vm_readv(1, ctypes.byref(own), 1, ctypes.byref(its), 1, 0))
descriptor = libc.syscall(434, 1, 0)
print({libc.syscall(438, descriptor, number, 0) for number in range(16)})
for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL):
    os.kill(1, number)
print(os.getppid())
"""
    assert ran(program).output.decode().splitlines() == ["[-1, -1]", "-1", "{-1}", "1"]


def test_orphans_do_not_end_their_program_and_end_with_it() -> None:
    program = """
import os, sys, time
def orphan(play):
    read, write = os.pipe()
    if os.fork() == 0:
        if os.fork() == 0:
            os.close(read)
            while os.getppid() != 1:
                time.sleep(0.001)
            play()
            os._exit(0)
        os._exit(0)
    os.wait()
    os.close(write)
    return read
orphan_ends = orphan(lambda: None)
os.read(orphan_ends, 1)
time.sleep(0.1)
print("whole", flush=True)
def print_on():
    os.setsid()
    while True:
        os.write(1, b"x")
orphan(print_on)
"""
    outcome = ran(program)
    assert outcome.ending in ("ended", "too much output") and outcome.output.startswith(b"whole\n")


def test_devices_and_programs_of_other_users_give_nothing() -> None:
    program = """
import os, shutil, subprocess
def refused(what, *arguments):
    if not isinstance(tried(what, *arguments), str):
        print("did", what, arguments)
for path in ("/dev/null", "/dev/urandom", "/usr", "/tmp"):
    for what, more in ((os.chmod, 0), (os.rename, "/tmp/x"), (os.setxattr, "user.a")):
        refused(what, path, more, *((b"x",) if what is os.setxattr else ()))
    refused(os.chown, path, 65534, 65534)
    refused(os.utime, path, (0, 0))
refused(os.mknod, "/tmp/disk", 0o60666, os.makedev(8, 0))
refused(open, "/dev/tty")
for name in ("su", "mount", "newuidmap", "pkexec"):
    found = shutil.which(name, path="/usr/bin:/bin:/usr/sbin")
    if found and subprocess.run([found, "-c", "true"], stdin=subprocess.DEVNULL, capture_output=True).returncode == 0:
        print("ran", name)
print("nothing")
"""
    assert ran(program).output.decode().splitlines() == ["nothing"]


@pytest.mark.launch
def test_what_a_killed_process_had_in_a_sandbox_dies_with_it() -> None:
    script = (
        "import asyncio\nfrom examples.environments.python_code import Limits, run_python\n"
        "program = 'import os, time; os.fork(); time.sleep(1000)'\n"
        "asyncio.run(run_python(program, Limits(cpu_s=1000)))"
    )
    parent = subprocess.Popen([sys.executable, "-c", script])
    try:
        wait_until(lambda: len(inside(parent.pid)) >= 4, "all of a sandbox")
        children = inside(parent.pid)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert not psutil.wait_procs(children, timeout=HANG_S)[1]


def test_a_cancelled_program_is_gone() -> None:
    async def cancelled() -> None:
        running = asyncio.create_task(run_python("import time; time.sleep(1000)", PATIENT))
        while len(inside(os.getpid())) < 3:
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancelled())
    psutil.wait_procs(inside(os.getpid()), timeout=HANG_S)


def test_a_sandbox_with_half_a_map_of_users_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The process that writes it is killed: it lives for a moment only."""
    script, writes = python_code._INSIDE.read_text(), "os._exit(_write_maps(parent, uid, gid))"
    assert writes in script
    (tmp_path / "inside.py").write_text(script.replace(writes, "os.kill(os.getpid(), signal.SIGKILL)"))
    monkeypatch.setattr(python_code, "_INSIDE", tmp_path / "inside.py")
    with pytest.raises(ProcessKilled, match="its sandbox was killed from outside"):
        asyncio.run(run_python("print('word')", PATIENT))


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [0, 1], ids=["the outer process", "the first process inside"])
def test_a_sandbox_that_somebody_killed_is_no_outcome_of_its_program(
    victim: int, blow: signal.Signals, hasty: None
) -> None:
    async def killed() -> None:
        limits = PATIENT if blow == signal.SIGKILL else Limits(cpu_s=5)
        running = asyncio.create_task(run_python("import time; time.sleep(1000)", limits))
        while len(inside(os.getpid())) < 3:
            await asyncio.sleep(0.01)
        process = next(one for one in psutil.Process().children() if one in inside(os.getpid()))
        for _ in range(victim):
            process = process.children()[0]
        process.send_signal(blow)
        with pytest.raises(ProcessKilled, match="its sandbox was (killed|stopped) from outside"):
            await running

    asyncio.run(killed())


def test_a_trial_of_the_sandbox_that_is_killed_is_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command, mark = python_code._command, tmp_path / "killed"
    dies_first = f'test -e {mark} || {{ : > {mark}; kill -KILL $$; }}; exec "$@"'
    monkeypatch.setattr(python_code, "_command", lambda limits: ["sh", "-c", dies_first, "sh", *command(limits)])
    require_sandbox()
    assert mark.exists()


def test_a_machine_without_a_sandbox_is_refused_and_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    command = python_code._command

    def broken(limits: Limits) -> list[str]:
        # A directory for the devices that is a file: building fails as it does where mounting is forbidden.
        *words, values = command(limits)
        return [*words, values.replace('"/usr"', '"/dev"')]

    monkeypatch.setattr(python_code, "_command", broken)
    with pytest.raises(ConfigError, match="cannot be built on this machine: .*It needs Linux 5.12"):
        PythonCode()
    with pytest.raises(EnvironmentFailure, match="the sandbox could not be built"):
        ran("print(1)")


def test_code_is_the_last_block() -> None:
    assert code_of("def f(): pass") == "def f(): pass"
    assert code_of("First:\n```python\na\n```\nThen:\n```\nb\n```\nDone.") == "b\n"


@pytest.fixture(scope="module")
def environment() -> PythonCode:
    return PythonCode(cpu_s=60)


def scored(environment: PythonCode, task: Task, *answers: str) -> list[tuple[float, float]]:
    return [(score.reward, score.metrics["exact"]) for score in scores(environment, task, *answers)]


def test_the_answers_of_its_tasks_are_right(environment: PythonCode) -> None:
    seeds = [TaskSeed(0, "env", index) for index in range(200)]
    tasks = [environment.make_task(seed) for seed in seeds]
    assert tasks == [environment.make_task(seed) for seed in seeds] and len({task.answer for task in tasks}) > 100
    for task in tasks[:6]:
        assert scored(environment, task, task.answer, f"```python\n{task.answer}```") == [(1.0, 1.0)] * 2
    for task in tasks:  # all kinds of steps, without a process each
        names: dict[str, Any] = {}
        exec(task.answer, names)
        assert tuple(tuple(names["solve"](list(numbers))) for numbers in task.inputs) == task.outputs


@pytest.mark.parametrize("answer", [
    "", "no code at all", "import os; os._exit(0)", "def solve(n): return 1 / 0", "print('[]\\n' * 8)",
    "class Equal(list):\n    __eq__ = lambda a, b: True\ndef solve(n): return object()",
    "import os\nfor fd in range(3, 64):\n    try: os.close(fd)\n    except OSError: pass\ndef solve(n): return n",
])  # fmt: skip
def test_answers_that_solve_nothing_earn_nothing(environment: PythonCode, answer: str) -> None:
    assert scored(environment, environment.make_task(TaskSeed(0, "env", 0)), answer) == [(0.0, 0.0)]


def test_a_function_that_is_right_for_some_inputs_earns_their_share(environment: PythonCode) -> None:
    task = environment.make_task(TaskSeed(0, "env", 0))
    half = f"right = {task.answer!r}\nexec(right)\nwhole = solve\ncalls = []\ndef solve(n):\n"
    half += "    calls.append(n)\n    return whole(n) if len(calls) <= 4 else None"
    assert scored(environment, task, half) == [(0.5, 0.0)]


def test_files_memory_and_output_are_bounded() -> None:
    small = replace(PATIENT, files_bytes=2**20)
    assert "File too large" in ran("open('/tmp/a', 'wb').write(bytes(2**21))", small).output.decode()
    several = "for n in range(3): open(f'/tmp/{n}', 'wb').write(bytes(2**19 + 1))"
    assert "No space left on device" in ran(several, small).output.decode()
    many = "for n in range(10_000):\n    open(f'/tmp/{n}', 'w').close()\n    print(n)"
    lines = ran(many).output.decode().splitlines()
    assert any("No space left on device" in line for line in lines) and sum(line.isdigit() for line in lines) <= 1000
    assert b"MemoryError" in ran("x = bytes(2**30)", replace(PATIENT, memory_bytes=2**28)).output
    outcome = ran("while True: print('x' * 1000)", replace(PATIENT, output_bytes=5000))
    assert (outcome.ending, len(outcome.output)) == ("too much output", 5000)
