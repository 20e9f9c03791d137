"""Parts of a run that are started by hand: they take the journal along, and each is there once."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.config import TrainerConfig
from holdfast.config.load import parse_command_line
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.errors import RunDirError
from holdfast.launcher.launch import launch_orchestrator
from holdfast.launcher.resume.prepare import prepare
from holdfast.run import lock
from holdfast.run.run_dir import RunDir
from tests.builders.attempts import write_settings
from tests.runs.processes import HANG_S
from tests.unit.launcher.resume.test_resume import STATE, add_batch, add_checkpoint

pytestmark = pytest.mark.usefixtures("in_root")


@pytest.fixture
def run_dir(run_dir: RunDir) -> RunDir:
    """Return a run whose orchestrator is three batches ahead of the newest checkpoint, that of step 2."""
    for step in range(1, 6):
        add_batch(run_dir, step, version=max(0, step - 2))
    add_checkpoint(run_dir, 2, files=STATE)
    return run_dir


@pytest.fixture(autouse=True)
def release_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock of a directory lasts as long as the process; here several launches share one."""
    monkeypatch.setattr(RunDir, "lock", lambda _: None)


def _config(run_dir: RunDir, **settings: object) -> TrainerConfig:
    base = {"output_dir": str(run_dir.path), "model": {"name": "examples/reverse_text/model"}, "max_steps": 10}
    return TrainerConfig.model_validate(base | {"ckpt": {"resume_step": "latest"}} | settings)


def _start(config: TrainerConfig) -> None:
    prepare(config, clean=False, dry_run=False)


@contextmanager
def _living_orchestrator(run_dir: RunDir) -> Iterator[None]:
    """Hold its lock, as the command does that has become the orchestrator."""
    code = (
        "import os, sys; from pathlib import Path; from holdfast.run.run_dir import RunDir\n"
        "RunDir(Path(sys.argv[1])).lock_orchestrator(over_exec=True)\n"
        "os.execv('/bin/sh', ['sh', '-c', 'echo held; exec cat'])"
    )
    pipe = subprocess.PIPE
    held = subprocess.Popen([sys.executable, "-c", code, str(run_dir.path)], stdin=pipe, stdout=pipe, text=True)
    assert held.stdout is not None and held.stdout.readline() == "held\n"
    try:
        yield
    finally:
        held.communicate()


@pytest.mark.parametrize("was_configured", [True, False])
def test_a_trainer_alone_keeps_the_batches_behind_its_checkpoint(run_dir: RunDir, was_configured: bool) -> None:
    if was_configured:
        write_settings(run_dir, "trainer", _config(run_dir))
    _start(_config(run_dir))
    assert run_dir.published_batches() == [1, 2, 3, 4, 5]


def test_beside_a_living_orchestrator_nothing_of_its_own_is_touched(run_dir: RunDir) -> None:
    unfinished = run_dir.rollouts / ".tmp-step_6-1"
    unfinished.mkdir()
    run_dir.generations(6).touch()
    with _living_orchestrator(run_dir):
        _start(_config(run_dir))
    assert run_dir.published_batches() == [1, 2, 3, 4, 5]
    assert unfinished.exists() and run_dir.generations(6).exists()
    _start(_config(run_dir))
    assert not unfinished.exists(), "of a dead one"


def test_a_trainer_that_makes_other_weights_is_refused_beside_a_living_orchestrator(run_dir: RunDir) -> None:
    """Which has made batches by the old ones, and would never make them again."""
    write_settings(run_dir, "trainer", _config(run_dir))
    other = _config(run_dir, optim={"lr": 0.5})
    with _living_orchestrator(run_dir), pytest.raises(RunDirError, match="an orchestrator runs in .* batch 5 and what"):
        _start(other)
    assert run_dir.published_batches() == [1, 2, 3, 4, 5]
    _start(other)
    assert run_dir.published_batches() == [1, 2, 3, 4]


def test_a_trainer_that_goes_back_is_refused_beside_a_living_orchestrator(run_dir: RunDir) -> None:
    add_checkpoint(run_dir, 1, files=STATE)
    older = _config(run_dir, ckpt={"resume_step": 1})
    with _living_orchestrator(run_dir), pytest.raises(RunDirError, match="an orchestrator runs in .* batch 2 and what"):
        _start(older)
    assert run_dir.published_batches() == [1, 2, 3, 4, 5] and run_dir.committed_steps() == [1, 2]
    _start(older)
    assert run_dir.published_batches() == [1] and run_dir.committed_steps() == [1]


def test_an_orchestrator_leaves_a_half_removed_run_alone(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunDir, "lock_orchestrator", lambda *_, **__: None)
    (run_dir.path / "removal.mark").touch()
    words = ["@", "configs/reverse_text/orch.toml", "--output-dir", str(run_dir.path)]
    with pytest.raises(RunDirError, match="Start the trainer first"):
        launch_orchestrator(parse_command_line(OrchestratorConfig, words))
    _start(_config(run_dir, ckpt={"resume_step": "auto"}))
    assert run_dir.published_batches() == [] and not run_dir.is_being_removed()


def test_a_trainer_does_not_clear_the_run_of_a_living_orchestrator(run_dir: RunDir) -> None:
    config = _config(run_dir, ckpt=None)
    with _living_orchestrator(run_dir), pytest.raises(RunDirError, match="Stop it"):
        prepare(config, clean=True, dry_run=False)
    assert run_dir.published_batches() == [1, 2, 3, 4, 5]


@pytest.mark.launch
def test_a_second_orchestrator_and_one_beside_an_rl_are_refused(run_dir: RunDir, command: Callable[[str], str]) -> None:
    words = [command("orchestrator"), "@", "configs/reverse_text/orch.toml", "--output-dir", str(run_dir.path)]
    with _living_orchestrator(run_dir):
        second = subprocess.run(words, capture_output=True, text=True)
        assert second.returncode == 2
        assert "has an orchestrator already (process " in second.stderr and "Traceback" not in second.stderr
        with pytest.raises(RunDirError, match="has an orchestrator already"):
            prepare(_config(run_dir), clean=False, dry_run=False, orchestrator=OrchestratorConfig())


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_filesystem_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def no_flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.undo()
    monkeypatch.setattr(fcntl, "flock", no_flock)
    with pytest.raises(RunDirError, match="cannot be locked: .* flock: mount Lustre with -o flock") as refused:
        RunDir(tmp_path).lock()
    assert refused.value.exit_code == 2
    (tmp_path / "lock").touch()
    with pytest.raises(RunDirError, match="cannot be locked"):
        lock.is_held(tmp_path / "lock")
    assert not lock._is_taken(-1), "where nothing can be locked, nothing is"
    number = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):  # which is not taken for free
        lock._is_taken(-1)


def test_what_a_killed_holder_left_is_waited_for_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import os, sys; from pathlib import Path; from holdfast.run.lock import take; take(Path(sys.argv[1]))"
    program += "; child = os.fork(); print(child, flush=True) if child else None; os.read(0, 1)"
    monkeypatch.undo()
    monkeypatch.setattr(lock, "_DYING_S", 0.2)
    path = tmp_path / "lock"
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        left = int(holder.stdout.readline())
        holder.kill()
        holder.wait()
        with pytest.raises(RunDirError, match=rf"process {holder.pid} started and that did not end .* `fuser {path}`"):
            lock.take(path)
        monkeypatch.setattr(lock, "_DYING_S", HANG_S)
        with ThreadPoolExecutor() as pool:
            taken = pool.submit(lock.take, path)
            with pytest.raises(TimeoutError):
                taken.result(timeout=0.3)
            os.kill(left, signal.SIGKILL)
            assert taken.result(timeout=HANG_S) is None


def test_a_holder_of_another_container_is_never_taken_for_dead() -> None:
    """Its process id means another process here, or none."""
    me = lock.Holder.me()
    nobody = 2**22 + 1  # beyond what a kernel gives
    assert not me.is_dead and lock.Holder(nobody, me.host, me.pid_space).is_dead
    boot_id, container = me.pid_space.split("/")
    assert container == os.readlink("/proc/self/ns/pid")
    assert not lock.Holder(nobody, me.host, f"{boot_id}/pid:[1]").is_dead
    assert not lock.Holder(nobody, me.host, f"another boot/{container}").is_dead
