"""Processes of an `rl` run that a test kills or stops, one after the other, and the run that has to heal."""

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.faults.held_steps import at_start, exists, held_after
from tests.forking.popen import Engine
from tests.integration.conftest import REFERENCE_STEPS
from tests.runs.processes import command_line
from tests.runs.rl import CompletedRun, RlRun, complete, last_step

STEPS = ("--max-steps", str(REFERENCE_STEPS), "--ckpt.interval", "2")
_HEARTBEAT_S = 15


def orchestrator(run: RlRun) -> psutil.Process:
    (found,) = run.find("holdfast.orchestrator.main")
    return found


def rank(run: RlRun) -> psutil.Process:
    _, found = run.find("holdfast.trainer.launch")
    return found


def trainer(run: RlRun) -> psutil.Process:
    return run.find("holdfast.trainer.launch")[0]


def inference(run: RlRun) -> psutil.Process:
    (found,) = run.find("holdfast.inference.main")
    return found


def engines(run: RlRun) -> list[psutil.Process]:
    return [process for process in run.processes() if "EngineCore" in "".join(command_line(process))]


def engine(run: RlRun) -> psutil.Process:
    (found,) = engines(run)
    return found


def awaited(run: RlRun, victim: Callable[[RlRun], psutil.Process]) -> psutil.Process:
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


def deal(directory: Path, blows: list[Blow], *flags: str, engine: Engine = "stub") -> CompletedRun:
    """Deal the blows to a run, each behind what was trained before it; return the run at its end."""
    dealt = directory.with_name("dealt")
    held = at_start(held_after(REFERENCE_STEPS - 2, until=exists(dealt)))
    timeout = ("--heartbeat-timeout-s", str(_HEARTBEAT_S))
    with RlRun(directory, *STEPS, *timeout, *flags, environment=held, engine=engine) as run:
        for blow in blows:
            # Behind what was trained before the last of them: only then what it hit is there again.
            run.wait_for_step(min(max(blow.step, last_step(run.run_dir) + 1), REFERENCE_STEPS - 2))
            awaited(run, blow.victim).send_signal(blow.number)
            run.wait_for_match(blow.says)
        dealt.touch()
        return complete(run)


def killed_twice(
    output_dir: Path, *flags: str, orchestrator: int, rank: int, held: int, starts_python: bool = False
) -> CompletedRun:
    """Return such a run when it has ended. `orchestrator`: the step after which the orchestrator is killed. `rank`: the
    step after which rank 0 is killed. `held`: a later step, which the trainer does not leave behind before.
    `starts_python`: start all of it as a user does. Forks of one process have one order of sets and one state of
    `random`, so what depends on those shows only here.
    """
    is_killed = output_dir.with_name(f"{output_dir.name}_rank_killed")
    environment = at_start(held_after(held, until=exists(is_killed)))
    with RlRun(output_dir, *flags, environment=environment, starts_python=starts_python) as run:
        run.wait_for_step(orchestrator)
        run.find("holdfast.orchestrator.main")[0].kill()
        run.wait_for_output("orchestrator was killed by signal 9: starting it again")
        run.wait_for_step(rank)
        run.find("holdfast.trainer.launch")[1].kill()
        is_killed.touch()
        return complete(run)
