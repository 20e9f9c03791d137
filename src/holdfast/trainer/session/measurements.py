"""What every program measures of its steps: where the time goes, throughput, memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import psutil
import torch

from holdfast.shared.process.heartbeat import moved
from holdfast.shared.process.timeline import record
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.session.profiling import Profiler
from holdfast.trainer.session.session import Session

# Of one name in one step that the timeline tells one by one: with many updates of a step it would grow without bound.
_SPANS_OF_A_NAME = 2


class Stopwatch:
    """Seconds spent in named phases since the last `take`; and when each was, for the timeline.

    Args:
        profiler: told where steps begin, and the names of phases; what it takes itself counts to no step.
    """

    def __init__(self, profiler: Profiler | None = None) -> None:
        self._profiler = profiler
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()
        self._step = 0
        self._counts: dict[str, int] = {}
        self._rest: dict[str, tuple[float, float]] = {}

    def begin_step(self, step: int) -> None:
        """Count the phases that follow to `step`. Collective."""
        self._tell_rest()
        self._step, self._counts = step, {}
        if self._profiler is not None:
            begin = time.perf_counter()
            self._profiler.begin_step(step)
            self._started += time.perf_counter() - begin

    def end(self) -> None:
        """Say that the last step is done. Collective."""
        self._tell_rest()
        if self._profiler is not None:
            self._profiler.end()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to `time/<name>`."""
        moved()
        now, begin = time.time(), time.perf_counter()
        try:
            with nullcontext() if self._profiler is None else self._profiler.phase(name):
                yield
        finally:
            moved()
            key, seconds = f"time/{name}", time.perf_counter() - begin
            self._seconds[key] = self._seconds.get(key, 0.0) + seconds
            self._tell(name, now, now + seconds)

    def _tell(self, name: str, begin: float, end: float) -> None:
        count = self._counts[name] = self._counts.get(name, 0) + 1
        if count <= _SPANS_OF_A_NAME:
            record(name, begin, end, step=self._step)
        else:
            self._rest[name] = (self._rest.get(name, (begin, end))[0], end)

    def _tell_rest(self) -> None:
        for name, (begin, end) in self._rest.items():
            record(name, begin, end, step=self._step, count=self._counts[name] - _SPANS_OF_A_NAME)
        self._rest = {}

    def take(self) -> dict[str, float]:
        """Return the phases and `time/step`, the wall time since the last call; start again."""
        self._tell_rest()
        now = time.perf_counter()
        taken = {**self._seconds, "time/step": now - self._started}
        self._seconds, self._started = {}, now
        return taken


# Dense bfloat16 peak of one GPU in FLOP/s, by a part of its name (NVIDIA's data sheets).
_PEAK_FLOPS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12}


def model_flops(num_parameters: int, num_tokens: int) -> float:
    """Return the floating-point operations of one forward and backward pass: 6 per parameter and token.

    Chowdhery et al. 2022, "PaLM", appendix B, without its term for attention. Recomputed activations, passes that
    only measure and further epochs do not count: the figure is what the step needs at least.
    """
    return 6.0 * num_parameters * num_tokens


def throughput(mesh: Mesh, num_parameters: int, *, num_tokens: int, seconds: float) -> dict[str, float]:
    """Return `tokens_per_s`, `tflops` of each device, and `mfu`, their share of its peak where that is known."""
    flops_per_s = model_flops(num_parameters, num_tokens) / seconds / mesh.world_size
    metrics = {"tokens_per_s": num_tokens / seconds, "tflops": flops_per_s / 1e12}
    if mesh.device.type == "cuda":  # untested: needs a GPU
        name = torch.cuda.get_device_name(mesh.device)
        peak = next((flops for part, flops in _PEAK_FLOPS.items() if part in name), None)
        metrics |= {"mfu": flops_per_s / peak} if peak is not None else {}
    return metrics


def memory_gib(mesh: Mesh) -> float:
    """Return the most memory of any rank in GiB: peak on a GPU, resident on a CPU."""
    if mesh.device.type == "cuda":
        own = torch.cuda.max_memory_allocated() / 2**30  # untested: needs a GPU
    else:
        own = psutil.Process().memory_info().rss / 2**30
    return mesh.max({"memory": own})["memory"]


def step_metrics(session: Session[Any], stopwatch: Stopwatch, *, num_tokens: int) -> dict[str, float]:
    """Return the figures that every program reports at the end of a step of `num_tokens` tokens. Collective."""
    mesh, progress = session.mesh, session.progress
    num_parameters = sum(parameter.numel() for parameter in session.policy.hf_model.parameters())
    memory = memory_gib(mesh)
    times = stopwatch.take()
    rates = throughput(mesh, num_parameters, num_tokens=num_tokens, seconds=times["time/step"])
    counters = {"samples": progress.samples, "tokens": progress.tokens}
    return {"memory_gib": memory, **times, **rates, **counters}
