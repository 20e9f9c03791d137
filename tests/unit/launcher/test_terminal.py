"""What surrounds a command decides nothing about its run: a terminal that goes, a reader that dies, proxies."""

import asyncio
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fastapi import FastAPI

from holdfast.config import SftConfig
from holdfast.config.orchestrator import ClientConfig
from holdfast.config.training import ParallelConfig
from holdfast.errors import ConfigError
from holdfast.launcher import liveness
from holdfast.launcher.liveness import Health, HealthProbe
from holdfast.launcher.outer_nodes import with_outer_nodes
from holdfast.launcher.server_choice import _look
from holdfast.launcher.supervisor import Supervisor
from holdfast.orchestrator.client.http import HttpTransport
from holdfast.process.child import _LossyFile
from tests.runs.processes import wait_until
from tests.servers.orchestrator_fakes import MODEL, FakeEngine, serving
from tests.servers.quick_server import served


@pytest.mark.usefixtures("restored_signals")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_signals_that_a_parent_had_ignored_stay_ignored(tmp_path: Path, number: signal.Signals) -> None:
    """As under `nohup`, where the terminal's end is not the run's, and in the background, where Ctrl-C is not."""
    signal.signal(number, signal.SIG_IGN)
    with Supervisor() as supervisor:
        code = f"import os; os.kill(os.getppid(), {number:d}); os.kill(os.getpid(), {number:d})"
        supervisor.start("child", [sys.executable, "-c", code], tmp_path / "log", environment={})
        assert supervisor.run(lambda: None) is None, "neither the launcher nor its child takes note"


def test_output_that_would_have_to_wait_is_dropped() -> None:
    """Another program left the mode of a terminal, which is shared, so that nothing waits."""
    master, slave = os.openpty()
    os.set_blocking(slave, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(slave, b"x" * 100)
    output = _LossyFile(slave, "w", closefd=False)
    assert output.write("ünheard".encode()) == 8
    print("unheard", file=io.TextIOWrapper(io.BufferedWriter(output), "utf-8"), flush=True)
    assert b"heard" not in os.read(master, 1 << 16)
    os.close(master)
    os.close(slave)


@pytest.mark.launch
def test_the_console_outlives_who_reads_it() -> None:
    code = (
        "from pathlib import Path; from holdfast.view.console import Console\n"
        "from holdfast.process.child import make_output_lossy\n"
        "from holdfast.run.run_dir import RunDir\n"
        "make_output_lossy(); nowhere = RunDir(Path('/nonexistent'))\n"
        "with Console(nowhere, attempt=1, first_step=0, max_steps=1) as console:\n"
        "    for number in range(200): console.say(f'line {number}'); print('plain', flush=True)\n"
    )
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (0, b"")


async def _ask_as_orchestrator(url: str) -> bytes:
    transport = HttpTransport(ClientConfig(urls=[url]), key="client")
    try:
        return await transport.get(url, "/weights")
    finally:
        await transport.close()


def test_proxies_never_meet_the_servers_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    engine = FakeEngine()
    with serving(engine), served(FastAPI()) as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy)
        liveness._opener.cache_clear()  # else it is of before
        found = _look(engine.url)
        assert found is not None and found.model == MODEL
        assert f'"model":"{MODEL}"'.encode() in asyncio.run(_ask_as_orchestrator(engine.url))
        probe = HealthProbe(Health(f"{engine.url}/health"), 0.05)
        wait_until(probe.silent_s, "an answer to the probe")  # 0 before the first good one


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "head", "MASTER_PORT": "29500",
}  # fmt: skip
SRUN = {
    "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "gpu[003-004,7],head", "SLURM_JOB_ID": "12345",
}  # fmt: skip
PLAIN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-0.job", "MASTER_PORT": "23456"}


def config(**parallel: object) -> SftConfig:
    return SftConfig(parallel=ParallelConfig.model_validate(parallel), output_dir=Path("run"))


@pytest.mark.parametrize(("environment", "endpoint"), [
    (TORCHRUN, "head:29501"), (SRUN, "gpu003:29745"),
    (SRUN | {"MASTER_ADDR": "head", "MASTER_PORT": "29500"}, "head:29500"),
    (SRUN | {"SLURM_STEP_NODELIST": "a1,a2"}, "a1:29745"),
    (SRUN | {"SLURM_STEP_NODELIST": "rack[1-2]-gpu"}, "rack1-gpu:29745"), (PLAIN, "job-0.job:23456"),
    (PLAIN | {"MASTER_ADDR": "fd00::1"}, "[fd00::1]:23456"),
])  # fmt: skip
def test_the_nodes_of_an_outer_launcher_are_those_of_the_run(environment: dict[str, str], endpoint: str) -> None:
    found, rank = with_outer_nodes(config(num_ranks=4), environment)
    assert (found.parallel.nodes, found.parallel.rdzv_endpoint, rank) == (2, endpoint, 1)
    assert found.parallel.num_ranks == 4
    same, _ = with_outer_nodes(config(nodes=2), environment)
    assert same.parallel.nodes == 2
    found, rank = with_outer_nodes(config(rdzv_endpoint="other:1"), environment)
    assert (found.parallel.rdzv_endpoint, rank) == ("other:1", None), "an address that was given decides who leads"


@pytest.mark.parametrize(("environment", "says"), [
    (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, "torchrun starts several processes on a node"),
    ({key: TORCHRUN[key] for key in TORCHRUN if key != "GROUP_RANK"}, "torchrun .* GROUP_RANK is not set"),
    (TORCHRUN | {"GROUP_RANK": "one"}, "GROUP_RANK of torchrun should be a number, got 'one'"),
    (TORCHRUN | {"MASTER_PORT": "x"}, "MASTER_PORT of torchrun should be a number, got 'x'"),
    ({"RANK": "0"}, "WORLD_SIZE, MASTER_PORT, MASTER_ADDR is not set"),
    (PLAIN | {"LOCAL_RANK": "3"}, "several processes on a node"),
    (PLAIN | {"LOCAL_WORLD_SIZE": "4"}, "several processes on a node"),
    (SRUN | {"SLURM_STEP_NUM_TASKS": "16"}, "srun starts several processes on a node"),
    (SRUN | {"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is not set"),
    (SRUN | {"SLURM_STEP_NODELIST": "["}, "should be a list of hosts"),
    (SRUN | {"SLURM_JOB_ID": "x"}, "SLURM_JOB_ID of srun should be a number, got 'x'"),
    (SRUN | {"MASTER_PORT": "x"}, "srun gives its nodes should be HOST:PORT .* got 'gpu003:x'"),
    (TORCHRUN | {"MASTER_PORT": "65535"}, "got 'head:65536'. Correct MASTER_ADDR and MASTER_PORT"),
    (PLAIN | {"MASTER_ADDR": "a b"}, "got 'a b:23456'"),
    (PLAIN | {"RANK": "2"}, "gives this node the rank 2, but the ranks of 2 nodes end at 1"),
])  # fmt: skip
def test_what_is_half_said_is_refused(environment: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        with_outer_nodes(config(), environment)


def test_settings_that_contradict_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.nodes = 3, and torchrun starts this command on 2 nodes"):
        with_outer_nodes(config(nodes=3), TORCHRUN)
    with pytest.raises(ConfigError, match=r"parallel\.nodes = 2 needs the place where they meet"):
        with_outer_nodes(config(nodes=2), {})
    with pytest.raises(ConfigError, match=r"parallel\.rdzv_endpoint = head is where several nodes meet"):
        with_outer_nodes(config(rdzv_endpoint="head"), {})
