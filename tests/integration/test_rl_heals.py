"""An rl run heals itself: each process dies once, or hangs, and the end is that of the run that nothing disturbed."""

import json
import re
import signal
from pathlib import Path

import pytest

from holdfast.run.metrics import read_metrics
from tests.faults.blows import STEPS, Blow, awaited, deal
from tests.faults.held_steps import NEVER, at_start, exists, held_after
from tests.forking.engines import config_of, start_server
from tests.integration.conftest import REFERENCE_STEPS, UsedServer
from tests.runs.rl import MODEL, SMALL_BATCH, CompletedRun, RlRun, assert_same_end, complete

pytestmark = pytest.mark.launch

# The server of these runs is another's, and must outlive them.
_WITH_A_SERVER = [
    Blow(
        3, "orchestrator", signal.SIGKILL, r"orchestrator was killed by signal 9: starting it again \(restart 1 of 3\)"
    ),
    Blow(6, "rank_0", signal.SIGKILL, r"trainer ended with exit code 137: starting it again \(restart 1 of 3\)"),
    Blow(9, "trainer", signal.SIGKILL, r"trainer was killed by signal 9: starting it again \(restart 2 of 3\)"),
    Blow(12, "orchestrator", signal.SIGSTOP, r"orchestrator has sent no heartbeat for \d+ s: killing it"),
    Blow(15, "rank_0", signal.SIGSTOP, r"trainer has sent no heartbeat for \d+ s: killing it"),
]


def test_orchestrator_and_trainer_die_and_hang(rl_server: UsedServer, reference: CompletedRun, tmp_path: Path) -> None:
    healed = deal(tmp_path / "run", _WITH_A_SERVER, *rl_server.flags)
    assert_same_end(healed, reference, REFERENCE_STEPS)
    assert "Traceback" not in healed.output
    # The orchestrator alone is no new attempt; the three deaths of the trainer are one each.
    assert sorted(path.name for path in (healed.run_dir.path / "configs").iterdir()) == [
        f"attempt_{number}" for number in range(1, 5)
    ]


def test_when_restarts_are_used_up_one_report_says_why(rl_server: UsedServer, tmp_path: Path) -> None:
    flags = (*rl_server.flags, *STEPS, "--max-restarts", "1")
    with RlRun(tmp_path / "run", *flags, environment=at_start(held_after(10, until=NEVER))) as run:
        run.wait_for_step(2)
        awaited(run, "orchestrator").kill()
        run.wait_for_output("starting it again (restart 1 of 1)")
        run.wait_for_step(6)
        awaited(run, "orchestrator").kill()
        ended = complete(run)
    assert ended.exit_code == 1 and not ended.survivors
    report = ended.output[ended.output.index("error: ") :]
    log = ended.run_dir.logs(1) / "orchestrator.log"
    assert report.startswith(f"error: orchestrator was killed by signal 9; the last lines of {log}:\n")
    assert log.read_text().splitlines()[-1] in report
    assert re.search(r"it was started again 1 times? in 600 s", report) and ended.output.count("error: ") == 1


def test_an_error_that_was_told_is_never_started_again(rl_server: UsedServer, tmp_path: Path) -> None:
    # A prompt leaves no room in a session of 4 tokens: the orchestrator says so and ends with 2.
    flags = (*rl_server.flags, *STEPS, "--orchestrator.seq-len", "4", "--orchestrator.sampling.max-tokens", "2")
    with RlRun(tmp_path / "run", *flags) as run:
        ended = complete(run)
    assert ended.exit_code == 2, ended.output
    assert "starting it again" not in ended.output and not ended.survivors


def test_one_of_two_named_servers_may_be_dead(rl_server: UsedServer, reference: CompletedRun, tmp_path: Path) -> None:
    """Nobody starts it again, so the run ends with the other one."""
    dying = start_server("stub", config_of(MODEL), tmp_path / "dying.log").wait_ready()
    urls = json.dumps([dying.url, rl_server.handle.url])
    flags, held = ("--orchestrator.client.urls", urls), at_start(held_after(8, until=exists(tmp_path / "dead")))
    try:
        with RlRun(tmp_path / "run", *STEPS, *SMALL_BATCH, *flags, environment=held) as run:
            run.wait_for_step(4)
            dying.kill()
            (tmp_path / "dead").touch()
            done = complete(run)
    finally:
        dying.kill()
    assert_same_end(done, reference, REFERENCE_STEPS)
    metrics = list(read_metrics(done.run_dir.metrics))
    assert metrics[2]["engine/0/requests"] > 0 and metrics[2]["engine/1/requests"] > 0
    assert sum(step["engine/0/failures"] for step in metrics) == 1
    assert metrics[-1]["engine/0/requests"] == 0 < metrics[-1]["engine/1/requests"]
