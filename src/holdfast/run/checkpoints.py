"""The content of a directory of checkpoints: kinds, states, and which steps retention may remove.

Knows names, manifests and sizes; what tensors are inside is the trainer's business.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from holdfast.errors import CheckpointError, ReadError
from holdfast.process.heartbeat import file_size
from holdfast.run import manifest
from holdfast.run.atomic import TEMPORARY_PREFIX, is_gone
from holdfast.run.manifest import MANIFEST_NAME, Manifest, Verification
from holdfast.run.weights import holds_adapter

if TYPE_CHECKING:  # commands that only look at files need no settings
    from holdfast.config.base import CkptConfig

TRAINER_DIR = "trainer"
ORCHESTRATOR_DIR = "orchestrator"
MODEL_DIR = "model"
REFERENCE_NAME = "reference_logprobs.npz"
REFERENCE_MODEL_NAME = "reference.json"
"""The weights that the reference was computed by: a resume computes it again if the other file is damaged."""
# Beside its config.json: the names of the tensors in files, of a model that memory holds in another layout.
NAMES_NAME = "tensor_names.json"
_STEP = re.compile(r"step_(0|[1-9]\d*)")
_TORN_STEP = re.compile(rf"{re.escape(TEMPORARY_PREFIX)}step_(\d+)")
_LOWER_IS_BETTER = re.compile(r"loss|error|perplexity|kl|mismatch")

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_PICKLED_FILES = "pytorch_model*.bin"
_TO_SAFETENSORS = (
    "python -c 'import sys, torch, safetensors.torch as s; [s.save_file({k: v.contiguous().clone() for k, v in "
    'torch.load(f, map_location="cpu").items()}, f.rsplit(".", 1)[0] + ".safetensors") for f in sys.argv[1:]]\''
)


class Kind(StrEnum):
    """The content of a directory, by the files in it."""

    CHECKPOINT = "checkpoint"
    """A committed step of a run: model, optimizer, counters and random state."""
    DCP = "torch.distributed.checkpoint directory"
    """Sharded tensors without a manifest, written by other programs."""
    WEIGHTS = "weights snapshot"
    """Published weights of a run: Hugging Face files with a manifest."""
    HUGGING_FACE = "Hugging Face directory"
    """config.json with safetensors."""
    ADAPTER = "LoRA adapter"
    """adapter_config.json with adapter_model.safetensors, ours or of peft."""
    TENSORS = "weights file"
    """One .safetensors file."""
    PICKLED = "pickle of torch.save"
    """A .bin, .pt, .pth or .ckpt file, or a directory of pytorch_model*.bin without safetensors: never read."""
    AMBIGUOUS = "directory of two kinds at once"
    """Weights files beside the index of sharded tensors."""
    UNKNOWN = "nothing known"
    """None of these."""


def kind_of(path: Path) -> Kind:
    """Return the kind of content of `path`, only by the names of its files."""
    try:
        return _kind_of(path)
    except FileNotFoundError:  # it has gone meanwhile
        return Kind.UNKNOWN


def _kind_of(path: Path) -> Kind:
    if path.is_file():
        if path.suffix in _PICKLES:
            return Kind.PICKLED
        return Kind.TENSORS if path.suffix == ".safetensors" else Kind.UNKNOWN
    if not path.is_dir():
        return Kind.UNKNOWN
    has_weights = any(path.glob("*.safetensors"))
    for index, kind in ((path / TRAINER_DIR / ".metadata", Kind.CHECKPOINT), (path / ".metadata", Kind.DCP)):
        if index.exists():
            return Kind.AMBIGUOUS if has_weights else kind
    if holds_adapter(path):
        return Kind.ADAPTER
    if has_weights and (path / "config.json").exists():
        return Kind.WEIGHTS if (path / MANIFEST_NAME).exists() else Kind.HUGGING_FACE
    # A checkpoint that lost its index: its verification names the missing file.
    if (path / MANIFEST_NAME).exists():
        return Kind.CHECKPOINT
    return Kind.PICKLED if any(path.glob(_PICKLED_FILES)) else Kind.UNKNOWN


@dataclass(frozen=True)
class Entry:
    """One step in a directory of checkpoints.

    Attributes:
        status: `committed`: it has a valid manifest (its files may still be damaged: see `manifest.verify`). `damaged`:
            its manifest is missing or wrong. `unreadable`: its manifest cannot be read, and nobody knows whether it is
            whole. `foreign`: it is of another run. `torn`: a save that never committed.
        manifest: None unless committed or foreign.
        reason: why it is not committed.
    """

    step: int
    path: Path
    status: Literal["committed", "damaged", "unreadable", "foreign", "torn"]
    manifest: Manifest | None
    reason: str

    @property
    def size_bytes(self) -> int:
        """Size of all files that can be looked at; a step may be removed meanwhile."""
        return sum(file_size(Path(place) / name) for place, _, names in os.walk(self.path) for name in names)


def list_entries(directory: Path, run_ids: Collection[str] | None = None) -> list[Entry]:
    """Return the entries of a directory of checkpoints, ascending by step. Manifests are read, data is not. Names other
    than `step_N` and unfinished saves are somebody else's and left out. `run_ids`: the runs whose checkpoints may be
    there (`RunDir.run_ids`); None: all runs."""
    if not directory.is_dir():
        return []
    return sorted(
        (entry for path in directory.iterdir() if (entry := _entry(path, run_ids)) is not None),
        key=lambda entry: (entry.step, entry.path.name),
    )


def _entry(path: Path, run_ids: Collection[str] | None) -> Entry | None:
    if not path.is_dir():
        return None
    # match, not fullmatch: removals and downloads add a random suffix.
    if match := _TORN_STEP.match(path.name):
        return Entry(int(match[1]), path, "torn", None, "the save never committed")
    match = _STEP.fullmatch(path.name)
    if match is None:
        return None
    step = int(match[1])
    try:
        listing = manifest.read_manifest(path)
    except CheckpointError as error:
        # Removed since it was listed: not damaged.
        return None if is_gone(path) else Entry(step, path, "damaged", None, str(error))
    except ReadError as error:
        return Entry(step, path, "unreadable", None, str(error))
    if listing.step != step:
        reason = f"{path / MANIFEST_NAME} is the manifest of step {listing.step}"
        return Entry(step, path, "damaged", None, reason)
    if run_ids is not None and listing.run_id not in run_ids:
        reason = f"{path} is a checkpoint of another run ({listing.run_id}), not of the run in this directory"
        return Entry(step, path, "foreign", listing, reason)
    return Entry(step, path, "committed", listing, "")


def verify_checkpoint(
    directory: Path, *, how: Verification, step: int | None = None, to_resume: bool = False
) -> Manifest:
    """Check that `directory` is a whole checkpoint, and return its manifest.

    Args:
        how: see `manifest.verify`.
        step: the step that it must be of; unset: any.
        to_resume: allow damage to a file that the trainer can compute again.

    Raise CheckpointError for the first file that is missing or damaged, or another kind of directory; ReadError for the
    first file that cannot be read.
    """
    spared = []
    if to_resume and f"{TRAINER_DIR}/{REFERENCE_MODEL_NAME}" in manifest.read_manifest(directory).files:
        spared = [f"{TRAINER_DIR}/{REFERENCE_NAME}"]
    listing = manifest.verify(directory, how=how, step=step, spared=spared)
    if listing.kind != "checkpoint":
        raise CheckpointError(f"{directory} holds {listing.kind}, not a checkpoint")
    return listing


def newest_intact(
    steps: Iterable[int],
    check: Callable[[int], object],
    *,
    say: Callable[[str], None],
    what: str = "checkpoint",
    passing: tuple[type[Exception], ...] = (),
) -> tuple[int | None, list[str]]:
    """Return the newest step that `check` finds no damage in, or None; and what the others lack.

    Args:
        steps: in any order.
        check: raises a CheckpointError for a step that is damaged; whatever else it raises passes.
        say: gets a message for each skipped step.
        what: the name of the steps in messages.
        passing: kinds of CheckpointError that are not damage and pass, too.
    """
    damaged: list[str] = []
    for step in sorted(steps, reverse=True):
        try:
            check(step)
        # First: these are CheckpointErrors, too.
        except passing:
            raise
        except CheckpointError as error:
            say(f"skipping the {what} of step {step}: {error}")
            damaged.append(str(error))
        else:
            return step, damaged
    return None, damaged


def describe_found(path: Path) -> str:
    """Describe the content of `path` in a few words, for errors; runs and directories of checkpoints with steps."""
    kind = kind_of(path)
    if kind is Kind.AMBIGUOUS:
        return f"a {kind} (.metadata beside *.safetensors): move away what is not meant"
    if kind is not Kind.UNKNOWN:
        return f"a {kind}"
    if not path.exists():
        return "nothing: there is no such file or directory"
    if path.is_file():
        return "a file of no known kind"
    for directory, name in ((path / "checkpoints", "run directory"), (path, "directory of checkpoints")):
        if entries := list_entries(directory):
            steps = ", ".join(str(entry.step) for entry in entries if entry.status == "committed")
            return f"a {name} with {f'the steps {steps}' if steps else 'no committed step'}"
    if (path / "run.json").exists():
        return "a run directory without checkpoints"
    return "a directory of no known kind" if any(path.iterdir()) else "an empty directory"


def to_safetensors(path: Path) -> str:
    """Say that `path` is pickled, and the command that writes its tensors into safetensors beside it."""
    files = path if path.is_file() else path / _PICKLED_FILES
    return f"is a pickle, which may hold code and is never loaded. Convert it: {_TO_SAFETENSORS} {files}"


def require_weights(path: Path) -> Kind:
    """Return what kind of weights `path` holds, by the names of its files. Raise CheckpointError, which says what is
    there and what is needed, if there are none."""
    kind = kind_of(path)
    if kind not in (Kind.UNKNOWN, Kind.AMBIGUOUS, Kind.PICKLED):
        return kind
    if kind is Kind.PICKLED:
        raise CheckpointError(f"no weights can be taken from {path} (ckpt.init_from): it {to_safetensors(path)}")
    raise CheckpointError(
        f"no weights can be taken from {path} (ckpt.init_from): it is {describe_found(path)}. Needed: a checkpoint "
        "(OTHER/checkpoints/step_N), a torch.distributed.checkpoint directory, a Hugging Face directory with weights, "
        "or a .safetensors file. A model that is to be used by its name is given as --model.name."
    )


@dataclass(frozen=True)
class BestMetric:
    """The metric that decides which checkpoint is best, and whether lower values are better."""

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
        """Return the step with the best value; the earliest if several are equal; None if no step has the metric.
        `saved`: the metrics of each step. NaN is never best."""
        values = {
            step: metrics[self.name]
            for step, metrics in saved.items()
            if self.name in metrics and metrics[self.name] == metrics[self.name]  # NaN is unequal to itself
        }
        if not values:
            return None
        sign = 1 if self.lower_is_better else -1
        return min(values, key=lambda step: (sign * values[step], step))


@dataclass(frozen=True)
class Retention:
    """Which checkpoints to keep: the newest `keep`, every `keep_interval`-th step, and the best.

    With `keep` unset all are kept."""

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
            saved: every committed step with its metrics; without damaged and torn ones.
            protected: steps in use, such as the step that the run was resumed from.
        """
        if self.keep is None:
            return []
        steps = sorted(saved)
        kept = set(steps[-self.keep :]) | set(protected)
        if self.keep_interval is not None:
            kept |= {step for step in steps if step % self.keep_interval == 0}
        best = self.keep_best.best(saved) if self.keep_best is not None else None
        if best is not None:
            kept.add(best)
        return [step for step in steps if step not in kept]
