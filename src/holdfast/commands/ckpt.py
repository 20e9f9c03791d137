"""The command `ckpt`: parses the command line, runs one action, prints its report and returns an exit code.

`ls` lives here. `commands.ckpt_dirs` has `verify` and `show`; `commands.ckpt_export` has `export`, `promote`
and `prune`. No action imports torch before an action needs tensors.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from holdfast.arguments import Parser, Subcommands
from holdfast.commands.ckpt_dirs import CheckpointDirs, TensorWorkFailed, is_temporary, occupied, show, size_of, verify
from holdfast.commands.ckpt_export import export, promote, prune
from holdfast.errors import CheckpointError, ReadError
from holdfast.run import manifest
from holdfast.run.atomic import is_gone
from holdfast.run.checkpoints import Entry, kind_of
from holdfast.run.manifest import Manifest
from holdfast.view.tables import Grid, Report, age, number, size

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_EPILOG = "STEP is a number, `latest`, or the path of a checkpoint such as OTHER/checkpoints/step_20."


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the arguments; prints help and exits on -h.

    Returns:
        `command` (name of the subcommand), `output_dir`, `json`, and what the subcommand takes.

    Raises:
        ConfigError: an unknown subcommand or flag, with the nearest spelling, or a value that cannot be used.
    """
    return _subcommands().parse(argv)


def _subcommands() -> Subcommands:
    subcommands = Subcommands("ckpt", "Look into the checkpoints of a run.", _EPILOG)
    add = subcommands.add
    _add_looking(add("ls", "List steps and exports."), add("verify", "Check every byte against the manifests."))
    add("show", "Show what one step holds.").add_argument("step", metavar="STEP")
    export = add("export", "Write a step's model as a Hugging Face directory.")
    export.add_argument("step", metavar="STEP")
    export.add_argument("--to", type=Path, required=True, metavar="DIR", help="new directory")
    _add_export(export)
    promote = add("promote", "Export a step to OUTPUT_DIR/exports/NAME, which retention never touches.")
    promote.add_argument("step", metavar="STEP")
    promote.add_argument("--name", type=_name, required=True, help="letters, digits, '.', '_' and '-'")
    _add_export(promote)
    _add_prune(add("prune", "Remove steps by the rules of --ckpt.keep, and what torn saves left."))
    return subcommands


def _add_looking(ls: Parser, verify: Parser) -> None:
    ls.add_argument("--metric", metavar="NAME", help="marks the best: min:val/loss (ckpt.keep_best, reward/mean, loss)")
    verify.add_argument("steps", nargs="*", metavar="STEP", help="all steps and exports if none is named")
    verify.add_argument("--how", choices=("full", "size"), default="full", help="every byte (full), or sizes only")


def _add_export(command: Parser) -> None:
    command.add_argument("--dtype", choices=("float32", "bfloat16"), help="that of the run if unset")
    command.add_argument("--max-shard-size", type=_size, metavar="SIZE", help="such as 4GB or 500MiB (4GiB)")
    command.add_argument("--base", metavar="NAME_OR_DIR", help="weights to merge a LoRA adapter into; unset: it alone")


def _add_prune(prune: Parser) -> None:
    prune.add_argument("--keep", type=_positive, metavar="K", help="keep the newest K; unset: all steps stay")
    prune.add_argument("--keep-interval", type=_positive, metavar="M", help="keep every Mth step besides")
    prune.add_argument("--keep-best", metavar="METRIC", help="keep the best besides, such as max:reward/mean")
    prune.add_argument("--dry-run", action="store_true", help="say what would be removed, and remove nothing")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 0")
    return int(text)


def _name(text: str) -> str:
    if not _NAME.fullmatch(text) or text.startswith("."):
        raise argparse.ArgumentTypeError(
            f"'{text}' is not a name: letters, digits, '.', '_' and '-' are allowed, and no '.' at the start"
        )
    return text


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    size = int(float(match[1]) * unit) if match and unit else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a size such as 4GB, 500MB or 2GiB")
    return size


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
    lines = [_step_line(entry, name, best) for entry in entries]
    steps = [line for line in lines if not is_gone(Path(line.path))]  # what a run has removed is not damaged
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
    return Grid(columns, rows)


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
    return Grid(("export", "status", ">step", ">size", ">age"), rows)


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


_ACTIONS: dict[str, Callable[..., Report]] = {
    "ls": ls,
    "verify": verify,
    "show": show,
    "export": export,
    "promote": promote,
    "prune": prune,
}


def main(argv: list[str]) -> int:
    """Run one subcommand; return 0, 1 when something is wrong with a checkpoint, or a failure's code.

    Raises:
        HoldfastError: a mistake in the command, or something that is missing or damaged.
    """
    arguments = vars(parse(argv))
    action = _ACTIONS[arguments.pop("command")]
    as_json = arguments.pop("json")
    dirs = CheckpointDirs(arguments.pop("output_dir"))
    try:
        report = action(dirs, **arguments)
    except TensorWorkFailed as failure:
        return failure.exit_code
    report.print(as_json=as_json)
    return report.exit_code
