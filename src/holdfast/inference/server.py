"""The server's life: start the engine, serve, and end for one of four reasons.

SIGTERM, SIGINT               exit code 0
the engine died               exit code 75, with the reason in the log (also while it starts)
the engine did not start      exit code 3 (InferenceError), also if it fails at its first token
its model cannot be read      exit code 5: the run waits for the storage
"""

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
from argparse import Namespace
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil
import uvicorn
import uvloop
from prometheus_client import REGISTRY
from pydantic import ValidationError
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from holdfast.config import InferenceConfig
from holdfast.config.base import is_loopback
from holdfast.errors import ConfigError, InferenceError, ReadError, is_storage_failure
from holdfast.inference import Preflight
from holdfast.inference import engine as engines
from holdfast.inference.access import Ownership
from holdfast.inference.routes import Routes, build_application, unless
from holdfast.inference.weights import EngineWeights, ServerMetrics
from holdfast.process.child import is_ignored, is_stopped
from holdfast.process.events import report
from holdfast.process.heartbeat import send_none_while
from holdfast.protocol.inference import Owner
from holdfast.run.manifest import file_digest

ENGINE_DIED_EXIT_CODE = 75
# vLLM's name of an engine process that a signal ended.
_KILLED = re.compile(r"'EngineCore\w*': -\d+")

_T = TypeVar("_T")

_log = logging.getLogger("inference")
_WATCH_INTERVAL_S = 0.2
_KEEP_ALIVE_S = 120
_BACKLOG = 2048  # uvicorn's own


class _EngineProcesses:
    """The processes of the engine, to see a SIGSTOP while the engine starts: `/health` shows it only later."""

    def __init__(self) -> None:
        self._found: list[psutil.Process] = []
        self._is_starting = True

    def are_stopped(self) -> bool:
        """Whether a signal stopped any of them."""
        try:
            if self._is_starting:
                self._found = psutil.Process().children(recursive=True)
            # By `is_running`: the number of a process that has ended may be another process's now.
            return any(process.is_running() and is_stopped(process.pid) for process in self._found)
        except (psutil.Error, OSError):  # a machine may hide other users' processes
            return False

    def have_started(self) -> None:
        """Look for no new processes: that reads all processes of the machine."""
        self._is_starting = False


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers: the engine must be ended first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(config: InferenceConfig, preflight: Preflight, *, owner: Owner | None = None) -> int:
    """Serve the run `owner`, or any run, until asked to stop; return the exit code. Raise ConfigError if vLLM refuses
    an argument, or another server took the port meanwhile; InferenceError if the engine did not start."""
    device = "cpu" if current_platform.is_cpu() else "cuda"
    args = engines.parse_arguments(engines.vllm_arguments(config, preflight.model_dir, preflight.tokenizer_dir, device))
    # Until the loop runs, the engine ends with this process. The launcher ends servers by SIGTERM: never ignored.
    signals = [signal.SIGTERM] if is_ignored(signal.SIGINT) else [signal.SIGTERM, signal.SIGINT]
    for number in signals:
        signal.signal(number, lambda *_: os._exit(0))
    report("starting the engine", model=config.model.name)
    try:
        return uvloop.run(_serve(config, args, preflight, owner, signals))
    except EngineDeadError:  # between its start and the first request
        _log.error("the engine died while it started (its log is above)")
        return ENGINE_DIED_EXIT_CODE


async def _serve(
    config: InferenceConfig,
    args: Namespace,
    preflight: Preflight,
    owner: Owner | None,
    signals: Sequence[signal.Signals],
) -> int:
    processes = _EngineProcesses()
    send_none_while(processes.are_stopped)
    async with contextlib.AsyncExitStack() as stack:
        try:
            engine = await stack.enter_async_context(engines.running_engine(args))
        except (RuntimeError, ValueError) as error:
            await asyncio.to_thread(_require_readable, preflight.model_dir)
            if _KILLED.search(str(error)):  # another start may succeed
                _log.error("the engine died while it started: %s", error)
                return ENGINE_DIED_EXIT_CODE
            raise InferenceError(f"the engine did not start: {_reason(error)} (its log is above)") from None
        processes.have_started()
        metrics = ServerMetrics()
        metrics.watch(engine.engine_core)
        REGISTRY.register(metrics)
        ownership = Ownership(config.server.lease_s, reserved=owner)
        engine_weights = EngineWeights(
            engine,
            metrics,
            ownership,
            update_timeout_s=config.server.update_timeout_s,
            num_workers=engine.vllm_config.parallel_config.world_size,
        )
        if config.model.load == "auto":
            await _while_alive(engine, engine_weights.adopt_initial())
        # Before the port answers: a server that cannot generate must not look well.
        await _check_first_token(engine)
        engines.end_turns(engine, preflight.tokenizer_dir)
        engines.give_logprobs_of_model(engine)
        vllm_app = await _while_alive(engine, engines.build_vllm_app(engine, args))
        routes = Routes(
            engines.VllmSampler(engine),
            engine_weights=engine_weights,
            ownership=ownership,
            metrics=metrics,
            model_name=config.model.name,
            health_timeout_s=config.server.health_timeout_s,
        )
        local = is_loopback(config.server.host)
        app = build_application(vllm_app, routes, local=local, admin_token=preflight.admin_token)
        server = _Server(
            uvicorn.Config(
                app,
                access_log=False,
                log_config=None,
                log_level="warning",
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
            )
        )
        vllm_app.state.server = server
        ready = ""
        if owner is None:
            name = config.server.model_name or config.model.name
            tools = f"tools by {args.tool_call_parser}" if args.enable_auto_tool_choice else ""
            ready = ", ".join(filter(None, [f"ready: {config.server.url}/v1", f'model "{name}"', tools]))
        return await _run(server, engine, sock=preflight.sock, signals=signals, ready=ready)


async def _run(
    server: _Server, engine: AsyncLLM, *, sock: socket.socket, signals: Sequence[signal.Signals], ready: str
) -> int:
    """Serve until one of `signals` comes or the engine dies; print the line `ready`, if it has text."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in signals:
        loop.add_signal_handler(number, stopping.set)
    host, port = sock.getsockname()[:2]
    try:
        # The socket was bound before the engine was loaded, so that the port is ours.
        sock.listen(_BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}. Another server took the port.") from None
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    watching = asyncio.create_task(_engine_death(engine))
    asked = asyncio.create_task(stopping.wait())
    while not server.started:
        if serving.done():
            serving.result()
            raise InferenceError("the web server ended while it started (its log is above)")
        await asyncio.sleep(0.005)
    report("ready", host=host, port=port)
    if ready:
        print(ready, flush=True)
    await asyncio.wait((serving, watching, asked), return_when=asyncio.FIRST_COMPLETED)
    # Ctrl-C may end the engine too: that is a request to stop.
    died = watching.done() and not stopping.is_set()
    if died:
        _log.error("the engine died (%s); the server ends", watching.result())
    # In a thread: shutdown waits for the process. 0: at once, requests are dropped.
    await loop.run_in_executor(None, engine.shutdown, 0)
    # Else uvicorn would wait for the requests in flight.
    engine.output_processor.propagate_error(EngineDeadError())
    for waiting in getattr(engine.engine_core, "utility_results", {}).values():  # an update of the weights, say
        if not waiting.done():
            waiting.set_exception(EngineDeadError())
    server.should_exit = True
    for task in (watching, asked):
        task.cancel()
    await serving
    return ENGINE_DIED_EXIT_CODE if died else 0


async def _while_alive(engine: AsyncLLM, work: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of `work`, which asks the engine. Raise EngineDeadError if the engine dies."""
    return await unless(work, _engine_death(engine), EngineDeadError())


async def _check_first_token(engine: AsyncLLM) -> None:
    """Generate one token: an engine that cannot run this model must fail before the first client. Raise InferenceError
    if the engine failed by itself, and would fail again; EngineDeadError if something killed the engine."""
    try:
        await _while_alive(engine, engines.generate_one_token(engine))
    except (EngineDeadError, EngineGenerateError) as error:
        await asyncio.sleep(_WATCH_INTERVAL_S)  # for its exit code
        processes = getattr(engine.engine_core.resources.engine_manager, "processes", [])
        # Negative: a signal. Another start may succeed.
        if any(process.exitcode is not None and process.exitcode < 0 for process in processes):
            raise EngineDeadError from None
        raise InferenceError(
            "the engine cannot run this model: it failed at its first token (its log is above)"
        ) from error


def _require_readable(model_dir: Path) -> None:
    """Read all files of the model, whose failure an engine does not name. Raise ReadError if the storage fails."""
    for path in sorted(model_dir.iterdir()):
        try:
            if path.is_file():
                file_digest(path)
        except OSError as error:
            if is_storage_failure(error):
                raise ReadError.of(path, error) from error


def _reason(error: Exception) -> str:
    """Return the message without pydantic's values and links, and without vLLM's list of all models."""
    if isinstance(error, ValidationError):
        said = "; ".join(one["msg"] for one in error.errors(include_url=False, include_context=False))
    else:
        said = str(error).replace("\n", "\n       ")
    return said.partition(" Supported architectures: ")[0]


async def _engine_death(engine: AsyncLLM) -> str:
    """Return how the engine's process ended, once it has."""
    # Empty if Ray runs the engine: then only the client's own error tells.
    processes = getattr(engine.engine_core.resources.engine_manager, "processes", [])
    while True:
        for process in processes:
            if process.exitcode is not None:
                # Ctrl-C reaches the engine too: our own handler gets time to run.
                await asyncio.sleep(_WATCH_INTERVAL_S)
                code = process.exitcode
                how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                return f"{process.name} ended with {how}"
        if engine.errored:
            return "its client reports an error, see above"
        await asyncio.sleep(_WATCH_INTERVAL_S)
