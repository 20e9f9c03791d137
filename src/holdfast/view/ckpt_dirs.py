"""Finds the steps of a run for `ckpt` and `evaluate`, resolves a STEP argument, and exports a step.

`tensor_work` surrounds every call that needs torch: it turns errors into messages and keeps stdout clean. Callers
import torch code inside the function that needs it, so actions without tensors start without torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import CheckpointError, ConfigError, ReadError
from holdfast.process.child import heavy_imports, report_error
from holdfast.run import manifest
from holdfast.run.checkpoints import TRAINER_DIR, Entry, Kind, describe_found, kind_of, list_entries
from holdfast.run.choose_run import no_run, steps_of
from holdfast.run.manifest import Manifest, Verification
from holdfast.run.run_dir import RunDir
from holdfast.view.hub import write_card
from holdfast.view.tables import working

if TYPE_CHECKING:
    from holdfast.config.base import DType
    from holdfast.trainer.export import Written


class CheckpointDirs:
    """The directories that one RUN stands for. A directory that holds `step_N` itself, as a training loop of
    one's own may have it, is taken for the directory of checkpoints."""

    def __init__(self, run: Path) -> None:
        self.run_dir = RunDir(run)
        self.run = run
        is_bare = not (run / "checkpoints").is_dir() and any(run.glob("step_*"))
        self.checkpoints = run if is_bare else run / "checkpoints"

    def check(self) -> None:
        """Raise ConfigError, naming the directory, if it is missing or holds nothing of a run."""
        if not (self.run_dir.holds_run() or self.checkpoints.is_dir()):
            raise no_run(self.run, "neither run.json nor checkpoints")

    def entries(self) -> list[Entry]:
        """Return the steps, ascending; steps with a missing or cut file are `damaged`, others `unreadable`."""
        self.check()
        return [_checked(entry) for entry in list_entries(self.checkpoints, self.run_dir.run_ids())]

    def step_directory(self, text: str) -> Path:
        """Return the directory of one step: a number, `latest` (-1 is the same), or a path. Raise as
        `step_directories`; ConfigError for a span of steps."""
        found = self.step_directories(text)
        if len(found) > 1:
            raise ConfigError(f"'{text}' means {len(found)} steps, and one is needed, such as {found[-1].name}.")
        return found[0]

    def step_directories(self, text: str) -> list[Path]:
        """Return the directories of the steps that STEP means: a step, `all`, the steps of a span such as 3-7, or a
        path. Raise CheckpointError, with the existing steps, if there is none."""
        path = Path(text)
        if steps_of(text, ()) is None or (text.startswith("step_") and path.is_dir()):
            if kind_of(path) != Kind.CHECKPOINT:
                raise CheckpointError(
                    f"'{text}' is neither a step nor the directory of a checkpoint, but {describe_found(path)}. "
                    "Give a number, `latest`, or the path of a checkpoint."
                )
            return [path]
        entries = [entry for entry in self.entries() if entry.status != "torn"]
        there = {entry.step: entry.path for entry in entries}
        own = [entry.step for entry in entries if entry.status != "foreign"]
        wanted = steps_of(text, own if text in ("latest", "-1") else [*there]) or ()
        found = [path for step, path in there.items() if step in wanted]
        if not found:
            said = f"it has {', '.join(map(str, there))}" if there else "no step"
            raise CheckpointError(f"step {text.removeprefix('step_')} is not in {self.checkpoints}: {said}.")
        return found


def _checked(entry: Entry) -> Entry:
    """Compare the sizes of a committed step's files with its manifest."""
    if entry.status != "committed":
        return entry
    try:
        manifest.verify(entry.path, how="size", step=entry.step)
    except CheckpointError as error:
        return dataclasses.replace(entry, status="damaged", reason=str(error))
    except ReadError as error:
        return dataclasses.replace(entry, status="unreadable", reason=str(error))
    return entry


class TensorWorkFailed(Exception):
    """Reading or writing tensors failed, which has been said; the command ends with `exit_code`."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code


@contextlib.contextmanager
def tensor_work(what: str) -> Iterator[None]:
    """Show on a terminal that `what` takes its time, and keep stdout for the report. Raise TensorWorkFailed if the
    block raised, which is reported as in the processes of a run: storage that failed as such."""
    try:
        with working(what), _stdout_on_stderr():
            yield
    except Exception as error:
        raise TensorWorkFailed(report_error(error)) from error


@contextlib.contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    """Send to stderr what libraries print, whatever language they are written in: `--json` is read by scripts."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        ctypes.CDLL(None).fflush(None)  # output of libraries in C may still be in their buffer
        os.dup2(stdout, 1)
        os.close(stdout)


def verified(directory: Path, *, how: Verification = "full") -> Manifest:
    """Check a directory before it is used, and return its manifest. Raise CheckpointError, naming the damaged file."""
    step = directory.name.removeprefix("step_")
    is_step = directory.name.startswith("step_") and step.isdecimal() and (directory / TRAINER_DIR).exists()
    with working(f"verifying {directory}"):
        return manifest.verify(directory, how=how, step=int(step) if is_step else None)


def export(
    dirs: CheckpointDirs,
    *,
    step: str,
    to: Path,
    dtype: DType | None,
    base: str | None,
    form: str = "hf",
    name: str | None = None,
) -> Written:
    """Verify a step, and write its model as the new Hugging Face directory `to`, or its state in another format; with a
    model card if it gets a `name` on a hub."""
    directory = dirs.step_directory(step)
    if to.exists():
        raise ConfigError(f"--to {to} exists already; nothing is written over. Name a new directory.")
    verified(directory)
    with tensor_work("reading and writing tensors"):
        with heavy_imports():
            from holdfast.trainer.export import Export, export
            from holdfast.trainer.exporting import export_state
        add = partial(write_card, step=directory, name=name) if name is not None else None
        request = Export(directory, to.absolute(), dtype, base, add)
        return export(request) if form == "hf" else export_state(request, form)
