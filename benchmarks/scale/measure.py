"""One configuration: what a sharded save costs rank 0 besides writing its own shards."""

from __future__ import annotations

import gc
import pickle
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter, default_planner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from benchmarks.scale.models import CONFIGS, model_tensors
from benchmarks.scale.plans import fake_mesh, local_plan, plan_of_rank, sharded_state, write_results
from holdfast.run.manifest import FileEntry, Manifest, encode_manifest

MEMORY_LIMIT_BYTES = 16 << 30


@dataclass
class Figures:
    """What was measured, on rank 0 unless it says otherwise. Seconds are of the processor.

    Attributes:
        num_items: tensors and shards that one rank plans to write.
        local_s: one rank makes its plan.
        receive_s: unpickle the plans of all ranks.
        gathered_bytes: those plans.
        global_s: make the global plan; of that `validate_s` in torch's check of overlaps.
        send_s: pickle the plans that go back.
        cached_local_s, cached_global_s: the same two plans with torch's plan cache, second save.
        reported_bytes: what all ranks report after writing.
        report_s: unpickle the reports.
        finish_s: make and write `.metadata`.
        read_s: read `.metadata`, which every rank does in a load.
        metadata_bytes, manifest_bytes: sizes of the files.
        peak_bytes: most memory of the process; the imported modules are 0.7 GiB of it.
    """

    num_items: int = 0
    local_s: float = 0.0
    receive_s: float = 0.0
    gathered_bytes: int = 0
    global_s: float = 0.0
    validate_s: float = 0.0
    send_s: float = 0.0
    cached_local_s: float = 0.0
    cached_global_s: float = 0.0
    reported_bytes: int = 0
    report_s: float = 0.0
    finish_s: float = 0.0
    read_s: float = 0.0
    metadata_bytes: int = 0
    manifest_bytes: int = 0
    peak_bytes: int = 0


def measure(model: str, num_ranks: int, *, collect_garbage: bool) -> Figures:
    """Plan and finish one save of `model` on `num_ranks` ranks, then plan a second one.

    Call it in a process of its own: memory is that of the process.

    Raises:
        MemoryError: it takes more than `MEMORY_LIMIT_BYTES`.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    if not collect_garbage:
        gc.disable()
    figures = Figures()
    parameters, buffers = model_tensors(CONFIGS[model])
    with fake_mesh(num_ranks) as mesh:
        state = sharded_state(parameters, buffers, mesh)
        local_plan(state, rank=0)  # warms torch's own caches
        with timed(figures, "local_s"):
            first = local_plan(state, rank=0)
        figures.num_items = len(first.items)
        planned, metadata = plan_twice(figures, state, first, num_ranks)
        _finish(figures, planned, metadata)
    figures.manifest_bytes = len(encode_manifest(_manifest(num_ranks)))
    figures.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return figures


def plan_twice(figures: Figures, state: dict, first: SavePlan, num_ranks: int) -> tuple[list[SavePlan], Metadata]:
    """Make the global plan of the first save, and what a second one makes with torch's cache."""
    planner = _planner(state)
    planner.create_local_plan()
    plans = []
    for rank in range(num_ranks):
        sent = pickle.dumps(plan_of_rank(first, rank, num_ranks))
        figures.gathered_bytes += len(sent)
        with timed(figures, "receive_s"):
            plans.append(pickle.loads(sent))
    with timed(figures, "global_s"), _timed_validation(figures):
        planned, metadata = planner.create_global_plan(plans)
    for plan in planned:
        with timed(figures, "send_s"):
            pickle.dumps(plan)
    planner.finish_plan(planned[0])
    second = _planner(state)
    with timed(figures, "cached_local_s"):
        unchanged = second.create_local_plan()
    with timed(figures, "cached_global_s"):
        again, _ = second.create_global_plan([unchanged] * num_ranks)
    assert not any(plan.usable for plan in again), "torch's cache was not used"
    return planned, metadata


def _planner(state: dict) -> DefaultSavePlanner:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False, enable_plan_caching=True)
    planner.set_up_planner(state, is_coordinator=True)
    return planner


def _finish(figures: Figures, planned: list[SavePlan], metadata: Metadata) -> None:
    """Take the reports of all ranks and write `.metadata`."""
    reports = []
    for rank, plan in enumerate(planned):
        sent = pickle.dumps(write_results(plan, rank))
        figures.reported_bytes += len(sent)
        with timed(figures, "report_s"):
            reports.append(pickle.loads(sent))
    with tempfile.TemporaryDirectory() as folder:
        writer = FileSystemWriter(folder)
        with timed(figures, "finish_s"):
            writer.finish(metadata, reports)
        figures.metadata_bytes = (Path(folder) / ".metadata").stat().st_size
        with timed(figures, "read_s"):
            FileSystemReader(folder).read_metadata()


def _manifest(num_ranks: int) -> Manifest:
    """A manifest with the files that so many ranks write."""
    entry = FileEntry(1 << 32, "0123456789abcdef" * 2)
    of_ranks = [name for rank in range(num_ranks) for name in (f"__{rank}_0.distcp", f"random_rank_{rank}.json")]
    files = {f"trainer/{name}": entry for name in (".metadata", "progress.json", "config.toml", *of_ranks)}
    return Manifest(kind="checkpoint", step=1, policy_version=1, files=files, world_size=num_ranks)


@contextmanager
def timed(figures: Figures, name: str) -> Iterator[None]:
    """Add the processor time of the block to a field: all of it is one thread, whatever else the machine does."""
    begin = time.process_time()
    yield
    setattr(figures, name, getattr(figures, name) + time.process_time() - begin)


@contextmanager
def _timed_validation(figures: Figures) -> Iterator[None]:
    """Time the part of torch's global planning that checks for overlaps."""
    validate = default_planner._validate_global_plan

    def validate_timed(global_plan: list[SavePlan], metadata: Metadata) -> list[str]:
        with timed(figures, "validate_s"):
            return validate(global_plan, metadata)

    default_planner._validate_global_plan = validate_timed
    try:
        yield
    finally:
        default_planner._validate_global_plan = validate
