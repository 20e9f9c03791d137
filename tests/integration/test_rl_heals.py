"""An rl run heals itself: each process dies once, or hangs, and the end is that of the run that nothing disturbed."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.faults.held_steps import NEVER, at_start, exists, held_after
from tests.forking.popen import Engine
from tests.integration.conftest import REFERENCE_STEPS, UsedServer
from tests.runs.ports import free_port
from tests.runs.processes import command_line
from tests.runs.rl import SMALL_BATCH, CompletedRun, RlRun, assert_same_end, complete, last_step, succeeded

pytestmark = pytest.mark.launch

_STEPS = ("--max-steps", str(REFERENCE_STEPS), "--ckpt.interval", "2")
_HEARTBEAT_S = 15


def _orchestrator(run: RlRun) -> psutil.Process:
    (found,) = run.find("holdfast.orchestrator.main")
    return found


def _rank(run: RlRun) -> psutil.Process:
    _, rank = run.find("holdfast.trainer.launch")
    return rank


def _trainer(run: RlRun) -> psutil.Process:
    return run.find("holdfast.trainer.launch")[0]


def _inference(run: RlRun) -> psutil.Process:
    (found,) = run.find("holdfast.inference.main")
    return found


def _engines(run: RlRun) -> list[psutil.Process]:
    return [process for process in run.processes() if "EngineCore" in "".join(command_line(process))]


def _engine(run: RlRun) -> psutil.Process:
    (found,) = _engines(run)
    return found


def _found(run: RlRun, victim: Callable[[RlRun], psutil.Process]) -> psutil.Process:
    """Return a process as soon as it is there: it may be one that is just being started again."""
    found: list[psutil.Process] = []

    def is_there() -> bool:
        try:
            found.append(victim(run))
        except (ValueError, IndexError):
            return False
        return True

    run.wait_for(is_there, victim.__name__)
    return found[0]


@dataclass(frozen=True)
class Blow:
    """A signal to one process after a step, and what the console must say about it."""

    step: int
    victim: Callable[[RlRun], psutil.Process]
    number: signal.Signals
    says: str


# The server of these runs is another's, and must outlive them.
_WITH_A_SERVER = [
    Blow(
        3, _orchestrator, signal.SIGKILL, r"orchestrator was killed by signal 9: starting it again \(restart 1 of 3\)"
    ),
    Blow(6, _rank, signal.SIGKILL, r"trainer ended with exit code 137: starting it again \(restart 1 of 3\)"),
    Blow(9, _trainer, signal.SIGKILL, r"trainer was killed by signal 9: starting it again \(restart 2 of 3\)"),
    Blow(12, _orchestrator, signal.SIGSTOP, r"orchestrator has shown no sign of life for \d+ s: killing it"),
    Blow(15, _rank, signal.SIGSTOP, r"trainer has shown no sign of life for \d+ s: killing it"),
]
_OWN_SERVER = [
    Blow(3, _inference, signal.SIGKILL, r"inference was killed by signal 9: starting it again \(restart 1 of 3\)"),
    Blow(7, _engine, signal.SIGKILL, r"inference ended with exit code \d+: starting it again \(restart 2 of 3\)"),
    Blow(11, _engine, signal.SIGSTOP, r"inference has (shown no sign of life|come no further) for \d+ s.*: killing it"),
]


def _deal(directory: Path, blows: list[Blow], *flags: str, engine: Engine = "stub") -> CompletedRun:
    dealt = directory.with_name("dealt")
    held = at_start(held_after(REFERENCE_STEPS - 2, until=exists(dealt)))
    timeout = ("--heartbeat-timeout-s", str(_HEARTBEAT_S))
    with RlRun(directory, *_STEPS, *timeout, *flags, environment=held, engine=engine) as run:
        for blow in blows:
            # Behind what was trained before the last of them: only then what it hit is there again.
            run.wait_for_step(min(max(blow.step, last_step(run.run_dir) + 1), REFERENCE_STEPS - 2))
            _found(run, blow.victim).send_signal(blow.number)
            run.wait_for_match(blow.says)
        dealt.touch()
        return complete(run)


def test_orchestrator_and_trainer_die_and_hang(rl_server: UsedServer, reference: CompletedRun, tmp_path: Path) -> None:
    healed = _deal(tmp_path / "run", _WITH_A_SERVER, *rl_server.flags)
    assert_same_end(healed, reference, REFERENCE_STEPS)
    assert "Traceback" not in healed.output
    # The orchestrator alone is no new attempt; the three deaths of the trainer are one each.
    assert sorted(path.name for path in (healed.run_dir.path / "configs").iterdir()) == [
        f"attempt_{number}" for number in range(1, 5)
    ]


@pytest.mark.timeout(1800)
@pytest.mark.engine
def test_inference_and_its_engine_die_and_hang(vllm_server: UsedServer, tmp_path: Path) -> None:
    # An engine that is stopped while it takes new weights has this long.
    flags = (*SMALL_BATCH, "--inference.server.port", str(free_port()), "--inference.server.update-timeout-s", "10")
    reference = succeeded(tmp_path / "reference", *vllm_server.flags, *_STEPS)
    healed = _deal(tmp_path / "run", _OWN_SERVER, *flags, engine="vllm")
    assert_same_end(healed, reference, REFERENCE_STEPS)
    assert "Traceback" not in healed.output
    # Orchestrator and trainer went on as they were.
    assert [path.name for path in (healed.run_dir.path / "configs").iterdir()] == ["attempt_1"]


@pytest.mark.timeout(1800)
@pytest.mark.engine
def test_an_engine_that_is_killed_while_it_starts_is_started_again(tmp_path: Path) -> None:
    port = ("--inference.server.port", str(free_port()))
    with RlRun(tmp_path / "run", *SMALL_BATCH, *port, "--max-steps", "2", engine="vllm") as run:
        for number, cpu_s in enumerate((0.0, 0.3), start=1):  # as it appears, and while it loads
            run.wait_for(lambda: _engines(run), "the engine")
            (engine,) = _engines(run)
            run.wait_for(lambda: sum(engine.cpu_times()[:2]) >= cpu_s, "its start")  # noqa: B023
            engine.kill()
            run.wait_for_output(f"inference ended with exit code 75: starting it again (restart {number} of 3)")
        ended = complete(run)
    assert ended.exit_code == 0, ended.output
    assert not ended.survivors
    assert [path.name for path in (ended.run_dir.path / "configs").iterdir()] == ["attempt_1"]


def test_when_restarts_are_used_up_one_report_says_why(rl_server: UsedServer, tmp_path: Path) -> None:
    flags = (*rl_server.flags, *_STEPS, "--max-restarts", "1")
    with RlRun(tmp_path / "run", *flags, environment=at_start(held_after(10, until=NEVER))) as run:
        run.wait_for_step(2)
        _found(run, _orchestrator).kill()
        run.wait_for_output("starting it again (restart 1 of 1)")
        run.wait_for_step(6)
        _found(run, _orchestrator).kill()
        ended = complete(run)
    assert ended.exit_code == 1
    assert not ended.survivors
    report = ended.output[ended.output.index("error: ") :]
    log = ended.run_dir.logs(1) / "orchestrator.log"
    assert report.startswith(f"error: orchestrator was killed by signal 9; the last lines of {log}:\n")
    assert log.read_text().splitlines()[-1] in report
    assert re.search(r"it was started again 1 times? in 600 s", report)
    assert ended.output.count("error: ") == 1


def test_an_error_that_was_told_is_never_started_again(rl_server: UsedServer, tmp_path: Path) -> None:
    # A prompt leaves no room in a session of 4 tokens: the orchestrator says so and ends with 2.
    flags = (*rl_server.flags, *_STEPS, "--orchestrator.seq-len", "4", "--orchestrator.sampling.max-tokens", "2")
    with RlRun(tmp_path / "run", *flags) as run:
        ended = complete(run)
    assert ended.exit_code == 2, ended.output
    assert "starting it again" not in ended.output
    assert not ended.survivors
