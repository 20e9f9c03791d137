"""`ckpt verify` and `ckpt show`: whether a step is whole, and what it holds."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from holdfast.commands.ckpt.checkpoint_dirs import CheckpointDirs, is_temporary
from holdfast.commands.ckpt.tensor_work import tensor_work
from holdfast.commands.tables import Grid, Report, number, size, working
from holdfast.commands.track.settings import read_settings
from holdfast.shared.errors import CheckpointError, ReadError
from holdfast.shared.files import manifest
from holdfast.shared.files.checkpoints import TRAINER_DIR, kind_of
from holdfast.shared.files.manifest import Manifest, Verification
from holdfast.shared.process.child import heavy_imports

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
            from holdfast.trainer.conversion.reading import describe
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
