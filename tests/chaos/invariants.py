"""What must hold of a run that was hit, beside the run of the same seed that nothing disturbed."""

from collections import Counter

import msgspec

from holdfast.run.journal import STATE_NAME, read_accepted
from holdfast.run.metrics import read_metrics
from tests.chaos.driver import ChaosRun
from tests.runs.rl import CompletedRun, assert_same, exact_metrics, outcome


def check(chaos: ChaosRun, reference: CompletedRun, *, max_steps: int, turns: int | None = 1) -> dict[str, str]:
    """Check every invariant; return what was found for each, in words. `turns`: of every session; None in rounds, where
    a turn has any number of parts. Raises `AssertionError`: naming the invariant that is broken.
    """
    assert chaos.exit_code == 0, f"the run failed:\n{chaos.console[-1][-6000:]}"
    assert not chaos.survivors, f"processes outlived their launcher: {chaos.survivors}"
    assert_same(outcome(chaos.run_dir, max_steps), outcome(reference.run_dir, max_steps))
    assert chaos.killed_when_thawed == 0, f"{chaos.killed_when_thawed} processes were killed for a pause of all"
    check_metrics(chaos, reference, max_steps=max_steps)
    return {
        "steps": f"all {max_steps} trained, one line of metrics each, equal to those of the undisturbed run",
        "final state": "weights, optimizer, random generators and orchestrator equal to the undisturbed run, "
        "byte for byte",
        "processes": "none outlived its launcher",
        "tasks": check_tasks(chaos, max_steps=max_steps),
        "batches": check_batches(chaos, max_steps=max_steps),
        "generations": check_generations(chaos, turns=turns),
    }


def check_metrics(chaos: ChaosRun, reference: CompletedRun, *, max_steps: int) -> None:
    """Every step has one line, on the machine that trained it last, equal to the undisturbed one's."""
    expected = {int(line["step"]): line for line in exact_metrics(reference.run_dir, range(1, max_steps + 1))}
    missing = set(expected)
    for run_dir in (*chaos.left, chaos.run_dir):
        steps = [int(line["step"]) for line in read_metrics(run_dir.metrics)] if run_dir.metrics.exists() else []
        found = exact_metrics(run_dir, steps)
        assert found == [expected[step] for step in steps], f"other metrics in {run_dir.path}"
        missing -= set(steps)
    assert not missing, f"steps {sorted(missing)} have no line"


def check_tasks(chaos: ChaosRun, *, max_steps: int) -> str:
    """Every task trains exactly once: in the batches of steps 1 to `max_steps`, tasks have no gap and no repetition."""
    batches = chaos.witness.batches()
    assert list(batches) == list(range(1, max_steps + 1)), "not every batch was seen"
    trained: Counter[tuple[str, int, int]] = Counter(
        (rollout.environment, rollout.task_id, rollout.sample_index)
        for step in batches
        for rollout in batches[step][-1].rollouts
    )
    assert set(trained.values()) == {1}, "a rollout is in two batches"
    tasks = {task for _, task, _ in trained}
    accepted = read_accepted(chaos.run_dir.batch(max_steps) / STATE_NAME, step=max_steps)
    still_open = {task for position in accepted.environments.values() for task in position.open}
    assert not tasks & still_open, "a trained task is still open"
    assert sorted(tasks | still_open) == list(range(len(tasks | still_open))), "a task was skipped"
    return f"{len(tasks)} tasks in {len(trained)} rollouts, each trained once, none left out"


def check_batches(chaos: ChaosRun, *, max_steps: int) -> str:
    """No batch is made again once it is in the journal."""
    again = {step: made for step, made in chaos.witness.batches().items() if len(made) > 1}
    if chaos.left:  # what no checkpoint held is gone with the machine
        for step, made in again.items():
            first, *others = (msgspec.structs.replace(batch, metrics={}) for batch in made)
            assert all(other == first for other in others), f"batch {step} was made again, and is another"
        return f"{max_steps} were published; {len(again)} of them again on an empty machine, equal"
    assert not again, f"batches {list(again)} were made again"
    return f"{max_steps} were published, each once"


def check_generations(chaos: ChaosRun, *, turns: int | None) -> str:
    """No generation that was logged is asked for again: none is in a log twice, none that was seen is gone."""
    if chaos.left:
        return "not counted, as the logs of a machine are gone with it"
    logged = chaos.witness.generations()
    again = {step: count for step, found in logged.items() if (count := found.total() - len(found))}
    assert not again, f"generations were asked for again, by batch: {again}"
    assert chaos.witness.lost() == 0, f"{chaos.witness.lost()} logged generations were lost"
    total = sum(found.total() for found in logged.values())
    rollouts = sum(len(made[-1].rollouts) for made in chaos.witness.batches().values())
    assert turns is None or total == turns * rollouts, (
        f"{total} generations were logged for {rollouts} rollouts of {turns} turns"
    )
    return (
        f"{total} were logged in {len(logged)} logs, none twice; at the hits {chaos.witness.num_noted} were finished "
        "in batches that were not, all of them were kept"
    )
