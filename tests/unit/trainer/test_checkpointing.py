"""When the training programs save, and where: by steps, by minutes, at the end, and when a signal asks."""

import os
import signal
import threading
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.config import CkptConfig, DpoConfig, RewardTrainingConfig, SftConfig
from holdfast.errors import SaveError, Stopped
from holdfast.process.heartbeat import does, start_heartbeat
from holdfast.remote.uploader import CLOSE_S
from holdfast.run import manifest
from holdfast.run.run_dir import RunDir
from holdfast.trainer import saving
from holdfast.trainer import stop as stop_module
from holdfast.trainer.checkpoint.checkpointer import Checkpointer
from holdfast.trainer.checkpoint.commit import ObjectStorage, Storage
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.saving import GraceOver, Saver, _is_to_be_evaluated, open_storage
from holdfast.trainer.stop import StopRequest
from tests.builders.toy import ENVIRONMENTS
from tests.builders.train_states import held_writes
from tests.runs.processes import HANG_S


@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_writes_to_a_store_and_all_wait(is_remote: bool, rank: int, tmp_path: Path, mesh: Mesh) -> None:
    ckpt = {"dir": f"file://{tmp_path / 'there'}", "resume_step": 4} if is_remote else {} if rank else None
    config = SftConfig.model_validate({"output_dir": str(tmp_path), "max_steps": 1, "ckpt": ckpt})
    storage = open_storage(config, RunDir(tmp_path), replace(mesh, rank=rank), older_weights=0)
    assert type(storage) is (ObjectStorage if is_remote and rank == 0 else Storage)
    assert storage.close_s == (CLOSE_S if is_remote else 0)
    storage.close(HANG_S)


def test_a_checkpoint_stays_until_it_is_evaluated(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    evaluated = {"interval": 4, "environments": ENVIRONMENTS}
    config = DpoConfig.model_validate({"max_steps": 9, "eval": evaluated, "ckpt": {"interval": 2, "keep": 1}})
    assert [step for step in (2, 4, 6, 8, 9) if _is_to_be_evaluated(config, run_dir, step)] == [4, 8, 9]
    run_dir.evaluation(4).mkdir(parents=True)
    (run_dir.evaluation(4) / "summary.json").write_text("{}")
    assert not _is_to_be_evaluated(config, run_dir, 4) and _is_to_be_evaluated(config, run_dir, 8)
    run_dir.give_up_evaluations()
    assert not _is_to_be_evaluated(config, run_dir, 8), "nobody waits for it"
    run_dir.given_up.unlink()
    assert _is_to_be_evaluated(config, run_dir, 8) and not _is_to_be_evaluated(DpoConfig(), run_dir, 8)
    assert not _is_to_be_evaluated(RewardTrainingConfig(), run_dir, 8)


MAX_STEPS = 7


def no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the seconds of a clock that stands still until a test adds to them."""
    now = [1000.0]
    for module in (saving, stop_module):  # no others: threads and torch have limits of their own
        monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_the_wait_for_uploads_has_its_own_bound(tmp_path: Path, mesh: Mesh) -> None:
    """It may take longer than `--trainer.save-timeout-s`."""
    heartbeat = start_heartbeat()
    does("finishing", bound_s=1.0)
    checkpointer = Checkpointer(tmp_path / "here", {"counter": {"step": 0}})
    storage = ObjectStorage(f"file://{tmp_path / 'there'}")
    config = CkptConfig(dir=f"file://{tmp_path / 'there'}")
    Saver(checkpointer, config, mesh, max_steps=MAX_STEPS, committed=None, storage=storage).close()
    assert heartbeat.beat.doing == "its wait for uploads" and (heartbeat.beat.bound_s or 0.0) > CLOSE_S


class Loop:
    """A loop whose state is one tensor and a counter, with a saver of its own."""

    def __init__(self, directory: Path, mesh: Mesh, *, committed: int | None = None, **config: Any) -> None:
        self.counter = {"step": committed or 0}
        section, self.stop = CkptConfig(**config), StopRequest()
        state = {"model": torch.nn.Linear(1, 1), "counter": self.counter}
        how = {"save_async": section.save_async, "on_failure": section.on_failure}
        self.checkpointer = Checkpointer(directory, state, **how)
        self.settle = self.checkpointer.wait
        self.saver = Saver(self.checkpointer, section, mesh, max_steps=MAX_STEPS, committed=committed, stop=self.stop)

    def step(self, **attachments: bytes) -> list[int]:
        """One step, as the programs take it; asked to stop, it stops."""
        if self.saver.is_asked_to_stop():
            self.saver.stop(self.counter["step"], {"loss": 0.5}, attachments)
        self.counter["step"] += 1
        return self.saver.after_step(self.counter["step"], {"loss": 1.0}, attachments)


Start = Callable[..., Loop]


@pytest.fixture
def start(run_dir: RunDir, mesh: Mesh) -> Start:
    return lambda **config: Loop(run_dir.checkpoints, mesh, **config)


@pytest.mark.parametrize("save_async", [False, True])
@pytest.mark.parametrize(("config", "saved"), [
    ({}, [7]), ({"interval": 3}, [3, 6, 7]), ({"interval": 7}, [7]), ({"interval": 1}, list(range(1, 8))),
])  # fmt: skip
def test_it_saves_every_interval_and_the_final_step(
    config: dict[str, int], saved: list[int], save_async: bool, start: Start, run_dir: RunDir
) -> None:
    loop = start(save_async=save_async, **config)
    told = [step for _ in range(MAX_STEPS) for step in loop.step()]
    loop.saver.close()
    assert run_dir.committed_steps() == saved
    assert told == (saved if not save_async else saved[: len(told)]), "each commit is told once, in order"
    assert manifest.verify(run_dir.checkpoint(7)).metrics == {"loss": 1.0}


def test_every_commit_is_told_when_the_next_save_comes_before_the_next_poll(start: Start) -> None:
    """The trainer of `rl` keeps the weights that a commit needs by what it is told."""
    loop = start(interval=1)
    told = loop.step()
    loop.settle()
    told += loop.step()  # saves step 2, by which the save of step 1 has ended
    assert loop.saver.in_flight() in ([2], [])
    loop.settle()
    told += loop.step()
    loop.settle()
    assert told[:2] == [1, 2]
    loop.saver.close()


def test_it_saves_minutes_after_the_last_save(start: Start, clock: list[float], run_dir: RunDir) -> None:
    loop = start(every_minutes=2.0, interval=5, save_async=False)
    for minutes in (1.0, 1.5, 1.0, 1.5, 1.5, 1.0):  # before steps 1 to 6
        clock[0] += 60 * minutes
        loop.step()
    assert run_dir.committed_steps() == [2, 4, 5]
    clock[0] += 60 * 0.9
    loop.step()
    loop.saver.close()
    assert run_dir.committed_steps() == [2, 4, 5, 7]


def test_without_checkpoints_nothing_is_saved_and_nobody_is_asked(run_dir: RunDir, mesh: Mesh) -> None:
    stop = StopRequest()
    stop.ask(signal.SIGTERM)
    with Checkpointer(run_dir.checkpoints, {"counter": {}}) as checkpointer:
        saver = Saver(checkpointer, None, mesh, max_steps=1, committed=None, stop=stop)
        assert not saver.is_asked_to_stop() and saver.after_step(1, {}) == []
    assert run_dir.committed_steps() == []


@pytest.mark.parametrize("save_async", [False, True])
def test_a_signal_saves_the_step_that_is_done(save_async: bool, start: Start, run_dir: RunDir) -> None:
    loop = start(save_async=save_async)
    loop.step()
    loop.step()
    loop.stop.ask(signal.SIGUSR1)
    with pytest.raises(Stopped, match="stopped by SIGUSR1: step 2 is saved") as caught:
        loop.step(state=b"after 2")
    assert caught.value.exit_code == 128 + signal.SIGUSR1 and run_dir.committed_steps() == [2]
    assert (run_dir.checkpoint(2) / "state").read_text() == "after 2"
    assert manifest.verify(run_dir.checkpoint(2)).metrics == {"loss": 0.5}


@pytest.mark.parametrize("committed", [None, 4])
def test_what_is_saved_is_not_saved_again(committed: int | None, start: Start, run_dir: RunDir) -> None:
    """Before the first step there is nothing to save; after a resume it is saved."""
    loop = start(committed=committed)
    loop.stop.ask(signal.SIGTERM)
    with pytest.raises(Stopped, match="step 4 is saved" if committed else "before step 1") as caught:
        loop.step()
    assert caught.value.exit_code == 143 and run_dir.committed_steps() == []


def test_a_save_that_is_under_way_is_waited_for(start: Start, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = start(interval=1)
    with held_writes(monkeypatch) as held:
        loop.step()
        loop.stop.ask(signal.SIGTERM)
        timer = threading.Timer(0.1, held.release)
        timer.start()
        with pytest.raises(Stopped, match="step 1 is saved"):
            loop.step()
        timer.join()
    assert run_dir.committed_steps() == [1]


@pytest.mark.parametrize("save_async", [False, True])
def test_a_step_whose_save_failed_is_saved_again_before_the_stop(
    save_async: bool, start: Start, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = start(interval=1, save_async=save_async, on_failure="warn")
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "write_manifest", no_space)
        loop.step()
        loop.settle()
    loop.stop.ask(signal.SIGTERM)
    with pytest.raises(Stopped, match="step 1 is saved"):
        loop.step()
    assert run_dir.committed_steps() == [1]


def test_grace_begins_at_the_signal(start: Start, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    loop = start(grace_s=30, interval=1)
    with held_writes(monkeypatch) as held:
        loop.step()
        loop.stop.ask(signal.SIGTERM)
        clock[0] += 60
        loop.stop.ask(signal.SIGUSR1)
        loop.stop.ask(signal.SIGINT)
        with pytest.raises(GraceOver, match="SIGUSR1: .* within ckpt.grace_s = 30 s"):
            loop.step()
        held.release()
        loop.settle()


def test_ctrl_c_has_no_deadline_until_another_signal_brings_one() -> None:
    stop = StopRequest()
    stop.ask(signal.SIGINT)
    first = stop.asked_s()
    stop.ask(signal.SIGTERM)
    assert stop.signal_number() == signal.SIGTERM and stop.asked_s() > first


@pytest.mark.parametrize("on_failure", ["stop", "warn"])
def test_a_failed_save_is_no_stop(on_failure: str, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = start(on_failure=on_failure)
    loop.step()
    monkeypatch.setattr(manifest, "write_manifest", no_space)
    loop.stop.ask(signal.SIGTERM)
    with pytest.raises(SaveError, match="step 1 could not be saved.*No space left"):
        loop.step()


@pytest.mark.parametrize("is_under_way", [True, False])
def test_grace_ends_a_wait(is_under_way: bool, start: Start, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = start(grace_s=0.05, interval=1 if is_under_way else None)
    with held_writes(monkeypatch) as held:
        loop.step()
        loop.stop.ask(signal.SIGTERM)
        with pytest.raises(GraceOver, match="SIGTERM: step 1 was not written within ckpt.grace_s = 0.05 s"):
            loop.step()
        assert run_dir.committed_steps() == []
        held.release()
        loop.settle()


@pytest.mark.parametrize("on_failure", ["stop", "warn"])
def test_an_upload_that_failed_for_good_stops_the_loop_or_is_logged(
    on_failure: str, start: Start, run_dir: RunDir, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = start(interval=1, on_failure=on_failure)
    storage = loop.saver._storage = ObjectStorage(f"file://{tmp_path / 'there'}")
    uploader = storage._uploader
    loop.step()
    loop.settle()
    shard = next(run_dir.checkpoint(1).rglob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    storage.publish(run_dir.checkpoint(1))
    with uploader._changed:
        assert uploader._changed.wait_for(lambda: uploader._failure is not None, HANG_S)
    if on_failure == "stop":
        with pytest.raises(SaveError, match=r"\.distcp is damaged"):
            loop.step()
    else:
        assert loop.step() is not None and ".distcp is damaged" in caplog.text
    loop.settle()
    storage.close(HANG_S)


@pytest.mark.usefixtures("restored_signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_any_fork_is_seen_by_all(number: int) -> None:
    assert StopRequest().signal_number() == 0
    request = StopRequest()
    request.listen()  # and nothing else before the fork, as the process that starts the ranks does
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), number)
        os._exit(request.signal_number())
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == number, "the fork lived on"
    assert request.signal_number() == number
