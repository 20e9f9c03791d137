"""`ckpt export`, `promote` and `prune`: what writes and removes."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from holdfast.commands.ckpt_dirs import CheckpointDirs, is_temporary, size_of, tensor_work, verified
from holdfast.errors import CheckpointError, ConfigError, ReadError, RunDirError
from holdfast.process.child import heavy_imports
from holdfast.run import atomic
from holdfast.run.checkpoints import BestMetric, Entry, Retention
from holdfast.run.lock import is_directory_locked
from holdfast.view.tables import Grid, Report, size

if TYPE_CHECKING:
    from holdfast.config.base import DType
    from holdfast.trainer.export import Written


def export(
    dirs: CheckpointDirs,
    *,
    step: str,
    to: Path,
    dtype: DType | None,
    max_shard_size: int | None,
    base: str | None,
) -> Report:
    """Write the model of a step as a new Hugging Face directory; the step is verified first."""
    directory = dirs.step_directory(step)
    _refuse_existing(to, "--to")
    verified(directory)
    with tensor_work("reading and writing tensors"):
        with heavy_imports():
            from holdfast.trainer.export import Export, export
        written = export(Export(directory, to.absolute(), dtype, max_shard_size, base))
    return _report(written)


def promote(
    dirs: CheckpointDirs,
    *,
    step: str,
    name: str,
    dtype: DType | None,
    max_shard_size: int | None,
    base: str | None,
) -> Report:
    """Export a step under a name; nothing ever removes it."""
    to = dirs.exports / name
    if to.exists():
        raise CheckpointError(
            f"the export '{name}' exists already: {to}. Choose another --name, or remove it yourself."
        )
    return export(dirs, step=step, to=to, dtype=dtype, max_shard_size=max_shard_size, base=base)


def _refuse_existing(directory: Path, flag: str) -> None:
    if directory.exists():
        raise ConfigError(f"{flag} {directory} exists already; nothing is written over. Name a new directory.")


def _report(written: Written) -> Report:
    count = f"{written.tensors:,} tensors, {written.parameters:,} parameters, {written.dtype}"
    files = f"{size(written.bytes)} in {written.files} safetensors file{'s' if written.files != 1 else ''}"
    return Report(msgspec.to_builtins(written), [f"wrote {written.directory}: {count}, {files}"])


class Removed(msgspec.Struct):
    """One directory that prune removed, or would remove."""

    path: str
    reason: str
    size_bytes: int


def prune(
    dirs: CheckpointDirs, *, keep: int | None, keep_interval: int | None, keep_best: str | None, dry_run: bool
) -> Report:
    """Remove superseded steps, torn saves and torn exports. A run that goes on is refused; the newest step stays.

    A step counts as kept only if it is whole: what stays is verified before anything goes.

    Raises:
        RunDirError: the run goes on.
    """
    if keep is None and (keep_interval is not None or keep_best is not None):
        raise ConfigError("--keep-interval and --keep-best keep steps besides the newest: say how many with --keep.")
    dirs.check()
    retention = Retention(keep, keep_interval, BestMetric.parse(keep_best) if keep_best else None)
    with contextlib.nullcontext() if dry_run else _sole_writer(dirs):
        return _prune(dirs, retention, dry_run=dry_run)


@contextlib.contextmanager
def _sole_writer(dirs: CheckpointDirs) -> Iterator[None]:
    dirs.run_dir.lock()
    if not dirs.checkpoints.is_dir():
        yield
        return
    descriptor = os.open(dirs.checkpoints, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if is_directory_locked(descriptor, take=True):
            raise RunDirError(f"a training loop saves into {dirs.checkpoints}. Wait for it or stop it, then prune.")
        yield
    finally:
        os.close(descriptor)


def _prune(dirs: CheckpointDirs, retention: Retention, *, dry_run: bool) -> Report:
    entries = dirs.entries()
    superseded, problems = _superseded(entries, retention)
    doomed = [entry for entry in entries if entry.status == "torn" or entry.step in superseded]
    torn_exports = [path for path in dirs.export_directories() if is_temporary(path) and not _is_being_written(path)]
    removed = [
        *(Removed(str(entry.path), _why(entry), entry.size_bytes) for entry in doomed),
        *(Removed(str(path), "torn", size_of(path)) for path in torn_exports),
    ]
    if not dry_run:
        for entry in doomed:
            _remove(entry)
        for path in torn_exports:
            shutil.rmtree(path)
    freed = sum(line.size_bytes for line in removed)
    rows = [(Path(line.path).name, line.reason, size(line.size_bytes)) for line in removed]
    verb = "would remove" if dry_run else "removed"
    stay = [entry.step for entry in entries if entry not in doomed]
    document = {
        "dry_run": dry_run,
        "removed": msgspec.to_builtins(removed),
        "freed_bytes": freed,
        "steps": stay,
        "problems": problems,
    }
    left = f"steps that stay: {', '.join(map(str, stay)) or 'none'}"
    parts = [Grid((verb, "why", ">size"), rows)] if rows else []
    return Report(document, [*parts, f"{verb} {len(removed)} directories, {size(freed)}; {left}"], problems)


def _why(entry: Entry) -> str:
    return "torn" if entry.status == "torn" else "superseded"


def _is_being_written(path: Path) -> bool:
    """Whether a process that writes into a directory lives: it holds a lock on it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return is_directory_locked(descriptor)
    finally:
        os.close(descriptor)


def _remove(entry: Entry) -> None:
    if entry.status == "torn":
        shutil.rmtree(entry.path)
    else:
        atomic.remove_directory(entry.path)


def _superseded(entries: list[Entry], retention: Retention) -> tuple[set[int], list[str]]:
    """Return the steps to remove, and what is wrong with steps that would have been kept.

    Damaged and unreadable steps are neither removed nor counted.
    """
    problems = [
        f"step {entry.step} is {entry.status} and stays: {entry.reason}"
        for entry in entries
        if entry.status in ("damaged", "unreadable")
    ]
    whole = {entry.step: entry for entry in entries if entry.status == "committed"}
    checked: set[int] = set()
    while True:
        saved = {step: entry.manifest.metrics for step, entry in whole.items() if entry.manifest}
        superseded = set(retention.superseded(saved))
        unchecked = sorted(whole.keys() - superseded - checked) if superseded else []
        if not unchecked:
            return superseded, problems
        for step in unchecked:
            try:
                verified(whole[step].path)
                checked.add(step)
            except CheckpointError as error:
                problems.append(f"step {step} is damaged and stays: {error}")
                del whole[step]
            except ReadError as error:
                problems.append(f"step {step} is unreadable and stays: {error}")
                del whole[step]
