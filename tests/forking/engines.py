"""Inference servers: `start_server("vllm", config, log).wait_ready()`, forked from a process that has imported vLLM."""

import atexit
import functools
import importlib
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from holdfast.config import InferenceConfig
from holdfast.process.child import LAUNCHER_ENV, heavy_imports
from tests.forking.popen import STUB_ENGINE, Engine, run_module
from tests.forking.server import Fork, ForkServer, Started
from tests.lanes.marks import require
from tests.runs.ports import free_port
from tests.runs.processes import HANG_S

READY_TIMEOUT_S = HANG_S
_POLL_S = 0.02

_IMPORTED = (
    "holdfast.inference.server", "transformers.models.qwen3.modeling_qwen3",
    "vllm.entrypoints.openai.chat_completion.serving", "vllm.entrypoints.openai.completion.serving",
    "vllm.model_executor.models.qwen3", "vllm.v1.engine.core", "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
)  # fmt: skip


class ServerHandle:
    def __init__(self, url: str, process: Fork | Started) -> None:
        self.url = url
        self.pid = process.pid
        self.log_path = process.log_path
        self._process = process

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> Self:
        """Return it when `/health` says 200. Raises `RuntimeError`: it ended, or took longer than `timeout_s`."""
        import httpx

        deadline = time.monotonic() + timeout_s
        with httpx.Client(timeout=timeout_s, verify=False) as client:  # one: each would read certificates for 20 ms
            while time.monotonic() < deadline:
                try:
                    if client.get(f"{self.url}/health").status_code == 200:
                        return self
                except httpx.TransportError:
                    pass
                try:
                    code = self.wait(_POLL_S)
                except TimeoutError:
                    continue
                raise RuntimeError(f"the server ended with exit code {code}:\n{self.log()}")
        raise RuntimeError(f"the server was not ready after {timeout_s} s:\n{self.log()}")

    def wait(self, timeout_s: float = HANG_S) -> int:
        """Return the exit code, a signal's negative, once the server ended. Raises `TimeoutError`: it still runs."""
        return self._process.wait(timeout_s)

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def terminate(self) -> int:
        self.send_signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> int:
        self.send_signal(signal.SIGKILL)
        return self.wait()

    def log(self) -> str:
        return self._process.log


class Engines:
    def __init__(self) -> None:
        self._server = ForkServer("tests.forking.engines:prepare")
        self._forks_launchers = False

    def server_of_launchers(self) -> ForkServer:
        """Return the server of forks, for a launcher whose own forks are to have imported vLLM."""
        require("engine")
        if not self._forks_launchers:
            self._server.prepare("tests.forking.commands:prepare")
            self._forks_launchers = True
        return self._server

    def start(
        self, config: InferenceConfig, log_path: Path, *, env: Mapping[str, str] | None = None,
        owner: Path | None = None, sabotage: str = "",
    ) -> ServerHandle:  # fmt: skip
        """Start a server for `config`; its output goes to `log_path`. Returns before it is ready.

        `env` comes on top of the environment of this process. `owner` is the directory of the run that the server
        is for, as `rl` starts it. `sabotage` is Python source that runs in the server before anything else, for
        faults that cannot be provoked from outside."""
        require("engine")
        arguments = _write_arguments(config, log_path, owner)
        fork = self._server.fork(
            "tests.forking.engines:be_server", log_path, environment={**os.environ, **(env or {})}, arguments=arguments,
            sabotage=sabotage,
        )  # fmt: skip
        return ServerHandle(f"http://127.0.0.1:{config.server.port}", fork)

    def close(self) -> None:
        self._server.close()


def config_of(
    model: Path, *, max_len: int = 64, server: Mapping[str, object] | None = None, **more: object
) -> InferenceConfig:
    """Return the configuration of a server of one thread at a free port; `more` is of the model."""
    values = {"model": {"name": str(model), "max_len": max_len, **more}, "engine": {"threads": 1}}
    return InferenceConfig.model_validate(values | {"server": {"port": free_port(), **(server or {})}})


def start_server(
    engine: Engine, config: InferenceConfig, log_path: Path, *, env: Mapping[str, str] | None = None, **options: Any
) -> ServerHandle:
    if engine == "vllm":
        return shared_engines().start(config, log_path, env=env, **options)
    # It ends with this process, as if this were its launcher.
    environment = {**os.environ, LAUNCHER_ENV: str(os.getpid()), **(env or {})}
    argv = [sys.executable, "-m", STUB_ENGINE, *_write_arguments(config, log_path, **options)]
    return ServerHandle(f"http://127.0.0.1:{config.server.port}", Started(argv, log_path, environment))


def _write_arguments(config: InferenceConfig, log_path: Path, owner: Path | None = None) -> list[str]:
    import tomli_w

    log_path.parent.mkdir(parents=True, exist_ok=True)
    toml_path = log_path.with_suffix(".toml")
    toml_path.write_text(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)))
    return [str(toml_path), *([] if owner is None else [str(owner)])]


@functools.cache
def shared_engines() -> Engines:
    engines = Engines()
    atexit.register(engines.close)
    return engines


def prepare() -> None:
    """In the server of forks: import what a server imports, with what it sets for that; launchers have none of it."""
    from holdfast.inference.main import set_environment

    kept = dict(os.environ)
    with heavy_imports():
        set_environment(InferenceConfig.model_validate({"engine": {"eager": True}}), "cpu")
        for name in _IMPORTED:
            importlib.import_module(name)
    for name in os.environ.keys() - kept.keys():
        del os.environ[name]
    os.environ.update(kept)


def be_server(arguments: list[str], sabotage: str) -> None:
    exec(sabotage, {})
    run_module(["holdfast.inference.main", *arguments])
