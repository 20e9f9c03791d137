"""Which files go to which worker of the nightly lane, and when: those with engines lie at one end of a queue, those
with commands and ranks at the other, the longest outermost. Half of the workers take from each end, so each kind of
process is started once."""

from collections import defaultdict
from collections.abc import Callable, Mapping

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

# The estimate of a test without a recorded duration.
_SECONDS = {"engine": 8.0, "launch": 4.0, "ranks": 3.0, "docs": 2.0, "clock": 3.0, "trl": 0.5}


def _estimate(marks: set[str]) -> float:
    return max((_SECONDS[mark] for mark in marks & _SECONDS.keys()), default=0.1)


def sort(items: list[pytest.Item], known: Mapping[str, float]) -> None:
    """Sort tests by file, which took so many seconds, into the queue; the tests of one file stay as they are."""
    estimates: dict[str, float] = defaultdict(float)
    resources: dict[str, set[str]] = {}
    for item in items:
        marks, file = {mark.name for mark in item.iter_markers()}, item.nodeid.partition("::")[0]
        estimates[file] += _estimate(marks)
        resources.setdefault(file, set()).update(marks)

    def place(item: pytest.Item) -> float:
        file = item.nodeid.partition("::")[0]
        seconds = known.get(file, estimates[file])
        if "engine" in resources[file]:
            return -seconds
        return seconds if resources[file] & {"launch", "ranks"} else 0.0

    items.sort(key=place)


class TwoEnds(LoadFileScheduling):
    """Every second worker takes its files from the back of the queue."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        if list(self.nodes).index(node) % 2:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)


def scheduler(config: pytest.Config, log: Callable[..., None]) -> TwoEnds:
    """Return a scheduler that keeps the order of the queue."""
    config.option.loadscopereorder = False
    return TwoEnds(config, log)
