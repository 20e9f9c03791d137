"""`rl` on a Ray cluster of two nodes, its trainer on both: the run of one machine, bit for bit, whatever is lost."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.launcher.cluster.cluster import ResourceRequest, wait_for_places
from holdfast.launcher.cluster.ray import RayCluster
from holdfast.process.imports import module_command
from tests.conftest import ROOT
from tests.runs.processes import WITH_STUB_ENGINE
from tests.runs.ray_clusters import RayNodes, node_of, other_environment
from tests.runs.rl import SMALL_BATCH, CompletedRun, RlRun, assert_same, complete, last_step, outcome, succeeded

pytestmark = [pytest.mark.launch, pytest.mark.timeout(900)]
STEPS = 10
AS_A_USER: Any = {"environment": {"HOLDFAST_ADMIN_TOKEN": "of-the-test", **WITH_STUB_ENGINE}, "starts_python": True}
FLAGS = (
    *SMALL_BATCH,
    *("--max-steps", str(STEPS), "--ckpt.interval", "2"),
    *("--trainer.parallel.threads", "1", "--inference.engine.threads", "1"),
)
TIMEOUT_S = 400.0


@pytest.fixture(scope="module")
def head() -> Iterator[RayNodes]:
    """The cluster of all tests. The first of them finds no node but its head."""
    with RayNodes(3, 3) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def nodes(head: RayNodes) -> RayNodes:
    for node in (0, 1):
        head.add(node)
    return head


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> CompletedRun:
    """The same run on this machine alone, with two ranks."""
    output_dir = tmp_path_factory.mktemp("local") / "run"
    return succeeded(output_dir, *FLAGS, "--trainer.parallel.num-ranks", "2", timeout_s=TIMEOUT_S)


def on_ray(nodes: RayNodes, output_dir: Path, *flags: str) -> RlRun:
    cluster = ("--cluster", f"ray://{nodes.address}", "--cluster-strategy", "spread", "--trainer.parallel.nodes", "2")
    return RlRun(output_dir, *FLAGS, *cluster, *flags, **AS_A_USER)


def test_a_node_without_our_version_is_refused_by_name(head: RayNodes, tmp_path: Path) -> None:
    """Before anything starts. The head runs nothing, so that all processes come to the node of a stranger."""
    for version, path, reason in (
        (None, "", "a node of the Ray cluster cannot import holdfast: ModuleNotFoundError: No module named 'holdfast'"),
        ("0.0.1", "", " has holdfast 0.0.1, this machine has "),
        (None, str(ROOT / "src"), " has holdfast without an installation, this machine has "),
    ):
        with node_of(other_environment(tmp_path / f"of_{version}", version=version), head.address, cores=4, path=path):
            flags = ("--cluster", f"ray://{head.address}", "--cluster-timeout-s", "150")
            with RlRun(tmp_path / "run", *FLAGS, *flags, **AS_A_USER) as run:
                refused = complete(run)
        assert refused.exit_code == 2 and reason in refused.output, refused.output
        assert not refused.survivors and not (tmp_path / "run" / "logs").exists()


def test_who_is_killed_last_is_killed_with_its_group(
    nodes: RayNodes, tmp_path: Path, ends: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nobody waits for it: the actor must not be gone before it has done so."""
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    log = tmp_path / "a.log"
    program = "import subprocess, time\nprint(subprocess.Popen(['sleep', '600']).pid, flush=True)\ntime.sleep(600)"
    (tmp_path / "starts.py").write_text(program)
    cluster = RayCluster(nodes.address, "pack")
    cluster.check([ResourceRequest("a", 1)])
    assert wait_for_places(cluster, timeout_s=TIMEOUT_S, pause=lambda s: time.sleep(s), say=print) is None
    process = cluster.host("a").start(module_command("starts"), log, {"PYTHONPATH": str(tmp_path)})
    while not (log.exists() and log.read_bytes().endswith(b"\n")):
        assert process.poll() is None
    actor = psutil.Process(psutil.Process(process.pid).ppid())
    closed, is_waited_for = cluster._channels["a"]._has_closed, threading.Event()
    real = closed.wait
    monkeypatch.setattr(closed, "wait", lambda seconds: is_waited_for.set() or real(seconds))
    actor.suspend()  # so that it comes to the kill later than `close`
    process.kill()
    closing = threading.Thread(target=cluster.close)
    closing.start()
    while closing.is_alive() and not is_waited_for.wait(0.1):
        continue
    actor.resume()
    closing.join()
    assert ends(int(log.read_text()))


def test_a_node_that_is_lost_and_comes_back(nodes: RayNodes, local: CompletedRun, tmp_path: Path) -> None:
    """And a stop behind that, from which this machine alone takes the run to its end."""
    with on_ray(nodes, tmp_path / "run") as run:
        run.wait_for_step(3)
        nodes.remove(1)
        run.wait_for_match("is gone: .* is lost")
        run.wait_for_output("waiting for the cluster: no place for")
        before = last_step(run.run_dir)
        nodes.add(1)
        run.wait_for_output("(attempt 2)")
        run.wait_for_step(before)
        run.interrupt(signal.SIGTERM)
        stopped = complete(run, TIMEOUT_S)
    assert stopped.exit_code == 128 + signal.SIGTERM and "which is saved" in stopped.output, stopped.output
    assert not stopped.survivors and before < STEPS
    here = ("--trainer.parallel.num-ranks", "2", "--ckpt.resume-step", "latest")
    done = succeeded(tmp_path / "run", *FLAGS, *here, timeout_s=TIMEOUT_S)
    assert_same(outcome(done.run_dir, STEPS), outcome(local.run_dir, STEPS))
    logs = {path.name for path in done.run_dir.logs(1).glob("*.log")}
    assert logs == {"trainer.log", "trainer_1.log", "orchestrator.log", "inference.log"}


def test_of_two_runs_on_one_cluster_one_is_killed_and_the_other_goes_on(nodes: RayNodes, tmp_path: Path) -> None:
    """Under one name, in two directories, with the same ports to begin with. Nothing outlives the killed launcher."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    flags = ("--cluster", f"ray://{nodes.address}")
    with (
        RlRun(tmp_path / "a" / "run", *FLAGS, *flags, **AS_A_USER) as one,
        RlRun(tmp_path / "b" / "run", *FLAGS, *flags, **AS_A_USER) as other,
    ):
        one.wait_for_step(2)
        other.wait_for_step(1)
        one.interrupt(signal.SIGKILL)
        done = complete(other, TIMEOUT_S)
        assert not complete(one).survivors
    assert done.exit_code == 0 and "attempt 2" not in done.output, done.output
    again = (*flags, "--ckpt.resume-step", "auto")
    resumed = succeeded(tmp_path / "a" / "run", *FLAGS, *again, timeout_s=TIMEOUT_S, **AS_A_USER)
    assert_same(outcome(done.run_dir, STEPS), outcome(resumed.run_dir, STEPS))


def test_what_the_cluster_does_not_have_is_said_before_anything_starts(nodes: RayNodes, tmp_path: Path) -> None:
    with on_ray(nodes, tmp_path / "run", "--trainer.parallel.num-ranks", "4") as run:
        refused = complete(run)
    assert refused.exit_code == 2
    assert "too few resources" in refused.output and "trainer: 4 CPU; trainer_1: 4 CPU" in refused.output
    there = refused.output.partition("there, node by node: ")[2].strip()
    assert sorted(there.split("; ")) == ["3 CPU", "3 CPU", "nothing"]
    with on_ray(nodes, tmp_path / "run", "--dry-run") as run:
        planned = complete(run)
    assert planned.exit_code == 0 and "\ntrainer (2 nodes)  by ray://" in planned.output, planned.output
    assert not (tmp_path / "run" / "logs").exists()
    flags = ("--cluster", f"ray://{nodes.address}")
    with RlRun(tmp_path / "run", *FLAGS, *flags, environment={"HOLDFAST_ADMIN_TOKEN": ""}, starts_python=True) as run:
        refused = complete(run)
    assert refused.exit_code == 2 and "needs an admin token: set the environment" in refused.output, refused.output
