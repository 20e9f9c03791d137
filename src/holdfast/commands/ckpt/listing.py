"""`ckpt ls`: what lies in the directories of a run."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from holdfast.commands.ckpt.checkpoint_dirs import CheckpointDirs, is_temporary, occupied, size_of
from holdfast.commands.tables import Grid, Report, age, number, size
from holdfast.shared.errors import CheckpointError, ReadError
from holdfast.shared.files import manifest
from holdfast.shared.files.checkpoints import Entry, kind_of
from holdfast.shared.files.manifest import Manifest


class StepLine(msgspec.Struct):
    """One checkpoint. `metric` and `world_size` are None where the manifest has none."""

    step: int
    status: str
    kind: str
    size_bytes: int
    age_s: float
    metric: float | None
    best: bool
    world_size: int | None
    path: str
    reason: str


class ExportLine(msgspec.Struct):
    """One directory in `exports/`."""

    name: str
    status: str
    step: int | None
    size_bytes: int
    age_s: float
    path: str
    reason: str


def ls(dirs: CheckpointDirs, *, metric: str | None) -> Report:
    """List steps and exports; a damaged or unreadable one is a problem, a torn one is not."""
    entries = dirs.entries()
    saved = {entry.step: entry.manifest.metrics for entry in entries if entry.manifest and entry.status == "committed"}
    chosen = dirs.metric(metric, saved)
    best = chosen.best(saved) if chosen else None
    name = chosen.name if chosen else ""
    steps = [_step_line(entry, name, best) for entry in entries]
    exports = [_export_line(path) for path in dirs.export_directories()]
    bad = ("damaged", "unreadable")
    problems = [f"step {line.step} is {line.status}: {line.reason}" for line in steps if line.status in bad]
    problems += [f"export {line.name} is {line.status}: {line.reason}" for line in exports if line.status in bad]
    sizes = occupied(dirs.output_dir)
    document = {
        "checkpoints": str(dirs.checkpoints),
        "metric": name or None,
        "best": best,
        "steps": msgspec.to_builtins(steps),
        "exports": msgspec.to_builtins(exports),
        "occupied_bytes": sizes,
        "problems": problems,
    }
    parts: list[Grid | str] = [f"no checkpoints in {dirs.checkpoints}"]
    if steps:
        parts = [_step_grid(steps, name or "metric")]
    if any(line.status == "torn" for line in steps):
        parts.append("torn: a save that goes on right now, or that was cut off; it counts for nothing")
    if exports:
        parts += ["", _export_grid(exports)]
    parts.append(
        f"occupied: {size(sum(sizes.values()))}: " + ", ".join(f"{name} {size(sizes[name])}" for name in sizes)
    )
    return Report(document, parts, problems)


def _step_grid(lines: list[StepLine], metric: str) -> Grid:
    rows = [
        (
            str(line.step),
            line.status,
            line.kind,
            size(line.size_bytes),
            age(line.age_s),
            number(line.metric) + (" best" if line.best else ""),
            str(line.world_size or "-"),
        )
        for line in lines
    ]
    columns = (">step", "status", "kind", ">size", ">age", metric, ">ranks")
    return Grid(columns, rows, expendable=("kind", "ranks", "age", "size"))


def _export_grid(lines: list[ExportLine]) -> Grid:
    rows = [
        (
            line.name,
            line.status,
            "-" if line.step is None else str(line.step),
            size(line.size_bytes),
            age(line.age_s),
        )
        for line in lines
    ]
    return Grid(("export", "status", ">step", ">size", ">age"), rows, expendable=("age", "size"))


def _step_line(entry: Entry, metric: str, best: int | None) -> StepLine:
    listing = entry.manifest
    return StepLine(
        step=entry.step,
        status=entry.status,
        kind=kind_of(entry.path).value,
        size_bytes=entry.size_bytes,
        age_s=_age_s(entry.path, listing),
        metric=listing.metrics.get(metric) if listing else None,
        best=entry.status == "committed" and entry.step == best,
        world_size=listing.world_size if listing else None,
        path=str(entry.path),
        reason=entry.reason,
    )


def _export_line(path: Path) -> ExportLine:
    listing, status, reason = None, "committed", ""
    if is_temporary(path):
        status, reason = "torn", "an export that goes on right now, or that was cut off"
    else:
        try:
            listing = manifest.verify(path, how="size")
        except CheckpointError as error:
            status, reason = "damaged", str(error)
        except ReadError as error:
            status, reason = "unreadable", str(error)
    step = listing.step if listing else None
    return ExportLine(path.name, status, step, size_of(path), _age_s(path, listing), str(path), reason)


def _age_s(path: Path, listing: Manifest | None) -> float:
    """Seconds since a directory was written; 0 where the clock went back, or it has gone."""
    try:
        written = listing.created_unix_s if listing else path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
    return max(0.0, time.time() - written)
