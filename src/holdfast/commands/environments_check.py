"""`environments check`: finds reasons why a run with an environment would not resume exactly, by asking it repeatedly.

The check asks for the same tasks and scores in several ways, here and in child processes, and compares the digests.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from holdfast.chat.tokenizer import load_tokenizer
from holdfast.commands.environments_probe import Findings, Request, probe, solve
from holdfast.config.environments import EnvironmentConfig
from holdfast.errors import ConfigError, EnvironmentFailure
from holdfast.orchestrator.env.interface import Environment
from holdfast.orchestrator.env.registry import load_environment, require_methods
from holdfast.orchestrator.env.solvable import Solvability
from holdfast.process.child import LAUNCHER_ENV, killed_by
from holdfast.process.imports import module_command
from holdfast.view.tables import Grid, Report, working

_KEY = "environments[0]"


def load(settings: EnvironmentConfig) -> Environment:
    """Return the environment that `settings` describe. Raise ConfigError if there is none, its arguments do not fit, or
    it lacks a method; EnvironmentFailure, with exit code 2, if its module or its constructor raised."""
    try:
        environment = load_environment(settings, key=_KEY)
    except EnvironmentFailure as failure:
        failure.exit_code = ConfigError.exit_code
        raise
    require_methods(type(environment), settings.id, key=_KEY)
    return environment


_MOST_PLAYED = 8
"""This many tasks are played, each with every answer."""
_MOST_LINES = 4
_HASH_SEEDS = ("1", "2", "3", "4")
"""Hash seeds of other processes. Two elements of a set have one order or the other: a single process would find in half
of all cases that a task depends on it."""
CHECKS = ("tasks", "prompts", "template", "sessions", "scores", "answers")


def check(settings: EnvironmentConfig, *, num_tasks: int, seed: int, model: str | None, seq_len: int) -> Report:
    """Ask an environment for its tasks, sessions and scores in several ways, and say what differs or fails.

    Args:
        num_tasks: tasks to make; the first eight are played.
        model: a model directory for its tokenizer and chat template; None: one token for each byte, no limits.

    Raise ConfigError or DataError if the environment or the tokenizer cannot be used; EnvironmentFailure if its module
    or its constructor raised.
    """
    if model is not None:
        load_tokenizer(model)  # a wrong name is not a fault of the environment
    request = Request(
        settings.model_dump_json(), num_tasks, min(num_tasks, _MOST_PLAYED), seed=seed, seq_len=seq_len, model=model
    )
    with working("asking the environment") as tell, contextlib.redirect_stdout(sys.stderr):
        first, others = asyncio.run(_ask_here(settings, request))
        tell("scoring the answers of tasks")
        is_playable = bool(first.scores) and not first.failures
        solved = asyncio.run(solve(load(settings), request)) if is_playable else None
        seeds = [seed for seed in _HASH_SEEDS if seed != os.environ.get("PYTHONHASHSEED")]
        for number, hash_seed in enumerate(seeds[:3]):
            tell(f"in another process, {number + 1}")
            # Only the first of them plays, too.
            asked = request if number == 0 else msgspec.structs.replace(request, num_played=0)
            others[f"made in another process (PYTHONHASHSEED={hash_seed})"] = _probe_in_process(asked, hash_seed)
    problems = {name: list(first.failures.get(name, [])) for name in CHECKS}
    for way, found in others.items():
        for name, failures in found.failures.items():
            problems[name] += [f"{way}: {one}" for one in failures if one not in first.failures.get(name, [])]
        problems["tasks"] += _task_differences(first, found, way)
        problems["sessions"] += _differences(first.sessions, found.sessions, "the session of", way)
        problems["scores"] += _differences(first.scores, found.scores, "the score of", way)
    problems["scores"] += [
        f"task {index}: the score of {name} is another when the same sessions are scored again"
        for index, names in first.changed_scores.items()
        for name in names
    ]
    problems["answers"] += solved.lines() if solved else []
    return _report(settings, request, first, problems, solved)


async def _ask_here(settings: EnvironmentConfig, request: Request) -> tuple[Findings, dict[str, Findings]]:
    """Ask one object twice, then a new one, the last task first."""
    environment = load(settings)
    first = await probe(environment, request)
    again = await probe(environment, request)
    backwards = await probe(load(settings), msgspec.structs.replace(request, is_reversed=True))
    return first, {"made again": again, "made by a new object in another order": backwards}


def _probe_in_process(request: Request, hash_seed: str) -> Findings:
    """Ask in another process, and once more in a new one if that was killed from outside."""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, LAUNCHER_ENV: str(os.getpid())}
    with tempfile.TemporaryDirectory(prefix="holdfast-check-") as directory:
        path = Path(directory) / "findings.json"
        command = module_command("holdfast.commands.environments_probe", str(path))

        def ask() -> subprocess.CompletedProcess[bytes]:
            # stdout repeats what this process already printed.
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


def _task_differences(first: Findings, found: Findings, way: str) -> list[str]:
    lines = []
    for index, parts in first.tasks.items():
        other = found.tasks.get(index, parts)
        if names := [name for name in {**parts, **other} if parts.get(name) != other.get(name)]:
            lines.append(f"task {index} is another when it is {way}: {', '.join(names)}")
    return lines


def _differences(
    first: Mapping[int, Mapping[str, str]], other: Mapping[int, Mapping[str, str]], what: str, way: str
) -> list[str]:
    return [
        f"task {index}: {what} {name} is another when it is {way}"
        for index, values in other.items()
        for name, value in values.items()
        if value != first.get(index, {}).get(name, value)
    ]


def _why_not_solved(solved: Solvability | None) -> str:
    if solved is None:
        return "a judge scores, or tasks have no `answer`"
    return "no task's `answer` earns a reward as the whole completion"


def _report(
    settings: EnvironmentConfig,
    request: Request,
    first: Findings,
    problems: Mapping[str, Sequence[str]],
    solved: Solvability | None,
) -> Report:
    different = len({tuple(sorted(parts.items())) for parts in first.tasks.values()})
    num_sessions = sum(map(len, first.sessions.values()))
    counts = {"tasks": 1, "prompts": len(first.lengths), "template": num_sessions, "sessions": num_sessions}
    counts["scores"] = len(first.scores)
    counts["answers"] = solved.num_tried if solved and solved.is_known else 0
    notes = {
        "tasks": f"{len(first.tasks)}, {different} of them different; made again, in another order, in other processes",
        "prompts": f"the longest has {max(first.lengths, default=0)} of {request.seq_len} tokens",
        "template": "writes all that was said",
        "sessions": f"{num_sessions} with scripted answers",
        "scores": f"of {len(first.scores)} tasks: the same every time, finite, one for each session",
        "answers": f"of {counts['answers']:,} {solved.what if solved else 'tasks'}: each earns the full reward",
    }
    if first.num_split:
        notes["template"] = f"rewrites earlier turns: {first.num_split} sessions split into branches"
    if first.is_plain:
        notes["prompts"] = "well formed; whether they fit is not known without a model's template"
    states = {name: "FAILED" if problems[name] else "OK" for name in CHECKS}
    for name in CHECKS:
        if problems[name]:
            notes[name] = ""
        elif name == "template" and request.model is None:
            states[name], notes[name] = "not checked", "needs --model.name"
        elif not counts[name]:
            states[name] = "not checked"
            notes[name] = (
                _why_not_solved(solved) if name == "answers" and not any(problems.values()) else "no task got this far"
            )
    unique = {name: list(dict.fromkeys(problems[name])) for name in CHECKS}
    lines: list[str] = []
    for name, found in unique.items():
        lines += [f"{name}: {line}" for line in found[:_MOST_LINES]]
        if len(found) > _MOST_LINES:
            lines.append(f"{name}: and {len(found) - _MOST_LINES} more")
    document = {
        "id": settings.id,
        "checks": [{"check": name, "state": states[name], "problems": unique[name]} for name in CHECKS],
    }
    rows = [(name, states[name], notes[name]) for name in CHECKS]
    return Report(document, [Grid(("check", "state", "found"), rows), *([""] if lines else [])], problems=lines)
