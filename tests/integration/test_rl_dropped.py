"""Runs that drop groups: processes die in the middle, and what is drawn, dropped and trained stays the same."""

from pathlib import Path

import pytest

from holdfast.protocol.rollouts import Dropped
from holdfast.run.journal import STATE_NAME, Accepted, Counts, read_accepted, read_batch
from holdfast.run.run_dir import RunDir
from tests.faults.blows import killed_twice
from tests.integration.conftest import UsedServer
from tests.runs.rl import assert_same_end, exact_metrics, succeeded

pytestmark = pytest.mark.launch

_STEPS = 8
_SETTINGS = """
[dynamic_sampling]
max_problems_per_step = 24

[[environments]]
id = "reverse_text"
args = { min_length = 1, max_length = 3 }
on_error = "drop"
"""


def _accepted(run_dir: RunDir) -> Accepted:
    return read_accepted(run_dir.batch(_STEPS) / STATE_NAME, step=_STEPS)


def _dropped(run_dir: RunDir) -> dict[int, list[Dropped]]:
    return {step: read_batch(run_dir, step).dropped for step in run_dir.published_batches()}


def test_orchestrator_and_trainer_die_under_dynamic_sampling(rl_server: UsedServer, tmp_path: Path) -> None:
    settings = tmp_path / "orchestrator.toml"
    settings.write_text(_SETTINGS)
    flags = ("--orchestrator", "@", str(settings), *rl_server.flags, "--max-steps", str(_STEPS), "--ckpt.interval", "1")
    straight = succeeded(tmp_path / "straight", *flags)
    killed = killed_twice(tmp_path / "killed", *flags, orchestrator=2, rank=5, held=6)
    assert_same_end(killed, straight, _STEPS)
    assert _dropped(killed.run_dir) == _dropped(straight.run_dir)

    accepted = _accepted(straight.run_dir)
    (trained,) = exact_metrics(straight.run_dir, [_STEPS])
    num_dropped = accepted.dropped["zero_signal"].problems
    assert num_dropped > 0
    assert accepted.problems == accepted.next_task("reverse_text") == 8 * _STEPS + num_dropped
    assert accepted.batched == Counts(8 * _STEPS, int(trained["samples"]), int(trained["tokens"]))
    lines = exact_metrics(straight.run_dir, range(1, _STEPS + 1))
    seen = sum(line["groups/dropped/zero_signal"] for line in lines)
    assert seen == num_dropped
