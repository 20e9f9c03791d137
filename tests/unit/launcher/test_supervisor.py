"""Starting and stopping children: real processes, no orphans."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.launcher.cluster.hosts import LocalProcess
from holdfast.launcher.supervisor import Child, Supervisor, end_of_log, error_message, last_lines
from holdfast.process.child import LAUNCHER_ENV
from tests.runs.processes import HANG_S, wait_until
from tests.unit.conftest import When

pytestmark = pytest.mark.usefixtures("restored_signals")
Ends = Callable[..., bool]
READY = "import sys, time, signal, os; print('ready', flush=True)\n"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", READY + code]


def _wait_for(child: Child, text: str) -> None:
    wait_until(lambda: text in child.log.read_text() or child.process.poll() is not None)
    assert text in child.log.read_text()


def test_a_run_is_over_when_every_worker_did_its_work(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        for name in ("a", "b"):
            told = {"environment": {"NAME": name}}
            supervisor.start(name, python("print(os.environ['NAME'])"), tmp_path / f"{name}.log", **told)
        service = supervisor.start("s", python("time.sleep(600)"), tmp_path / "s.log", environment={}, is_service=True)
        assert supervisor.run(lambda: None) is None and service.process.poll() is None
    assert (tmp_path / "a.log").read_text().splitlines() == ["ready", "a"]
    assert service.process.returncode == -signal.SIGTERM


def test_a_worker_that_ends_without_having_done_its_work_has_failed(tmp_path: Path) -> None:
    """As an orchestrator does whose environment calls `sys.exit`; asked once, as what proves it may be pruned."""
    answers, how = iter([True, False]), (python(""), tmp_path / "a.log")
    with Supervisor() as supervisor:
        supervisor.start("a", *how, environment={}, has_done_its_work=lambda: next(answers))
        assert supervisor.run(lambda: None) is None
        early = supervisor.start("a", *how, environment={}, has_done_its_work=lambda: next(answers, False))
        assert supervisor.run(lambda: None) is early
        again = supervisor.restart(early)
        assert supervisor.run(lambda: None) is again, "what is asked stays with the one that takes its place"


def test_a_service_that_ends_by_itself_failed_even_with_code_0(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        supervisor.start("worker", python("time.sleep(600)"), tmp_path / "w.log", environment={})
        service = supervisor.start("service", python(""), tmp_path / "s.log", environment={}, is_service=True)
        assert supervisor.run(lambda: None) is service and service.process.returncode == 0


def test_a_service_that_dies_when_all_is_done_is_not_missed(tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        for is_service in (True, False):
            name, code = ("service", "sys.exit(3)") if is_service else ("worker", "")
            supervisor.start(name, python(code), tmp_path / name, environment={}, is_service=is_service).process.wait()
        assert supervisor.run(lambda: None) is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_launcher_ends_the_run(number: signal.Signals, tmp_path: Path, when: When) -> None:
    signal.signal(number, signal.SIG_DFL)  # whoever runs the tests may have it ignored
    with Supervisor() as supervisor:
        child = supervisor.start("worker", python("time.sleep(600)"), tmp_path / "w.log", environment={})
        assert os.getsid(child.process.pid) == child.process.pid != os.getsid(0), "Ctrl-C reaches the launcher alone"
        when(lambda: True, lambda: os.kill(os.getpid(), number))
        assert supervisor.run(lambda: None) == number
    assert child.process.returncode == -signal.SIGTERM


def test_the_echo_of_a_signal_is_no_second_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.launcher.supervisor.ECHO_S", HANG_S)
    code = (
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), os._exit(7)))\n"
        "import os; print('saves', flush=True); time.sleep(600)"
    )
    with Supervisor() as supervisor:
        child = supervisor.start("saving", python(code), tmp_path / "s.log", environment={})
        _wait_for(child, "saves")
        signal.raise_signal(signal.SIGTERM)
        assert supervisor.run(lambda: None) == signal.SIGTERM
        signal.raise_signal(signal.SIGTERM)
        assert supervisor.ask_to_end(child, signal.SIGTERM, lambda: None, timeout_s=HANG_S)
        assert child.process.returncode == 7


def test_a_second_signal_ends_the_wait_for_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.launcher.supervisor.ECHO_S", 0.0)
    with Supervisor() as supervisor:
        code = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
        child = supervisor.start("deaf", python(code), tmp_path / "d.log", environment={})
        _wait_for(child, "deaf")
        signal.raise_signal(signal.SIGTERM)
        assert supervisor.run(lambda: None) == signal.SIGTERM
        signal.raise_signal(signal.SIGTERM)  # before the launcher has passed the first one on
        assert not supervisor.ask_to_end(child, signal.SIGTERM, lambda: pytest.fail("it waits"), timeout_s=HANG_S)
        child.process.kill()


def test_a_child_that_ignores_sigterm_is_killed_with_its_children(tmp_path: Path, ends: Ends) -> None:
    code = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "import subprocess\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True); print('stubborn', flush=True); time.sleep(600)"
    )
    with Supervisor() as supervisor:
        child = supervisor.start("stubborn", python(code), tmp_path / "s.log", environment={})
        _wait_for(child, "stubborn")
        supervisor.stop(timeout_s=0.2)
    assert child.process.returncode == -signal.SIGKILL and ends(int(child.log.read_text().splitlines()[1]))


def test_children_that_a_dead_child_left_behind_are_killed(tmp_path: Path, ends: Ends) -> None:
    code = (
        "import subprocess\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True); os._exit(1)"
    )
    with Supervisor() as supervisor:
        child = supervisor.start("leaving", python(code), tmp_path / "l.log", environment={})
        assert supervisor.run(lambda: None) is child
        grandchild = int(child.log.read_text().splitlines()[1])
        assert not ends(grandchild, within_s=0)
    assert ends(grandchild)


def test_who_has_the_id_of_a_dead_child_by_now_is_left_alone() -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    dead.wait()
    other = subprocess.Popen(["sleep", "600"], start_new_session=True)
    dead.pid = other.pid  # as the kernel may give it anew
    process = LocalProcess(dead)
    process.kill()
    process.clear(HANG_S)
    other.terminate()
    assert other.wait() == -signal.SIGTERM, "it lived, and nobody waited for its end"


def test_a_child_whose_launcher_is_gone_already_ends_at_once() -> None:
    code = "from holdfast.process.child import die_with_launcher as die; die(); print('alive')"
    code += "; import os; print(os.environ)"
    launcher = {**os.environ, LAUNCHER_ENV: str(os.getpid())}
    alive = subprocess.run([sys.executable, "-c", code], env=launcher, capture_output=True, text=True)
    assert alive.stdout.startswith("alive") and LAUNCHER_ENV not in alive.stdout, "its own children have another parent"
    dead = subprocess.run([sys.executable, "-c", code], env={**os.environ, LAUNCHER_ENV: "1"}, capture_output=True)
    assert dead.returncode == 1 and dead.stdout == b""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_a_child_dies_with_its_launcher(ends: Ends) -> None:
    launch = (
        "import subprocess, sys, os\n"
        f"env = {{**os.environ, '{LAUNCHER_ENV}': str(os.getpid())}}\n"
        "code = 'from holdfast.process.child import die_with_launcher as die; die(); '\n"
        "code += 'print(1, flush=True); input()'\n"
        "child = subprocess.Popen([sys.executable, '-c', code], env=env, stdin=-1, stdout=-1)\n"
        "child.stdout.readline(); print(child.pid, flush=True); sys.stdin.read()\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", launch], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    child = int(launcher.stdout.readline())
    assert not ends(child, within_s=0)
    launcher.kill()
    launcher.communicate()
    assert ends(child)


def test_what_a_child_started_outlives_a_launcher_that_is_killed(tmp_path: Path, ends: Ends) -> None:
    """As a sandbox that an environment starts: only who has asked the kernel dies with the launcher."""
    code = (
        "import subprocess; from holdfast.process.child import die_with_launcher as die; die()\n"
        "print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    )
    launch = (
        "import sys; from pathlib import Path; from holdfast.launcher.supervisor import Supervisor\n"
        f"Supervisor().__enter__().start('child', {python(code)!r}, Path(sys.argv[1]), environment={{}})\n"
        "sys.stdin.read()"
    )
    log = tmp_path / "child.log"
    launcher = subprocess.Popen([sys.executable, "-c", launch, str(log)], stdin=subprocess.PIPE)
    wait_until(lambda: log.exists() and len(log.read_text().split()) == 2)
    grandchild = int(log.read_text().split()[1])
    child = int(Path(f"/proc/{grandchild}/stat").read_text().split()[3])
    launcher.kill()
    launcher.communicate()
    assert ends(child) and not ends(grandchild, within_s=0)
    os.kill(grandchild, signal.SIGKILL)
    assert ends(grandchild)


def test_the_error_of_a_log_is_its_last_error_block(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    assert error_message(log) is None and last_lines(log) == ""
    log.write_text("12:00 INFO hello\nerror: first\nnoise\nerror: second\n       more of it\n    not of it\n")
    assert error_message(log) == "second\n       more of it"
    assert last_lines(log, 2) == "           more of it\n        not of it"
    log.write_text("no message here\n")
    assert error_message(log) is None
    assert error_message(tmp_path) is None and last_lines(tmp_path) == f"    {tmp_path} cannot be read: Is a directory"


def test_of_a_long_log_only_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "long.log"
    log.write_text(f"error: old\n{'line' * 100}\nerror: new\n")
    monkeypatch.setattr("holdfast.launcher.supervisor._MOST_BYTES", 20)
    assert end_of_log(log) == ["lineline", "error: new"]
    assert error_message(log) == "new" and error_message(log, begin=log.stat().st_size) is None


def test_a_child_is_started_again_when_what_the_dead_one_started_has_let_go(tmp_path: Path) -> None:
    """A process takes a while to give back its memory, and only then what it holds besides."""
    holder = (
        "import fcntl, time; lock = open('held', 'a'); fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB); "
        "memory = bytearray(1 << 30); open('holds', 'w'); time.sleep(600)"
    )
    code = (
        f"import subprocess; os.chdir({str(tmp_path)!r})\n"
        "if os.path.exists('holds'):\n"
        "    import fcntl; fcntl.flock(open('held', 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB); print('free', flush=True)\n"
        "else:\n"
        f"    subprocess.Popen([sys.executable, '-S', '-c', {holder!r}])\n"
        "    time.sleep(600)\n"
    )
    with Supervisor() as supervisor:
        child = supervisor.start("a", python(code), tmp_path / "a.log", environment={})
        wait_until((tmp_path / "holds").exists)
        os.kill(child.process.pid, signal.SIGKILL)
        again = supervisor.restart(child)
        again.process.wait()
    assert "free" in again.log.read_text(), again.log.read_text()


def test_what_the_dead_said_is_not_their_successors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks and engines go on writing after the process that started them."""
    clear = LocalProcess.clear

    def ended_late(process: LocalProcess, timeout_s: float) -> None:
        clear(process, timeout_s)
        with open(tmp_path / "a.log", "a") as log:
            log.write("error: of the dead\n")

    code = "import os; print('later' if os.path.exists('said') else 'error: no room'); open('said', 'w'); sys.exit(3)"
    with Supervisor() as supervisor:
        program = python(f"import os; os.chdir({str(tmp_path)!r}); {code}")
        child = supervisor.start("a", program, tmp_path / "a.log", environment={})
        assert child.process.wait() == 3 and child.error == "no room"
        monkeypatch.setattr(LocalProcess, "clear", ended_late)
        again = supervisor.restart(child)
        monkeypatch.undo()
        assert again.process.wait() == 3 and again.error is None
        assert again.log.read_text() == "ready\nerror: no room\nerror: of the dead\nready\nlater\n"
