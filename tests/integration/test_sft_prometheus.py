"""`sft` that Prometheus reads: while it goes on, through a kill and a resume, beside another run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from holdfast.run.metrics import read_metrics
from holdfast.view.trackers.scrape import series_of
from tests.conftest import ModelFactory
from tests.forking.commands import Run, shared_commands
from tests.pages.series import documented_series, names_of_rows
from tests.runs.ports import free_port
from tests.runs.prometheus import scrape, scraped_when
from tests.runs.training import pairs_command

pytestmark = pytest.mark.launch

Start = Callable[..., Run]
_ENDLESS = ("--max-steps", "100000", "--optim.schedule-steps", "100", "--ckpt.interval", "20")


@contextmanager
def _ended(run: Run) -> Iterator[Run]:
    """Kill the launcher, and what dies with it, however the test ends."""
    try:
        yield run
    finally:
        if not run.has_ended:
            os.kill(run.pid, signal.SIGKILL)
            run.wait()


@pytest.fixture
def start(tmp_path: Path, tiny_model: ModelFactory, sft_data: Path) -> Iterator[Start]:
    """Return a function that starts an endless run, in a directory by that name."""
    with ExitStack() as stack:

        def begin(name: str, *flags: str) -> Run:
            run = shared_commands().sft(tmp_path / name, tiny_model(weights=False), sft_data, *_ENDLESS, *flags)
            return stack.enter_context(_ended(run))

        yield begin


def test_a_run_is_read_while_it_goes_on_and_again_after_a_kill(start: Start) -> None:
    port = free_port()
    held_out = ("--data.validation-fraction", "0.2", "--val-interval", "5")
    run = start("run", "--prometheus.port", str(port), *held_out)
    early = scraped_when(port, lambda found: found.value("holdfast_trainer_step") >= 1)
    wanted = documented_series() - {"holdfast_orchestrator_step"} | names_of_rows("Run", "Training")
    later = scraped_when(port, lambda found: wanted <= found.samples.keys())
    assert later.value("holdfast_trainer_step") > early.value("holdfast_trainer_step")
    assert later.value("holdfast_trainer_steps_total") == later.value("holdfast_trainer_step")
    assert later.value("holdfast_process_up", process="trainer") == 1
    assert later.value("holdfast_run_info", attempt="1", program="sft") == 1
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    with pytest.raises(OSError):
        scrape(port)
    steps = [int(line["step"]) for line in read_metrics(run.output / "metrics.jsonl")]

    again = start("run", "--prometheus.port", str(port), *held_out, "--ckpt.resume-step", "latest")
    resumed = scraped_when(port, lambda found: found.value("holdfast_trainer_steps_total") >= 1)
    assert resumed.value("holdfast_run_attempt") == 2
    # A counter that begins anew: not the steps of the attempt before.
    assert resumed.value("holdfast_trainer_steps_total") < resumed.value("holdfast_trainer_step")
    assert resumed.value("holdfast_trainer_step") > resumed.value("holdfast_trainer_steps_total") + 19
    assert max(steps) >= 20
    os.kill(again.pid, signal.SIGTERM)
    assert again.wait().code == 128 + signal.SIGTERM
    last = read_metrics(again.output / "metrics.jsonl")[-1]
    assert {series_of(name).name for name in last if name != "step"} <= resumed.samples.keys()
    assert not (again.output / "prometheus.json").exists()


@pytest.mark.parametrize("program", ["dpo", "reward-model"])
def test_what_the_dashboard_shows_of_preferences(program: str, tmp_path: Path, tiny_model: ModelFactory) -> None:
    port, output = free_port(), tmp_path / "run"
    argv = pairs_command(program, output, tiny_model(), *_ENDLESS, "--prometheus.port", str(port))[1:]
    with _ended(shared_commands().start(program, output, argv)):
        wanted = names_of_rows("Preferences and reward models")
        if program == "reward-model":
            wanted = {"holdfast_rewards_accuracies", "holdfast_rewards_margins", "holdfast_rewards_mean"}
        found = scraped_when(port, lambda found: wanted <= found.samples.keys())
        assert found.value("holdfast_run_info", program=program) == 1
