"""The parts of the checkpoint benchmark: a training loop, a rival writer, raw writes, peak memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil
import torch
from torch import Tensor, nn

from holdfast.trainer.checkpoint.state import ObjectsState

T = TypeVar("T")
_CHUNK = 1 << 22


class TinyLoop:
    """Twelve square layers with AdamW; steps are real: forward, backward, update in place.

    Args:
        width: of each layer; the state is 12 layers x width squared x 3 tensors x 4 bytes.
    """

    def __init__(self, width: int) -> None:
        torch.manual_seed(0)
        self._model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(12)))
        self.optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-5, fused=True)
        self._input = torch.randn(16, width)
        self.waited_s = 0.0
        self.state = ObjectsState({"model": self._model, "optimizer": self.optimizer})
        self.step()

    def watch_waits(self, make: Callable[[], T]) -> T:
        """Call `make`, which may hook into the optimizer's steps; the time in its hook counts in `waited_s`."""
        began = 0.0

        def begin(*_: object) -> None:
            nonlocal began
            began = time.perf_counter()

        def end(*_: object) -> None:
            self.waited_s += time.perf_counter() - began

        self.optimizer.register_step_pre_hook(begin)
        made = make()
        self.optimizer.register_step_pre_hook(end)
        return made

    @property
    def num_bytes(self) -> int:
        """Bytes of parameters and moments."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.state.tensors().values())

    def largest(self) -> Tensor:
        """A tensor of the state to write from."""
        return max(self.state.tensors().values(), key=Tensor.numel)

    def step(self) -> float:
        """Take one step; return its seconds."""
        started = time.perf_counter()
        self._model(self._input).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - started

    def steps_while(self, goes_on: Callable[[], bool]) -> list[float]:
        """Take steps as long as `goes_on`; return the seconds of those that lay wholly within it."""
        times = [self.step()]
        while goes_on():
            times.append(self.step())
        return times[:-1] or times

    def steps_for(self, seconds: float) -> list[float]:
        """Take steps for about `seconds`; return the seconds of each."""
        until = time.perf_counter() + seconds
        return self.steps_while(lambda: time.perf_counter() < until)


def write_raw(path: Path, tensor: Tensor, size: int) -> float:
    """Write `size` bytes of `tensor`, again and again, and fsync once; return the seconds."""
    view = memoryview(tensor.detach().contiguous().view(-1).numpy()).cast("B")  # type: ignore[arg-type]
    started = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for chunk in _chunks(view, size):
        os.write(descriptor, chunk)
    os.fsync(descriptor)
    os.close(descriptor)
    return time.perf_counter() - started


def _chunks(view: memoryview, size: int) -> Iterator[memoryview]:
    done = offset = 0
    while done < size:
        chunk = view[offset : offset + min(_CHUNK, size - done)]
        yield chunk
        done += len(chunk)
        offset = (offset + len(chunk)) % len(view)


_RIVAL = """
import os, sys, xxhash
path, size = sys.argv[1], int(sys.argv[2])
data, digest = os.urandom(1 << 22), xxhash.xxh3_128()
descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
for _ in range(size // len(data)):
    os.write(descriptor, data)
    digest.update(data)
os.fsync(descriptor)
os.unlink(path)
"""


class Beside:
    """Another process that hashes and writes as many bytes: takes cores, memory and disk, but no lock of ours."""

    def __init__(self, path: Path, size: int) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", _RIVAL, str(path), str(size)])

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.wait()

    def is_running(self) -> bool:
        """Whether it still writes."""
        return self._process.poll() is None


class PeakMemory:
    """How far this process's resident memory rises in a block, by the kernel's high-water mark (Linux)."""

    def __init__(self) -> None:
        self.grown_bytes = 0
        self._before = 0

    def __enter__(self) -> PeakMemory:
        Path("/proc/self/clear_refs").write_text("5")
        self._before = psutil.Process().memory_info().rss
        return self

    def __exit__(self, *_: object) -> None:
        (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
        self.grown_bytes = int(line.split()[1]) * 1024 - self._before


def drop_from_cache(directory: Path) -> None:
    """Have the kernel forget the pages of every file, so that the next read comes from the disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
