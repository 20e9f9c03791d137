"""What a process waits for: how long it does, and that its error names phase, process and policy version in the end."""

import asyncio
import itertools
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from holdfast.config import TrainerConfig
from holdfast.config.training import ParallelConfig, TrainedModelConfig
from holdfast.errors import STUCK, ConfigError, InferenceError
from holdfast.orchestrator.main import orchestrate
from holdfast.process.heartbeat import start_heartbeat
from holdfast.run.run_dir import RunDir
from holdfast.trainer.data.packing import Sample, build_micro_batch
from holdfast.trainer.mesh import Mesh, open_mesh
from holdfast.trainer.model.policy import build_policy, predict
from holdfast.trainer.programs import rl
from holdfast.trainer.session import Stopwatch
from tests.conftest import ModelFactory
from tests.faults.rl_trainers import STEPS, Trainers, make_journal, run_trainer
from tests.runs.ports import free_port
from tests.runs.processes import HANG_S, wait_until
from tests.servers.orchestrator_fakes import FakeEngine, make_config, publish_weights, serving


def error_of(path: Path, engine: FakeEngine, *, code: int, timeout_s: float = 10, ready_timeout_s: float = 10) -> str:
    """Run the orchestrator into its error, which has exit code `code`, and return what that says."""
    config = make_config(path, engine, weights_timeout_s=0.05)
    config.client.timeout_s, config.client.ready_timeout_s = timeout_s, ready_timeout_s
    with pytest.raises(InferenceError) as raised:
        asyncio.run(orchestrate(config))
    assert raised.value.exit_code == code
    return str(raised.value)


def test_inference_that_does_not_come(tmp_path: Path) -> None:
    engine = FakeEngine()
    with serving(engine):
        pass
    told = error_of(tmp_path, engine, code=3, ready_timeout_s=0.05)
    assert told.startswith(f"waiting for inference: the inference server {engine.url} did not become ready within 0.05")


def test_weights_that_do_not_come(tmp_path: Path) -> None:
    engine = FakeEngine()
    with serving(engine):
        told = error_of(tmp_path, engine, code=STUCK)
    assert told.startswith("waiting for weights, policy version 0: the trainer published no ")
    assert "within 0.05 s (weights_timeout_s)" in told


def test_weights_that_an_engine_does_not_take(tmp_path: Path) -> None:
    engine = FakeEngine(lie_version=1)
    publish_weights(RunDir(tmp_path), 0, b"zero")
    with serving(engine):
        told = error_of(tmp_path, engine, code=3)
    assert told.startswith("pushing weights and reading them back, policy version 0: ")
    assert f"{engine.url} was given policy version 0 and reports version 1" in told


def test_an_answer_takes_its_time_while_its_server_is_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine, run_dir = FakeEngine(), RunDir(tmp_path)

    async def answer_late(_: int) -> None:
        while "takes longer than 0.15 s; the server is well" not in caplog.text:
            await asyncio.sleep(0.01)

    engine.on_generate = answer_late
    publish_weights(run_dir, 0, b"zero")
    with serving(engine):
        error_of(tmp_path, engine, code=STUCK, timeout_s=0.05)  # the next weights do not come
    assert run_dir.published_batches() == [1, 2]
    assert len(engine.requests) == len({str(request) for request in engine.requests}), "nothing was asked for twice"


def test_batches_that_do_not_come(tmp_path: Path) -> None:
    config = TrainerConfig.model_validate({"model": {"name": "x"}, "batch_timeout_s": 0.05})
    expected = "waiting for batches, policy version 3: the orchestrator published no batch 4 within 0.05 s"
    with pytest.raises(InferenceError, match=expected) as raised:
        rl._wait_for_batch(RunDir(tmp_path), 4, config)
    assert raised.value.exit_code == STUCK


@pytest.mark.launch
def test_the_bounds_of_the_work_of_a_trainer(tiny_model: ModelFactory, tmp_path: Path) -> None:
    """Waiting is not bounded by the launcher: whoever is waited for is."""
    trainers = Trainers(tiny_model(), make_journal(tmp_path / "journal"), tmp_path)
    settings = {"hang_timeout_s": 11, "startup_timeout_s": 22, "save_timeout_s": 33}
    run = run_trainer(trainers.prepare("run", loss={"type": "tests.faults.noted_bounds:loss"}, **settings))
    assert run.code == 0, f"{run.log}\n{run.trainer_log}"
    lines = run.trainer_log.splitlines()
    noted = [line.removeprefix("bound: ") for line in lines if line.startswith("bound: ")]
    steps = [
        (f"its wait for batch {step}: None", f"step {step}: {first_s}", f"publishing and saving step {step}: 33.0")
        for step, first_s in zip(range(1, STEPS + 1), (22.0, 11.0, 11.0, 11.0), strict=True)
    ]
    assert noted == ["its start: 22.0", *itertools.chain(*steps), "finishing: 33.0"]


def test_each_pass_and_phase_of_a_trainer_is_a_sign_of_life(tiny_model: ModelFactory, mesh: Mesh) -> None:
    policy = build_policy(TrainedModelConfig(name=str(tiny_model())), mesh, seed=0)
    sample = Sample(np.arange(5, 13, dtype=np.int32), np.arange(8) >= 3)
    micro = build_micro_batch([sample], [0], pack=policy.layout.packs, device=mesh.device)
    heartbeat = start_heartbeat()
    for _ in range(3):
        predict(policy, micro)
    assert heartbeat.beat.moves == 3
    with Stopwatch().phase("optimizer"):
        assert heartbeat.beat.moves == 4
    assert heartbeat.beat.moves == 5


_RANKS = """
import os, signal, sys, threading, time
import torch
from holdfast.trainer.mesh import open_mesh
from holdfast.config.training import ParallelConfig

timeout_s = float(sys.argv[1])
other = os.fork()
rank = 1 if other == 0 else 0
os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2])
ran_s = 0.0  # while this rank waited, less what it was frozen for, and less what others had of a busy core

def count():
    global ran_s
    while True:
        last = time.monotonic()
        time.sleep(0.05)
        ran_s += min(time.monotonic() - last, 0.1)

def freeze():
    time.sleep(0.5)
    for pid in (other, os.getpid()):
        os.kill(pid, signal.SIGSTOP)

with open_mesh(ParallelConfig(collective_timeout_s=timeout_s, threads=1, replicas=2)) as mesh:
    mesh.barrier()
    of_groups = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in mesh.groups]
    assert of_groups == [timeout_s] * 2, of_groups
    if rank == 1:
        threading.Event().wait()
    print(other, flush=True)
    for work in (count, freeze):
        threading.Thread(target=work, daemon=True).start()
    try:
        mesh.barrier()
    except Exception as error:
        print(f"{ran_s:.1f} {error}", flush=True)
        os.kill(other, signal.SIGKILL)
        raise
"""


@pytest.mark.ranks
@pytest.mark.clock
def test_the_clock_of_a_collective_goes_on_while_all_is_frozen() -> None:
    """Both ranks run for far less than the time that the collective has, and yet it is over."""
    timeout_s = 10.0
    command = [sys.executable, "-c", _RANKS, str(timeout_s), str(free_port())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        ranks = [psutil.Process(int(rank.stdout.readline())), psutil.Process(rank.pid)]
        try:
            wait_until(lambda: all(one.status() == psutil.STATUS_STOPPED for one in ranks), "their stop")
            time.sleep(timeout_s + 1)
            for one in ranks:
                one.resume()
            ran_s, _, told = rank.stdout.read().partition(" ")
            assert rank.wait(HANG_S) == 1, "the rank dies of it"
        finally:
            for one in ranks:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
    assert float(ran_s) < 0.8 * timeout_s and "imed out" in told, told


def test_a_gpu_that_was_asked_for_and_is_not_there_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system. Please check that you have one")

    monkeypatch.setattr("torch.cuda.init", init)
    words = r"parallel\.device = cuda, but torch finds no GPU here: Found no NVIDIA driver on your system\. "
    with pytest.raises(ConfigError, match=words):
        open_mesh(ParallelConfig(device="cuda")).__enter__()
