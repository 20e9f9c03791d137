"""Where the steps and exports of a run lie, and which step an argument means."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from holdfast.commands.track.settings import read_settings
from holdfast.shared.errors import CheckpointError, ConfigError, ReadError, RunDirError
from holdfast.shared.files import manifest
from holdfast.shared.files.checkpoints import BestMetric, Entry, Kind, describe_found, kind_of, list_entries
from holdfast.shared.files.durable import TEMPORARY_PREFIX
from holdfast.shared.files.run_dir import RunDir


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
        size = size_of(path, seen) if path.is_dir() else path.stat().st_size
        if size:
            sizes[path.name] = size
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


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
