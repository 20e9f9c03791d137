"""What the tests of `rl` share: an inference server of each kind, and the run that nothing disturbs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from holdfast.config import InferenceConfig
from tests.forking.engines import ServerHandle, config_of, start_server
from tests.forking.popen import Engine
from tests.runs.processes import HANG_S
from tests.runs.rl import MODEL, SMALL_BATCH, CompletedRun, succeeded

REFERENCE_STEPS = 20
PROMPT = [5, 17, 40, 41, 9, 66]


@pytest.fixture(scope="module", params=["stub", pytest.param("vllm", marks=pytest.mark.engine)])
def engine(request: pytest.FixtureRequest) -> Engine:
    """Both kinds of servers, one after the other: what holds for one holds for the other."""
    return request.param


class Served:
    """An inference server, and what tests ask of it. Used as a context manager, it has ended well behind that."""

    def __init__(self, handle: ServerHandle) -> None:
        self.handle = handle
        self.http = httpx.Client(base_url=handle.url, timeout=HANG_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        assert self.handle.terminate() == 0

    def weights(self) -> dict[str, Any]:
        """What the server says that it serves."""
        return self.http.get("/weights").raise_for_status().json()

    def update(self, path: Path, version: int, owner: dict[str, str] | None = None) -> httpx.Response:
        """Give the server weights."""
        return self.http.post("/update_weights", json={"path": str(path), "version": version, "owner": owner})

    def ask(self, **fields: Any) -> httpx.Response:
        """Ask for tokens."""
        body = {"token_ids": PROMPT, "seeds": [1], "max_tokens": 20} | fields
        return self.http.post("/inference/v1/generate", json=body)

    def choices(self, **fields: Any) -> list[dict[str, Any]]:
        response = self.ask(**fields)
        assert response.status_code == 200, response.text
        return response.json()["choices"]

    def metric(self, name: str) -> float:
        line = next(line for line in self.http.get("/metrics").text.splitlines() if line.startswith(f"{name} "))
        return float(line.split()[1])


class UsedServer(Served):
    """A server that `rl` finds at the address that `flags` name, and must leave running."""

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of `rl` that point to this server, with a small batch."""
        return ("--inference.server.port", self.handle.url.rsplit(":", 1)[1], *SMALL_BATCH)

    def generated_tokens(self) -> int:
        """How many tokens it has sampled since its start."""
        return int(self.metric("holdfast_generated_tokens_total"))


@pytest.fixture(scope="session")
def rl_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UsedServer]:
    """The server that most runs use, one after the other: the stub engine."""
    handle = start_server("stub", _config(), tmp_path_factory.mktemp("rl_server") / "inference.log").wait_ready()
    with UsedServer(handle) as server:
        yield server


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UsedServer]:
    """The same with vLLM."""
    handle = start_server("vllm", _config(), tmp_path_factory.mktemp("vllm_server") / "inference.log").wait_ready()
    with UsedServer(handle) as server:
        yield server


def _config() -> InferenceConfig:
    # Runs that a test has killed own it no more when the next one comes.
    return config_of(MODEL, server={"lease_s": 0.001})


@pytest.fixture(scope="session")
def foreign_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of the example's shape that no run here ever publishes."""
    from safetensors.torch import load_file, save_file

    directory = tmp_path_factory.mktemp("foreign")
    tensors = {name: tensor * 0.5 for name, tensor in load_file(MODEL / "model.safetensors").items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="session")
def reference(rl_server: UsedServer, foreign_weights: Path, tmp_path_factory: pytest.TempPathFactory) -> CompletedRun:
    """The run of 20 steps that nothing disturbs; the server carried other weights, called version 0, before it."""
    rl_server.update(foreign_weights, version=0).raise_for_status()
    flags = ("--max-steps", str(REFERENCE_STEPS), "--ckpt.interval", "2")
    return succeeded(tmp_path_factory.mktemp("reference") / "run", *rl_server.flags, *flags)
