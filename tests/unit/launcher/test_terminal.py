"""What surrounds a command decides nothing about its run: a terminal that goes, a reader that dies, proxies."""

import asyncio
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest

from holdfast.config import InferenceConfig
from holdfast.config.orchestrator import ClientConfig
from holdfast.launcher.engines import _look
from holdfast.launcher.liveness import Health, HealthProbe
from holdfast.launcher.supervise import Supervisor
from holdfast.orchestrator.client.http import HttpTransport
from holdfast.process.child import _LossyFile
from holdfast.protocol.inference import ServedWeights
from tests.runs.processes import HANG_S


@pytest.mark.usefixtures("restored_signals")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_signals_that_a_parent_had_ignored_stay_ignored(tmp_path: Path, number: signal.Signals) -> None:
    """As under `nohup`, where the terminal's end is not the run's, and in the background, where Ctrl-C is not."""
    signal.signal(number, signal.SIG_IGN)
    with Supervisor() as supervisor:
        code = f"import os; os.kill(os.getppid(), {number:d}); os.kill(os.getpid(), {number:d})"
        supervisor.start("child", [sys.executable, "-c", code], tmp_path / "log", environment={})
        assert supervisor.run(lambda: None) is None, "neither the launcher nor its child takes note"


@contextmanager
def _dead_reader() -> Iterator[int]:
    """Give the end of a pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    try:
        yield write
    finally:
        os.close(write)


def test_output_that_would_have_to_wait_is_dropped() -> None:
    """Another program left the mode of a terminal, which is shared, so that nothing waits."""
    master, slave = os.openpty()
    os.set_blocking(slave, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(slave, b"x" * 100)
    output = _LossyFile(slave, "w", closefd=False)
    assert output.write("ünheard".encode()) == 8
    print("unheard", file=io.TextIOWrapper(io.BufferedWriter(output), "utf-8"), flush=True)
    assert b"heard" not in os.read(master, 1 << 16)
    os.close(master)
    os.close(slave)


@pytest.mark.launch
def test_the_console_outlives_who_reads_it() -> None:
    code = (
        "from pathlib import Path; from holdfast.view.console import Console\n"
        "from holdfast.process.child import make_output_lossy\n"
        "from holdfast.run.run_dir import RunDir\n"
        "make_output_lossy(); nowhere = RunDir(Path('/nonexistent'))\n"
        "with Console(nowhere, attempt=1, first_step=0, max_steps=1) as console:\n"
        "    for number in range(200): console.say(f'line {number}'); print('plain', flush=True)\n"
    )
    with _dead_reader() as pipe:
        ended = subprocess.run([sys.executable, "-c", code], stdout=pipe, stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stderr) == (0, b"")


class _Server(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        served = ServedWeights(None, None, "m", uid=os.getuid(), boot_id="first", owner=None)
        self.wfile.write(msgspec.json.encode(served))

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class _Proxy(_Server):
    def do_GET(self) -> None:
        self.send_response(503)
        self.end_headers()


@contextmanager
def _serving(kind: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


async def _ask_as_orchestrator(url: str) -> bytes:
    transport = HttpTransport(ClientConfig(urls=[url]), key="client")
    try:
        return await transport.get(url, "/weights")
    finally:
        await transport.close()


def test_proxies_never_meet_the_servers_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with _serving(_Server) as port, _serving(_Proxy) as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy}")
        config = InferenceConfig.model_validate({"server": {"port": port}})
        served = _look(config.server.url)
        assert served is not None and served.model == "m"
        assert b'"model":"m"' in asyncio.run(_ask_as_orchestrator(config.server.url))
        probe = HealthProbe(Health(f"{config.server.url}/health"), 0.05)
        deadline = time.monotonic() + HANG_S
        while not probe.silent_s():  # 0 before the first good answer
            assert time.monotonic() < deadline, "no answer reached the probe"
            time.sleep(0.01)
