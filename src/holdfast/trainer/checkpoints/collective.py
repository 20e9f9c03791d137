"""A few collectives over Python objects, in which one rank's failure is every rank's."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch.distributed as dist

from holdfast.shared.errors import STORAGE_FAILED, HoldfastError, RankLost, SaveError, is_storage_failure

T = TypeVar("T")


class Ranks:
    """The ranks that save together, with a gloo group of their own; one process without torch.distributed, too.

    A background save must not share a group with training: collectives of two threads would mix.
    Making the object is collective.

    Args:
        timeout_s: a collective that takes longer fails; unset: torch's default.
    """

    def __init__(self, *, timeout_s: float | None = None) -> None:
        self.rank, self.world_size = rank_and_world_size()
        self._group: dist.ProcessGroup | None = None
        if self.world_size > 1:
            timeout = datetime.timedelta(seconds=timeout_s) if timeout_s is not None else None
            self._group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def together(self, action: Callable[[], T], *, error: type[HoldfastError] = SaveError) -> T:
        """Run `action` on every rank and return its result.

        Raises:
            HoldfastError: of the class `error`, on every rank, when it failed on any: which, and why.
        """
        result, failure = None, None
        try:
            result = action()
        except Exception as caught:  # noqa: BLE001 - told to all ranks, and raised on each of them
            failure = caught
        told = (describe(failure), is_storage_failure(failure)) if failure is not None else None
        failed = {rank: reason for rank, reason in enumerate(self.all_gather(told)) if reason is not None}
        if failed:
            reasons = [f"rank {rank}: {reason}" for rank, (reason, _) in failed.items()]
            raised = error(failed[0][0] if set(failed) == {0} else "; ".join(reasons))
            if any(is_storage for _, is_storage in failed.values()):
                raised.exit_code = STORAGE_FAILED  # on every rank: which of them ends first must not matter
            raise raised from failure
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
        """Return this rank's part of what rank 0 gives as a list."""
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
    """Turn the failure of a collective itself into the error that it means."""
    try:
        yield
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
