"""Processes of an `rl` run that a test kills or stops, one after the other, and the run that has to heal."""

import signal
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.conftest import ROOT
from tests.faults.held_steps import at_start, exists, held_after
from tests.forking.popen import Engine
from tests.integration.conftest import REFERENCE_STEPS
from tests.runs.processes import command_line
from tests.runs.rl import CompletedRun, RlRun, complete, last_step

STEPS = ("--max-steps", str(REFERENCE_STEPS), "--ckpt.interval", "2")
_HEARTBEAT_S = 15
PLAYERS = {
    "worker": "holdfast.orchestrator.worker", "mcp_server": str(ROOT / "tests" / "servers" / "light_mcp_server.py"),
    "before_mcp_server": "holdfast.process.noted_end", "mathematics": "holdfast.orchestrator.env.math_answers",
    "sandbox": str(ROOT / "examples" / "environments" / "sandbox_inside.py"), "tracker": "holdfast.view.track",
}  # fmt: skip
"""What plays, scores or tells beside the parts of a run: a word of the command line of each, by a victim's name."""


def find_process(run: RlRun, victim: str) -> psutil.Process | None:
    """Return the process of `run` that is called `victim` in a schedule; None while there is none."""
    try:
        if victim == "launcher":
            return run.launcher()
        if victim == "trainer" or victim.startswith("rank_"):
            position = 0 if victim == "trainer" else 1 + int(victim.removeprefix("rank_"))
            found = run.find("holdfast.trainer.launch")  # it starts the ranks, in their order
            return found[position] if len(found) > position else None
        if victim in PLAYERS:
            found = run.find(PLAYERS[victim])
            return found[0] if found else None
        if victim == "orchestrator":
            found = run.find("holdfast.orchestrator.main")
        else:
            # By its configuration, which is called as the process: one of several servers is another's neighbour.
            name = victim.replace("engine", "inference")
            found = run.find("holdfast.inference.main")
            found = [one for one in found if any(word.endswith(f"/{name}.toml") for word in command_line(one))]
        if victim.startswith("engine"):
            children = found[0].children() if found else []
            found = [child for child in children if "EngineCore" in "".join(command_line(child))]
        return found[0] if found else None
    except psutil.NoSuchProcess:
        return None


def awaited(run: RlRun, victim: str) -> psutil.Process:
    """Return a process as soon as it is there: it may be one that is just being started again."""
    found: list[psutil.Process | None] = []

    def is_there() -> bool:
        found.append(find_process(run, victim))
        return found[-1] is not None

    run.wait_for(is_there, victim)
    assert found[-1] is not None
    return found[-1]


@dataclass(frozen=True)
class Blow:
    """A signal to one process after a step, and what the console must say about it."""

    step: int
    victim: str
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


def kill_both(run: RlRun, *, orchestrator: int, rank: int) -> None:
    """Kill the orchestrator behind a step, and rank 0 behind a later one."""
    run.wait_for_step(orchestrator)
    run.find("holdfast.orchestrator.main")[0].kill()
    run.wait_for_output("orchestrator was killed by signal 9: starting it again")
    run.wait_for_step(rank)
    run.find("holdfast.trainer.launch")[1].kill()


def killed_twice(
    output_dir: Path, *flags: str, orchestrator: int, rank: int, held: int, starts_python: bool = False
) -> CompletedRun:
    """Return such a run when it has ended. `orchestrator`: the step after which the orchestrator is killed. `rank`: the
    step after which rank 0 is killed. `held`: a later step, which the trainer does not leave behind before.
    `starts_python`: start all of it as a user does. Forks of one process have one order of sets and one state of
    `random`, so what depends on those shows only here."""
    is_killed = output_dir.with_name(f"{output_dir.name}_rank_killed")
    environment = at_start(held_after(held, until=exists(is_killed)))
    with RlRun(output_dir, *flags, environment=environment, starts_python=starts_python) as run:
        kill_both(run, orchestrator=orchestrator, rank=rank)
        is_killed.touch()
        return complete(run)
