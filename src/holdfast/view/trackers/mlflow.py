"""MLflow: a server or a database, whatever MLFLOW_TRACKING_URI says."""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from sqlalchemy import make_url

from holdfast.view.trackers.interface import TrackedRun, Tracker

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read at the import


_RUN_TAG = "holdfast.run_id"
_ORIGIN_TAG = "holdfast.origin"
_MOST_METRICS, _MOST_PARAMS, _MOST_CHARACTERS = 1000, 100, 500
_NOT_ALLOWED = re.compile(r"[^\w\-. :/]")
T = TypeVar("T", Metric, Param)


class MLflow(Tracker):
    """One run of an experiment, which is found again by a tag.

    MLflow takes back nothing that it has, and a step may have arrived in part: what it has of each metric is asked for
    when a process begins, and only later steps are sent.
    """

    def begin(self, run: TrackedRun, *, after: int) -> int:
        """Begin the run, or find it."""
        with _alone(mlflow.get_tracking_uri()):
            self._client = MlflowClient()
        self._metrics: list[Metric] = []
        found = self._find(run) or self._create(run)
        self._id = found.info.run_id
        self._client.update_run(self._id, status="RUNNING")
        self._has = {metric.key: metric.step for metric in found.data._metric_objs}
        params = {_name(key): str(value)[:_MOST_CHARACTERS] for key, value in run.settings.items()}
        before = {**found.data.params, **{key: value for key, value in found.data.tags.items() if key in params}}
        new = [Param(key, value) for key, value in params.items() if key not in found.data.params]
        for part in _parts(new, _MOST_PARAMS):
            self._client.log_batch(self._id, params=part)
        # What a later attempt has changed: a parameter keeps its first value.
        changed = [RunTag(key, value) for key, value in params.items() if before.get(key, value) != value]
        tags = [RunTag(tag, "true") for tag in run.tags]
        self._client.log_batch(self._id, tags=[*tags, *changed, RunTag("holdfast.attempt", str(run.attempt))])
        return max(min(after, max(self._has.values(), default=0)), 0)

    def _find(self, run: TrackedRun) -> Run | None:
        experiment = self._client.get_experiment_by_name(run.project)
        if experiment is None:
            return None
        found = self._client.search_runs([experiment.experiment_id], f"tags.`{_RUN_TAG}` = '{run.id}'")
        return found[0] if found else None

    def _create(self, run: TrackedRun) -> Run:
        experiment = self._client.get_experiment_by_name(run.project)
        if experiment is not None:
            number = experiment.experiment_id
        else:
            try:
                number = self._client.create_experiment(run.project)
            except MlflowException:  # another run has just made it
                experiment = self._client.get_experiment_by_name(run.project)
                if experiment is None:
                    raise
                number = experiment.experiment_id
        tags = {_RUN_TAG: run.id} | ({_ORIGIN_TAG: run.origin} if run.origin else {})
        return self._client.create_run(number, tags=tags, run_name=run.name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the step until `flush`, or until it is enough for a request."""
        now_ms = int(time.time() * 1000)
        for key, value in metrics.items():
            name = _name(key)
            if self._has.get(name, -1) < step:
                self._metrics.append(Metric(name, value, now_ms, step))
        if len(self._metrics) >= _MOST_METRICS:
            self.flush()

    def log_evaluation(self, step: int, metrics: Mapping[str, float], *, is_last: bool) -> bool:
        """Log it at its step, whatever came since."""
        self.log(step, metrics)
        return True

    def flush(self) -> None:
        """Send what was kept."""
        for part in _parts(self._metrics, _MOST_METRICS):
            self._client.log_batch(self._id, metrics=part)
        self._metrics.clear()

    def close(self) -> None:
        """Say that the run is over."""
        self.flush()
        self._client.set_terminated(self._id)


@contextmanager
def _alone(uri: str) -> Iterator[None]:
    """Let no other run make or change the tables of a database in a file meanwhile: MLflow itself takes no lock."""
    url = make_url(uri) if uri.startswith("sqlite") else None
    if url is None or not url.database or url.database == ":memory:":
        yield
        return
    directory = os.open(Path(url.database).absolute().parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # some network filesystems lock no directories: a loser tries again
            fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def _name(key: str) -> str:
    """Return a name that MLflow takes: `eval/sort/avg:4`."""
    return _NOT_ALLOWED.sub(lambda match: ":" if match[0] == "@" else "_", key)


def _parts(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]
