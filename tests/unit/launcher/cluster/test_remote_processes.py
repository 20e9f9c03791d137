"""Processes as the launcher sees them: on this machine, and behind real agents, over pipes of this machine."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from holdfast.errors import STORAGE_FAILED, ConfigError, ProcessDied, is_storage_failure
from holdfast.launcher.cluster import channels
from holdfast.launcher.cluster.channels import PipeChannel
from holdfast.launcher.cluster.cluster import ResourceRequest, assign, is_trainer, trainer_names, wanted_and_there
from holdfast.launcher.cluster.hosts import RemoteHost, RemoteProcess, agent_command, travelling
from holdfast.launcher.supervisor import Child, Supervisor
from holdfast.process.imports import module_command
from tests.runs.processes import HANG_S

SERVES = module_command("http.server", "0")
Ends = Callable[..., bool]


@pytest.fixture
def channel() -> Iterator[PipeChannel]:
    channel = PipeChannel(agent_command())
    yield channel
    channel.close()


def started(channel: PipeChannel, log: Path) -> RemoteProcess:
    """Return a process that has said its first word."""
    process = RemoteHost("other", "127.0.0.1", channel).start(SERVES, log, {"PYTHONUNBUFFERED": "1"})
    while not (log.exists() and log.read_bytes()):
        assert process.poll() is None
    return process


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_process_of_another_host(channel: PipeChannel, tmp_path: Path) -> None:
    process = started(channel, tmp_path / "logs" / "a.log")
    assert process.pid and is_alive(process.pid)
    assert process.wait(0.01) is None is process.returncode
    process.show_stacks([], tmp_path / "a.log")
    process.signal(signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM == process.poll()
    process.signal(signal.SIGTERM)
    assert process.loss is None
    again = started(channel, tmp_path / "b.log")
    again.clear(HANG_S)
    assert again.returncode == -signal.SIGKILL and again.loss is None


def test_what_runs_there_ends_with_the_agent_and_is_lost(channel: PipeChannel, tmp_path: Path, ends: Ends) -> None:
    process = started(channel, tmp_path / "a.log")
    channel.close()
    assert process.wait() == -signal.SIGKILL
    assert process.loss is not None and process.loss.startswith("other is lost: its connection has ended (exit code 0)")
    process.kill()  # says nothing more
    with suppress(ProcessLookupError):  # a program that is none of ours would not ask the kernel to end it
        os.kill(process.pid, signal.SIGKILL)
    assert ends(process.pid)
    after = RemoteHost("other", "127.0.0.1", channel).start(SERVES, tmp_path / "b.log", {})
    assert after.poll() == -signal.SIGKILL and after.pid == 0 and "other is lost" in str(after.loss)
    assert channel.is_lost


def test_the_reason_of_a_lost_connection_is_the_first_error_that_it_told(tmp_path: Path) -> None:
    code = "import sys; print('srun: error: no such node', file=sys.stderr); sys.exit(1)"
    channel = PipeChannel([sys.executable, "-c", code])
    process = RemoteHost("other", "127.0.0.1", channel).start(SERVES, tmp_path / "a.log", {})
    process.wait()
    assert process.loss == "other is lost: srun: error: no such node"
    channel.close()


def test_a_directory_that_the_host_does_not_have_is_named(channel: PipeChannel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no directory /nowhere \(No such file or directory\), from which"):
        channel.call("start", ["http.server"], str(tmp_path / "a.log"), {}, "/nowhere")
    started = channel.post("start", ["http.server"], "a.log", {}, "/nowhere")
    process = RemoteProcess(channel, host="other", started=started)
    with pytest.raises(ConfigError, match="has no directory /nowhere"):
        process.wait()
    assert process.wait() == ConfigError.exit_code and process.loss is None, "it is said once"
    process.kill()
    process.clear(HANG_S)
    assert process.loss is None, "the agent answers still"
    missing = [str(tmp_path / "no"), "/nowhere/at/all"]
    assert channel.call("missing", [str(tmp_path), *missing]) == missing
    first = channel.call("reserve", 20000)
    assert channel.call("reserve", first) > first, "it is held"


def test_what_a_host_has_of_its_own_stays_its_own() -> None:
    mine = {"HOLDFAST_ADMIN_TOKEN": "t", "PATH": "/x", "CUDA_VISIBLE_DEVICES": "0", "RAY_ADDRESS": "a", "HF_HOME": "/h"}
    assert travelling(mine) == {"HOLDFAST_ADMIN_TOKEN": "t", "HF_HOME": "/h"}


def test_processes_are_spread_over_what_the_nodes_have() -> None:
    needs = [ResourceRequest("trainer", 2, 2), ResourceRequest("inference", 1, 1), ResourceRequest("orchestrator", 1)]
    assert assign(needs, [{"CPU": 4, "GPU": 2}, {"CPU": 4, "GPU": 1}]) == [0, 1, 1]
    assert assign(needs, [{"CPU": 4, "GPU": 2}]) is None and assign([], []) == []
    uneven = [ResourceRequest("trainer", 4, 4), ResourceRequest("a", 3, 3), ResourceRequest("b", 3, 3)]
    assert assign(uneven, [{"CPU": 8, "GPU": 6}, {"CPU": 8, "GPU": 4}]) == [1, 0, 0]
    said = wanted_and_there(needs, [{"CPU": 4, "GPU": 2}, {}])
    assert "trainer: 2 CPU, 2 GPU; inference: 1 CPU, 1 GPU; orchestrator: 1 CPU" in said
    assert said.endswith("there, node by node: 4 CPU, 2 GPU; nothing")
    assert wanted_and_there(needs, []).endswith("no node")


def test_the_names_of_trainers() -> None:
    assert trainer_names(1) == ["trainer"] and trainer_names(2) == ["trainer", "trainer_1"]
    assert all(map(is_trainer, trainer_names(3))) and not is_trainer("inference_0")


def test_the_agent_says_nothing_but_its_answers() -> None:
    call = '{"method": "start", "arguments": [["http.server"], "a.log", {}, "/nowhere"]}\n'
    done = subprocess.run(agent_command(), input=call, capture_output=True, text=True)
    assert done.stdout.startswith('{"error": "') and done.stdout.count("\n") == 1 and done.returncode == 0


def test_an_agent_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also one that reads nothing, and nobody waits for it meanwhile. What it may say later is no answer any more."""
    for name in ("CALL_TIMEOUT_S", "_CLOSE_TIMEOUT_S"):
        monkeypatch.setattr(channels, name, 0.05)
    channel = PipeChannel([sys.executable, "-c", "import time; time.sleep(600)"])
    host = RemoteHost("other", "127.0.0.1", channel)
    try:
        process = host.start(SERVES, tmp_path / "a.log", {"TEXT": "x" * 200_000})
        assert process.wait() == -signal.SIGKILL and process.loss == "other is lost: it does not answer"
        with pytest.raises(ProcessDied, match="other is lost: it does not answer"):
            host.ask("missing", [])
        assert channel.is_lost
    finally:
        channel.close()


def test_a_full_disk_of_another_host_is_a_full_disk(tmp_path: Path) -> None:
    """For which the launcher waits, as for one of its own."""
    code = 'input(); print(\'{"error": "no room", "errno": 28}\', flush=True); input()'
    channel = PipeChannel([sys.executable, "-c", code])
    process = RemoteHost("other", "127.0.0.1", channel).start(SERVES, tmp_path / "a.log", {})
    with pytest.raises(OSError, match="no room") as full:
        process.wait()
    assert is_storage_failure(full.value) and process.wait() == STORAGE_FAILED and process.loss is None
    channel.close()


@pytest.mark.usefixtures("restored_signals")
def test_all_are_stopped_though_one_could_not_be_started(channel: PipeChannel, tmp_path: Path) -> None:
    full = PipeChannel([sys.executable, "-c", 'input(); print(\'{"error": "no room", "errno": 28}\', flush=True)'])
    refused = RemoteHost("other", "127.0.0.1", full).start(SERVES, tmp_path / "a.log", {})
    living = started(channel, tmp_path / "b.log")
    with suppress(OSError):
        refused._started.result(HANG_S)
    with Supervisor() as supervisor:
        for process in (refused, living):
            supervisor.children.append(Child("other", process, tmp_path / "b.log", False, SERVES, {}))
        supervisor.stop()
        assert (refused.returncode, living.returncode) == (STORAGE_FAILED, -signal.SIGTERM)
    full.close()


def test_a_process_with_the_number_of_an_earlier_one_has_not_ended(tmp_path: Path) -> None:
    code = 'input(); print(\'{"result": 7}\\n{"ended": -9, "pid": 7}\', flush=True); input()'
    channel = PipeChannel([sys.executable, "-c", f"{code}; print('{{\"result\": 7}}', flush=True); input()"])
    host = RemoteHost("other", "127.0.0.1", channel)
    assert host.start(SERVES, tmp_path / "a.log", {}).wait() == -signal.SIGKILL
    again = host.start(SERVES, tmp_path / "b.log", {})
    while not again.pid:
        assert again.poll() is None
    assert again.poll() is None and channel._ends == {}
    channel.close()


def test_all_agents_are_ended_at_once(channel: PipeChannel) -> None:
    """One that does not end by itself holds up none of the others."""
    mute = PipeChannel(["sleep", "600"])
    closing = threading.Thread(target=channels.close_all, args=([mute, channel],))
    closing.start()
    assert channel._process.wait(HANG_S) == 0 and closing.is_alive() and mute._process.poll() is None
    mute._process.kill()
    closing.join()


def test_nobody_waits_for_a_frozen_agent_that_is_to_signal_and_kill(channel: PipeChannel, tmp_path: Path) -> None:
    """The launcher looks after its other processes meanwhile, and the agent does all of it when it goes on."""
    log = tmp_path / "a.log"
    process = started(channel, log)
    os.kill(channel._process.pid, signal.SIGSTOP)
    process.signal(signal.SIGINT)
    process.show_stacks([], log)
    process.kill()
    assert process.poll() is None is process.loss, "nobody knows yet"
    os.kill(channel._process.pid, signal.SIGCONT)
    assert process.wait() in (-signal.SIGINT, 0, -signal.SIGKILL) and process.loss is None


@pytest.mark.usefixtures("restored_signals")
@pytest.mark.parametrize("by_supervisor", [False, True], ids=["cleared", "stopped"])
def test_who_is_cleared_or_stopped_on_a_mute_host_is_lost(
    channel: PipeChannel, by_supervisor: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = tmp_path / "a.log"
    process = started(channel, log)
    monkeypatch.setattr(channels, "CALL_TIMEOUT_S", 0.5)
    monkeypatch.setattr("holdfast.launcher.supervisor.STOP_TIMEOUT_S", 0.01)
    os.kill(channel._process.pid, signal.SIGSTOP)
    try:
        if by_supervisor:
            with Supervisor() as supervisor:
                supervisor.children.append(Child("other", process, log, False, SERVES, {}))
                supervisor.stop(0.01)
        else:
            process.clear(0.01)
        assert process.returncode == -signal.SIGKILL and process.loss == "other is lost: it does not answer"
    finally:
        os.kill(channel._process.pid, signal.SIGCONT)
