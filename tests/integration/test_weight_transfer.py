"""Weights by collective: an engine takes them from the trainer's memory, with the bits of the directory."""

import re
import signal
from pathlib import Path

import pytest

from tests.faults.blows import STEPS, Blow, deal
from tests.faults.held_steps import at_start
from tests.forking.popen import Engine
from tests.integration.conftest import REFERENCE_STEPS
from tests.runs.ports import free_port
from tests.runs.rl import SMALL_BATCH, CompletedRun, assert_same_end, succeeded

pytestmark = pytest.mark.launch

COLLECTIVE = ("--weights.transport", "collective")


@pytest.mark.ranks
def test_both_transports_end_with_the_same_bits(engine: Engine, tmp_path: Path) -> None:
    """The trainer has two ranks, and gathers what it sends."""
    steps = ("--max-steps", "4", "--ckpt.interval", "4", "--async-level", "0", "--trainer.parallel.num-ranks", "2")
    flags = (*SMALL_BATCH, *steps, "--inference.server.port", str(free_port()))
    by_directory = succeeded(tmp_path / "directory", *flags, engine=engine)
    by_collective = succeeded(tmp_path / "collective", *flags, *COLLECTIVE, engine=engine)
    assert_same_end(by_collective, by_directory, 4)
    log = (by_collective.run_dir.logs(1) / "orchestrator.log").read_text()
    # Version 0 carries the parity prompt, so it comes as a directory.
    assert re.findall(r"version (\d+) went to 1 engines from the trainer's memory", log) == ["1", "2", "3"]
    assert "as a directory" not in log


_BLOWS = [
    Blow(3, "rank_0", signal.SIGKILL, r"trainer ended with exit code 137: starting it again \(restart 1 of 3\)"),
    Blow(6, "inference", signal.SIGKILL, r"inference was killed by signal 9: starting it again \(restart 1 of 3\)"),
    Blow(9, "orchestrator", signal.SIGKILL, r"orchestrator was killed by signal 9: starting it again"),
    Blow(12, "rank_0", signal.SIGSTOP, r"trainer has sent no heartbeat for \d+ s: killing it"),
]


def test_every_process_dies_or_hangs(reference: CompletedRun, tmp_path: Path) -> None:
    flags = (*SMALL_BATCH, *COLLECTIVE, "--inference.server.port", str(free_port()))
    healed = deal(tmp_path / "run", _BLOWS, *flags)
    assert_same_end(healed, reference, REFERENCE_STEPS)
    assert "Traceback" not in healed.output
    logs = [(healed.run_dir.logs(attempt) / "orchestrator.log").read_text() for attempt in (1, 2, 3)]
    assert all("from the trainer's memory" in log for log in logs), logs


def _killed_while_sending(marks: Path, times: int) -> str:
    """Return source of a fault: the trainer is killed in the middle of its first transfers."""
    return (
        "import os, signal\n"
        "from pathlib import Path\n"
        "from holdfast.protocol import transfer\n"
        "groups_of = transfer.groups_of\n"
        "def killed(entries, *, most_bytes):\n"
        "    for number, group in enumerate(groups_of(entries, most_bytes=1)):\n"  # on both sides
        f"        marks = Path({str(marks)!r})\n"
        f"        if number == 5 and 'RANK' in os.environ and len(list(marks.iterdir())) < {times}:\n"
        "            (marks / str(os.getpid())).touch()\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        yield group\n"
        "transfer.groups_of = killed\n"
    )


def test_a_trainer_that_is_killed_while_it_sends_costs_nothing(
    reference: CompletedRun, engine: Engine, tmp_path: Path
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    flags = (*SMALL_BATCH, *STEPS, *COLLECTIVE, "--inference.server.port", str(free_port()))
    healed = succeeded(tmp_path / "run", *flags, environment=at_start(_killed_while_sending(marks, 2)), engine=engine)
    assert len(list(marks.iterdir())) == 2
    if engine == "stub":  # the reference is of that engine
        assert_same_end(healed, reference, REFERENCE_STEPS)
    assert healed.output.count("trainer ended with exit code 137: starting it again") == 2
    torn = [
        path.read_text().count("answered 503: the weights are torn")
        for path in healed.run_dir.path.rglob("orchestrator.log")
    ]
    assert sum(torn) == 2, healed.output
    assert not re.findall("inference.*starting it again", healed.output), "the engine was mended where it was"
