"""From optimizer step to the first token of the new version: `uv run --group cpu python -m benchmarks.weight_sync`.

Publishes versions of a model with random weights as the trainer does, and pushes them to a vLLM server as the
orchestrator does, which then samples one token. Rounds of both transports alternate on one server, and each version
differs from the version before it. Prints medians, beside one copy of the same bytes in memory. The directory alone is
compared with the same bytes written by one call and synced, in turns, and its copies of bytes are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, PreTrainedTokenizerBase

from holdfast.config.orchestrator import ClientConfig
from holdfast.config.rl_trainer import CollectiveWeights
from holdfast.config.training import ParallelConfig, TrainedModelConfig
from holdfast.orchestrator.client.client import InferenceClient
from holdfast.orchestrator.weight_sync import WeightPusher
from holdfast.protocol.inference import GenerateRequest
from holdfast.run.run_dir import RunDir
from holdfast.trainer.data.samples import load_tokenizer
from holdfast.trainer.mesh import join_mesh
from holdfast.trainer.model.policy import Policy, build_policy
from holdfast.trainer.model.publish import WeightPublisher
from holdfast.trainer.model.tensor_names import DTYPES
from holdfast.trainer.model.weight_offers import WeightOffers
from tests.runs.ports import free_port

TRANSPORTS = ("directory", "collective")
_WAIT_S = 1800.0
_TOKENIZER = "examples/reverse_text/base"
# hidden size, size of the MLP, layers, heads, heads of keys, tokens
_SIZES = {
    "3M": (192, 512, 6, 6, 2, 1024),
    "135M": (576, 1536, 30, 9, 3, 49152),  # SmolLM2-135M
    "400M": (1024, 4096, 22, 16, 8, 49152),
}


class Copies(TorchDispatchMode):
    """Counts the bytes that torch copies from tensor to tensor in the block."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator, and count what it copied."""
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten._to_copy, torch.ops.aten.clone):
            self.num_bytes += result.nbytes
        return result


class Measurement:
    """A model, its server and its run, and the seconds of each round.

    Attributes:
        reads: bytes that the server got by system calls for reading in each round, by transport.
    """

    def __init__(self, model: Path, directory: Path, url: str, server: psutil.Process | None = None) -> None:
        self.reads: dict[str, list[int]] = {transport: [] for transport in TRANSPORTS}
        self._server = server
        self.run_dir = RunDir(directory / "run")
        self.run_dir.create()
        self._url = url
        mesh = join_mesh(ParallelConfig(), rank=0, world_size=1, device=torch.device("cpu"))
        tokenizer: PreTrainedTokenizerBase = load_tokenizer(_TOKENIZER)
        self.policy: Policy = build_policy(TrainedModelConfig(name=str(model), init="random"), mesh, seed=0)
        self._publishers = {
            dtype: WeightPublisher(self.run_dir, self.policy, tokenizer, mesh, dtype=dtype) for dtype in DTYPES
        }
        self._publisher = self._publishers["float32"]

    async def measure(self, transports: Sequence[str], rounds: int) -> dict[str, list[float]]:
        """Return the seconds of each round by transport; the first round of each warms up, and is left out."""
        seconds: dict[str, list[float]] = {transport: [] for transport in transports}
        client_config = ClientConfig(urls=[self._url], ready_timeout_s=_WAIT_S)
        with WeightOffers(self.run_dir, CollectiveWeights(), torch.device("cpu")) as offers:
            async with InferenceClient(client_config, run_dir=self.run_dir) as client:
                await client.engines[0].wait_for_health()
                pusher = WeightPusher(client, self.run_dir, timeout_s=_WAIT_S, seq_len=64)
                for version in range(len(transports) * (rounds + 1)):
                    transport = transports[version % len(transports)]
                    used = offers if transport == "collective" else None
                    before = read_bytes(self._server)
                    seconds[transport].append(await self._round(client, pusher, version, used))
                    self.reads[transport].append(read_bytes(self._server) - before)
        return {transport: measured[1:] for transport, measured in seconds.items()}

    async def _round(
        self, client: InferenceClient, pusher: WeightPusher, version: int, offers: WeightOffers | None
    ) -> float:
        with torch.no_grad():  # an optimizer step
            for parameter in self.policy.parameters():
                parameter.mul_(1.0001)
        begin = time.perf_counter()
        # The trainer publishes in a thread of its own, and the orchestrator waits meanwhile, as their processes do.
        publishing = threading.Thread(target=self._publisher.publish, args=(version,), kwargs={"offers": offers})
        publishing.start()
        weights = await pusher.wait_for(version, check=lambda: None)
        weights = await pusher.serve(weights, check=lambda: None)
        request = GenerateRequest(token_ids=[5, 6, 7], seeds=[version], max_tokens=1, weights_digest=weights.digest)
        await client.generate(request)
        seconds = time.perf_counter() - begin
        publishing.join()
        assert (weights.written is None) == (offers is not None), "it came by the other transport"
        self._publisher.prune({version})
        return seconds

    def publish_alone(self, dtype: str, rounds: int) -> str:
        """Return what it takes to publish in `dtype`, beside a write of the same bytes. The first round warms up."""
        publisher, taken, raw, more = self._publishers[dtype], list[float](), list[float](), list[int]()
        size, trainer = 0, psutil.Process()
        with Copies() as copies:
            before = io_bytes(trainer, "wchar")
            publisher.publish(rounds + 1)
            wrote = io_bytes(trainer, "wchar") - before
        publisher.prune(set())
        for version in range(rounds + 1):
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
            before, begin = peak_bytes(trainer), time.perf_counter()
            path = publisher.publish(version) / "model.safetensors"
            taken.append(time.perf_counter() - begin)
            more.append(peak_bytes(trainer) - before)
            written, copy = path.read_bytes(), self.run_dir.path / "raw"
            begin = time.perf_counter()
            with open(copy, "xb") as file:
                file.write(written)
                file.flush()
                os.fsync(file.fileno())
            raw.append(time.perf_counter() - begin)
            copy.unlink()
            size = len(written)
            del written
            publisher.prune(set())
        ratios = [one / other for one, other in zip(taken[1:], raw[1:], strict=True)]
        return (
            f"{dtype}, {size / 1e6:.1f} MB in {statistics.median(taken[1:]):.3f} s, {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) of a plain write; of the bytes: memory {max(more) / size:.2f}, "
            f"copied {copies.num_bytes / size:.2f}, handed to the disk {wrote / size:.2f}"
        )

    def copy_seconds(self, rounds: int) -> float:
        """Return the median seconds of a copy of all parameters in memory."""
        return statistics.median(self._copy() for _ in range(rounds))

    def _copy(self) -> float:
        begin = time.perf_counter()
        copies = [parameter.detach().clone() for parameter in self.policy.parameters()]
        assert copies
        return time.perf_counter() - begin


def write_model(directory: Path, size: str) -> None:
    """Write the configuration of a model without weights, with a tokenizer."""
    hidden, mlp, layers, heads, key_heads, vocab = _SIZES[size]
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=key_heads, vocab_size=vocab, tie_word_embeddings=True, max_position_embeddings=512,
        bos_token_id=None, eos_token_id=3, pad_token_id=0,
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(directory)
    load_tokenizer(_TOKENIZER).save_pretrained(directory)


@contextmanager
def serving(model: Path, directory: Path, *, threads: int) -> Iterator[tuple[str, psutil.Process]]:
    """Start a vLLM server without weights; yield its address and process."""
    port = free_port()
    command = [sys.executable, "-m", "holdfast", "inference", "--model.name", str(model), "--model.load", "dummy"]
    command += ["--model.max-len", "64", "--server.port", str(port), "--engine.threads", str(threads)]
    command += ["--output-dir", str(directory / "server")]
    with open(directory / "server.log", "w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)
        finally:
            process.terminate()


def read_bytes(server: psutil.Process | None) -> int:
    """Return how many bytes a server and its children have got by system calls for reading."""
    processes = [server, *server.children(recursive=True)] if server else []
    return sum(io_bytes(process, "rchar") for process in processes)


def io_bytes(process: psutil.Process, counter: str) -> int:
    """Return how many bytes a process has got (`rchar`) or given (`wchar`) by system calls."""
    return int(Path(f"/proc/{process.pid}/io").read_text().partition(f"{counter}:")[2].split()[0])


def peak_bytes(process: psutil.Process) -> int:
    """Return the largest resident memory so far of a process and its children, added up."""
    peak = 0
    for one in [process, *process.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess, FileNotFoundError):
            status = Path(f"/proc/{one.pid}/status").read_text()
            peak += 1024 * int(status.partition("VmHWM:")[2].split()[0])
    return peak


def main() -> None:
    """Print a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=_SIZES, default=list(_SIZES))
    parser.add_argument("--transports", nargs="*", choices=TRANSPORTS, default=TRANSPORTS, help="none: no server")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1, help="of trainer and engine, each")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory() as place:
            directory = Path(place)
            write_model(directory / "model", size)
            if not arguments.transports:
                measurement = Measurement(directory / "model", directory, "")
                for dtype in DTYPES:
                    print(f"{size}: {measurement.publish_alone(dtype, arguments.rounds)}", flush=True)
                continue
            with serving(directory / "model", directory, threads=arguments.threads) as (url, server):
                measurement = Measurement(directory / "model", directory, url, server)
                seconds = asyncio.run(measurement.measure(arguments.transports, arguments.rounds))
                peak = peak_bytes(server)
            num_bytes = sum(one.numel() * one.element_size() for one in measurement.policy.parameters())
            shown = ", ".join(
                f"{transport} {statistics.median(measured):.3f} s ({min(measured):.3f} to {max(measured):.3f}), "
                f"{statistics.median(measurement.reads[transport]) / num_bytes:.2f} of the bytes read by the server"
                for transport, measured in seconds.items()
            )
            print(
                f"{size}, {num_bytes / 1e6:.1f} MB: {shown}; a copy of the bytes "
                f"{measurement.copy_seconds(arguments.rounds):.4f} s; peak of the server {peak / 2**20:.0f} MiB",
                flush=True,
            )


if __name__ == "__main__":
    main()
