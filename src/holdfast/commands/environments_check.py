"""`environments check`: finds reasons why a run with an environment would not resume exactly, by asking it repeatedly.

The check asks for the same tasks and scores in several ways, here and in child processes, and compares the digests.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.chat.tokenizer import load_tokenizer
from holdfast.commands.environments_probe import Findings, Request, probe
from holdfast.config.environments import EnvironmentConfig
from holdfast.errors import ConfigError, EnvironmentFailure
from holdfast.orchestrator.env.interface import Environment
from holdfast.orchestrator.env.registry import load_environment, require_methods
from holdfast.process.child import LAUNCHER_ENV, killed_by
from holdfast.process.imports import module_command
from holdfast.view.tables import Grid, Report, working

_KEY = "environments[0]"


def load(settings: EnvironmentConfig) -> Environment:
    """Return the environment that `settings` describe.

    Raises:
        ConfigError: there is none, its arguments do not fit, or it lacks a method.
        EnvironmentFailure: its module or its constructor raised; with exit code 2, since nothing was running.
    """
    try:
        environment = load_environment(settings, key=_KEY)
    except EnvironmentFailure as failure:
        failure.exit_code = ConfigError.exit_code
        raise
    require_methods(type(environment), settings.id, key=_KEY)
    return environment


_MOST_PLAYED = 8
"""Of the tasks so many are played, each with every answer, in four ways."""
_MOST_LINES = 4
_HASH_SEEDS = ("1", "2", "3", "4")
"""Of the processes that are asked. Two elements of a set stand in one order or the other: a single process would see
in half of all cases that a task depends on it."""
_WAYS_HERE = 3
CHECKS = ("tasks", "prompts", "template", "sessions", "scores")


@dataclass(frozen=True)
class Way:
    """One way of asking again."""

    name: str
    found: Findings


def check(settings: EnvironmentConfig, *, num_tasks: int, seed: int, model: str | None, seq_len: int) -> Report:
    """Ask an environment for its tasks, sessions and scores in several ways, and say what differs or fails.

    Args:
        num_tasks: made; the first eight are played.
        model: a model directory for its tokenizer and chat template; None: one token for each byte, no limits.

    Raises:
        ConfigError, DataError: the environment or the tokenizer cannot be used.
        EnvironmentFailure: its module or its constructor raised.
    """
    if model is not None:
        load_tokenizer(model)  # a mistake in the name is none of the environment
    request = Request(
        settings.model_dump_json(), num_tasks, min(num_tasks, _MOST_PLAYED), seed=seed, seq_len=seq_len, model=model
    )
    with working("asking the environment") as tell, contextlib.redirect_stdout(sys.stderr):
        progress = _CheckProgress(tell, _WAYS_HERE + len(_hash_seeds()))
        first, others = asyncio.run(_ask_here(settings, request, progress))
        others += _ask_elsewhere(request, progress)
    problems: dict[str, list[str]] = {name: [] for name in CHECKS}
    for way in [Way("", first), *others]:
        for name, failures in way.found.failures.items():
            known = first.failures.get(name, []) if way.name else []
            problems[name] += [f"{way.name}: {one}" if way.name else one for one in failures if one not in known]
    for way in others:
        problems["tasks"] += _task_differences(first, way)
        problems["sessions"] += _differences(first.sessions, way.found.sessions, "the session of", way)
        problems["scores"] += _differences(first.scores, way.found.scores, "the score of", way)
    problems["scores"] += [
        f"task {index}: the score of {name} is another when the same sessions are scored again"
        for index, names in first.changed_scores.items()
        for name in names
    ]
    return _report(settings, request, first, problems)


@dataclass
class _CheckProgress:
    """Tells a person which way of asking is on, and at which task it is.

    Attributes:
        tell: shows a line.
        num_ways: there are.
    """

    tell: Callable[[str], None]
    num_ways: int
    _way: str = ""
    _number: int = 0

    def begin(self, way: str) -> None:
        """The next way is on."""
        self._number += 1
        self._way = f"{self._number} of {self.num_ways}, {way}"
        self.tell(self._way)

    def at(self, task: str) -> None:
        """It is at a task."""
        self.tell(f"{self._way}, {task}")


async def _ask_here(
    settings: EnvironmentConfig, request: Request, progress: _CheckProgress
) -> tuple[Findings, list[Way]]:
    """Ask in this process: one object twice, then a new one, the last task first."""
    environment = load(settings)
    progress.begin("for the first time")
    first = await probe(environment, request, progress.at)
    progress.begin("again")
    again = Way("made again", await probe(environment, request, progress.at))
    new = load(settings)
    progress.begin("a new object, in another order")
    backwards = await probe(new, msgspec.structs.replace(request, is_reversed=True), progress.at)
    return first, [again, Way("made by a new object in another order", backwards)]


def _hash_seeds() -> list[str]:
    return [seed for seed in _HASH_SEEDS if seed != os.environ.get("PYTHONHASHSEED")][:3]


def _ask_elsewhere(request: Request, progress: _CheckProgress) -> list[Way]:
    """Ask in other processes, with other orders of sets; the first of them plays, too."""
    ways = []
    for number, hash_seed in enumerate(_hash_seeds()):
        progress.begin("in another process")
        one = request if number == 0 else msgspec.structs.replace(request, num_played=0)
        name = f"made in another process (PYTHONHASHSEED={hash_seed})"
        ways.append(Way(name, _probe_in_process(one, hash_seed)))
    return ways


def _probe_in_process(request: Request, hash_seed: str) -> Findings:
    """Ask in another process, and once more in a new one if that was killed from outside."""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, LAUNCHER_ENV: str(os.getpid())}
    with tempfile.TemporaryDirectory(prefix="holdfast-check-") as directory:
        path = Path(directory) / "findings.json"
        command = module_command("holdfast.commands.environments_probe", str(path))

        def ask() -> subprocess.CompletedProcess[bytes]:
            # What it prints, it has said in this one.
            asked, quiet = msgspec.json.encode(request), subprocess.DEVNULL
            return subprocess.run(command, input=asked, env=environment, stdout=quiet, stderr=subprocess.PIPE)

        done = ask()
        if killed_by(done.returncode) is not None:
            done = ask()
        if done.returncode == 0 and path.exists():
            return msgspec.json.decode(path.read_bytes(), type=Findings)
    lines = done.stderr.decode(errors="backslashreplace").strip().splitlines()
    said = lines[-1].removeprefix("error: ") if lines else "it said nothing"
    found = Findings()
    killed = killed_by(done.returncode)
    how = f"was killed by {killed.name} twice" if killed else f"ended with code {done.returncode}"
    found.fail("tasks", f"the process {how}: {said}")
    return found


def _task_differences(first: Findings, way: Way) -> list[str]:
    lines = []
    for index, parts in first.tasks.items():
        other = way.found.tasks.get(index)
        if other is not None and other != parts:
            names = [name for name in {**parts, **other} if parts.get(name) != other.get(name)]
            lines.append(f"task {index} is another when it is {way.name}: {', '.join(names)}")
    return lines


def _differences(
    first: Mapping[int, Mapping[str, str]], other: Mapping[int, Mapping[str, str]], what: str, way: Way
) -> list[str]:
    return [
        f"task {index}: {what} {name} is another when it is {way.name}"
        for index, values in other.items()
        for name, value in values.items()
        if value != first.get(index, {}).get(name, value)
    ]


def _report(
    settings: EnvironmentConfig, request: Request, first: Findings, problems: Mapping[str, Sequence[str]]
) -> Report:
    different = len({tuple(sorted(parts.items())) for parts in first.tasks.values()})
    notes = {
        "tasks": f"{len(first.tasks)}, {different} of them different; made again, in another order, in other processes",
        "prompts": f"the longest has {max(first.lengths, default=0)} of {request.seq_len} tokens",
        "template": f"writes earlier turns anew: {first.num_split} sessions split into branches"
        if first.num_split
        else "writes all that was said",
        "sessions": f"{sum(map(len, first.sessions.values()))} with scripted answers",
        "scores": f"of {len(first.scores)} tasks: the same every time, finite, one for each session",
    }
    states = {name: "FAILED" if problems[name] else "OK" for name in CHECKS}
    if first.is_plain:
        notes["prompts"] = "well formed; whether they fit is not known without a model's template"
    counts = {
        "prompts": len(first.lengths),
        "template": sum(map(len, first.sessions.values())),
        "sessions": sum(map(len, first.sessions.values())),
        "scores": len(first.scores),
    }
    for name, count in counts.items():
        if count == 0 and not problems[name]:
            states[name], notes[name] = "not checked", "no task got this far"
    if request.model is None and not problems["template"]:
        states["template"], notes["template"] = "not checked", "needs --model.name"
    rows = [(name, states[name], "" if problems[name] else notes[name]) for name in CHECKS]
    lines: list[str] = []
    for name in CHECKS:
        shown = list(dict.fromkeys(problems[name]))
        lines += [f"{name}: {line}" for line in shown[:_MOST_LINES]]
        if len(shown) > _MOST_LINES:
            lines.append(f"{name}: and {len(shown) - _MOST_LINES} more")
    document = {
        "id": settings.id,
        "checks": [
            {"check": name, "state": states[name], "problems": list(dict.fromkeys(problems[name]))} for name in CHECKS
        ],
    }
    return Report(document, [Grid(("check", "state", "found"), rows), *([""] if lines else [])], problems=lines)
