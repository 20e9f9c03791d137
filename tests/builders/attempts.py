"""What the processes of an attempt leave: settings, and what they say."""

import json
from pathlib import Path

from holdfast.config.base import Command
from holdfast.config.load import to_toml
from holdfast.run.run_dir import RunDir


def write_settings(run_dir: RunDir, name: str, settings: str | Command, *, attempt: int = 1) -> Path:
    path = run_dir.configs(attempt) / f"{name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(settings if isinstance(settings, str) else to_toml(settings))
    return path


def tell(run_dir: RunDir, process: str, phase: str, *, attempt: int = 1, **fields: object) -> Path:
    """Append an event, behind a line that may be torn; return the file."""
    path = run_dir.logs(attempt) / "events.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.write("\n" + json.dumps({"time": 100.0, "process": process, "phase": phase, **fields}) + "\n")
    return path
