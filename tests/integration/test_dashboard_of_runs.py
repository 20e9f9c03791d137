"""The page of real runs while they go on: through restarts, kills and resumes, until nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import read_metrics
from holdfast.run.run_dir import RunDir
from holdfast.view.report.serve import PROCESS
from tests.conftest import ModelFactory
from tests.forking.commands import Run, shared_commands
from tests.integration.conftest import UsedServer
from tests.runs.dashboards import charts_in, curve_in, page_when, request
from tests.runs.ports import free_port
from tests.runs.rl import RlRun, complete
from tests.runs.training import refused, run_sft

pytestmark = pytest.mark.launch

_ENDLESS = ("--max-steps", "100000", "--optim.schedule-steps", "100", "--ckpt.interval", "20")
# In every launcher: the next page is made at once. How long a run waits is tested in test_dashboard_endpoint.py.
_AT_ONCE = """
from holdfast.view.report import serve
serve._SHARE = 1.0
serve.Builds.__init__.__kwdefaults__["pause_s"] = 0.1
"""


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULT_AT_START", _AT_ONCE)


@pytest.fixture
def started(tmp_path: Path, tiny_model: ModelFactory, sft_data: Path) -> Iterator[tuple[Run, int]]:
    """An endless run of `sft` and the port of its page."""
    port = free_port()
    flags = (*_ENDLESS, "--dashboard.port", str(port))
    run = shared_commands().sft(tmp_path / "run", tiny_model(weights=False), sft_data, *flags)
    yield run, port
    if not run.has_ended:
        os.kill(run.pid, signal.SIGKILL)
        run.wait()


def test_sft_is_shown_while_it_goes_on_and_another_run_gets_no_port_of_it(
    started: tuple[Run, int], tmp_path: Path, tiny_model: ModelFactory, sft_data: Path
) -> None:
    run, port = started
    page = page_when(port, lambda page: len(curve_in(page)) >= 1)
    assert "<td>going on</td>" in page and "<td>sft</td>" in page
    assert f"Dashboard: http://127.0.0.1:{port}/\n" in run.log
    taken = run_sft(tmp_path / "other", tiny_model(weights=False), sft_data, "--dashboard.port", str(port))
    refused(taken, f"dashboard: 127.0.0.1:{port} is in use", "--dashboard.port")
    assert not (tmp_path / "other").exists()
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait().code == 128 + signal.SIGTERM
    with pytest.raises(OSError):
        request(port)
    assert "WARNING" not in run.log


@pytest.mark.timeout(900)
def test_rl_is_shown_through_a_dead_trainer_a_dead_launcher_and_a_resume(rl_server: UsedServer, tmp_path: Path) -> None:
    port = free_port()
    flags = (*rl_server.flags, "--max-steps", "100000", "--trainer.optim.schedule-steps", "100")
    flags = (*flags, "--ckpt.interval", "2", "--ckpt.resume-step", "auto", "--dashboard.port", str(port))
    with RlRun(tmp_path / "run", *flags) as run:
        first = page_when(port, lambda page: len(curve_in(page, "reward")) >= 3)
        assert curve_in(first, "reward")[0] == 1 and "<td>going on</td>" in first and 'class="rollout' in first
        run_id = json.loads((run.run_dir.path / "run.json").read_bytes())["run_id"]
        assert f'data-run="{run_id}"' in first
        later = page_when(port, lambda page: len(curve_in(page, "reward")) > len(curve_in(first, "reward")))
        assert charts_in(later)["reward"]["layout"]["shapes"] == []
        run.find("holdfast.trainer.launch")[0].send_signal(signal.SIGKILL)
        run.wait_for_match(r"trainer was killed by signal 9: starting it again \(restart 1 of 3\)")
        killed_at = _last_step(run.run_dir)
        healed = page_when(port, lambda page: curve_in(page, "reward")[-1:] > [killed_at + 2])
        _is_one_curve(healed, run_id, num_starts=2)
        # While a page is being made.
        request(port)
        run.wait_for(lambda: run.find(PROCESS), "the process that makes the page")
        run.interrupt(signal.SIGKILL)
        assert not complete(run).survivors
    with pytest.raises(OSError):
        request(port)
    shown = _last_step(run.run_dir)
    with RlRun(tmp_path / "run", *flags) as again:
        resumed = page_when(port, lambda page: curve_in(page, "reward")[-1:] > [shown + 2])
        _is_one_curve(resumed, run_id, num_starts=3)
        request(port)
        again.interrupt(signal.SIGINT)
        ended = complete(again)
    assert ended.exit_code == 128 + signal.SIGINT, ended.output
    assert not ended.survivors and "dashboard:" not in ended.output
    with pytest.raises(OSError):
        request(port)
    assert not list(run.run_dir.path.glob("*.html")) and not list(run.run_dir.path.glob("*dashboard*"))


def _last_step(run_dir: RunDir) -> int:
    """Return how far the attempts have come that have ended; a page may be older."""
    return int(read_metrics(run_dir.metrics)[-1]["step"])


def _is_one_curve(page: str, run_id: str, *, num_starts: int) -> None:
    """Check that a page shows one run with all its steps, and a mark for every start but the first."""
    steps = curve_in(page, "reward")
    assert steps == list(range(1, len(steps) + 1)) and f'data-run="{run_id}"' in page
    assert len(charts_in(page)["reward"]["layout"]["shapes"]) == num_starts - 1
