"""Weight push: brings policy weights from the trainer to the engines, and checks what the engines serve.

A policy version takes three steps. Only the way its bytes travel depends on the transport.

    publish   the trainer writes a version and makes it visible as a whole   `trainer.model.publish`
    stage     an engine reads and checks it, while the old version serves    `inference.weight_files`
    swap      the engine pauses, and its model takes the staged weights      `inference.worker`

The orchestrator waits for a version, and has every engine stage and swap it by one `POST /update_weights`. Then it
reads version and digest back. A lost engine gets its weights again (`push`). Each engine proves once, by the parity
check, that it computes the trainer's log-probabilities with these weights (`check_canary`).

The only transport is a directory of safetensors per version, which trainer and engines both see. It appears by one
rename, with a manifest, so its digest is known before an engine has read it. A second transport is a class here (named
in `orchestrator.main`), one in `inference.weight_files` (named in the worker), and one in the trainer's publisher.
See docs/decisions.md.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from holdfast.errors import CheckpointError, InferenceError, WaitedInVain
from holdfast.orchestrator.client.client import InferenceClient
from holdfast.orchestrator.client.http import Unavailable
from holdfast.orchestrator.client.pool import Engine
from holdfast.orchestrator.tasks import phase
from holdfast.process.heartbeat import Wait
from holdfast.protocol.inference import CANARY_NAME, Canary, GenerateRequest, Owner, UpdateRequest, deviation
from holdfast.run import atomic
from holdfast.run.journal import POLL_S
from holdfast.run.manifest import MANIFEST_NAME, is_committed, read_manifest
from holdfast.run.run_dir import RunDir
from holdfast.run.weights import listed_digest

_log = logging.getLogger("orchestrator")


async def check_canary(client: InferenceClient, engine: Engine, canary: Canary, *, weights_digest: str) -> None:
    """Have an engine compute the canary's log-probabilities with the weights that it is of, and compare.

    Raises:
        Unavailable: it was lost meanwhile.
        InferenceError: it computes something else from the weights that it reports.
    """
    request = GenerateRequest(
        token_ids=canary.token_ids,
        seeds=[0],
        max_tokens=1,
        stop_token_ids=[],
        weights_digest=weights_digest,
        prompt_logprobs=True,
    )
    (choice,) = await client.ask(engine, request)
    found, allowed = deviation(canary, choice.prompt_logprobs or []), canary.allowed_nats
    _log.info("%s: canary differs by %.2g nats from the trainer's (allowed: %s)", engine.url, found, allowed)
    # `not <=` rather than `>`: NaN is refused, too.
    if allowed is not None and not found <= allowed:
        raise InferenceError(
            f"{engine.url} serves the right weights, but computes other log-probabilities from them than the "
            f"trainer: {found:.3g} nats apart on average for a fixed text, allowed are {allowed:.3g}. One of "
            "the two leaves out a detail of the architecture, such as an attention soft cap (try "
            "--trainer.model.attention eager), or has another dtype (--trainer.sampler-dtype), config.json or "
            "a faulty kernel. If the difference is meant, raise --trainer.mismatch-limit."
        )


class PublishedWeights(Protocol):
    """A version that the trainer has published."""

    @property
    def version(self) -> int:
        """The policy version."""
        ...

    @property
    def digest(self) -> str:
        """What an engine must report after loading it."""
        ...

    @property
    def location(self) -> str:
        """What an engine is told to stage: `UpdateRequest.path`."""
        ...

    def was_replaced(self) -> bool:
        """Whether it went away or was published again since it was found: then whoever stages it may fail."""
        ...

    def read_canary(self) -> Canary | None:
        """Return what the trainer computed with it, where it published that.

        Raises:
            CheckpointError: it cannot be read.
        """
        ...


class WeightTransport(Protocol):
    """Finds the versions that the trainer publishes."""

    @property
    def place(self) -> str:
        """Where they are, for people."""
        ...

    def is_published(self, version: int) -> bool:
        """Whether `version` is there whole."""
        ...

    async def wait_for(self, version: int, *, check: Callable[[], None]) -> PublishedWeights:
        """Wait for the trainer to publish `version`, without blocking the event loop.

        Args:
            check: called at each round; may raise.

        Raises:
            WaitedInVain: it did not come in time.
            CheckpointError: it came, and is not what it should be.
        """
        ...


# How often weights may be published again while engines load them.
_REPLACEMENTS = 3


class WeightPusher:
    """Has all engines of a client serve what the trainer publishes, and prove once that they compute with it.

    A version of the attempt before may have no canary; then they prove it with the first one that has.

    Args:
        client: of the engines, which the run owns from the first push on.
        transport: by which published weights come to them.
        seq_len: of the longest sessions that the engines take.
    """

    def __init__(self, client: InferenceClient, transport: WeightTransport, *, seq_len: int) -> None:
        self._client = client
        self._transport = transport
        self._seq_len = seq_len
        self._serving: PublishedWeights | None = None
        self._proven: set[Engine] = set()

    async def wait_for(self, version: int, *, check: Callable[[], None]) -> PublishedWeights:
        """Wait until the trainer has published `version`; `check` is called meanwhile and may raise.

        Raises:
            WaitedInVain: it did not come in time.
            CheckpointError: it came, and is not what it should be.
        """
        if self._serving is not None and self._serving.version == version:
            return self._serving
        return await self._transport.wait_for(version, check=check)

    async def serve(self, weights: PublishedWeights, *, check: Callable[[], None]) -> PublishedWeights:
        """Make all engines that are there serve `weights`, and return what they serve; the others get it as they come.

        Raises:
            InferenceError: an engine refused them, belongs to another run, reports another version or digest, or
                computes something else with them; or none was there for too long.
        """
        for _ in range(_REPLACEMENTS):
            try:
                # Also what serves already: an engine may have been restarted since.
                await self._push_to_all(weights)
                break
            except InferenceError:
                # Only a version that the trainer published anew meanwhile is worth another try.
                if not weights.was_replaced():
                    raise
                _log.warning("%s was published again while it was loaded; loading it again", weights.location)
                weights = await self._transport.wait_for(weights.version, check=check)
        else:
            raise InferenceError(f"{weights.location} was published again {_REPLACEMENTS} times while it was loaded")
        self._serving = weights
        return weights

    async def _push_to_all(self, weights: PublishedWeights) -> None:
        owner = await self._client.lease.claim()
        pool = self._client.pool

        async def push_to(engine: Engine) -> None:
            await push(engine, weights, owner)
            await self._prove(engine, weights)

        async def restore(engine: Engine) -> None:
            try:
                await push_to(engine)
            except InferenceError as error:
                # They are gone once the trainer has gone on, and the next version will be asked for.
                if weights.was_replaced() and pool.there():
                    raise Unavailable(f"{weights.location} is not there any more: {error}") from None
                raise

        # Before the push: an engine that comes back during it must get these.
        self._client.expect(version=weights.version, restore=restore)
        with phase("pushing weights and reading them back", version=weights.version):
            await pool.attend(push_to)
            await pool.wait_for_any()

    async def _prove(self, engine: Engine, weights: PublishedWeights) -> None:
        """Have an engine that serves `weights` compute their canary, unless it has proved itself before."""
        if engine in self._proven or (canary := weights.read_canary()) is None:
            return
        # Engines take sessions of `seq_len` tokens, of which they must sample one.
        await check_canary(self._client, engine, canary.head(self._seq_len - 1), weights_digest=weights.digest)
        self._proven.add(engine)


async def push(engine: Engine, weights: PublishedWeights, owner: Owner) -> None:
    """Make an engine serve `weights`, and read version and digest back.

    Raises:
        Unavailable: it was lost meanwhile.
        InferenceError: it refused, or serves something else afterwards.
    """
    served = await engine.served()
    if (served.version, served.digest) != (weights.version, weights.digest):
        boot_id = served.boot_id
        await engine.update_weights(UpdateRequest(weights.location, weights.version, owner))
        served = await engine.served()
        # Before version and digest are looked at: a restart is no refusal.
        if served.boot_id != boot_id:
            raise Unavailable(f"the server was restarted while it was given policy version {weights.version}")
    if served.version != weights.version:
        raise InferenceError(
            f"{engine.url} was given policy version {weights.version} and reports version {served.version}. "
            "Does somebody else push weights to this server?"
        )
    if served.digest != weights.digest:
        raise InferenceError(
            f"{engine.url} loaded version {weights.version} with digest {served.digest}, but {weights.location} "
            f"was published with digest {weights.digest}: the weights changed or were damaged on the way."
        )


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
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
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
        if atomic.is_visible(path):
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
