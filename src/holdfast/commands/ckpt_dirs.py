"""Finds the steps and exports of a run for `ckpt`, resolves a STEP argument, and has `ckpt verify` and `ckpt show`.

`tensor_work` surrounds every call that needs torch: it turns errors into messages and keeps stdout clean. Callers
import torch code inside the function that needs it. So every action without tensors starts without torch's seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from holdfast.errors import CheckpointError, ConfigError, ReadError, RunDirError
from holdfast.process.child import heavy_imports, report_error
from holdfast.run import manifest
from holdfast.run.atomic import TEMPORARY_PREFIX, is_gone
from holdfast.run.checkpoints import TRAINER_DIR, BestMetric, Entry, Kind, describe_found, kind_of, list_entries
from holdfast.run.manifest import Manifest, Verification
from holdfast.run.run_dir import RunDir
from holdfast.run.settings import read_settings
from holdfast.view.tables import Grid, Report, number, size, working


class CheckpointDirs:
    """The directories that one `--output-dir` stands for.

    A directory that holds `step_N` itself, as a training loop of one's own may have it, is taken for the
    directory of checkpoints.
    """

    def __init__(self, output_dir: Path) -> None:
        self.run_dir = RunDir(output_dir)
        self.output_dir = output_dir
        self.exports = output_dir / "exports"
        is_bare = not (output_dir / "checkpoints").is_dir() and any(output_dir.glob("step_*"))
        self.checkpoints = output_dir if is_bare else output_dir / "checkpoints"

    def check(self) -> None:
        """Refuse a directory that is not there or that holds nothing of a run.

        Raises:
            RunDirError: naming the directory.
        """
        if not self.output_dir.is_dir():
            raise RunDirError(f"there is no directory {self.output_dir}. Name the run with --output-dir.")
        if not (self.run_dir.holds_run() or self.checkpoints.is_dir() or self.exports.is_dir()):
            raise RunDirError(f"{self.output_dir} holds neither a run nor checkpoints. Name the run with --output-dir.")

    def entries(self) -> list[Entry]:
        """Return the steps, ascending; those with a missing or cut file are `damaged`, others `unreadable`."""
        self.check()
        return [_checked(entry) for entry in list_entries(self.checkpoints)]

    def step_directory(self, text: str) -> Path:
        """Return the directory of a step: a number, `latest` (-1 is the same), or a path.

        Raises:
            CheckpointError: it is not there, naming the steps that are.
        """
        if not (text.isdecimal() or text in ("latest", "-1")):
            path = Path(text)
            if kind_of(path) != Kind.CHECKPOINT:
                raise CheckpointError(
                    f"'{text}' is neither a step nor the directory of a checkpoint, but {describe_found(path)}"
                )
            return path
        entries = [entry for entry in self.entries() if entry.status != "torn"]
        wanted = [entry for entry in entries if not text.isdecimal() or entry.step == int(text)]
        if not wanted:
            steps = ", ".join(str(entry.step) for entry in entries)
            raise CheckpointError(
                f"step {text} is not in {self.checkpoints}: {f'it has {steps}' if steps else 'no step'}."
            )
        return wanted[-1].path

    def export_directories(self) -> list[Path]:
        """Return the promoted exports, those being written or torn included, by name."""
        return sorted(path for path in self.exports.glob("*") if path.is_dir()) if self.exports.is_dir() else []

    def metric(self, asked: str | None, saved: Mapping[int, Mapping[str, float]]) -> BestMetric | None:
        """Return the metric that says which step is the best.

        Args:
            asked: `min:NAME`, `max:NAME` or `NAME`; None: `ckpt.keep_best` of the run, else the mean
                reward or the loss where the steps have it.
            saved: step -> metrics.

        Raises:
            ConfigError: no step has the metric that was asked for.
        """
        known = sorted({name for metrics in saved.values() for name in metrics})
        if asked is not None:
            metric = BestMetric.parse(asked)
            if saved and metric.name not in known:
                there = f"They have: {', '.join(known)}." if known else "They have none."
                raise ConfigError(f"--metric {asked}: no step has the metric '{metric.name}'. {there}")
            return metric
        configured = self._configured_best()
        if configured is not None:
            return BestMetric.parse(configured)
        return next((BestMetric.parse(name) for name in ("reward/mean", "loss") if name in known), None)

    def _configured_best(self) -> str | None:
        """Return `ckpt.keep_best` of the newest attempt."""
        directory = self.run_dir.configs(self.run_dir.next_attempt() - 1)
        for path in sorted(directory.glob("*.toml")):
            best = read_settings(path).get("ckpt", {}).get("keep_best")
            if best is not None:
                return str(best)
        return None


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


def is_temporary(path: Path) -> bool:
    """Whether `path` is being written, or was when its writer died."""
    return path.name.startswith(TEMPORARY_PREFIX)


def occupied(output_dir: Path) -> dict[str, int]:
    """Return the bytes that each thing in a run directory occupies, the largest first; what is linked counts once."""
    seen: set[tuple[int, int]] = set()
    sizes: dict[str, int] = {}
    for path in sorted(output_dir.iterdir()):
        with contextlib.suppress(FileNotFoundError):  # temporary files come and go
            sizes[path.name] = size_of(path, seen) if path.is_dir() else path.stat().st_size
    return dict(sorted(((name, size) for name, size in sizes.items() if size), key=lambda item: -item[1]))


def size_of(directory: Path, seen: set[tuple[int, int]] | None = None) -> int:
    """Return the size of all files in a directory that can be looked at, in bytes; they may go away meanwhile.

    Args:
        seen: files that are left out; those of this directory are added.
    """
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                status = (Path(parent) / name).stat()
            except OSError:
                continue
            if seen is not None:
                if (status.st_dev, status.st_ino) in seen:
                    continue
                seen.add((status.st_dev, status.st_ino))
            total += status.st_size
    return total


class TensorWorkFailed(Exception):
    """Reading or writing tensors failed, which has been said; the command ends with `exit_code`."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code


@contextlib.contextmanager
def tensor_work(what: str) -> Iterator[None]:
    """Show on a terminal that `what` takes its time, and keep stdout for the report.

    Raises:
        TensorWorkFailed: the block raised, which is reported as in the processes of a run: storage that failed as such.
    """
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
        ctypes.CDLL(None).fflush(None)  # what libraries in C have printed may still lie in their buffer
        os.dup2(stdout, 1)
        os.close(stdout)


CONFIG = f"{TRAINER_DIR}/config.toml"
PROGRESS = f"{TRAINER_DIR}/progress.json"
_SUMMARY = (
    "max_steps",
    "seed",
    "model.name",
    "model.dtype",
    "data.name",
    "data.batch_size",
    "data.seq_len",
    "loss.type",
    "optim.lr",
    "optim.schedule",
    "parallel.num_ranks",
)


class Verified(msgspec.Struct):
    """What checking one directory found; `reason` names the damaged file."""

    path: str
    ok: bool
    size_bytes: int
    reason: str


def verify(dirs: CheckpointDirs, *, steps: list[str], how: Verification) -> Report:
    """Check steps (all, and all exports, if none is named) against their manifests."""
    if steps:
        directories = [dirs.step_directory(text) for text in steps]
    else:
        directories = [entry.path for entry in dirs.entries() if entry.status != "torn"]
        directories += [path for path in dirs.export_directories() if not is_temporary(path)]
    started = time.monotonic()
    lines = [_verify_one(directory, how) for directory in directories]
    if not steps:
        lines = [line for line in lines if line.ok or not is_gone(Path(line.path))]
    seconds = time.monotonic() - started
    num_bytes, num_ok = sum(line.size_bytes for line in lines), sum(line.ok for line in lines)
    rows = [(Path(line.path).name, "OK" if line.ok else "damaged", size(line.size_bytes)) for line in lines]
    speed = f"{num_bytes / 1e6 / max(seconds, 1e-9):,.0f} MB/s" if how == "full" else "sizes only"
    total = f"{num_ok} of {len(lines)} OK; {size(num_bytes)} in {seconds:.2f} s, {speed}"
    problems = [line.reason for line in lines if not line.ok]
    document = {
        "how": how,
        "directories": msgspec.to_builtins(lines),
        "size_bytes": num_bytes,
        "seconds": seconds,
        "problems": problems,
    }
    nothing = f"no checkpoints in {dirs.checkpoints}"
    parts = [Grid(("directory", "status", ">size"), rows), total] if lines else [nothing]
    return Report(document, parts, problems)


def _verify_one(directory: Path, how: Verification) -> Verified:
    try:
        listing = verified(directory, how=how)
    except (CheckpointError, ReadError) as error:
        return Verified(str(directory), False, 0, str(error))
    return Verified(str(directory), True, sum(entry.size_bytes for entry in listing.files.values()), "")


def verified(directory: Path, *, how: Verification = "full") -> Manifest:
    """Check a directory before it is used, and return its manifest.

    Raises:
        CheckpointError: naming the damaged file.
    """
    step = directory.name.removeprefix("step_")
    # Exports have other names, which say nothing of their step.
    is_step = directory.name.startswith("step_") and step.isdecimal() and (directory / TRAINER_DIR).exists()
    with working(f"verifying {directory}"):
        return manifest.verify(directory, how=how, step=int(step) if is_step else None)


def show(dirs: CheckpointDirs, *, step: str) -> Report:
    """Show manifest, counters, tensors and settings of one step."""
    directory = dirs.step_directory(step)
    listing = verified(directory)
    with tensor_work("reading the index of the tensors"):
        with heavy_imports():
            from holdfast.trainer.export import describe
        groups = describe(directory / TRAINER_DIR)
    settings = read_settings(directory / CONFIG) if (directory / CONFIG).exists() else {}
    document = {
        "path": str(directory),
        "kind": kind_of(directory).value,
        "manifest": msgspec.to_builtins(listing),
        "counters": counters(directory),
        "tensors": msgspec.to_builtins(groups),
        "config": settings,
    }
    rows = [(name, f"{group.tensors:,}", f"{group.elements:,}", size(group.bytes)) for name, group in groups.items()]
    parts: list[Grid | str] = [
        Grid(("checkpoint", ""), _details(directory, listing)),
        "",
        Grid(("tensors", ">number", ">elements", ">size"), rows),
    ]
    summary = [(key, str(value)) for key in _SUMMARY if (value := _lookup(settings, key)) is not None]
    if summary:
        parts += ["", Grid(("setting", ""), summary)]
    return Report(document, parts)


def _details(directory: Path, listing: Manifest) -> list[tuple[str, str]]:
    """Return what there is to say of a manifest, a line each."""
    details = {
        "path": str(directory),
        "kind": kind_of(directory).value,
        "step": str(listing.step),
        "policy version": str(listing.policy_version),
        "run": listing.run_id,
        "program": listing.program,
        "ranks": str(listing.world_size),
        "mesh": _joined(listing.mesh),
        "written": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(listing.created_unix_s)),
        "files": str(len(listing.files)),
        "size": size(sum(entry.size_bytes for entry in listing.files.values())),
        "counters": _joined(
            {name: value for name, value in counters(directory).items() if isinstance(value, int | float)}
        ),
        "metrics": _joined({name: number(value) for name, value in listing.metrics.items()}),
        "libraries": _joined(listing.libraries),
    }
    fingerprints: dict[str, str] = msgspec.to_builtins(listing.fingerprints)
    details |= {f"{name} fingerprint": value for name, value in fingerprints.items()}
    return [(name, value) for name, value in details.items() if value]


def counters(directory: Path) -> dict[str, Any]:
    """Return the counters of a step; a checkpoint of another program may have none."""
    path = directory / PROGRESS
    return json.loads(path.read_bytes()) if path.exists() else {}


def _lookup(settings: dict[str, Any], key: str) -> Any:
    value: Any = settings
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _joined(values: Mapping[str, Any]) -> str:
    return "  ".join(f"{name} {value}" for name, value in values.items())
