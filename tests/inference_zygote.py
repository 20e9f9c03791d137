"""Real inference servers for tests, started in a second or two instead of a quarter of a minute.

A helper process, the zygote, imports vLLM once. For every server it forks a child that runs
`holdfast.inference.main` as a process of its own: tests can kill it, and see the exit code that it really
gives. Servers and zygote end with the process that asked for them, however that ends.

    zygote = shared_zygote()
    server = zygote.start(InferenceConfig(...), tmp_path / "inference.log")
    server.wait_ready()

The zygote is also what this file runs as a program (`python tests/inference_zygote.py`): it reads
one JSON request per line from stdin and answers with JSON lines on stdout.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from holdfast.shared.config import InferenceConfig
from holdfast.shared.process.child import die_with_parent, heavy_imports

IMPORT_TIMEOUT_S = 180.0
READY_TIMEOUT_S = 90.0
_FIRST_PORT = 12_000  # behind the ones that programs are known by

_IMPORTED_BY_A_SERVER = (
    "holdfast.inference.server",
    "transformers.models.qwen3.modeling_qwen3",
    "vllm.entrypoints.openai.chat_completion.serving",
    "vllm.entrypoints.openai.completion.serving",
    "vllm.model_executor.models.qwen3",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
)


def free_port() -> int:
    """Return a TCP port that nothing listens on, and that nothing gets by asking for any port.

    What a test starts may bind it much later: the system would have given a port of its own range to somebody else.
    """
    first_of_any = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = secrets.randbelow(first_of_any - _FIRST_PORT) + _FIRST_PORT
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


class ServerHandle:
    """One server: a process that a test may ask, stop and kill."""

    def __init__(self, url: str, pid: int, log_path: Path) -> None:
        self.url = url
        self.pid = pid
        self.log_path = log_path
        self._ended = threading.Event()
        self._exit_code: int | None = None

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Return when `/health` says 200.

        Raises:
            RuntimeError: the server ended, or took longer than `timeout_s`.
        """
        import httpx

        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{self.url}/health", timeout=timeout_s).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            if self._ended.wait(0.02):
                raise RuntimeError(f"the server ended with exit code {self._exit_code}:\n{self.log()}")
        raise RuntimeError(f"the server was not ready after {timeout_s} s:\n{self.log()}")

    def wait(self, timeout_s: float = 30.0) -> int:
        """Return the exit code once the server ended; a signal's number is negative, as in subprocess.

        Raises:
            TimeoutError: it still runs after `timeout_s`.
        """
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"server {self.pid} still runs after {timeout_s} s:\n{self.log()}")
        assert self._exit_code is not None
        return self._exit_code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the server has ended."""
        if not self._ended.is_set():
            os.kill(self.pid, number)

    def terminate(self) -> int:
        """Ask the server to stop, and return its exit code."""
        self.send_signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> int:
        """Kill the server as a crash would, and return its exit code."""
        self.send_signal(signal.SIGKILL)
        return self.wait()

    def log(self) -> str:
        """What the server wrote so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def _set_ended(self, exit_code: int) -> None:
        self._exit_code = exit_code
        self._ended.set()


class Zygote:
    """A process that has imported vLLM and forks servers."""

    def __init__(self) -> None:
        self._servers: dict[int, ServerHandle] = {}
        self._started: dict[int, int] = {}
        self._changed = threading.Condition()
        self._requests = 0
        self._ready = False
        self._gone = False
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._read_answers, daemon=True)
        self._reader.start()

    def start(
        self,
        config: InferenceConfig,
        log_path: Path,
        *,
        env: Mapping[str, str] | None = None,
        owner: Path | None = None,
        sabotage: str = "",
    ) -> ServerHandle:
        """Fork a server for `config`; its output goes to `log_path`. Returns before it is ready.

        `owner` is the directory of the run that the server is for, as `rl` starts it. `sabotage` is
        Python source that runs in the server before anything else, for faults that cannot be provoked
        from outside.
        """
        import tomli_w

        log_path.parent.mkdir(parents=True, exist_ok=True)
        toml_path = log_path.with_suffix(".toml")
        toml_path.write_text(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)))
        with self._changed:
            self._wait_for(lambda: self._ready, IMPORT_TIMEOUT_S)
            self._requests += 1
            number = self._requests
            request = {"id": number, "toml": str(toml_path), "log": str(log_path), "env": dict(env or {})}
            request |= {"sabotage": sabotage, "owner": [] if owner is None else [str(owner)]}
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            self._wait_for(lambda: number in self._started, READY_TIMEOUT_S)
            return self._servers[self._started[number]]

    def close(self) -> None:
        """End the zygote and every server that it forked."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def _wait_for(self, condition: Any, timeout_s: float) -> None:
        if not self._changed.wait_for(lambda: condition() or self._gone, timeout_s) or self._gone:
            raise RuntimeError("the zygote gave no answer" if not self._gone else "the zygote ended")

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            with self._changed:
                if "ready" in answer:
                    self._ready = True
                elif "exit_code" in answer:
                    self._servers[answer["pid"]]._set_ended(answer["exit_code"])
                else:
                    url = f"http://127.0.0.1:{answer['port']}"
                    self._servers[answer["pid"]] = ServerHandle(url, answer["pid"], Path(answer["log"]))
                    self._started[answer["id"]] = answer["pid"]
                self._changed.notify_all()
        with self._changed:
            self._gone = True
            self._changed.notify_all()


@functools.cache
def shared_zygote() -> Zygote:
    """Return the one zygote of this process; it starts importing at the first call."""
    zygote = Zygote()
    atexit.register(zygote.close)
    return zygote


def _main() -> NoReturn:
    die_with_parent()
    with heavy_imports():
        _import_everything()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    _say({"ready": True})
    import select

    buffer = b""
    while True:
        readable, _, _ = select.select([0, wake_read], [], [])
        if wake_read in readable:
            os.read(wake_read, 4096)
            _reap()
        if 0 in readable:
            chunk = os.read(0, 65536)
            if not chunk:
                os._exit(0)
            buffer += chunk
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                _fork_server(json.loads(line))


def _import_everything() -> None:
    from holdfast.inference.main import set_environment

    set_environment(InferenceConfig.model_validate({}))
    for name in _IMPORTED_BY_A_SERVER:
        importlib.import_module(name)


def _fork_server(request: dict[str, Any]) -> None:
    import tomli

    port = tomli.loads(Path(request["toml"]).read_text())["server"]["port"]
    pid = os.fork()
    if pid == 0:
        _run_server(request)
    _say({"id": request["id"], "pid": pid, "port": port, "log": request["log"]})


def _run_server(request: dict[str, Any]) -> NoReturn:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    die_with_parent()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(request["env"])
    code = 1
    try:
        from holdfast.inference.main import main

        exec(request["sabotage"], {})
        code = main([request["toml"], *request["owner"]])
    except BaseException:  # noqa: BLE001 - this is the end of the process
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _say({"pid": pid, "exit_code": os.waitstatus_to_exitcode(status)})


def _say(answer: dict[str, Any]) -> None:
    os.write(1, (json.dumps(answer) + "\n").encode())


if __name__ == "__main__":
    _main()
