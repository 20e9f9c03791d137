"""One measured run of the orchestrator, with or without the journal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec

from holdfast import Completion
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.orchestrator import batch_maker, batch_pipeline
from holdfast.orchestrator.generation_log import GenerationLog, Header
from holdfast.orchestrator.main import orchestrate
from holdfast.protocol.rollouts import Batch, Sampling
from holdfast.run import atomic, manifest
from holdfast.run.run_dir import RunDir
from holdfast.run.weights import weights_digest

MODEL = "examples/reverse_text/base"
GROUP_SIZE = 8


class Measured(msgspec.Struct):
    """What one run took.

    Attributes:
        num_rollouts: rollouts made.
        wall_s: seconds from the first line of the program to the last batch on the disk.
        core_s: seconds of a core that the process used meanwhile, all threads.
        longest_append_s: longest time that keeping one answer took, on the event loop; 0 without a journal.
    """

    num_rollouts: int
    wall_s: float
    core_s: float
    longest_append_s: float = 0.0

    @property
    def wall_rate(self) -> float:
        """Rollouts per second by the clock."""
        return self.num_rollouts / self.wall_s

    @property
    def core_rate(self) -> float:
        """Rollouts per second of the core's time."""
        return self.num_rollouts / self.core_s

    def __str__(self) -> str:
        return (
            f"{self.wall_rate:,.0f} rollouts/s by the clock, {self.core_rate:,.0f} by the core's time, "
            f"longest append {1000 * self.longest_append_s:.1f} ms"
        )


class _NoLog(GenerationLog):
    """Keeps nothing."""

    def __init__(self, _: RunDir, step: int, *, weights_digest: str, stop_token_ids: list[int], **__: object) -> None:
        self.header = Header(0, step, weights_digest, stop_token_ids)

    def find(self, token_ids: Sequence[int], *, sampling: Sampling, max_tokens: int, seed: int) -> Completion | None:
        """Find nothing."""
        return None

    def append(self, *_: object, **__: object) -> None:
        """Keep nothing."""

    def close(self) -> None:
        """Close nothing."""


class _TimedLog(GenerationLog):
    """Times every append."""

    longest_s = 0.0

    def append(
        self,
        token_ids: Sequence[int],
        *,
        sampling: Sampling,
        max_tokens: int,
        seeds: Sequence[int],
        completions: Sequence[Completion],
    ) -> None:
        """Keep an answer, and the time that it took."""
        begin = time.perf_counter()
        super().append(token_ids, sampling=sampling, max_tokens=max_tokens, seeds=seeds, completions=completions)
        _TimedLog.longest_s = max(_TimedLog.longest_s, time.perf_counter() - begin)


def _publish_nothing(self: batch_pipeline.BatchPublisher, batch: Batch, state: bytes) -> None:
    """Take the place of `BatchPublisher._publish`."""


def publish_first_weights(run_dir: RunDir) -> str:
    """Publish something as version 0, for the schedule to wait for; return its digest."""
    run_dir.create()
    final = run_dir.weights_of(0)
    atomic.make_directory(final.parent)
    temporary = atomic.temporary_sibling(final)
    temporary.mkdir()
    (temporary / "model.safetensors").write_bytes(b"no tensors")
    listing = manifest.Manifest(kind="weights", step=0, policy_version=0, files=manifest.describe_files(temporary))
    manifest.write_manifest(temporary, listing)
    atomic.publish_directory(temporary, final)
    return weights_digest(final)


def measure(
    run_dir: RunDir, url: str, *, num_rollouts: int, num_tokens: int, batch_size: int, journal: bool
) -> Measured:
    """Make the rollouts and return what they took. Meant for a process of its own: it changes modules."""
    num_steps = max(1, num_rollouts // batch_size)
    config = OrchestratorConfig.model_validate(
        {
            "output_dir": run_dir.path,
            "max_steps": num_steps,
            "async_level": num_steps,  # version 0 makes all batches, so that no trainer is needed
            "model": {"name": MODEL},
            "environments": [{"id": "benchmarks.journal.environment:Nothing"}],
            "problems_per_step": batch_size // GROUP_SIZE,
            "group_size": GROUP_SIZE,
            "seq_len": num_tokens + 128,
            "sampling": {"max_tokens": num_tokens},
            "client": {"urls": [url]},
        }
    )
    batch_maker.GenerationLog = _TimedLog if journal else _NoLog
    if not journal:
        batch_pipeline.BatchPublisher._publish = _publish_nothing
    wall, core = time.perf_counter(), time.process_time()
    asyncio.run(orchestrate(config))
    wall, core = time.perf_counter() - wall, time.process_time() - core
    made = num_steps * config.problems_per_step * GROUP_SIZE
    return Measured(made, wall, core, _TimedLog.longest_s)
