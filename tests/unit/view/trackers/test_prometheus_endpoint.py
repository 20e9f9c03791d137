"""What the endpoint says of the files of a run, and what it stands."""

from __future__ import annotations

import http.client
import json
import math
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from holdfast.config.view import PrometheusConfig
from holdfast.errors import ConfigError
from holdfast.run.run_dir import RunDir
from holdfast.view.trackers.prometheus import PrometheusServer, listening_for_prometheus
from holdfast.view.trackers.scrape import RunCollector
from tests.builders.checkpoint_files import write_checkpoint
from tests.runs.ports import free_port
from tests.runs.processes import HANG_S
from tests.runs.prometheus import scrape, scraped_when

Serve = Callable[..., tuple[PrometheusServer, int]]


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "run")
    found.path.mkdir()
    found.create()
    return found


@pytest.fixture
def serve(run_dir: RunDir) -> Iterator[Serve]:
    """Return a function that serves the run at a free port, and gives the endpoint and the port."""
    with ExitStack() as stack:

        def start(host: str = "127.0.0.1", **engines: str) -> tuple[PrometheusServer, int]:
            listener = stack.enter_context(listening_for_prometheus(PrometheusConfig(port=0, host=host)))
            assert listener is not None
            endpoint = stack.enter_context(PrometheusServer(listener, run_dir, "sft"))
            endpoint.begin(1, max_steps=9, engines=engines)
            return endpoint, listener.port

        yield start


def said(endpoint: PrometheusServer) -> list[str]:
    found: list[str] = []
    endpoint.look({}, found.append)
    return found


def train(run_dir: RunDir, *steps: int, **metrics: float | None) -> None:
    with open(run_dir.metrics, "a") as file:
        for step in steps:
            file.write(json.dumps({"step": step, "loss": 1 / step, "tokens": 100 * step, **metrics}) + "\n")


def go_back(run_dir: RunDir, *, to: int) -> None:
    """Replace the file as a resume does."""
    lines = run_dir.metrics.read_bytes().splitlines(keepends=True)[:to]
    new = run_dir.metrics.with_name("new")
    new.write_bytes(b"".join(lines))
    new.rename(run_dir.metrics)


def tell_event(run_dir: RunDir, process: str, phase: str, **fields: object) -> None:
    run_dir.logs(1).mkdir(parents=True, exist_ok=True)
    with open(run_dir.logs(1) / "events.jsonl", "a") as file:
        file.write(json.dumps({"time": 100.0, "process": process, "phase": phase, **fields}) + "\n")


@pytest.mark.parametrize("openmetrics", [False, True])
def test_a_run_from_its_first_moment(run_dir: RunDir, serve: Serve, openmetrics: bool) -> None:
    endpoint, port = serve()
    before = scrape(port, openmetrics=openmetrics)
    assert before.value("holdfast_trainer_step") == 0 and before.value("holdfast_trainer_max_steps") == 9
    assert "holdfast_loss" not in before.samples and "holdfast_checkpoint_step" not in before.samples
    endpoint.look({"trainer": True, "orchestrator": False}, print)
    train(run_dir, 1, 2)
    write_checkpoint(run_dir, 2)
    run_dir.batch(3).mkdir(parents=True)
    # Names of directories are looked at once a second.
    scraped_when(port, lambda found: "holdfast_checkpoint_step" in found.samples)
    found = scrape(port, openmetrics=openmetrics)
    labels = {"run": "run", "run_id": run_dir.run_id()}
    assert found.samples["holdfast_loss"] == [(labels, 0.5)]
    assert found.value("holdfast_process_up", process="trainer", **labels) == 1
    assert found.value("holdfast_process_up", process="orchestrator") == 0
    assert found.value("holdfast_run_info", attempt="1", program="sft") == 1
    assert found.value("holdfast_trainer_step") == found.value("holdfast_checkpoint_step") == 2
    assert found.value("holdfast_orchestrator_step") == 3
    assert found.types["holdfast_trainer_steps_total"] == "counter" and found.types["holdfast_tokens"] == "gauge"


def test_a_number_that_json_lacks_is_nan_and_what_is_none_is_left_out(run_dir: RunDir, serve: Serve) -> None:
    _, port = serve()
    train(run_dir, 1, grad_norm=None, lr=1, note="x")  # pyright: ignore[reportArgumentType]
    found = scrape(port)
    assert math.isnan(found.value("holdfast_grad_norm")) and found.value("holdfast_lr") == 1
    assert "holdfast_note" not in found.samples


def test_evaluations_stay_until_the_next_and_all_else_is_of_the_last_step(run_dir: RunDir, serve: Serve) -> None:
    _, port = serve()
    train(run_dir, 1, **{"val/loss": 2.0, "eval/sort/avg@4": 0.5, "staleness/max": 1.0})
    train(run_dir, 2)
    found = scrape(port)
    assert found.value("holdfast_val_loss") == 2
    assert found.value("holdfast_eval_environment_avg_at_k", environment="sort", k="4") == 0.5
    assert "holdfast_staleness_max" not in found.samples
    train(run_dir, 3, **{"val/loss": 1.0})
    assert scrape(port).value("holdfast_val_loss") == 1
    go_back(run_dir, to=2)
    assert scrape(port).value("holdfast_val_loss") == 2


def test_steps_behind_a_resume_count(run_dir: RunDir, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = threading.Semaphore(0)
    look = RunCollector.look

    def counted(collector: RunCollector) -> None:
        look(collector)
        looked.release()

    _, port = serve()
    train(run_dir, 1, 2, 3, 4)
    scrape(port)
    monkeypatch.setattr(RunCollector, "look", counted)
    go_back(run_dir, to=2)
    for _ in range(2):  # the first may have begun before
        assert looked.acquire(timeout=HANG_S)
    resumed = scrape(port)
    assert resumed.value("holdfast_trainer_steps_total") == 4 and resumed.value("holdfast_tokens") == 200
    train(run_dir, 3, 4, 5)
    found = scrape(port)
    assert found.value("holdfast_trainer_steps_total") == 7 and found.value("holdfast_trainer_step") == 5


def test_a_fault_of_a_look_is_told_once(run_dir: RunDir, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint, port = serve()
    monkeypatch.setattr("holdfast.view.state.RunState.take_step", lambda *_, **__: 1 / 0)
    train(run_dir, 1)
    told: list[str] = []
    while not told:
        told += said(endpoint)
    assert told == ["WARNING: prometheus: the run is not seen: ZeroDivisionError: division by zero"]
    monkeypatch.undo()
    assert scrape(port).value("holdfast_trainer_max_steps") == 9


def test_another_launcher_counts_from_zero(run_dir: RunDir, serve: Serve) -> None:
    train(run_dir, 1, 2, 3)
    tell_event(run_dir, "launcher", "starting again", restarted="trainer")
    tell_event(run_dir, "trainer", "ALERT: entropy fell", step=2)
    _, port = serve()
    resumed = scrape(port)
    assert resumed.value("holdfast_trainer_step") == 3 and resumed.value("holdfast_trainer_steps_total") == 0
    assert resumed.value("holdfast_run_restarts_total") == 0
    assert resumed.value("holdfast_run_alarms_total", kind="alert") == 0
    tell_event(run_dir, "launcher", "starting again", restarted="trainer")
    tell_event(run_dir, "trainer", "WARNING: it is late", step=3)
    tell_event(run_dir, "trainer", "ALERT: entropy fell", step=3)
    train(run_dir, 4)
    found = scrape(port)
    assert found.value("holdfast_run_restarts_total") == found.value("holdfast_trainer_steps_total") == 1
    assert found.value("holdfast_run_alarms_total", kind="alert") == 1
    assert found.value("holdfast_run_alarms_total", kind="warning") == 1


def test_metrics_for_one_name_are_told_once(run_dir: RunDir, serve: Serve) -> None:
    endpoint, port = serve()
    train(run_dir, 1, 2, **{"a-b": 1.0, "a/b": 2.0, "trainer/step": 7.0})
    for _ in range(2):
        found = scrape(port)
    assert found.value("holdfast_a_b") == 1 and found.value("holdfast_trainer_step") == 2
    assert said(endpoint) + said(endpoint) == [
        "WARNING: prometheus: metric 'a/b' is left out: another one is holdfast_a_b already",
        "WARNING: prometheus: metric 'trainer/step' is left out: another one is holdfast_trainer_step already",
    ]


def test_a_run_whose_files_cannot_be_read_is_served_as_far_as_it_is_known(run_dir: RunDir, serve: Serve) -> None:
    run_dir.metrics.mkdir()  # reading it is an error, and none of the storage
    endpoint, port = serve()
    assert scrape(port).value("holdfast_trainer_step") == 0
    (told,) = said(endpoint)
    assert "files of the run cannot be read" in told
    run_dir.metrics.rmdir()
    train(run_dir, 1)
    found = scrape(port)
    assert found.value("holdfast_trainer_step") == 1 and found.value("holdfast_trainer_steps_total") == 0
    run_dir.metrics.unlink()
    run_dir.metrics.mkdir()
    assert [scrape(port).value("holdfast_loss") for _ in range(2)] == [1, 1]
    assert said(endpoint) == [], "it was told before"


def test_a_fault_of_ours_is_told_once(run_dir: RunDir, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint, port = serve()
    monkeypatch.setattr("holdfast.view.trackers.scrape.series_of", lambda *_: 1 / 0)
    train(run_dir, 1)
    assert [answer(port, "/metrics")[0] for _ in range(2)] == [500, 500]
    assert said(endpoint) == ["WARNING: prometheus: nothing is served: ZeroDivisionError: division by zero"]
    monkeypatch.undo()
    assert scrape(port).value("holdfast_loss") == 1


def answer(port: int, path: str, host: str | None = None) -> tuple[int, str]:
    """Return status and text of the answer to a request that names the server `host`."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_S)
    try:
        connection.request("GET", path, headers={} if host is None else {"Host": host})
        found = connection.getresponse()
        return found.status, found.read().decode()
    finally:
        connection.close()


def test_other_paths_and_other_names_are_refused(serve: Serve) -> None:
    _, port = serve()
    assert answer(port, "/")[0] == 404 and "/metrics" in answer(port, "/")[1]
    assert answer(port, "/metrics?x=1", "localhost:1")[0] == 200
    assert answer(port, "/metrics", "evil.example")[0] == 403
    _, open_to_all = serve("0.0.0.0")
    assert answer(open_to_all, "/metrics", "node7.example")[0] == 200


def test_clients_that_say_nothing_are_bounded(serve: Serve) -> None:
    _, port = serve()
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
    threads = [thread for thread in threading.enumerate() if "process_request_thread" in thread.name]
    turned_away = socket.create_connection(("127.0.0.1", port), timeout=HANG_S)
    assert turned_away.recv(1) == b"", "the ninth is closed"
    assert len(threads) <= 8
    turned_away.close()
    for connection in silent:
        connection.close()
    assert scraped_when(port, lambda found: True).value("holdfast_trainer_step") == 0


def test_requests_without_a_thread_take_no_place(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint, port = serve()

    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("socketserver.ThreadingMixIn.process_request", no_thread)
    for _ in range(9):
        with pytest.raises(OSError):
            scrape(port)
    monkeypatch.undo()
    assert scrape(port).value("holdfast_trainer_step") == 0
    assert said(endpoint) == ["WARNING: prometheus: a request was not answered: RuntimeError: can't start new thread"]


def test_a_client_may_go_away(run_dir: RunDir, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint, port = serve()

    def gone(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("holdfast.view.web._Handler.send", gone)
    with pytest.raises(OSError):
        scrape(port)
    monkeypatch.undo()
    assert said(endpoint) == [] and scrape(port).value("holdfast_trainer_step") == 0


def test_a_port_that_is_taken_and_what_is_no_address(serve: Serve) -> None:
    _, port = serve()
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port} is in use.*--prometheus.port, or 0"):
        listening_for_prometheus(PrometheusConfig(port=port)).__enter__()
    for host in ("192.0.2.1", "no.such.host.invalid", "a" * 70 + ".example"):
        with pytest.raises(ConfigError, match=f"{host}:0 cannot be listened at.*--prometheus.host"):
            listening_for_prometheus(PrometheusConfig(port=0, host=host)).__enter__()


def test_a_port_is_free_for_the_next_launcher(run_dir: RunDir) -> None:
    port = free_port()
    for _ in range(2):  # the server closes first, so the port keeps a connection that has ended
        with (
            listening_for_prometheus(PrometheusConfig(port=port)) as listener,
            PrometheusServer(listener, run_dir, "sft"),
        ):
            assert scrape(port).value("holdfast_trainer_step") == 0


def test_the_file_for_prometheus(run_dir: RunDir, serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(listening_for_prometheus(PrometheusConfig(port=0)))
        assert listener is not None
        endpoint = stack.enter_context(PrometheusServer(listener, run_dir, "rl"))
        assert f"http://{listener.address}/metrics" in capsys.readouterr().out
        endpoint.begin(1, max_steps=9, engines={"inference": "http://127.0.0.1:8000/base"})
        own, engine = json.loads(run_dir.prometheus.read_bytes())
        assert own == {"targets": [f"127.0.0.1:{listener.port}"], "labels": {}}
        assert engine == {
            "targets": ["127.0.0.1:8000"],
            "labels": {
                "run": "run", "run_id": run_dir.run_id(), "process": "inference",
                "__scheme__": "http", "__metrics_path__": "/base/metrics",
            },
        }  # fmt: skip
    assert not run_dir.prometheus.exists()


def test_a_file_that_a_killed_launcher_left_goes_with_the_next_that_leads(run_dir: RunDir) -> None:
    run_dir.prometheus.write_text("[]")
    with PrometheusServer(None, run_dir, "sft", leads=False):
        pass
    assert run_dir.prometheus.exists()
    # A file that a killed launcher left goes with the next.
    run_dir.prometheus.write_text("[]")
    with PrometheusServer(None, run_dir, "sft") as endpoint:
        endpoint.begin(1, max_steps=9, engines={})
        endpoint.look({}, print)
    assert not run_dir.prometheus.exists()


def test_a_stubborn_file_is_told(run_dir: RunDir, serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir.prometheus / "in the way").mkdir(parents=True)
    endpoint, _ = serve()
    (told,) = said(endpoint)
    assert f"{run_dir.prometheus} is not written" in told
    with PrometheusServer(None, run_dir, "sft"):
        assert f"WARNING: {run_dir.prometheus} stays" in capsys.readouterr().out
