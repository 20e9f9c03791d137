"""Running several things at once so that the first failure stops the rest and is the one that is raised."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

_T = TypeVar("_T")


async def run_all(work: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Return the results in the order of `work`; the first failure cancels the others and is raised bare."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(item) for item in work]
    except BaseExceptionGroup as failures:
        first = _first(failures)
    else:
        return [task.result() for task in tasks]
    # Outside of `except`: else the group would be its context, and be printed with it.
    raise first


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    failure: BaseException = failures
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure
