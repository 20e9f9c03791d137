"""What one scrape of Prometheus shows: the files of a run as series.

A resume can take back steps, tokens and losses, so they are gauges. A counter counts from 0 what this launcher has seen
happen. To Prometheus a new launcher is a process restart, so no step counts twice and none appears from nowhere.

One rule turns each name in `metrics.jsonl` into a series, see docs/console.md: characters that Prometheus does not
allow become `_`, units are base units in full, and the parts in `<>` in docs/metrics.md become labels.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from holdfast.run.run_dir import RunDir
from holdfast.view.follow import Follower, Stepped
from holdfast.view.state import RunState

_OTHER = re.compile(r"[^a-zA-Z0-9_]")
_OF_K = re.compile(r"(?P<name>\w+)@(?P<k>\d+)")
_AGE = re.compile(r"age_(?P<age>\d+)")
_OF_ENVIRONMENT = re.compile(r"reward/(.+)/p10")
_OF_REWARDS = ("mean", "std", "p10", "p50", "p90")
_UNITS = (("_per_s", "_per_second", 1.0), ("_gib", "_bytes", 2.0**30))


@dataclass(frozen=True)
class PrometheusSeries:
    """Where a metric goes.

    Attributes:
        pattern: its name in docs/metrics.md, with `<>`.
        factor: from its unit to that of the series.
    """

    name: str
    pattern: str
    labels: tuple[tuple[str, str], ...] = ()
    factor: float = 1.0


def environments_of(metrics: Collection[str]) -> frozenset[str]:
    """Return the environments that a step has numbers of: each has quantiles of its rewards."""
    return frozenset(found[1] for name in metrics if (found := _OF_ENVIRONMENT.fullmatch(name)))


def series_of(metric: str, environments: Collection[str] = ()) -> PrometheusSeries:
    """Return the series of a metric, without the labels of its run.

    Args:
        metric: a name in `metrics.jsonl`.
        environments: those of `environments_of` the same step.
    """
    pattern, labels = _split(metric, environments)
    name, factor = f"holdfast_{_plain(pattern)}", 1.0
    for unit, base, times in _UNITS:
        if name.endswith(unit):
            name, factor = name.removesuffix(unit) + base, times
    if pattern == "time/<phase>":
        name = "holdfast_time_seconds"
    return PrometheusSeries(name, pattern, tuple(labels.items()), factor)


def _split(metric: str, environments: Collection[str]) -> tuple[str, Mapping[str, str]]:
    """Return the name as docs/metrics.md has it, and what stands for each part in `<>`."""
    head, _, rest = metric.partition("/")
    match head:
        case "time" if rest and "/" not in rest:
            return "time/<phase>", {"phase": rest}
        case "reward":
            name, _, statistic = rest.rpartition("/")
            if name in environments and statistic in _OF_REWARDS:
                return f"reward/<environment>/{statistic}", {"environment": name}
        case "curriculum" if "/" in rest:
            name, _, what = rest.rpartition("/")
            return f"curriculum/<environment>/{what}", {"environment": name}
        case "eval" if "/" in rest:
            name, _, what = rest.partition("/")
            pattern, labels = _of_environment(what)
            return f"eval/<environment>/{pattern}", {"environment": name, **labels}
        case "engine" if rest.partition("/")[0].isdecimal():
            number, _, what = rest.partition("/")
            return f"engine/<number>/{what}", {"engine": number}
        case "groups" if rest.startswith("dropped/"):
            return "groups/dropped/<reason>", {"reason": rest.removeprefix("dropped/")}
        case "mismatch_kl" if age := _AGE.fullmatch(rest):
            return "mismatch_kl/age_<age>", {"age": age["age"]}
    own = max((name for name in environments if metric.startswith(f"{name}/")), key=len, default=None)
    if own is not None:
        pattern, labels = _of_environment(metric.removeprefix(f"{own}/"))
        return f"<environment>/{pattern}", {"environment": own, **labels}
    return metric, {}


def _of_environment(name: str) -> tuple[str, Mapping[str, str]]:
    """Split what comes behind the name of an environment."""
    if found := _OF_K.fullmatch(name):
        return f"{found['name']}@<k>", {"k": found["k"]}
    for group in ("tools/failed", "requests/refused"):
        if name.startswith(f"{group}/"):
            return f"{group}/<reason>", {"reason": name.removeprefix(f"{group}/")}
    if name.startswith(("tools/", "requests/")):
        return name, {}
    # The environment's own, by any name: as a label it stays what it is.
    return "<metric>", {"metric": name}


def _plain(pattern: str) -> str:
    """Return a pattern as a part of a name: `<environment>` says what it is of, the other labels say it themselves."""
    text = pattern.replace("@<k>", "_at_k").replace("/<reason>", "").replace("/<number>", "").replace("_<age>", "")
    return _OTHER.sub("_", text.replace("<", "").replace(">", ""))


_ALARMS = ("alert", "warning")


class RunCollector(Collector):
    """Reads the files of one run, over all attempts of one launcher; for any number of threads.

    Attributes:
        run: labels of every series.
        attempt: that goes on.
        max_steps: that it trains until.
        processes: of the run -> whether they live.
        trouble: what could not be told, until somebody takes it from here.
    """

    def __init__(self, run_dir: RunDir, program: str) -> None:
        self._run_dir = run_dir
        self._program = program
        self.run = {"run": run_dir.path.name, "run_id": run_dir.run_id()}
        self._lock = threading.Lock()
        self._follower = Follower(run_dir)
        self._num_steps = 0
        self._newest_batch: int | None = None
        self._told: set[str] = set()
        self.attempt = 0
        self.max_steps = 0
        self.processes: Mapping[str, bool] = {}
        self.trouble: list[str] = []
        self._catch_up()
        state = self._follower.state
        self._restarts_before, self._alarms_before = state.restarts, state.num_alarms.copy()

    def _catch_up(self) -> None:
        try:
            self._follower.catch_up()
        except OSError as error:
            self.tell(f"files of the run cannot be read: {error}")

    def tell(self, trouble: str) -> None:
        """Leave a message for who shows it, once."""
        if trouble not in self._told:
            self._told.add(trouble)
            self.trouble.append(trouble)

    def look(self) -> None:
        """Take in what is new, also where nobody asks for long: steps between two scrapes and a resume count."""
        with self._lock:
            try:
                self._num_steps += sum(isinstance(news, Stepped) for news in self._follower.news())
                self._newest_batch = max(self._run_dir.published_batches(), default=None)
            except OSError as error:  # what was known is still told
                self.tell(f"files of the run cannot be read: {error}")

    def collect(self) -> Iterator[Metric]:
        """Return all series; called at each scrape."""
        self.look()
        with self._lock:
            own = [*self._of_run(self._follower.state), *self._of_checkpoints()]
            return iter([*own, *self._of_metrics(taken={sample.name for one in own for sample in one.samples})])

    def _of_run(self, state: RunState) -> Iterator[Metric]:
        yield self._info({"program": self._program, "attempt": str(self.attempt)})
        yield self._gauge("run_attempt", "Attempts that the run has begun", self.attempt)
        yield self._counter("run_restarts", "Processes started again", state.restarts - self._restarts_before)
        alarms = CounterMetricFamily("holdfast_run_alarms", "Alerts and warnings", labels=[*self.run, "kind"])
        for kind in _ALARMS:
            number = state.num_alarms[kind] - self._alarms_before[kind]
            alarms.add_metric([*self.run.values(), kind], number)
        yield alarms
        processes = GaugeMetricFamily("holdfast_process_up", "Whether it lives", labels=[*self.run, "process"])
        for name, lives in self.processes.items():
            processes.add_metric([*self.run.values(), name], lives)
        yield processes
        yield self._gauge("trainer_step", "Last step that was trained; goes back on a resume", state.step)
        yield self._gauge("trainer_max_steps", "Step that the run trains until", self.max_steps)
        yield self._counter("trainer_steps", "Steps trained while this launcher lives, again or not", self._num_steps)
        if state.stepped_unix_s is not None:
            yield self._gauge("trainer_step_timestamp_seconds", "End of the last step", state.stepped_unix_s)
        if state.left_s is not None:
            yield self._gauge("run_remaining_seconds", "Estimated time until the last step", state.left_s)
        if self._newest_batch is not None:
            yield self._gauge("orchestrator_step", "Step of the newest published batch", self._newest_batch)

    def _of_checkpoints(self) -> Iterator[Metric]:
        found = self._follower.checkpoints
        if found.good is not None and found.saved_unix_s is not None:
            yield self._gauge("checkpoint_step", "Step of the newest whole checkpoint", found.good)
            yield self._gauge("checkpoint_timestamp_seconds", "When that was committed", found.saved_unix_s)

    def _of_metrics(self, *, taken: set[str]) -> Iterator[Metric]:
        """Return the last line of `metrics.jsonl`, and evaluations of earlier ones, but for names that are taken."""
        state = self._follower.state
        values = {**state.evaluated, **state.metrics}
        values.pop("step", None)
        environments = environments_of(values)
        families: dict[str, GaugeMetricFamily] = {}
        patterns: dict[str, str] = {}
        for metric, value in values.items():
            number = _number(value)
            if number is None:
                continue
            series = series_of(metric, environments)
            # Two patterns for one name: a name of Prometheus has fewer characters.
            if series.name in taken or patterns.setdefault(series.name, series.pattern) != series.pattern:
                self.tell(f"metric '{metric}' is left out: another one is {series.name} already")
                continue
            if series.name not in families:
                names = [*self.run, *(name for name, _ in series.labels)]
                families[series.name] = GaugeMetricFamily(
                    series.name, f"{series.pattern}, see docs/metrics.md", labels=names
                )
            own = (value for _, value in series.labels)
            families[series.name].add_metric([*self.run.values(), *own], number * series.factor)
        yield from families.values()

    def _info(self, values: dict[str, str]) -> Metric:
        family = InfoMetricFamily("holdfast_run", "The run", labels=list(self.run))
        family.add_metric(list(self.run.values()), values)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"holdfast_{name}", text, labels=list(self.run))
        family.add_metric(list(self.run.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"holdfast_{name}", text, labels=list(self.run))
        family.add_metric(list(self.run.values()), value)
        return family


def _number(value: Any) -> float | None:
    """Return a value of a line; null, which stands for what JSON lacks, is NaN. None of what is no number."""
    if value is None:
        return math.nan
    return float(value) if isinstance(value, int | float) else None
