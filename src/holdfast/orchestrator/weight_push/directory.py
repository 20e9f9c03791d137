"""The transport by directory: every version is a directory of safetensors that trainer and engines both see.

A version appears by one rename, with a manifest from which its digest is known before an engine has read it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.shared.errors import CheckpointError, WaitedInVain
from holdfast.shared.files import durable
from holdfast.shared.files.journal import POLL_S
from holdfast.shared.files.manifest import MANIFEST_NAME, is_committed, read_manifest
from holdfast.shared.files.run_dir import RunDir
from holdfast.shared.files.weights_digest import listed_digest
from holdfast.shared.process.heartbeat import Wait
from holdfast.shared.wire.canary import CANARY_NAME, Canary


@dataclass(frozen=True)
class PublishedDirectory:
    """A published version, as a directory.

    Attributes:
        version: policy version.
        path: its directory.
        digest: what an engine must report after loading it.
        written: which file its manifest is, and since when; another one means that it was published again.
    """

    version: int
    path: Path
    digest: str
    written: tuple[int, int]

    @property
    def location(self) -> str:
        """Its directory, which an engine's machine must see by the same name."""
        return str(self.path)

    def was_replaced(self) -> bool:
        """Whether the directory went away or was published again since it was described."""
        try:
            return _written(self.path) != self.written
        except FileNotFoundError:
            return True

    def read_canary(self) -> Canary | None:
        """Return what the trainer computed with it, where it published that: see `holdfast.trainer.programs.rl`.

        Raises:
            CheckpointError: it cannot be read.
        """
        path = self.path / CANARY_NAME
        try:
            return msgspec.json.decode(path.read_bytes(), type=Canary)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise CheckpointError(f"{path} is damaged: {error}") from None


class DirectoryTransport:
    """Finds published versions in the directory of a run; implements `WeightTransport`.

    Args:
        run_dir: of the run.
        timeout_s: give a version up after so long in which nobody got anything done.
    """

    def __init__(self, run_dir: RunDir, *, timeout_s: float) -> None:
        self._run_dir = run_dir
        self._timeout_s = timeout_s

    @property
    def place(self) -> str:
        """The directory of all versions."""
        return str(self._run_dir.weights)

    def is_published(self, version: int) -> bool:
        """Whether `version` is there whole."""
        return is_committed(self._run_dir.weights_of(version))

    async def wait_for(self, version: int, *, check: Callable[[], None]) -> PublishedDirectory:
        """Wait for the trainer to publish `version`: see `wait_for_weights`."""
        return await wait_for_weights(self._run_dir, version, timeout_s=self._timeout_s, check=check)


def _written(path: Path) -> tuple[int, int]:
    """Return inode and time of the manifest: filesystems give the numbers of removed inodes to new ones."""
    status = (path / MANIFEST_NAME).stat()
    return status.st_ino, status.st_mtime_ns


def describe_weights(run_dir: RunDir, version: int) -> PublishedDirectory:
    """Return the published weights of `version`, from their manifest: no tensor is read.

    The content needs no check here: an engine computes its digest from the bytes that it loads.

    Raises:
        CheckpointError: the manifest is missing, damaged, or of something else.
    """
    path = run_dir.weights_of(version)
    manifest = read_manifest(path)
    written = _written(path)
    if manifest.kind != "weights" or manifest.policy_version != version:
        raise CheckpointError(
            f"{path} holds {manifest.kind} of version {manifest.policy_version}, expected weights of version {version}"
        )
    digest = listed_digest(manifest, path)
    if not digest:
        raise CheckpointError(f"{path} lists no *.safetensors file in its manifest")
    return PublishedDirectory(version=version, path=path, digest=digest, written=written)


async def wait_for_weights(
    run_dir: RunDir, version: int, *, timeout_s: float, check: Callable[[], None]
) -> PublishedDirectory:
    """Wait for the trainer to publish `version`, without blocking the event loop.

    Args:
        run_dir: where it appears.
        version: policy version.
        timeout_s: give up after so long in which nobody got anything done.
        check: called at each round; may raise.

    Raises:
        WaitedInVain: it did not come in time.
        CheckpointError: it came, and is not what it should be.
    """
    wait = Wait(timeout_s)
    path = run_dir.weights_of(version)
    while True:
        if durable.is_visible(path):
            try:
                return describe_weights(run_dir, version)
            except (CheckpointError, FileNotFoundError):
                # A resuming trainer may take the directory away to publish it again.
                if path.exists():
                    raise
        check()
        if wait.is_over():
            raise WaitedInVain(
                f"the trainer published no {path} within {timeout_s:g} s (weights_timeout_s). Is it running? "
                "Its log says what it is doing."
            )
        await asyncio.sleep(POLL_S)
