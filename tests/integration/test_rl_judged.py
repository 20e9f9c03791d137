"""A run with tools, workers and a judge, in which everything dies once: the run that nothing disturbs, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from holdfast.orchestrator.judge_client import Replied
from holdfast.run.record_log import read_records
from tests.conftest import ROOT
from tests.faults.held_steps import at_start, exists, held_after
from tests.integration.conftest import UsedServer
from tests.runs.ports import free_port
from tests.runs.processes import HANG_S
from tests.runs.rl import SMALL_BATCH, RlRun, assert_same_end, complete, succeeded

pytestmark = pytest.mark.launch

_STEPS = 14
_AT_ONCE = 4


@contextmanager
def _judge(port: int, asked: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A judge in a process of its own, which answers by the time that this yields."""
    judge = subprocess.Popen([sys.executable, "-m", "tests.servers.judge", str(port), str(asked)], cwd=ROOT)
    try:
        # Connecting is tried again after 0.5 s, then after twice as long each time.
        with httpx.Client(transport=httpx.HTTPTransport(retries=20), timeout=HANG_S) as client:
            client.get(f"http://127.0.0.1:{port}/")
        yield judge
    finally:
        judge.kill()
        judge.wait()


def _settings(port: int) -> tuple[str, ...]:
    judge = {
        "url": f"http://127.0.0.1:{port}/v1",
        "model": "judge",
        "prompt": "{first} and {second}",
        "max_score": 10.0,
        "max_concurrency": _AT_ONCE,
    }
    section = {"id": "tests.runs.judged_environment:JudgedTools", "args": {"judge": judge}, "workers": 2}
    return (
        "--orchestrator.environments",
        json.dumps([section]),
        *("--orchestrator.sampling.max-tokens", "8", "--max-steps", str(_STEPS), "--ckpt.interval", "2"),
    )


def _questions(asked: Path, what: str) -> Counter[str]:
    """How often each question was asked, or answered; a line that was cut off when the judge died was not."""
    lines = [line for line in asked.read_text().split("\n")[:-1] if line.endswith("]")]
    return Counter(question for kind, question in map(json.loads, lines) if kind == what)


@pytest.mark.timeout(1800)
def test_tools_workers_and_a_judge_are_killed_and_the_end_is_the_same(rl_server: UsedServer, tmp_path: Path) -> None:
    """And no question is asked again whose answer was kept."""
    port = free_port()
    settings = _settings(port)
    with _judge(port, tmp_path / "undisturbed"):
        undisturbed = succeeded(tmp_path / "reference", *rl_server.flags, *settings)
    own = (*SMALL_BATCH, "--inference.server.port", str(free_port()))
    asked = tmp_path / "asked"
    held = at_start(held_after(_STEPS - 2, until=exists(tmp_path / "all_killed")))
    with RlRun(tmp_path / "run", *own, *settings, environment=held) as run:
        with _judge(port, asked):
            run.wait_for_step(2)
            run.find("holdfast.orchestrator.worker")[-1].kill()
            run.wait_for_step(4)
        run.wait_for_output("waiting for a judge")
        with _judge(port, asked):
            run.wait_for_step(6)
            (orchestrator,) = run.find("holdfast.orchestrator.main")
            orchestrator.kill()
            run.wait_for_step(8)
            run.find("holdfast.inference.main")[0].kill()
            run.wait_for_step(10)
            run.find("holdfast.trainer.launch")[-1].kill()
            (tmp_path / "all_killed").touch()
            done = complete(run)
    assert_same_end(done, undisturbed, _STEPS)

    payloads, damages = read_records(run.run_dir.judgements)
    kept = [msgspec.msgpack.decode(payload, type=Replied).request for payload in payloads[1:]]
    assert not damages and len(kept) == len(set(kept)), "a reply was kept twice"
    assert _questions(asked, "answered").keys() == _questions(tmp_path / "undisturbed", "answered").keys()
    # Judge, orchestrator and trainer (with which the orchestrator starts again) had so many in flight at most.
    assert _questions(asked, "asked").total() - len(kept) <= 3 * _AT_ONCE
