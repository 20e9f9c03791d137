"""What the tests of `rl` share: an inference server of each kind, and the run that nothing disturbs."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.config import InferenceConfig
from tests.forking.engines import ServerHandle, config_of, start_server
from tests.forking.popen import Engine
from tests.runs.processes import HANG_S
from tests.runs.rl import MODEL, SMALL_BATCH, CompletedRun, succeeded

REFERENCE_STEPS = 20


@pytest.fixture(scope="module", params=["stub", pytest.param("vllm", marks=pytest.mark.engine)])
def engine(request: pytest.FixtureRequest) -> Engine:
    """Both kinds of servers, one after the other: what holds for one holds for the other."""
    return request.param


@dataclass(frozen=True)
class UsedServer:
    """An inference server that `rl` finds at the address that `flags` name, and must leave running."""

    handle: ServerHandle

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of `rl` that point to this server, with a small batch."""
        return ("--inference.server.port", self.handle.url.rsplit(":", 1)[1], *SMALL_BATCH)

    def weights(self) -> dict[str, Any]:
        """What the server says that it serves."""
        return httpx.get(f"{self.handle.url}/weights", timeout=HANG_S).raise_for_status().json()

    def push(self, path: Path, *, version: int) -> None:
        """Give the server weights, as an earlier run would have left them."""
        body = {"path": str(path), "version": version}
        httpx.post(f"{self.handle.url}/update_weights", json=body, timeout=HANG_S).raise_for_status()

    def generated_tokens(self) -> int:
        """How many tokens it has sampled since its start."""
        metrics = httpx.get(f"{self.handle.url}/metrics", timeout=HANG_S).raise_for_status().text
        match = re.search(r"^holdfast_generated_tokens_total (\S+)$", metrics, re.MULTILINE)
        assert match, metrics
        return int(float(match[1]))


@pytest.fixture(scope="session")
def rl_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UsedServer]:
    """The server that most runs use, one after the other: the stub engine."""
    handle = start_server("stub", _config(), tmp_path_factory.mktemp("rl_server") / "inference.log").wait_ready()
    yield UsedServer(handle)
    handle.terminate()


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UsedServer]:
    """The same with vLLM."""
    handle = start_server("vllm", _config(), tmp_path_factory.mktemp("vllm_server") / "inference.log").wait_ready()
    yield UsedServer(handle)
    handle.terminate()


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
    rl_server.push(foreign_weights, version=0)
    flags = ("--max-steps", str(REFERENCE_STEPS), "--ckpt.interval", "2")
    return succeeded(tmp_path_factory.mktemp("reference") / "run", *rl_server.flags, *flags)
