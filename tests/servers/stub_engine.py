"""The inference server with numpy in place of vLLM, which samples as exactly: `python -m tests.servers.stub_engine
CONFIG.toml [RUN DIRECTORY]`. Program, checks, routes, ownership and weight updates are those of `holdfast.inference`;
`test_engine_contract.py` holds it against vLLM."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import msgspec
import uvicorn
from prometheus_client import REGISTRY, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from holdfast.config import InferenceConfig
from holdfast.config.base import is_loopback
from holdfast.errors import ConfigError, DataError, InferenceError, ReadError, is_storage_failure
from holdfast.inference import Preflight
from holdfast.inference import main as program
from holdfast.inference.access import Ownership
from holdfast.inference.routes import Routes, build_application
from holdfast.inference.weights import EngineWeights, ServerMetrics
from holdfast.process.child import is_ignored
from holdfast.process.events import report
from holdfast.protocol.inference import MODELS_ROUTE, ModelCard, ModelList, Owner
from tests.servers.stub_sampler import StubSampler
from tests.servers.stub_weights import Weights

_BACKLOG = 2048


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `_run`."""
        yield


def serve(config: InferenceConfig, preflight: Preflight, *, owner: Owner | None = None) -> int:
    """Serve until asked to stop: `holdfast.inference.server.serve` with the other engine."""
    signals = [signal.SIGTERM] if is_ignored(signal.SIGINT) else [signal.SIGTERM, signal.SIGINT]
    for number in signals:
        signal.signal(number, lambda *_: os._exit(0))
    report("starting the engine", model=config.model.name)
    return asyncio.run(_serve(config, preflight, owner, signals))


async def _serve(
    config: InferenceConfig, preflight: Preflight, owner: Owner | None, signals: Sequence[signal.Signals]
) -> int:
    metrics, ownership = ServerMetrics(), Ownership(config.server.lease_s, reserved=owner)
    REGISTRY.register(metrics)
    sampler = _load(config, preflight.model_dir, metrics)
    engine_weights = EngineWeights(
        sampler,  # type: ignore[arg-type] - it has what is asked of vLLM's client
        metrics,
        ownership,
        update_timeout_s=config.server.update_timeout_s,
    )
    if config.model.load == "auto":
        await engine_weights.adopt_initial()
    routes = Routes(
        sampler,
        engine_weights=engine_weights,
        ownership=ownership,
        metrics=metrics,
        model_name=config.model.name,
        health_timeout_s=config.server.health_timeout_s,
    )
    local = is_loopback(config.server.host)
    app = build_application(_other_routes(config, sampler), routes, local=local, admin_token=preflight.admin_token)
    server = _Server(
        uvicorn.Config(
            app, access_log=False, log_config=None, log_level="warning", timeout_keep_alive=120, http="h11", ws="none"
        )
    )
    return await _run(server, sampler, preflight, signals)


def _load(config: InferenceConfig, model_dir: Path, metrics: ServerMetrics) -> StubSampler:
    try:
        weights = Weights(model_dir)
        served = weights.read(model_dir) if config.model.load == "auto" else None
    except OSError as error:
        if is_storage_failure(error):
            raise ReadError.of(error.filename, error) from error
        raise
    except (DataError, ValueError) as error:
        raise InferenceError(f"the engine did not start: {error}") from None
    return StubSampler(weights, served, metrics, max_len=config.model.max_len, most_rows=config.engine.max_num_seqs)


async def _run(
    server: uvicorn.Server, sampler: StubSampler, preflight: Preflight, signals: Sequence[signal.Signals]
) -> int:
    """Serve until one of `signals` comes."""
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    for number in signals:
        loop.add_signal_handler(number, stopping.set)
    host, port = preflight.sock.getsockname()[:2]
    try:
        preflight.sock.listen(_BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}. Another server took the port.") from None
    sampling = asyncio.create_task(sampler.run())
    serving = asyncio.create_task(server.serve(sockets=[preflight.sock]))
    while not (server.started or serving.done()):
        await asyncio.sleep(0.001)
    report("ready", host=host, port=port)
    asked = asyncio.create_task(stopping.wait())
    await asyncio.wait((serving, sampling, asked), return_when=asyncio.FIRST_COMPLETED)
    for task in (serving, sampling):
        if task.done():
            task.result()
            raise InferenceError("the stub engine ended by itself")
    sampling.cancel()
    sampler.close()
    server.should_exit = True
    await serving
    return 0


def _other_routes(config: InferenceConfig, sampler: StubSampler) -> Starlette:
    """Return the routes that are vLLM's own, of which there are two."""

    async def models(_: Request) -> Response:
        found = ModelList([ModelCard(config.model.name, sampler.max_len)])
        return Response(msgspec.json.encode(found), media_type="application/json")

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(REGISTRY), media_type="text/plain")

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield

    return Starlette(routes=[Route(MODELS_ROUTE, models), Route("/metrics", metrics)], lifespan=lifespan)


def main(argv: list[str]) -> int:
    """Be `holdfast.inference.main` with this engine; return the exit code."""
    server = ModuleType("holdfast.inference.server")
    server.serve = serve  # type: ignore[attr-defined]
    sys.modules[server.__name__] = server  # the program imports it when all checks have passed
    return program.main(argv)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
