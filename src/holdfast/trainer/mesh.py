"""One rank among all ranks: its device, its process groups, and every collective of the trainer.

`Mesh` is the place of one rank in training, with reductions of numbers and tensors. `RankGroup` is a second group of
the same ranks, for Python objects: a failure of one rank is raised on every rank. `Sums` adds up numbers on the device
over the micro-batches of a step, and reads them once, since each read waits for all queued work.
"""

import datetime
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from holdfast.config.training import ParallelConfig
from holdfast.errors import STORAGE_FAILED, ConfigError, HoldfastError, RankLost, SaveError, is_storage_failure
from holdfast.process.child import available_cores


class Sums:
    """Sums by name, in float64. `names` begin with 0, other sums with their first term."""

    def __init__(self, *names: str) -> None:
        self._sums: dict[str, Tensor | float] = dict.fromkeys(names, 0.0)

    def add(self, terms: Mapping[str, Tensor | float]) -> None:
        """Add numbers, or scalars on a device without their graphs."""
        for name, term in terms.items():
            value = term.detach().double() if isinstance(term, Tensor) else term
            self._sums[name] = self._sums.get(name, 0.0) + value

    def read(self) -> dict[str, float]:
        """Return all sums, in one transfer from the device."""
        on_device = {name: value for name, value in self._sums.items() if isinstance(value, Tensor)}
        moved = dict(zip(on_device, torch.stack(list(on_device.values())).tolist(), strict=True)) if on_device else {}
        return {name: moved[name] if isinstance(value, Tensor) else value for name, value in self._sums.items()}


def require_cuda() -> None:
    """Raise ConfigError if torch cannot use a GPU."""
    try:
        # `is_available` only asks the driver.
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # no driver, an old one; a build without CUDA
        reason = str(error).split(". ")[0]
        raise ConfigError(
            f"parallel.device = cuda, but torch finds no GPU here: {reason}. `nvidia-smi` shows what the driver sees; "
            "with --parallel.device cpu the CPU trains."
        ) from None


def set_numerics(*, deterministic: bool) -> None:
    """Switch TensorFloat-32 off; with `deterministic` use only algorithms that repeat bit for bit.

    An operation without such an algorithm then raises a RuntimeError."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        # Filling takes time, and our code never reads unwritten memory.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


T = TypeVar("T")


@dataclass(frozen=True)
class SequenceGroup:
    """The neighbouring ranks that share the rows of a micro-batch; `rank` of `size`."""

    rank: int
    size: int
    group: dist.ProcessGroup


@dataclass(frozen=True)
class Mesh:
    """This process's place among the ranks that train, and their collectives.

    Attributes:
        rank, world_size: global rank and number of ranks.
        device_mesh: torch's, with dimension `fsdp`, or `replicate` and `shard`.
        expert_mesh: of the same ranks for experts, with dimensions `efsdp` and `ep`, perhaps after `replicate`; None:
            experts are sharded as all else is.
        sequence: the ranks that share rows with this rank; None: this rank has rows of its own.
        cpu_offload: whether parameters, gradients and optimizer state are in the memory of the host.
    """

    rank: int
    world_size: int
    device: torch.device
    device_mesh: DeviceMesh
    sequence: SequenceGroup | None = None
    cpu_offload: bool = False
    expert_mesh: DeviceMesh | None = None

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups of training that this rank is in."""
        meshes = [self.device_mesh, *([self.expert_mesh] if self.expert_mesh is not None else [])]
        groups = [group for mesh in meshes for group in mesh.get_all_groups()]
        return [*groups, *([self.sequence.group] if self.sequence is not None else [])]

    @property
    def is_main(self) -> bool:
        """Whether this rank writes logs, metrics, weights and manifests."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """The part of a batch that this rank computes, of `data_size`."""
        return self.rank // self._sequence_size

    @property
    def data_size(self) -> int:
        """Number of parts of a batch; ranks that share rows have the same part."""
        return self.world_size // self._sequence_size

    @property
    def _sequence_size(self) -> int:
        return self.sequence.size if self.sequence is not None else 1

    @property
    def _repeats(self) -> bool:
        """Whether another rank of the sequence group reports the same data."""
        return self.sequence is not None and self.sequence.rank > 0

    @property
    def num_shards(self) -> int:
        """Number of ranks that share one copy of the parameters."""
        return self.device_mesh.size(-1)

    @property
    def parameter_device(self) -> torch.device:
        """Device of the parameters outside of computations."""
        return torch.device("cpu") if self.cpu_offload else self.device

    def sum(self, values: dict[str, float]) -> dict[str, float]:
        """Return the sum of each value over all parts of a batch, in one float64 collective."""
        return self._reduce(dict.fromkeys(values, 0.0) if self._repeats else values, dist.ReduceOp.SUM)

    def max(self, values: dict[str, float]) -> dict[str, float]:
        """Return the maximum over all ranks of each value, in one float64 collective."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: dict[str, float], operation: dist.ReduceOp.RedOpType) -> dict[str, float]:
        if self.world_size == 1:
            return values
        # float64: float32 counts tokens exactly up to 2^24 only.
        tensor = torch.tensor(list(values.values()), dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=operation)
        return dict(zip(values, tensor.tolist(), strict=True))

    def sum_tensor(self, tensor: Tensor) -> Tensor:
        """Return the sum over all parts of a batch of a CPU tensor of the same shape on each, in one collective."""
        if self._repeats:
            tensor.zero_()
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def concatenate(self, vector: Tensor) -> Tensor:
        """Return the CPU vectors of all parts of a batch, of any lengths, in the order of ranks."""
        if self.world_size == 1:
            return vector
        if self._repeats:
            vector = vector[:0]
        # Lengths first: all_gather takes tensors of one shape.
        size = torch.tensor([len(vector)])
        sizes = [torch.zeros_like(size) for _ in range(self.world_size)]
        dist.all_gather(sizes, size)
        longest = max(int(size) for size in sizes)
        padded = torch.cat([vector, vector.new_zeros(longest - len(vector))])
        parts = [torch.zeros_like(padded) for _ in range(self.world_size)]
        dist.all_gather(parts, padded)
        return torch.cat([part[: int(size)] for part, size in zip(parts, sizes, strict=True)])

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank, as copies in the memory of the host. Collective."""
        values: list[T | None] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]  # all are filled in

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()


@contextmanager
def open_mesh(config: ParallelConfig) -> Iterator[Mesh]:
    """Join the process group that torchrun describes, unless there is a group; leave it after the block."""
    if config.device == "cuda":
        require_cuda()
    use_cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    has_group = dist.is_initialized()
    rank, world_size = rank_and_world_size() if has_group else (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    timeout = datetime.timedelta(seconds=config.collective_timeout_s)
    if use_cuda:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        # Ranks share the cores of a machine.
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        torch.set_num_threads(config.threads or max(1, available_cores() // ranks_here))
    if not has_group:
        # CPU tensors (metrics of the host, checkpoint planning, parameters that are offloaded) go over gloo.
        backend = "cpu:gloo,cuda:nccl" if use_cuda else "gloo"
        dist.init_process_group(backend, timeout=timeout, device_id=device if use_cuda else None)
    mesh = join_mesh(config, rank=rank, world_size=world_size, device=device)
    if not has_group:
        for group in mesh.groups:  # a DeviceMesh gives them torch's own time-out
            dist.distributed_c10d._set_pg_timeout(timeout, group)
    yield mesh
    # Not after a failure: other ranks may be in a collective, and notice the end of this process.
    if not has_group:
        dist.destroy_process_group()


def join_mesh(config: ParallelConfig, *, rank: int, world_size: int, device: torch.device) -> Mesh:
    """Return this process's place among the ranks. Raise ConfigError if `config` cannot divide them. Collective."""
    try:
        config.check_ranks(world_size)
    except ValueError as error:
        raise ConfigError(f"parallel.{error}") from None
    names, shape = ("fsdp",), (world_size,)
    if config.replicas > 1:
        # Shards inside: ranks that share parameters are neighbours, on one machine if possible.
        names, shape = ("replicate", "shard"), (config.replicas, world_size // config.replicas)
    device_mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    expert_mesh = None
    if config.expert_parallel > 1:
        *copies, ranks = shape
        dimensions = (*copies, ranks // config.expert_parallel, config.expert_parallel)
        expert_mesh = init_device_mesh(device.type, dimensions, mesh_dim_names=(*names[:-1], "efsdp", "ep"))
    size, sequence = config.sequence_parallel, None
    if size > 1:
        sharing = init_device_mesh(device.type, (world_size // size, size), mesh_dim_names=("data", "sequence"))
        sequence = SequenceGroup(rank % size, size, sharing.get_group("sequence"))
    return Mesh(
        rank=rank,
        world_size=world_size,
        device=device,
        device_mesh=device_mesh,
        sequence=sequence,
        cpu_offload=config.cpu_offload,
        expert_mesh=expert_mesh,
    )


class RankGroup:
    """A gloo group of all ranks, also without torch.distributed. The constructor is collective."""

    def __init__(self, *, timeout_s: float | None = None) -> None:
        self.rank, self.world_size = rank_and_world_size()
        self._group: dist.ProcessGroup | None = None
        if self.world_size > 1:
            timeout = datetime.timedelta(seconds=timeout_s) if timeout_s is not None else None
            # Collectives of a save and of training would mix in one group.
            self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def together(self, action: Callable[[], T], *, error: type[HoldfastError] = SaveError) -> T:
        """Run `action` on every rank, and return its result. If a rank fails, raise `error` on every rank."""
        result, failure = None, None
        try:
            result = action()
        except Exception as caught:  # noqa: BLE001 - raised on all ranks
            failure = caught
        # As text: an exception may not be picklable.
        reason = (describe(failure), is_storage_failure(failure)) if failure is not None else None
        failed = {rank: found for rank, found in enumerate(self.all_gather(reason)) if found is not None}
        if failed:
            reasons = [f"rank {rank}: {reason}" for rank, (reason, _) in failed.items()]
            # Rank 0 is not named: the action was mostly `on_main`.
            told = failed[0][0] if set(failed) == {0} else "; ".join(reasons)
            is_storage = any(of_storage for _, of_storage in failed.values())
            raise error(told, exit_code=STORAGE_FAILED if is_storage else None) from failure  # any rank may end first
        return result  # type: ignore[return-value]  # without failure, action() returned

    def on_main(self, action: Callable[[], T], *, error: type[HoldfastError] = SaveError) -> T | None:
        """Run `action` on rank 0 while the others wait; return its result there and None elsewhere."""
        return self.together(action if self.is_main else lambda: None, error=error)

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        with _naming_lost_ranks():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank, on rank 0; an empty list elsewhere."""
        if self._group is None:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.is_main else None
        with _naming_lost_ranks():
            dist.gather_object(value, values, group=self._group, dst=0)
        return values or []

    def scatter(self, values: list[Any]) -> Any:
        """Return this rank's item of rank 0's list."""
        if self._group is None:
            return values[0]
        received: list[Any] = [None]
        with _naming_lost_ranks():
            dist.scatter_object_list(received, values if self.is_main else None, src=0, group=self._group)
        return received[0]

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on every rank."""
        return self.scatter([value] * self.world_size)

    def close(self) -> None:
        """Leave the group. Collective."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


@contextmanager
def _naming_lost_ranks() -> Iterator[None]:
    """Raise RankLost if a collective fails."""
    try:
        yield
    # gloo has no special error for closed connections and timeouts.
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise RankLost(f"another rank of the trainer ended or cannot be reached: {reason}") from error


def rank_and_world_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks; (0, 1) without torch.distributed."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def describe(error: BaseException) -> str:
    """Return what went wrong in one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}"
    return f"{error}" if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"
