"""Runs of `rl` whose orchestrator dies, and then a rank of their trainer; both are started again."""

from __future__ import annotations

from pathlib import Path

from tests.faults.held_steps import at_start, exists, held_after
from tests.runs.rl import CompletedRun, RlRun, complete


def killed_twice(
    output_dir: Path, *flags: str, orchestrator: int, rank: int, held: int, starts_python: bool = False
) -> CompletedRun:
    """Return such a run when it has ended.

    Args:
        orchestrator: the step after which the orchestrator is killed.
        rank: the step after which rank 0 is killed.
        held: a later step, which the trainer does not leave behind before.
        starts_python: start all of it as a user does. Forks of one process have one order of sets and one state of
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
