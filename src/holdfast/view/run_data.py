"""The data of a report on one run, whether the run continues, was killed, or is over.

Nothing here writes or waits. A file that goes away meanwhile is left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from holdfast.config import PROGRAMS
from holdfast.errors import CheckpointError, ConfigError, DataError
from holdfast.orchestrator.evaluation.statistics import Estimate, summary_in
from holdfast.run.atomic import is_gone
from holdfast.run.choose_run import no_run
from holdfast.run.run_dir import SUMMARY_NAME, RunDir, numbered_paths
from holdfast.run.settings import read_settings, without_secrets
from holdfast.run.timeline import Span, read_timeline
from holdfast.view.follow import ObservedRun, Tail
from holdfast.view.state import Alarm, alarm_of, unix_s_of

_MAX_STEPS = 2**53
"""Up to here every whole number is a float of its own."""
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Columns:
    """The metrics of a run.

    Attributes:
        steps: (N,) optimizer steps, ascending, each once.
        values: by name, (N,); NaN if a step does not have the number.
        damaged: lines that could not be read.
    """

    steps: Numbers
    values: dict[str, Numbers]
    damaged: int

    def curve(self, name: str) -> tuple[Numbers, Numbers]:
        """Return the steps at which a metric is a number, and its values; empty if the run does not have the metric."""
        values = self.values.get(name, np.full(len(self.steps), np.nan))
        known = np.isfinite(values)
        return self.steps[known], values[known]


def read_columns(path: Path) -> Columns:
    """Return the metrics in a `metrics.jsonl`; none if it does not exist. Raise OSError if it cannot be read."""
    rows: dict[float, dict[str, float | None]] = {}
    damaged = 0
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        try:
            row = msgspec.json.decode(line, type=dict[str, float | None])
            rows[_checked_step(row.pop("step"))] = row  # the last line of a step counts: the run went back before it
        except (msgspec.DecodeError, KeyError, ValueError):
            damaged += line.endswith(b"\n")  # else it is being written, or its writer was killed
    steps = sorted(rows)
    names = dict.fromkeys(name for row in rows.values() for name in row)
    values = {name: np.array([rows[step].get(name) for step in steps], dtype=np.float64) for name in names}
    return Columns(np.array(steps), values, damaged)


def _checked_step(step: float | None) -> float:
    if step is None or not 0 <= step < _MAX_STEPS:
        raise ValueError("a line without a step")
    return step


@dataclass(frozen=True)
class AttemptSummary:
    """A start or restart at the Unix time `begin`; `resume_step` is None if the trainer did not get so far."""

    number: int
    resume_step: int | None
    begin: float


@dataclass(frozen=True)
class RunData:
    """All of a run that is shown, except its rollouts.

    Attributes:
        program: `rl`, `sft`, `dpo`, `reward-model`, or `evaluate`.
        status: as `monitor` says it.
        max_steps: of the newest attempt; None if not known.
        starts: by attempt and process, the Unix times of its first word and of the end of its start.
        settings: of the newest attempt, by file, without secrets.
        estimates: version (None for `evaluate`), environment, number of tasks, name and value; by version.
        notes: files that could not be read, and other remarks.
    """

    run_dir: RunDir
    name: str
    program: str
    status: str
    max_steps: int | None
    metrics: Columns
    attempts: list[AttemptSummary]
    alarms: list[Alarm]
    starts: dict[tuple[int, str], tuple[float, float]]
    spans: list[Span]
    settings: dict[str, dict[str, Any]]
    estimates: list[tuple[int | None, str, int, str, Estimate]]
    notes: list[str]

    @property
    def last_step(self) -> int:
        """The last step with metrics; 0 without."""
        return int(self.metrics.steps[-1]) if len(self.metrics.steps) else 0

    @property
    def later_attempts(self) -> list[AttemptSummary]:
        return [attempt for attempt in self.attempts if attempt.number > 1]


def read_run(path: Path) -> RunData:
    """Return what is there of the run in `path`. Raise ConfigError if there is none; OSError if something cannot be
    read."""
    run_dir = RunDir(path)
    is_evaluation = (path / SUMMARY_NAME).is_file() or (path / "evaluation.json").is_file()
    if not (run_dir.holds_run() or run_dir.metrics.is_file() or is_evaluation):
        raise no_run(path)
    notes: list[str] = []
    newest = run_dir.configs(run_dir.next_attempt() - 1)
    settings = dict(_read_settings(newest if newest.is_dir() else path / "config", notes))
    metrics = read_columns(run_dir.metrics)
    if metrics.damaged:
        notes.append(f"{metrics.damaged} lines of metrics.jsonl could not be read and are left out")
    program = next((name for name in PROGRAMS if name in settings), "rl" if "trainer" in settings else "run")
    if is_evaluation and not run_dir.metrics.is_file():
        program = "evaluate"
    elif not len(metrics.steps):
        notes.append("no step is done, so there are no curves")
    observed = ObservedRun(run_dir, run_dir.path.name)
    observed.look()
    ended = observed.state.ended or {}
    if observed.status == "failed":
        lines = str(ended.get("error") or "").strip().splitlines()
        error = f": {lines[0]}" if lines else ""
        notes.append(f"attempt {observed.state.attempt} failed with exit code {ended.get('exit_code')}{error}")
    has_ended = program == "evaluate" and (path / SUMMARY_NAME).is_file()
    events = [(number, event) for number, log in run_dir.logged("events*.jsonl") for event in Tail(log)]
    spans = read_timeline(run_dir)
    return RunData(
        run_dir,
        name=run_dir.path.name,
        program=program,
        status="finished" if has_ended else observed.status,
        max_steps=observed.state.max_steps,
        metrics=metrics,
        attempts=_attempts(events, spans, notes),
        alarms=sorted(observed.state.alarms, key=lambda alarm: alarm.unix_s),
        starts=_starts(events, spans),
        spans=spans,
        settings=settings,
        estimates=list(_read_estimates(run_dir, notes)),
        notes=notes,
    )


def _read_settings(directory: Path, notes: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(directory.glob("*.toml")):
        try:
            yield path.stem, without_secrets(read_settings(path))
        except (CheckpointError, ConfigError, OSError, ValueError) as error:
            notes.append(f"settings are left out: {error}")


Events = list[tuple[int, dict[str, Any]]]


def _attempts(events: Events, spans: list[Span], notes: list[str]) -> list[AttemptSummary]:
    begins: dict[int, float] = {}
    times = [(number, unix_s_of(event)) for number, event in events] + [(span.attempt, span.begin) for span in spans]
    for number, time in times:
        begins[number] = min(time, begins.get(number, time))
    # Reversed: the trainer's first start in an attempt counts.
    steps = {span.attempt: span.step for span in reversed(spans) if (span.process, span.name) == ("trainer", "start")}
    if begins and (first := min(begins)) > 1:
        notes.append(f"attempts before {first} are not shown: their logs were removed (keep_attempts)")
    begin_of_run = {1: 0}  # also if the trainer of the first attempt did not get as far as its start
    return [AttemptSummary(number, (begin_of_run | steps).get(number), begins[number]) for number in sorted(begins)]


def _starts(events: Events, spans: list[Span]) -> dict[tuple[int, str], tuple[float, float]]:
    """Return when processes began, and when their start was over: at the first span, at `ready`, or the last word."""
    begun = {(span.attempt, span.process): span.begin for span in reversed(spans)}
    words: dict[tuple[int, str], list[tuple[float, str]]] = {}
    for number, event in events:
        if alarm_of(event) is None and event.get("process") not in (None, "", "launcher"):
            word = (unix_s_of(event), str(event.get("phase")))
            words.setdefault((number, str(event.get("process"))), []).append(word)
    starts = {}
    for place, said in words.items():
        ready = next((time for time, phase in said if phase == "ready"), said[-1][0])
        starts[place] = (said[0][0], begun.get(place, ready))
    return starts


def _read_estimates(run_dir: RunDir, notes: list[str]) -> Iterator[tuple[int | None, str, int, str, Estimate]]:
    places: list[tuple[int | None, Path]] = [(None, run_dir.path)]
    paths = (path for path in numbered_paths(run_dir.evaluations) if path.name.startswith("step_"))
    places += [(int(path.name.removeprefix("step_")), path) for path in paths]
    for version, path in places:
        if not (path / SUMMARY_NAME).is_file():
            continue
        try:
            summary = summary_in(path)
        except (DataError, OSError) as error:
            if not is_gone(path):  # else a resume has just set it aside
                notes.append(f"an evaluation is left out: {error}")
            continue
        for environment, found in summary.environments.items():
            for name, estimate in found.estimates.items():
                yield version, environment, found.num_tasks, name, estimate
