"""One start of a run: from nothing, its own checkpoint, or the checkpoint of another run (a fork), which stays as it
is.

Every attempt writes the settings of its processes, which the next attempt compares with its own.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from holdfast.config.base import Command
from holdfast.config.load import to_toml
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.config.training import TrainingCommand
from holdfast.errors import CheckpointError, ConfigError, RunDirError
from holdfast.launcher.resume.config_diff import compare_settings, describe_stretch
from holdfast.run import atomic, checked
from holdfast.run.checkpoints import TRAINER_DIR, Kind, describe_found, kind_of, list_entries, verify_checkpoint
from holdfast.run.manifest import MANIFEST_NAME, Manifest, Verification, read_manifest, verify
from holdfast.run.run_dir import INPUTS_NAME, RunDir, older_versions
from holdfast.run.settings import read_settings

T = TypeVar("T", bound=TrainingCommand | OrchestratorConfig)
CONFIG_NAME = "config.toml"


@dataclass(frozen=True)
class Fork:
    """A verified checkpoint of another run to start from.

    Attributes:
        directory: OTHER/checkpoints/step_N.
        listing: its manifest.
        weights: published weights of OTHER of the versions just before the step, which batches may need.
        created_unix_s: when OTHER was first started, for the date in chat templates; None if unknown.
    """

    directory: Path
    listing: Manifest
    weights: list[Path]
    created_unix_s: int | None

    @property
    def origin(self) -> dict[str, str | int]:
        """The entry in run.json."""
        return {"run_id": self.listing.run_id, "step": self.listing.step, "path": str(self.directory)}


def find_fork(path: Path, run_dir: RunDir, *, how: Verification, async_level: int = 0) -> Fork:
    """Return the checkpoint at `path`, verified. Raise CheckpointError if it is damaged, or not a checkpoint; the error
    names the flag that fits. Raise ConfigError if it is of this run itself.

    Args:
        run_dir: the run that is to start from it.
        how: see `manifest.verify`.
        async_level: how many versions before the step an RL run needs.
    """
    # Resolved: it may be a link into the run's own directory.
    directory = path.resolve()
    if directory.is_relative_to(run_dir.path.resolve()):
        raise ConfigError(
            f"ckpt.resume_dir = {path} lies in the run's own directory {run_dir.path}. Continue from it with "
            "--ckpt.resume-step N, or fork it into another directory with --output-dir."
        )
    _refuse_other_kinds(path)
    entry = next((entry for entry in list_entries(directory.parent) if entry.path == directory), None)
    try:
        listing = verify_checkpoint(directory, how=how, step=entry.step if entry else None)
    except CheckpointError as error:
        raise CheckpointError(
            f"ckpt.resume_dir = {path}: {error}. {_others(directory)}A damaged checkpoint cannot be forked."
        ) from None
    weights, created = [], None
    if directory.parent.name == "checkpoints":
        other = RunDir(directory.parent.parent)
        with suppress(RunDirError, OSError):
            created = other.created_unix_s()
        for version in older_versions(listing.step, async_level):
            if other.weights_of(version).is_dir():
                weights.append(other.weights_of(version))
            else:
                print(
                    f"{other.weights_of(version)} is no longer there: other weights sample the batch that it would have"
                )
    return Fork(directory, listing, weights, created)


def _refuse_other_kinds(path: Path) -> None:
    kind = kind_of(path)
    if kind is Kind.CHECKPOINT:
        return
    advice = f"--ckpt.init-from {path} starts a run from its weights."
    if kind is Kind.DCP and kind_of(path.parent) is Kind.CHECKPOINT:
        advice = f"The checkpoint is the directory that it lies in: --ckpt.resume-dir {path.parent}."
    elif kind is Kind.UNKNOWN:
        advice = "Give the directory of one step, such as OTHER/checkpoints/step_100."
    raise CheckpointError(
        f"ckpt.resume_dir = {path} is {describe_found(path)}. Needed: a checkpoint of a run "
        f"(OTHER/checkpoints/step_N), which holds optimizer, counters and random state besides the weights. {advice}"
    )


def _others(directory: Path) -> str:
    entries = list_entries(directory.parent)
    steps = [str(entry.step) for entry in entries if entry.status == "committed" and entry.path != directory]
    return f"Other committed steps there: {', '.join(steps)}. " if steps else ""


def copy_fork(fork: Fork, run_dir: RunDir, *, how: Verification) -> None:
    """Put the checkpoint, and the older weights that batches need, into `run_dir`. Raise CheckpointError if the disk is
    full, or weights of the other run are damaged.

    Files are hard-linked if the filesystem can do that, else copied: no process writes into a committed checkpoint.
    Each directory appears under its name by one rename, when it is whole."""
    for weights in fork.weights:
        version = int(weights.name.removeprefix("step_"))
        _bring_directory(weights, run_dir.weights_of(version), verify(weights, how=how, step=version))
    _bring_directory(fork.directory, run_dir.checkpoint(fork.listing.step), fork.listing)


def _bring_directory(source: Path, final: Path, listing: Manifest) -> None:
    temporary = atomic.temporary_sibling(final)
    try:
        atomic.make_directory(final.parent)
        all_linked = True
        for name in (*listing.files, MANIFEST_NAME):
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            all_linked &= atomic.link_or_copy(source / name, temporary / name)
        # Links are the verified bytes; copies are not.
        verify(temporary, how="size" if all_linked else "full", step=listing.step)
        # Its own run may have replaced the step since it was verified.
        if read_manifest(temporary).checksum != listing.checksum:
            raise CheckpointError(f"{source} changed while it was copied to {final}")
        atomic.publish_directory(temporary, final)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"{source} could not be copied to {final}: {error.strerror or error}") from error


@dataclass(frozen=True)
class Attempt:
    """One start of a run.

    Attributes:
        number: 1 for the first start in this directory.
        resume_step: the committed step to continue from; None for a fresh start.
        checkpoint: directory of that step, in this run or the forked one.
        inputs: digests of its inputs beside its settings; empty: not to be noted.
        to_go_on: how the user continues the run after this attempt.
    """

    run_dir: RunDir
    number: int
    resume_step: int | None
    checkpoint: Path | None = None
    fork: Fork | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)
    to_go_on: str = "give the same command again"

    @property
    def start(self) -> str:
        """The place at which the attempt starts."""
        if self.resume_step is None:
            return "from scratch"
        return f"from step {self.resume_step}" + (f" of {self.checkpoint}" if self.fork else "")


def process_name(config: TrainingCommand) -> str:
    """Return the name of the file with the resolved settings of a training program."""
    return "trainer" if config.program == "rl" else config.program


def with_resume(config: T, resume_step: int | None) -> T:
    """Return `config` with the resolved step in place of `latest`, `auto` or another run's checkpoint."""
    config = config.model_copy(deep=True)
    if config.ckpt is not None:
        config.ckpt.resume_step = resume_step
        config.ckpt.resume_dir = None
        # The step has weights of its own.
        if resume_step is not None:
            config.ckpt.init_from = None
    return config


def write_config(attempt: Attempt, name: str, config: Command, *, dry_run: bool, tells: bool = True) -> Path:
    """Write the resolved configuration of one process, print what differs from before if `tells`; return its path."""
    if dry_run and attempt.run_dir.path == Path(os.devnull):
        return attempt.run_dir.path
    directory = attempt.run_dir.path / "configs" / "dry_run" if dry_run else attempt.run_dir.configs(attempt.number)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.toml"
    if attempt.inputs and not dry_run:
        atomic.write_file(directory / INPUTS_NAME, checked.encode(attempt.inputs))
    noted = "".join(f"# {key}: from the environment variable {name}\n" for key, name in config.variables.items())
    atomic.write_file(path, checked.with_first_line(noted + to_toml(config)))
    if attempt.resume_step is not None and tells:
        _say_what_differs(attempt, name, config)
    return path


def _say_what_differs(attempt: Attempt, name: str, config: Command) -> None:
    """Print how `config` differs from the settings of the checkpoint, or else of the last attempt."""
    before, since = attempt.run_dir.configs(attempt.number - 1) / f"{name}.toml", "the last attempt"
    if isinstance(config, TrainingCommand) and attempt.checkpoint is not None:
        saved = attempt.checkpoint / TRAINER_DIR / CONFIG_NAME
        if saved.exists():
            before, since = saved, f"the checkpoint of step {attempt.resume_step}"
    if not before.exists():
        return
    old = read_settings(before)
    for line in compare_settings(old, config).describe(name, since):
        print(line)
    if isinstance(config, TrainingCommand):
        stretched = describe_stretch(old, config, step=attempt.resume_step or 0)
        if stretched is not None:
            print(stretched)


def last_started(run_dir: RunDir, number: int, names: Sequence[str]) -> Path | None:
    """Return the configurations of the newest attempt before `number` that has all, so may have started a process.

    An attempt that was refused before its first step and its first answer does not count."""
    for earlier in range(number - 1, 0, -1):
        directory = run_dir.configs(earlier)
        if all((directory / f"{name}.toml").exists() for name in names) and not was_refused(run_dir, earlier):
            return directory
    return None


def was_refused(run_dir: RunDir, attempt: int) -> bool:
    """Return whether an attempt ended with a refusal before it trained a step or sampled anything."""
    end = end_of(run_dir, attempt)
    return end is not None and end.get("exit_code") == 2 and end.get("trained") == 0 and not end.get("sampled")


def end_of(run_dir: RunDir, attempt: int) -> dict[str, Any] | None:
    """Return the event of the end of an attempt; None if the attempt noted none, such as a killed attempt."""
    try:
        lines = (run_dir.logs(attempt) / "events.jsonl").read_bytes().splitlines()
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        with suppress(ValueError):  # torn by a kill
            if (event := json.loads(line)).get("phase") == "ended":
                return event
    return None
