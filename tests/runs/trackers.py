"""Runs that trackers are sent, made without training, and what each tracker then has, read by its own library."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.config.view import TrackingConfig
from holdfast.run.run_dir import RunDir
from holdfast.view.sending import take_cursor
from tests.builders.attempts import tell, write_settings
from tests.forking.server import Fork
from tests.forking.trackers import start_tracking
from tests.runs.processes import HANG_S, wait_until

BUILT_IN = ("tensorboard", "wandb", "mlflow", "trackio")
_BLOCK_BYTES = 32 * 1024
Steps = dict[str, list[tuple[int, float]]]
"""Id or directory of a run -> its steps, with the loss of each, as often as they are there."""


class TrackedDirectory:
    """A run directory whose lines are written by the test."""

    def __init__(self, path: Path, home: Path) -> None:
        self.run_dir, self._events = RunDir(path), 0
        self.environment = {
            "WANDB_MODE": "offline", "WANDB_SILENT": "true", "TRACKIO_DIR": str(home / "trackio"),
            "MLFLOW_TRACKING_URI": f"sqlite:///{home / 'mlflow.db'}",
        }  # fmt: skip
        path.mkdir(parents=True, exist_ok=True)
        self.run_dir.create()
        self.settings(1, 'seed = 3\n[optim]\nlr = 0.5\n[data]\nname = "s3://me:hidden-word@store/rows"\n')

    @classmethod
    def of(cls, run_dir: RunDir) -> TrackedDirectory:
        """Return the directory of a run that a command has made."""
        found = cls.__new__(cls)
        found.run_dir, found.environment = run_dir, {}
        return found

    def settings(self, attempt: int, text: str) -> None:
        write_settings(self.run_dir, "sft", text, attempt=attempt)

    def train(self, *steps: int) -> None:
        """Append the lines of steps: a loss that says which step it is, and a value that is no number."""
        with open(self.run_dir.metrics, "a") as file:
            for step in steps:
                line = {"step": step, "loss": float(step), "eval/sort/avg@4": 0.5, "bad": None}
                file.write(f"{json.dumps(line)}\n")

    def go_back(self, step: int) -> None:
        """Replace the lines as a resume does."""
        lines = self.run_dir.metrics.read_text().splitlines(keepends=True)
        other = self.run_dir.metrics.with_name("other")
        other.write_text("".join(line for line in lines if json.loads(line)["step"] <= step))
        other.rename(self.run_dir.metrics)

    def start(self, tracker: str) -> Fork:
        config = TrackingConfig(backends=[tracker], project="tested")
        argv = [str(self.run_dir.path), tracker, config.model_dump_json()]
        return start_tracking(argv, self.run_dir.path / f"{tracker}.log", {**os.environ, **self.environment})

    def sent(self, tracker: str) -> int:
        path = self.run_dir.tracking / f"{tracker}.json"
        return json.loads(path.read_bytes())["step"] if path.exists() else 0

    def wait_for(self, process: Fork, tracker: str, step: int) -> None:
        wait_until(lambda: self.sent(tracker) >= step or process.poll() is not None)
        assert process.poll() is None, (self.run_dir.path / f"{tracker}.log").read_text()

    def end(self, process: Fork, tracker: str) -> None:
        """Say that no further step comes, and wait for the rest to be sent."""
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_S) == 0, (self.run_dir.path / f"{tracker}.log").read_text()

    def steps(self, tracker: str, metric: str = "loss") -> Steps:
        """What a tracker has of the runs of this directory."""
        return _READERS[tracker](self, metric)

    def tables(self, tracker: str) -> list[tuple[int, str]]:
        """Step and text of every table of answers that a tracker has."""
        if tracker == "tensorboard":
            from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

            accumulator = EventAccumulator(str(self.run_dir.path / "tensorboard" / "history_1"))
            accumulator.Reload()
            return [(one.step, one.tensor_proto.string_val[0].decode()) for one in accumulator.Tensors("answers")]
        if tracker == "wandb":
            rows = [
                (
                    path.parent / "files",
                    {".".join(one.nested_key) or one.key: one.value_json for one in record.history.item},
                )
                for path, record in _records(self)
            ]
            kept = [(place, row) for place, row in rows if "answers.path" in row]
            return [(int(row["_step"]), (place / json.loads(row["answers.path"])).read_text()) for place, row in kept]
        folder = self.run_dir.path.parent / "files"
        files = sorted(folder.rglob("step_*.json"))
        return [(int(path.stem.removeprefix("step_")), path.read_text()) for path in files]

    def tell(self, attempt: int, phase: str, *, step: int) -> None:
        self._events += 1
        tell(self.run_dir, "trainer", phase, attempt=attempt, time=100.0 + self._events, step=step)

    def alerts(self, tracker: str) -> list[tuple[str, str]]:
        """Title and text of the alerts that a tracker has, sorted."""
        if tracker == "wandb":
            records = [record.alert for _, record in _records(self) if record.HasField("alert")]
            return sorted((one.title, one.text) for one in records)
        program = (
            "import json, sys; from trackio.sqlite_storage import SQLiteStorage as s; "
            "print(json.dumps([[o['title'], o['text']] for o in s.get_alerts('tested') if sys.argv[1] in o['run']]))"
        )
        return sorted((title, text) for title, text in _of_trackio(self, program, self.run_dir.run_id()))

    def summary(self) -> dict[str, float]:
        """What W&B has that is of no step."""
        return {item.key: json.loads(item.value_json) for _, record in _records(self) for item in record.summary.update}


def note_sent(run_dir: RunDir, tracker: str, step: int) -> None:
    cursor = take_cursor(run_dir, tracker)
    cursor.step = step
    cursor.write(run_dir, tracker)


@contextmanager
def short_directory() -> Iterator[Path]:
    """Make a directory whose name leaves room for that of a socket, as those of tests do not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


def _in_tensorboard(run: TrackedDirectory, metric: str) -> Steps:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Steps = {}
    for directory in sorted((run.run_dir.path / "tensorboard").iterdir()):
        accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0})
        accumulator.Reload()
        found[directory.name] = [(event.step, event.value) for event in accumulator.Scalars(metric)]
    return found


def _records(run: TrackedDirectory) -> Iterator[tuple[Path, Any]]:
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    for path in sorted(run.run_dir.tracking.glob("wandb/offline-run-*/*.wandb")):
        for data in wandb_records(path):
            yield path, Record.FromString(data)


def _in_wandb(run: TrackedDirectory, metric: str) -> Steps:
    found: Steps = {}
    for _, record in _records(run):
        if record.run.run_id:
            found.setdefault(record.run.run_id, [])
        if record.history.item:
            values = {
                item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json)
                for item in record.history.item
            }
            if metric in values:
                found[next(reversed(found))].append((values["_step"], values[metric]))
    return found


def wandb_records(path: Path) -> list[bytes]:
    """Return the records of a `.wandb` file: the log format of LevelDB behind a header of 7 bytes."""
    data, offset = path.read_bytes(), 7
    records, parts = [], b""
    while offset + 7 <= len(data):
        if (left := _BLOCK_BYTES - offset % _BLOCK_BYTES) < 7:
            offset += left
            continue
        _, length, kind = struct.unpack("<IHB", data[offset : offset + 7])
        parts += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(parts)
            parts = b""
    return records


def _in_mlflow(run: TrackedDirectory, metric: str) -> Steps:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=run.environment["MLFLOW_TRACKING_URI"])
    experiment = client.get_experiment_by_name("tested")
    assert experiment is not None
    found: Steps = {}
    for one in client.search_runs([experiment.experiment_id]):
        history = client.get_metric_history(one.info.run_id, metric)
        found[one.data.tags["holdfast.run_id"]] = sorted((metric.step, metric.value) for metric in history)
    own = run.run_dir.run_id()
    return {run_id: steps for run_id, steps in sorted(found.items()) if run_id.startswith(own)}


def _of_trackio(run: TrackedDirectory, program: str, *argv: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", program, *argv], env={**os.environ, **run.environment}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def _in_trackio(run: TrackedDirectory, metric: str) -> Steps:
    program = (
        "import json, sys; from trackio.sqlite_storage import SQLiteStorage as s; p, m = 'tested', sys.argv[1]; "
        "print(json.dumps({n: [(l['step'], l[m]) for l in s.get_logs(p, n) if m in l] for n in s.get_runs(p)}))"
    )
    found: Mapping[str, list[tuple[int, float]]] = _of_trackio(run, program, metric)
    own = run.run_dir.run_id()
    return {
        name: [(step, loss) for step, loss in steps]
        for name, steps in sorted(found.items(), key=lambda item: len(item[0]))  # of another way: a number behind it
        if own in name
    }


_READERS: dict[str, Callable[[TrackedDirectory, str], Steps]] = {
    "tensorboard": _in_tensorboard, "wandb": _in_wandb, "mlflow": _in_mlflow, "trackio": _in_trackio,
}  # fmt: skip
