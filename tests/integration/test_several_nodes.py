"""Runs on several nodes: their commands on one machine, which meet over loopback, with one rank each."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import psutil
import pytest

from holdfast.run.metrics import read_metrics
from holdfast.run.run_dir import RunDir
from tests.faults.held_steps import ASKED_TO_STOP, exists, held_after
from tests.forking.commands import Run, shared_commands, wait_for, wait_for_step
from tests.runs.ports import free_port
from tests.runs.processes import HANG_S
from tests.runs.profiles import Trace, traces
from tests.runs.training import sft_command
from tests.unit.trainer.programs.in_process import publish_journal

pytestmark = [pytest.mark.launch, pytest.mark.ranks]

Models = Callable[..., Path]
STEPS, HELD = 12, 7


class Nodes:
    def __init__(self, output: Path, program: str, argv: list[str]) -> None:
        self.output = output
        self.run_dir = RunDir(output)
        self._program = program
        self._argv = [*argv, "--parallel.nodes", "2", "--parallel.rdzv-endpoint", f"localhost:{free_port()}"]
        self._started = 0
        self.runs: list[Run] = []
        self.trainer_fault = ""

    def start(self, node: int, *flags: str) -> Run:
        """Start the command of one node; node 0 first, which leads."""
        self._started += 1
        log = self.output.with_name(f"{self.output.name}_{node}_{self._started}.out")
        argv = [*self._argv, *flags]
        run = shared_commands().start(self._program, self.output, argv, log=log, trainer_fault=self.trainer_fault)
        if not node:
            wait_for(lambda: "waiting for the others" in run.log, "what leads the others", run)
        self.runs[node : node + 1] = [run]
        return run

    def start_all(self, *flags: str) -> None:
        for node in (0, 1):
            self.start(node, *flags)

    def wait_for_step(self, step: int) -> None:
        wait_for_step(step, *self.runs)

    def trainer(self, node: int) -> psutil.Process:
        (trainer,) = psutil.Process(self.runs[node].pid).children()
        return trainer

    def wait(self) -> list[int | None]:
        return [run.wait(HANG_S).code for run in self.runs]

    @property
    def weights(self) -> bytes:
        return (self.run_dir.weights_of(STEPS) / "model.safetensors").read_bytes()

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in read_metrics(self.run_dir.metrics)]


@pytest.fixture(scope="module")
def of_one_node(tmp_path_factory: pytest.TempPathFactory, tiny_model: Models, sft_data: Path) -> Nodes:
    """The same run by the two ranks of one node, which nothing disturbs."""
    output = tmp_path_factory.mktemp("one") / "run"
    run = shared_commands().sft(output, tiny_model(dropout=0.1), sft_data, "--max-steps", str(STEPS), ranks=2)
    assert run.wait(HANG_S).code == 0, run.log
    return Nodes(output, "sft", [])


@pytest.fixture
def nodes(tmp_path: Path, tiny_model: Models, sft_data: Path) -> Iterator[Nodes]:
    flags = ("--max-steps", str(STEPS), "--ckpt.interval", "4")
    made = Nodes(tmp_path / "run", "sft", sft_command(tmp_path / "run", tiny_model(dropout=0.1), sft_data, *flags)[1:])
    yield made
    for run in made.runs:
        run.kill()


def test_two_nodes_compute_what_two_ranks_of_one_do(nodes: Nodes, of_one_node: Nodes) -> None:
    """After one that was started with other settings, and refused."""
    flags = ("--profile", "3:4", "--dashboard.port", "0")
    nodes.start(0, *flags)
    refused = nodes.start(1, *flags, "--seed", "4").wait(HANG_S)
    assert refused.code == 2 and "error: nodes were started with other settings" in refused.log
    assert "seed: 3 -> 4" in refused.log
    nodes.start(1, *flags)
    assert nodes.wait() == [0, 0], nodes.runs[0].log
    assert nodes.weights == of_one_node.weights and nodes.losses == of_one_node.losses
    assert {path.name for path in nodes.run_dir.logs(1).iterdir()} == {
        "trainer.log", "trainer_1.log", "events.jsonl", "timeline_trainer.jsonl",
        "profile_steps_3_to_4", "dashboard.log",
    }  # fmt: skip
    (profile,) = nodes.run_dir.profiles()
    assert traces(profile) == ["rank_0.json.gz", "rank_1.json.gz"]
    assert Trace.read(profile, rank=0).steps() == Trace.read(profile, rank=1).steps() == [3, 4]


def test_a_signal_to_one_node_saves_on_all_and_a_resume_goes_on_bit_for_bit(nodes: Nodes, of_one_node: Nodes) -> None:
    nodes.trainer_fault = held_after(HELD, until=ASKED_TO_STOP)
    nodes.start_all()
    nodes.wait_for_step(5)
    os.kill(nodes.runs[1].pid, signal.SIGTERM)
    assert nodes.wait() == [128 + signal.SIGTERM] * 2
    stopped = nodes.run_dir.committed_steps()[-1]
    assert 5 <= stopped < STEPS and f"stopped at step {stopped}" in nodes.runs[0].log
    assert "the head node ended the run with exit code 143" in nodes.runs[1].log
    nodes.trainer_fault = ""
    nodes.start_all()
    assert nodes.wait() == [0, 0]
    assert nodes.weights == of_one_node.weights and nodes.losses == of_one_node.losses


@pytest.mark.parametrize(("what", "node"), [("trainer", 1), ("rank", 0), ("command", 0), ("command", 1)])
def test_what_is_killed_on_one_node_heals_on_all(
    nodes: Nodes, of_one_node: Nodes, node: int, what: Literal["trainer", "rank", "command"], tmp_path: Path
) -> None:
    nodes.trainer_fault = held_after(HELD, until=exists(tmp_path / "killed"))
    nodes.start_all()
    nodes.wait_for_step(5)
    if what == "command":
        nodes.runs[node].kill()
        nodes.start(node)  # by the same command
    else:
        (nodes.trainer(node) if what == "trainer" else nodes.trainer(node).children()[0]).kill()
    (tmp_path / "killed").touch()
    assert nodes.wait() == [0, 0], "\n".join(run.log for run in nodes.runs)
    assert nodes.weights == of_one_node.weights and nodes.losses == of_one_node.losses
    assert nodes.run_dir.next_attempt() == 3


@pytest.mark.clock
def test_a_node_that_does_not_come_back_ends_the_others(nodes: Nodes) -> None:
    nodes.trainer_fault = held_after(HELD, until=exists(nodes.output / "never"))
    nodes.start_all("--parallel.rdzv-timeout-s", "10")
    nodes.wait_for_step(5)
    gone, left = nodes.runs
    left.kill()
    assert gone.wait(HANG_S).code == 3
    assert "waited in vain for 10 s" in gone.log and "1 of 2 nodes are here" in gone.log


def test_without_checkpoints_a_death_ends_all(tmp_path: Path, tiny_model: Models, sft_data: Path) -> None:
    argv = sft_command(tmp_path / "run", tiny_model(), sft_data, "--max-steps", "1000")[1:]
    nodes = Nodes(tmp_path / "run", "sft", argv)
    nodes.start_all()
    nodes.wait_for_step(2)
    nodes.trainer(1).kill()
    assert nodes.wait() == [1, 1] and "error: the run has ended on node " in nodes.runs[1].log


def test_trainers_that_wait_for_a_batch_save_when_one_node_is_asked_to(tmp_path: Path, tiny_model: Models) -> None:
    """No orchestrator runs, and no collective: the third batch never comes."""
    argv = [
        "--output-dir", str(tmp_path / "run"), "--model.name", str(tiny_model()), "--max-steps", "10",
        "--parallel.threads", "1", "--ckpt", "--mismatch-limit", "inf",
    ]  # fmt: skip
    nodes = Nodes(tmp_path / "run", "trainer", argv)
    nodes.start_all()
    wait_for(lambda: "waiting for batches" in nodes.runs[0].log, "the wait", *nodes.runs)
    publish_journal(nodes.run_dir, (1, 2))
    nodes.wait_for_step(2)
    os.kill(nodes.runs[1].pid, signal.SIGTERM)
    assert nodes.wait() == [143, 143], "\n".join(run.log for run in nodes.runs)
    assert nodes.run_dir.committed_steps() == [2]
