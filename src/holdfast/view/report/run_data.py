"""What a report reads of one run: whatever is there, of a run that goes on, was killed, or is over.

Nothing here writes, and nothing waits: a file that goes away meanwhile is one that is not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from holdfast.config import PROGRAMS
from holdfast.errors import NOT_SAVED, CheckpointError, ConfigError, DataError
from holdfast.orchestrator.evaluation.statistics import Summary, summary_in
from holdfast.run.atomic import is_gone
from holdfast.run.run_dir import SUMMARY_NAME, RunDir, numbered_paths
from holdfast.run.settings import read_settings, without_secrets
from holdfast.run.timeline import Span, read_timeline
from holdfast.view.report.columns import Columns, read_columns
from holdfast.view.state import LAUNCHER

_TOLD = ("ALERT", "WARNING")
_MAX_CHECKPOINTS = 100


@dataclass(frozen=True)
class AttemptSummary:
    """One start or restart of a run.

    Attributes:
        number: from 1.
        resume_step: the step that it goes on behind.
        begin: Unix time of the first thing that is known of it; None where nothing is.
    """

    number: int
    resume_step: int
    begin: float | None


@dataclass(frozen=True)
class Event:
    """A line of `events.jsonl`."""

    attempt: int
    time: float
    process: str
    phase: str
    step: int | None
    exit_code: int | None = None
    error: str | None = None

    @property
    def is_alarm(self) -> bool:
        """Whether it is an alert or a warning."""
        return self.phase.startswith(_TOLD)


@dataclass(frozen=True)
class CheckpointLine:
    """A line of the table of checkpoints; `saved` is Unix time."""

    step: int
    status: str
    size_bytes: int
    saved: float | None


@dataclass(frozen=True)
class RunData:
    """All of a run that is shown, but for its rollouts.

    Attributes:
        name: of its directory.
        program: what it is a run of: `rl`, `sft`, `dpo`, `reward-model`, `evaluate`.
        max_steps: that its newest attempt goes to; None where that is not known.
        settings: of the newest attempt, by file.
        summaries: of evaluated versions; those of a run of `evaluate` alone are of version None.
        failure: how the newest attempt failed, in a line; empty where it did not.
        notes: what could not be read, and what else is to be said.
    """

    run_dir: RunDir
    name: str
    program: str
    is_under_way: bool
    max_steps: int | None
    metrics: Columns
    attempts: list[AttemptSummary] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    settings_text: dict[str, str] = field(default_factory=dict)
    summaries: dict[int | None, Summary] = field(default_factory=dict)
    checkpoints: list[CheckpointLine] = field(default_factory=list)
    num_checkpoints: int = 0
    failure: str = ""
    was_stopped: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        """The last step with metrics; 0 without."""
        return int(self.metrics.steps[-1]) if len(self.metrics.steps) else 0

    @property
    def told(self) -> list[Event]:
        """Alerts and warnings, in their order."""
        return [event for event in self.events if event.is_alarm]

    @property
    def later_attempts(self) -> list[AttemptSummary]:
        """Every attempt but the first."""
        return [attempt for attempt in self.attempts if attempt.number > 1]

    @property
    def state(self) -> str:
        """What has become of the run, in words."""
        if self.program == "evaluate":
            return "finished" if self.summaries else "not finished"
        if self.is_under_way:
            return "going on"
        if self.failure:
            return "failed"
        if self.max_steps is not None and self.last_step >= self.max_steps:
            return "finished"
        if not self.was_stopped:
            return "not going on"  # its launcher was killed
        saved = [one.step for one in self.checkpoints if one.status == "committed"]
        is_saved = "saved" if max(saved, default=0) >= self.last_step else "not saved"
        return f"stopped at {self.last_step} of {self.max_steps}, {is_saved if self.last_step else 'nothing trained'}"


def read_run(path: Path) -> RunData:
    """Return what is there of the run in `path`.

    Raises:
        ConfigError: there is none.
        OSError: something cannot be read.
    """
    run_dir = RunDir(path)
    has_summary = (path / SUMMARY_NAME).is_file() or (path / "evaluation.json").is_file()
    if not (run_dir.holds_run() or run_dir.metrics.is_file() or has_summary):
        raise ConfigError(f"{path} holds no run (no run.json, from {Path.cwd()}): name the output directory of one")
    notes: list[str] = []
    newest = run_dir.configs(run_dir.next_attempt() - 1)
    settings, texts = _read_settings(newest if newest.is_dir() else path / "config", notes)
    metrics = read_columns(run_dir.metrics)
    if metrics.damaged:
        notes.append(f"{metrics.damaged} lines of metrics.jsonl could not be read and are left out")
    program = _program_of(settings, is_evaluation=has_summary and not run_dir.metrics.is_file())
    events, spans = _read_events(run_dir), read_timeline(run_dir)
    is_under_way = run_dir.is_under_way()
    ended = _end_in(events, run_dir.next_attempt() - 1)
    failure = "" if is_under_way else _failure_of(ended)
    if failure:
        notes.append(failure)
    if program != "evaluate" and not len(metrics.steps):
        notes.append("no step is done, so there are no curves")
    entries = run_dir.entries()
    shown = entries[-_MAX_CHECKPOINTS:]
    trainer = settings.get("trainer") or settings.get(program) or {}
    return RunData(
        run_dir,
        name=run_dir.path.name,
        program=program,
        is_under_way=is_under_way,
        max_steps=trainer.get("max_steps"),
        metrics=metrics,
        attempts=_read_attempts(run_dir, events, spans, notes),
        events=events,
        spans=spans,
        settings=settings,
        settings_text=texts,
        summaries=_read_summaries(run_dir, notes),
        checkpoints=[
            CheckpointLine(
                one.step, one.status, size_bytes, one.manifest.created_unix_s if one.manifest is not None else None
            )
            for one, size_bytes in [(one, one.size_bytes) for one in shown]
            if not is_gone(one.path)  # asked last: a removed one has no size
        ],
        num_checkpoints=len(entries),
        failure=failure,
        was_stopped=ended is not None and _is_stop(ended.exit_code),
        notes=notes,
    )


def _program_of(settings: dict[str, dict[str, Any]], *, is_evaluation: bool) -> str:
    if is_evaluation:
        return "evaluate"
    if "trainer" in settings:
        return "rl"
    return next((name for name in PROGRAMS if name in settings), "run")


def _read_settings(directory: Path, notes: list[str]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    settings: dict[str, dict[str, Any]] = {}
    texts: dict[str, str] = {}
    for path in sorted(directory.glob("*.toml")):
        try:
            settings[path.stem] = without_secrets(read_settings(path))
            texts[path.name] = tomli_w.dumps(settings[path.stem])
        except (CheckpointError, ConfigError, OSError, ValueError) as error:
            notes.append(f"settings are left out: {error}")
    return settings, texts


def _read_events(run_dir: RunDir) -> list[Event]:
    events: list[Event] = []
    for attempt, path in run_dir.logged("events*.jsonl"):
        try:
            lines = path.read_bytes().splitlines()
        except FileNotFoundError:  # a resume has just removed an old attempt
            continue
        for line in lines:
            try:
                one = msgspec.json.decode(line, type=_EventLine)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            events.append(Event(attempt, one.time, one.process, one.phase, one.step, one.exit_code, one.error))
    return sorted(events, key=lambda event: event.time)


class _EventLine(msgspec.Struct):
    time: float
    process: str
    phase: str
    step: int | None = None
    exit_code: int | None = None
    error: str | None = None


def _end_in(events: list[Event], attempt: int) -> Event | None:
    """Return the last word of the launcher of `attempt`, of several nodes the first one's; None where there is none."""
    ended = (one for one in events if (one.attempt, one.process, one.phase) == (attempt, LAUNCHER, "ended"))
    return next(ended, None)


def _is_stop(exit_code: int | None) -> bool:
    """Whether a run with this exit code was stopped by a signal."""
    return exit_code is not None and (exit_code == NOT_SAVED or exit_code >= 128)


def _failure_of(last: Event | None) -> str:
    """Return how an attempt failed, by the last word of its launcher; else nothing."""
    if last is None or last.exit_code in (None, 0) or _is_stop(last.exit_code):
        return ""
    said = f": {last.error.splitlines()[0]}" if last.error else ""
    return f"attempt {last.attempt} failed with exit code {last.exit_code}{said}"


def _read_attempts(run_dir: RunDir, events: list[Event], spans: list[Span], notes: list[str]) -> list[AttemptSummary]:
    """Return the attempts whose settings are still there."""
    begins: dict[int, float] = {}
    for number, time in [*((one.attempt, one.time) for one in events), *((one.attempt, one.begin) for one in spans)]:
        begins[number] = min(time, begins.get(number, time))
    attempts = [
        AttemptSummary(number, step, begins.get(number))
        for number in range(1, run_dir.next_attempt())
        # In this order: one that goes meanwhile is not there.
        if (step := _resume_step(run_dir.configs(number))) is not None and run_dir.configs(number).is_dir()
    ]
    if attempts and attempts[0].number > 1:
        notes.append(f"{_earlier(attempts[0].number - 1)}: settings were removed (keep_attempts)")
    return attempts


def _earlier(last: int) -> str:
    return "attempt 1 is not shown" if last == 1 else f"attempts 1 to {last} are not shown"


def _resume_step(configs: Path) -> int | None:
    try:
        paths = sorted(configs.glob("*.toml"))
    except FileNotFoundError:
        return None
    for path in paths:
        try:
            step = (read_settings(path).get("ckpt") or {}).get("resume_step")
        except (CheckpointError, ConfigError, OSError, ValueError):
            continue
        if isinstance(step, int):
            return step
    return 0


def _read_summaries(run_dir: RunDir, notes: list[str]) -> dict[int | None, Summary]:
    found: dict[int | None, Summary] = {}
    for version, path in _evaluated(run_dir):
        try:
            found[version] = summary_in(path)
        except (DataError, OSError) as error:
            if not is_gone(path):  # else a resume has just set it aside
                notes.append(f"an evaluation is left out: {error}")
    return found


def _evaluated(run_dir: RunDir) -> Iterator[tuple[int | None, Path]]:
    if (run_dir.path / SUMMARY_NAME).is_file():
        yield None, run_dir.path
    for path in numbered_paths(run_dir.evaluations):
        if path.name.startswith("step_") and (path / SUMMARY_NAME).is_file():
            yield int(path.name.removeprefix("step_")), path


def shown_time(seconds: float | None) -> str:
    """Return a Unix time for people, in UTC."""
    try:
        return "-" if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):  # of a damaged line: there is no such year
        return "-"
