"""From a name in `metrics.jsonl` to the series that Prometheus gets: one rule for all, see docs/prometheus.md.

`/` and what else a name of Prometheus cannot hold become `_`, units are base units in full, and the parts that
docs/metrics.md has in `<>` are labels.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

_OTHER = re.compile(r"[^a-zA-Z0-9_]")
_OF_K = re.compile(r"(?P<name>\w+)@(?P<k>\d+)")
_AGE = re.compile(r"age_(?P<age>\d+)")
_OF_ENVIRONMENT = re.compile(r"reward/(.+)/p10")
_OF_REWARDS = ("mean", "std", "p10", "p50", "p90")
_UNITS = (("_per_s", "_per_second", 1.0), ("_gib", "_bytes", 2.0**30))


@dataclass(frozen=True)
class Series:
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


def series_of(metric: str, environments: Collection[str] = ()) -> Series:
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
    return Series(name, pattern, tuple(labels.items()), factor)


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
