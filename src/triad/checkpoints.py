"""What lies in a directory of checkpoints: kinds, states, and which ones retention may remove.

Knows names, manifests and sizes; what tensors are inside is the trainer's business.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

from triad import manifest
from triad.config.base import CkptConfig
from triad.durable import TEMPORARY_PREFIX
from triad.errors import CheckpointError
from triad.manifest import MANIFEST_NAME, Manifest

TRAINER_DIR = "trainer"
ORCHESTRATOR_DIR = "orchestrator"
_STEP = re.compile(r"step_(\d+)")
_LOWER_IS_BETTER = re.compile(r"loss|error|perplexity|kl|mismatch")


class Kind(StrEnum):
    """What a directory holds, by the files in it."""

    CHECKPOINT = "checkpoint"
    """A committed step of a run: model, optimizer, counters and random state."""
    DCP = "torch.distributed.checkpoint directory"
    """Sharded tensors without a manifest, written by other programs."""
    WEIGHTS = "weights snapshot"
    """Published weights of a run: Hugging Face files with a manifest."""
    HUGGING_FACE = "Hugging Face directory"
    """config.json with safetensors or pytorch_model.bin."""
    TENSORS = "weights file"
    """One .safetensors, .bin or .pt file."""
    UNKNOWN = "nothing known"
    """None of these."""


def kind_of(path: Path) -> Kind:
    """Tell what `path` holds from the names of its files alone."""
    if path.is_file():
        return Kind.TENSORS if path.suffix in (".safetensors", ".bin", ".pt") else Kind.UNKNOWN
    if not path.is_dir():
        return Kind.UNKNOWN
    if (path / TRAINER_DIR / ".metadata").exists():
        return Kind.CHECKPOINT
    if (path / ".metadata").exists():
        return Kind.DCP
    has_weights = any(any(path.glob(pattern)) for pattern in ("*.safetensors", "pytorch_model*.bin"))
    if has_weights and (path / "config.json").exists():
        return Kind.WEIGHTS if (path / MANIFEST_NAME).exists() else Kind.HUGGING_FACE
    if (path / MANIFEST_NAME).exists():
        return Kind.CHECKPOINT
    return Kind.UNKNOWN


@dataclass(frozen=True)
class Entry:
    """One step in a directory of checkpoints.

    Attributes:
        status: `committed`: it has a valid manifest (its files may still be damaged: see `manifest.verify`);
            `damaged`: its manifest is missing or wrong; `torn`: a save that never committed.
        manifest: None unless committed.
        reason: why it is not committed.
        size_bytes: of all files that are there.
    """

    step: int
    path: Path
    status: Literal["committed", "damaged", "torn"]
    manifest: Manifest | None
    reason: str
    size_bytes: int


def list_entries(directory: Path) -> list[Entry]:
    """Return what lies in a directory of checkpoints, ascending by step. Manifests are read, data is not."""
    if not directory.is_dir():
        return []
    return sorted(
        (entry for path in directory.iterdir() if (entry := _entry(path)) is not None),
        key=lambda entry: (entry.step, entry.path.name),
    )


def _entry(path: Path) -> Entry | None:
    is_torn = path.name.startswith(TEMPORARY_PREFIX)
    match = _STEP.match(path.name.removeprefix(TEMPORARY_PREFIX))
    if match is None or not path.is_dir():
        return None
    step, size = int(match[1]), _size_bytes(path)
    if is_torn:
        return Entry(step, path, "torn", None, "the save never committed", size)
    try:
        listing = manifest.read_manifest(path)
    except CheckpointError as error:
        return Entry(step, path, "damaged", None, str(error), size)
    if listing.step != step:
        return Entry(
            step, path, "damaged", None, f"{path / MANIFEST_NAME} is the manifest of step {listing.step}", size
        )
    return Entry(step, path, "committed", listing, "", size)


def _size_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


@dataclass(frozen=True)
class BestMetric:
    """Which metric says what the best checkpoint is, and in which direction."""

    name: str
    lower_is_better: bool

    @classmethod
    def parse(cls, text: str) -> BestMetric:
        """Read `min:NAME`, `max:NAME` or `NAME`."""
        mode, separator, name = text.partition(":")
        if separator and mode in ("min", "max"):
            return cls(name, mode == "min")
        return cls(text, _LOWER_IS_BETTER.search(text) is not None)

    def best(self, saved: Mapping[int, Mapping[str, float]]) -> int | None:
        """Return the step with the best value, the earliest of equals; None where no step has the metric.

        Args:
            saved: step -> metrics. NaN never is the best.
        """
        values = {
            step: metrics[self.name]
            for step, metrics in saved.items()
            if self.name in metrics and metrics[self.name] == metrics[self.name]
        }
        if not values:
            return None
        sign = 1 if self.lower_is_better else -1
        return min(values, key=lambda step: (sign * values[step], step))


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: the newest `keep`, every `keep_interval`-th step, and the best.

    With `keep` unset all stay.
    """

    keep: int | None = None
    keep_interval: int | None = None
    keep_best: BestMetric | None = None

    @classmethod
    def of(cls, config: CkptConfig | None) -> Retention:
        """Return the retention that a configuration asks for."""
        if config is None:
            return cls()
        best = BestMetric.parse(config.keep_best) if config.keep_best else None
        return cls(config.keep, config.keep_interval, best)

    def superseded(self, saved: Mapping[int, Mapping[str, float]], protected: Collection[int] = ()) -> list[int]:
        """Return the steps to remove, ascending.

        Args:
            saved: every committed step with its metrics; damaged and torn ones must not be in it.
            protected: steps in use, such as the one that the run was resumed from.
        """
        if self.keep is None:
            return []
        steps = sorted(saved)
        kept = set(steps[-self.keep :]) | set(protected)
        if self.keep_interval is not None:
            kept |= {step for step in steps if step % self.keep_interval == 0}
        if self.keep_best is not None:
            kept.add(self.keep_best.best(saved) or steps[-1])
        return [step for step in steps if step not in kept]
