"""TensorBoard: files of events in `tensorboard/` of the run directory."""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from tensorboard.compat.proto.event_pb2 import Event, SessionLog, SourceMetadata
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.record_writer import RecordWriter

from holdfast.process.events import EVENTS_ENV, append
from holdfast.run import atomic
from holdfast.run.run_dir import RunDir
from holdfast.view.trackers.interface import TrackedRun, Tracker

# Protocol buffers define their names when they are loaded.
# pyright: reportAttributeAccessIssue=false


_log = logging.getLogger("holdfast")
_FILE_NAME = re.compile(r"events\.out\.tfevents\.(\d+\.\d+)\.")
_LARGEST = (2 - 2**-23) * 2.0**127  # of float32, in which TensorBoard has every number


class TensorBoard(Tracker):
    """Writes one file of events for each process that ever sent.

    A file begins with the step that it goes on from. Readers then drop later steps of the files before it: those that
    were written when the process before was killed, and not noted yet.
    """

    def begin(self, run: TrackedRun, *, after: int) -> int:
        """Begin a new file behind `after`; the first one, where there is none: they stay on their machine."""
        self._run_dir, self._has_told = RunDir(run.directory), False
        directory = run.directory / "tensorboard" / f"history_{run.history}"
        if not directory.exists():
            after, self.begins_anew = 0, True
        atomic.make_directory(directory)
        self._file = _new_file(directory)
        self._writer = RecordWriter(self._file)
        self._write(Event(file_version="brain.Event:2", source_metadata=SourceMetadata(writer="holdfast")))
        self._write(Event(step=after + 1, session_log=SessionLog(status=SessionLog.START)))
        settings = "".join(f"    {key} = {value}\n" for key, value in run.settings.items())
        about = f"run {run.id}, attempt {run.attempt}\n\n{settings}"
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        text = TensorProto(dtype=DT_STRING, string_val=[about.encode()])
        tag = f"settings/attempt_{run.attempt}"
        value = Summary.Value(tag=tag, metadata=metadata, tensor=text)
        self._write(Event(step=after + 1, summary=Summary(value=[value])))
        return after

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event with all values, but for those that would be infinite there."""
        values = [
            Summary.Value(tag=name, simple_value=value) for name, value in metrics.items() if abs(value) <= _LARGEST
        ]
        self._write(Event(step=step, summary=Summary(value=values)))
        if len(values) < len(metrics) and not self._has_told:
            self._has_told = True
            self._tell(step, *next((name, value) for name, value in metrics.items() if abs(value) > _LARGEST))

    def _tell(self, step: int, name: str, value: float) -> None:
        """Say what is left out, once for each process."""
        said = (
            f"{name} of step {step} is {value:.3g}, more than a float32 holds, and TensorBoard has no other numbers. "
            "Its files do without such values; metrics.jsonl has them"
        )
        _log.warning("tensorboard: %s", said)
        if EVENTS_ENV in os.environ:  # beside a run; of the attempt that goes on now
            append(self._run_dir.newest_logs() / "events.jsonl", "tensorboard", f"WARNING: {said}")

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._writer.write(event.SerializeToString())

    def log_evaluation(self, step: int, metrics: Mapping[str, float], *, is_last: bool) -> bool:
        """Log it at its step, whatever came since."""
        self.log(step, metrics)
        return True

    def flush(self) -> None:
        """Have it on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self.flush()
        self._file.close()


def _new_file(directory: Path) -> BinaryIO:
    # Readers take files in the order of their names: the number is a time, but always after those that are there,
    # whatever the clock of this host says.
    there = [float(match[1]) for path in directory.iterdir() if (match := _FILE_NAME.match(path.name))]
    number = max([time.time(), *(earlier + 1e-3 for earlier in there)])
    return (directory / f"events.out.tfevents.{number:020.6f}.{socket.gethostname()}.{os.getpid()}").open("xb")
