"""The commands of this environment, and what stands in the recipes."""

from __future__ import annotations

import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

RECIPES = Path(__file__).parent / "recipes"


def run(program: str, *words: object) -> str:
    """Run a command of this environment, and return what it printed.

    Raises:
        SystemExit: it failed; with the end of what it printed.
    """
    command = [str(Path(sys.executable).parent / program), *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        end = "\n".join(done.stdout.splitlines()[-20:])
        sys.exit(f"{' '.join(command)} ended with exit code {done.returncode}:\n{end}")
    return done.stdout


def recipe(task: str) -> dict[str, Any]:
    """Return what stands in the file of a task."""
    return tomllib.loads((RECIPES / f"{task}.toml").read_text())


def environment_of(task: str) -> dict[str, Any]:
    """Return id and arguments of the one environment of a task."""
    (section,) = recipe(task)["orchestrator"]["environments"]
    return section


def held_out_environment_of(task: str) -> dict[str, Any]:
    """Return what evaluations play: the environment of the task, or one of its own where tasks are rows of a list."""
    sections = recipe(task).get("eval", {}).get("environments")
    return environment_of(task) if sections is None else sections[0]


def free_port() -> int:
    """Return a port that nobody listens at now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
