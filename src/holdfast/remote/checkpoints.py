"""Checkpoints on an object store: `--ckpt.dir s3://bucket/prefix`.

<url>/step_N/...            the files of a checkpoint, as in the run directory
<url>/step_N/manifest.json  put last, removed first: the commit
<url>/weights/step_V/...    weights of versions that resuming an RL run needs, with a manifest of their own
<url>/run/...               who the run is: `run.json`, and how far each tracker has come, `tracking/<tracker>.json`

Objects have no rename, so the manifest is the commit: a step without one does not exist. Steps are
committed on this machine first and copied from there, so a store that fails costs no checkpoint.
"""

import logging
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Literal

from holdfast.errors import CheckpointError, ReadError, RunDirError, StorageError
from holdfast.remote.object_store import ObjectStore
from holdfast.run import atomic, manifest
from holdfast.run.checkpoints import Retention
from holdfast.run.manifest import MANIFEST_NAME, FileEntry, Manifest
from holdfast.run.run_dir import INPUTS_NAME, STEP_NAME, RunDir, older_versions

WEIGHTS_DIR = "weights"
RUN_DIR = "run"
DISCARDED_NAME = "discarded.json"
Kind = Literal["checkpoint", "weights"]
_log = logging.getLogger("holdfast.remote")


class RemoteCheckpoints:
    """The checkpoints of one run below `url`. Every method may raise `StorageError`. Raise ConfigError if the URL
    cannot be used, or its driver is not installed."""

    def __init__(self, url: str) -> None:
        self._store = ObjectStore(url)
        self.url = self._store.url

    def steps(self) -> list[int]:
        """Return the committed steps, ascending; their files may have been damaged since."""
        return [step for step in self._numbers("") if self._store.read(f"step_{step}/{MANIFEST_NAME}") is not None]

    def read_manifest(self, step: int) -> Manifest:
        """Return the manifest of `step`. Raise CheckpointError if the step is not committed or its manifest damaged."""
        return self._committed(f"step_{step}", "checkpoint", step)[0]

    def upload(self, directory: Path, step: int, *, weights: Sequence[Path] = ()) -> bool:
        """Copy a committed checkpoint; return whether there was anything to do.

        A step with the same manifest is not uploaded again. With another manifest, the old step is uncommitted before
        its first file is replaced.

        Args:
            directory: the checkpoint on this machine; checked against its manifest, byte for byte.
            weights: published weights that a resume from it needs; copied first.

        Raise CheckpointError if it is not the intact checkpoint of `step`; nothing is committed then.
        """
        listing = manifest.read_manifest(directory)
        if listing.step != step:
            raise CheckpointError(f"{directory} is the checkpoint of step {listing.step}, not of step {step}")
        # Before the step: once its manifest is there, a resume may look for them.
        for path in weights:
            self._upload(path, f"{WEIGHTS_DIR}/{path.name}", same_files_suffice=True)
        return self._upload(directory, f"step_{step}")

    def write_identity(self, run_dir: RunDir) -> None:
        """Upload the files that identify the run, as they are now: another machine needs them to continue the run."""
        files = {"run.json": _read(run_dir.path / "run.json")}
        inputs = run_dir.noted_inputs()
        found = {INPUTS_NAME: inputs} if inputs is not None else {}
        found |= {f"tracking/{path.name}": path for path in sorted(run_dir.tracking.glob("*.json"))}
        for place, path in found.items():
            try:
                files[place] = _read(path)
            except ReadError as error:  # no step is less whole for that
                _log.warning("not kept at %s: %s", self.url, error)
        for place, data in files.items():
            name = f"{RUN_DIR}/{place}"
            if self._store.read(name) != data:
                self._store.write(name, data)

    def read_identity(self) -> dict[str, bytes]:
        """Return these files, by their paths in a run directory; without `run.json` none."""
        found = {name: self._store.read(f"{RUN_DIR}/{name}") for name in ("run.json", INPUTS_NAME)}
        for name in self._store.names(f"{RUN_DIR}/tracking"):
            found[f"tracking/{name}"] = self._store.read(f"{RUN_DIR}/tracking/{name}")
        return {name: data for name, data in found.items() if data is not None} if found["run.json"] else {}

    def _upload(self, directory: Path, name: str, *, same_files_suffice: bool = False) -> bool:
        data = _read(directory / MANIFEST_NAME)
        files = manifest.decode_manifest(data, str(directory / MANIFEST_NAME)).files
        remote = self._store.read(f"{name}/{MANIFEST_NAME}")
        if remote is not None:
            is_same = remote == data or (same_files_suffice and _files_of(remote) == files)
            if is_same and self._misfit(name, files) is None:
                return False
            # The commit goes before the first file changes: a step is never half old and half new.
            self._remove(f"{name}/{MANIFEST_NAME}")
        self._store.remove_tree(name)
        for file, entry in files.items():
            # Every byte, before it is sent: damage must not take the place of an intact step there.
            manifest.check_file(directory / file, entry)
            self._store.put(directory / file, f"{name}/{file}")
        # Listed again: a store may report success and keep less.
        misfit = self._misfit(name, files)
        if misfit is not None:
            raise StorageError(f"{misfit} after it was written; the store cannot be trusted")
        # The bytes that were checked, so both sides have the same manifest.
        self._store.write(f"{name}/{MANIFEST_NAME}", data)
        return True

    def _misfit(self, name: str, files: dict[str, FileEntry]) -> str | None:
        """Say which file is missing or of another size."""
        sizes = self._store.sizes(name)
        for file, entry in files.items():
            if sizes.get(file) != entry.size_bytes:
                found = f"has {sizes[file]} bytes" if file in sizes else "is missing"
                return f"{self.url}/{name}/{file} {found}, the manifest says {entry.size_bytes}"
        return None

    def download(self, step: int, to: Path, *, before: Callable[[Manifest], object] = lambda _: None) -> None:
        """Copy a step to the directory `to`, verified; on failure `to` stays as before. `before`: called once the
        download is whole, before it takes the place of `to`. Raise CheckpointError if the step is not there or damaged,
        naming the file; RunDirError if `to` cannot be written, which is not a fault of the step."""
        self._download(f"step_{step}", "checkpoint", step, to, before)

    def download_weights(self, version: int, to: Path) -> bool:
        """Copy the weights of a version to `to`; return whether they are there. Raise CheckpointError if they are
        damaged, naming the file."""
        name = f"{WEIGHTS_DIR}/step_{version}"
        if self._store.read(f"{name}/{MANIFEST_NAME}") is None:
            return False
        self._download(name, "weights", version, to)
        return True

    def _download(
        self, name: str, kind: Kind, step: int, to: Path, before: Callable[[Manifest], object] = lambda _: None
    ) -> None:
        listing, data = self._committed(name, kind, step)
        temporary = atomic.temporary_sibling(to)
        try:
            atomic.make_directory(to.parent)
            temporary.mkdir()
            for file, entry in listing.files.items():
                target = temporary / file
                target.parent.mkdir(parents=True, exist_ok=True)
                if not self._store.get(f"{name}/{file}", target):
                    raise CheckpointError(f"{self.url}/{name}/{file} is missing")
                manifest.check_file(target, entry, where=f"{self.url}/{name}/{file}")
            (temporary / MANIFEST_NAME).write_bytes(data)
            before(listing)
            if to.exists():
                # Only now: until the download is whole, the old directory may be the only copy.
                atomic.remove_directory(to)
            atomic.publish_directory(temporary, to)
        except OSError as error:
            raise RunDirError(f"{to} cannot be written: {error}. Nothing is wrong with {self.url}.") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _committed(self, name: str, kind: Kind, step: int) -> tuple[Manifest, bytes]:
        where = f"{self.url}/{name}/{MANIFEST_NAME}"
        data = self._store.read(f"{name}/{MANIFEST_NAME}")
        if data is None:
            raise CheckpointError(f"{where} is missing: {name} was never committed, or was removed")
        listing = manifest.decode_manifest(data, where)
        if (listing.kind, listing.step) != (kind, step):
            raise CheckpointError(f"{where} is the manifest of {listing.kind} {listing.step}: files were mixed up")
        return listing, data

    def remove(self, step: int) -> None:
        """Remove a step: first the commit, then the rest."""
        self._remove_directory(f"step_{step}")

    def _remove_directory(self, name: str) -> None:
        # The commit first: a removal that is cut off leaves a step that does not exist.
        self._remove(f"{name}/{MANIFEST_NAME}")
        self._store.remove_tree(name)

    def _remove(self, name: str) -> None:
        self._store.remove(name)
        if self._store.read(name) is not None:
            raise StorageError(f"{self.url}/{name} is still there after it was removed; the store cannot be trusted")

    def clear_leftovers(self) -> list[str]:
        """Remove what interrupted uploads and removals left; return the files."""
        removed = []
        for parent in ("", f"{WEIGHTS_DIR}/"):
            for number in self._numbers(parent):
                name = f"{parent}step_{number}"
                marks = (MANIFEST_NAME, DISCARDED_NAME)
                if all(self._store.read(f"{name}/{mark}") is None for mark in marks):
                    removed += self._store.remove_tree(name)
        try:
            for begin in ("step_", f"{WEIGHTS_DIR}/step_"):  # others may be of a run below this one's
                self._store.remove_parts(begin)
        except StorageError as error:  # many keys may read, write and remove, but not this
            _log.warning("parts of unfinished uploads may be left: %s", error)
        return removed

    def set_aside_after(self, step: int) -> list[int]:
        """Make later steps not exist, as a resume from `step` rewrites them; return which. Their files stay until the
        same step is uploaded again, with the manifest as `discarded.json`."""
        later = []
        for number in reversed(self._numbers("")):
            if number > step and (data := self._store.read(f"step_{number}/{MANIFEST_NAME}")) is not None:
                # Written before the commit goes: else clear_leftovers would take its files for leftovers.
                self._store.write(f"step_{number}/{DISCARDED_NAME}", data)
                self._remove(f"step_{number}/{MANIFEST_NAME}")
                later.append(number)
        return sorted(later)

    def apply_retention(
        self, retention: Retention, *, protected: Collection[int] = (), older_weights: int = 0
    ) -> list[int]:
        """Remove the steps that are superseded, and weights that no step needs; return the steps.

        Args:
            protected: steps to keep whatever `retention` says.
            older_weights: how many earlier versions of weights a step needs; 0: leave all weights.
        """
        saved = {}
        for step in self.steps():
            try:
                saved[step] = self.read_manifest(step).metrics
            # Before its base class: an unreachable store is not a damaged manifest.
            except StorageError:
                raise
            except CheckpointError as error:
                _log.warning("left alone: %s", error)
                # Nobody knows which batches it needs, and somebody may mend it.
                protected = {*protected, step}
        superseded = retention.superseded(saved, protected)
        for step in superseded:
            self.remove(step)
        kept = (set(saved) | set(protected)) - set(superseded)
        needed = {version for step in kept for version in (*older_versions(step, older_weights), step)}
        if older_weights and kept:
            for version in self._numbers(f"{WEIGHTS_DIR}/"):
                # Later weights may belong to an interrupted upload that is repeated.
                if version not in needed and version < max(kept):
                    self._remove_directory(f"{WEIGHTS_DIR}/step_{version}")
        return superseded

    def abort(self) -> None:
        """Make the call in progress, and all later ones, fail now. For other threads."""
        self._store.abort()

    def _numbers(self, parent: str) -> list[int]:
        matches = (STEP_NAME.match(name) for name in self._store.names(parent.rstrip("/")))
        return sorted(int(match[1]) for match in matches if match)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ReadError.of(path, error) from error


def _files_of(data: bytes) -> dict[str, FileEntry] | None:
    try:
        return manifest.decode_manifest(data, MANIFEST_NAME).files
    except CheckpointError:
        return None
