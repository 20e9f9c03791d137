"""Brings policy weights from the trainer to the engines, and checks what the engines serve.

    publish   the trainer writes `weights/step_N`, and renames it into place   `trainer.model.publish`
    stage     an engine reads and checks it, while the old version serves      `inference.weight_files`
    swap      the engine pauses, and its model takes the staged weights        `inference.worker`

The orchestrator waits for a version, has every engine stage and swap it by one `POST /update_weights`, and reads
version and digest back (`push`). With `weights.transport = "collective"` the trainer offers a version before it writes
the directory, and engines take it from the trainer's memory first (`_transfer`). Engines without it then get the
directory. Each engine proves once, by the parity check, that it computes the trainer's
log-probabilities (`check_parity_prompt`). The manifest of a version has its digest.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.errors import CheckpointError, InferenceError, WaitedInVain
from holdfast.orchestrator.client.client import InferenceClient
from holdfast.orchestrator.client.http import Unavailable
from holdfast.orchestrator.client.pool import Engine, EngineLost
from holdfast.orchestrator.tasks import phase
from holdfast.process.heartbeat import Wait
from holdfast.protocol import inference
from holdfast.protocol.transfer import Offer, Transfer
from holdfast.run import atomic
from holdfast.run.journal import POLL_S
from holdfast.run.manifest import MANIFEST_NAME, read_manifest
from holdfast.run.run_dir import RunDir
from holdfast.run.weights import listed_digest

_T = TypeVar("_T")

_log = logging.getLogger("orchestrator")


@dataclass(frozen=True)
class PublishedWeights:
    """A policy version that the trainer has published.

    Attributes:
        path: its directory, which the engines see under the same path.
        digest: what an engine must report after loading it.
        written: inode and time of its manifest, which tell whether it was published again; None: the trainer offers
            it, and is still writing the directory.
    """

    version: int
    path: Path
    digest: str
    written: tuple[int, int] | None

    def was_replaced(self) -> bool:
        """Whether the directory is gone, not there yet, or was published again, so that staging it may fail."""
        try:
            return _written(self.path) != self.written
        except FileNotFoundError:
            return True

    def read_parity_prompt(self) -> inference.ParityPrompt | None:
        """Return the trainer's parity prompt, if there is one. Raises CheckpointError if it is damaged."""
        return _read(self.path / inference.PARITY_PROMPT_NAME, inference.ParityPrompt)


def _written(path: Path) -> tuple[int, int]:
    # Both: a filesystem may reuse the inode of a removed file.
    status = (path / MANIFEST_NAME).stat()
    return status.st_ino, status.st_mtime_ns


def describe_weights(run_dir: RunDir, version: int) -> PublishedWeights:
    """Return a published version, from its manifest. Raises CheckpointError if it is missing, damaged, or another."""
    path = run_dir.weights_of(version)
    try:
        written = _written(path)  # first: a manifest that is written from here on shows as another one
    except FileNotFoundError:
        written = (0, 0)  # it is not there, as the next line says
    manifest = read_manifest(path)
    if manifest.kind != "weights" or manifest.policy_version != version:
        raise CheckpointError(
            f"{path} holds {manifest.kind} of version {manifest.policy_version}, expected weights of version {version}"
        )
    digest = listed_digest(manifest, path)
    if not digest:
        raise CheckpointError(f"{path} lists no *.safetensors file in its manifest")
    return PublishedWeights(version=version, path=path, digest=digest, written=written)


def read_offer(run_dir: RunDir) -> Offer | None:
    """Return what the trainer offers, if it does. Raises CheckpointError if the offer is damaged."""
    return _read(run_dir.offer, Offer)


def _read(path: Path, kind: type[_T]) -> _T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


async def wait_for_weights(
    run_dir: RunDir, version: int, *, timeout_s: float, check: Callable[[], None], takes_offers: bool = False
) -> PublishedWeights:
    """Wait for the trainer to publish `version`; `check` is called again and again, and may raise. `takes_offers`:
    return the version as soon as the trainer offers it. Raises WaitedInVain after `timeout_s` seconds without progress
    of any process; CheckpointError if the published weights are damaged, or another version."""
    wait = Wait(timeout_s)
    path = run_dir.weights_of(version)
    while True:
        if atomic.is_visible(path):
            try:
                return describe_weights(run_dir, version)
            except (CheckpointError, FileNotFoundError):
                # A resuming trainer may remove the directory and publish it again.
                if path.exists():
                    raise
        elif takes_offers and (offer := read_offer(run_dir)) is not None and offer.version == version:
            return PublishedWeights(version=version, path=path, digest=offer.digest, written=None)
        check()
        if wait.is_over():
            raise WaitedInVain(
                f"the trainer published no {path} within {timeout_s:g} s (weights_timeout_s). Is it running? "
                "Its log says what it is doing."
            )
        await asyncio.sleep(POLL_S)


# How often weights may be published again while engines load them.
_REPLACEMENTS = 3


@dataclass(eq=False)
class WeightPusher:
    """Makes all engines of a client serve what the trainer publishes, and checks each once for parity.

    Args:
        client: of the engines, which the run owns from the first push on.
        timeout_s: how long to wait for a version.
        seq_len: of the longest sessions that the engines take.
    """

    client: InferenceClient
    run_dir: RunDir
    _: KW_ONLY
    timeout_s: float
    seq_len: int
    _serving: PublishedWeights | None = field(default=None, init=False)
    _proven: set[Engine] = field(default_factory=set, init=False)

    async def wait_for(self, version: int, *, check: Callable[[], None]) -> PublishedWeights:
        """Wait until the trainer has published `version`; see `wait_for_weights`."""
        if self._serving is not None and self._serving.version == version:
            return self._serving
        return await wait_for_weights(self.run_dir, version, timeout_s=self.timeout_s, check=check, takes_offers=True)

    async def serve(self, weights: PublishedWeights, *, check: Callable[[], None]) -> PublishedWeights:
        """Make all usable engines serve `weights`, and return what they serve; lost engines get it when they return.

        Raises InferenceError: an engine refused the weights, belongs to another run, reports another version or digest,
        or computes other numbers with them; or all engines were away for too long."""
        for _ in range(_REPLACEMENTS):
            try:
                # Also if it is served already: an engine may have been restarted.
                weights = await self._push_to_all(weights, check)
                break
            except InferenceError as error:
                if isinstance(error, EngineLost) or not weights.was_replaced():
                    raise
                _log.warning("%s was published again while it was loaded; loading it again", weights.path)
                weights = await wait_for_weights(self.run_dir, weights.version, timeout_s=self.timeout_s, check=check)
        else:
            raise InferenceError(f"{weights.path} was published again {_REPLACEMENTS} times while it was loaded")
        self._serving = weights
        return weights

    async def _push_to_all(self, weights: PublishedWeights, check: Callable[[], None]) -> PublishedWeights:
        """Give all usable engines `weights`, or what was published in their place, and return that."""
        owner = await self.client.lease.claim()
        pool = self.client.pool

        async def published() -> PublishedWeights:
            return await wait_for_weights(self.run_dir, weights.version, timeout_s=self.timeout_s, check=check)

        async def give(engine: Engine, weights: PublishedWeights) -> None:
            await push(engine, weights, owner)
            await self._prove(engine, weights)

        async def restore(engine: Engine) -> None:
            directory = await published() if weights.written is None else weights
            try:
                await give(engine, directory)
            except InferenceError as error:
                # The trainer has published a newer version, which comes next.
                if directory.was_replaced() and pool.there():
                    raise Unavailable(f"{directory.path} is not there any more: {error}") from None
                raise

        # Before the push: an engine that comes back meanwhile must get these weights.
        self.client.expect(version=weights.version, restore=restore)
        with phase("pushing weights and reading them back", version=weights.version):
            offer = read_offer(self.run_dir)
            is_offered = offer is not None and (offer.version, offer.digest) == (weights.version, weights.digest)
            have_all = offer is not None and is_offered and await _transfer(pool.there(), weights, offer, owner)
            if weights.written is None and not have_all:
                weights = await published()
            await pool.attend(lambda engine: give(engine, weights))
            await pool.wait_for_any()
        return weights

    async def _prove(self, engine: Engine, weights: PublishedWeights) -> None:
        if engine in self._proven or (parity := weights.read_parity_prompt()) is None:
            return
        # Engines take `seq_len` tokens, including one sampled token.
        await check_parity_prompt(self.client, engine, parity.head(self.seq_len - 1), weights_digest=weights.digest)
        self._proven.add(engine)


async def _transfer(engines: Sequence[Engine], weights: PublishedWeights, offer: Offer, owner: inference.Owner) -> bool:
    """Have the engines that serve something else take `offer`, all in one group; return whether all have it.

    One attempt, and no error: an engine without the weights then gets the directory."""

    async def join(engine: Engine, first_rank: int) -> None:
        transfer = Transfer(offer, num_members=num_members, first_rank=first_rank, attempt=attempt)
        await engine.update_weights(inference.UpdateRequest(str(weights.path), weights.version, owner, transfer))

    def failed(results: Sequence[object]) -> bool:
        errors = [error for error in results if isinstance(error, BaseException)]
        for error in errors:
            if not isinstance(error, InferenceError | Unavailable):
                raise error
            _log.warning("version %d goes to the engines as a directory: %s", weights.version, error)
        return bool(errors)

    served = await asyncio.gather(*(engine.served() for engine in engines), return_exceptions=True)
    first_ranks: dict[Engine, int] = {}
    num_members, attempt = 1, secrets.token_hex(8)  # the trainer
    for engine, found in zip(engines, served, strict=True):
        if not isinstance(found, BaseException) and (found.version, found.digest) != (weights.version, weights.digest):
            first_ranks[engine] = num_members
            num_members += found.num_workers
    joined = await asyncio.gather(*(join(*one) for one in first_ranks.items()), return_exceptions=True)
    has_failed = failed([*served, *joined])
    if first_ranks and not has_failed:
        _log.info("version %d went to %d engines from the trainer's memory", weights.version, len(first_ranks))
    return not has_failed


async def push(engine: Engine, weights: PublishedWeights, owner: inference.Owner) -> None:
    """Make an engine serve `weights`, and read version and digest back.

    Raises Unavailable if the engine was lost meanwhile, InferenceError if it refused or serves something else."""
    served = await engine.served()
    if (served.version, served.digest) != (weights.version, weights.digest):
        boot_id = served.boot_id
        await engine.update_weights(inference.UpdateRequest(str(weights.path), weights.version, owner))
        served = await engine.served()
        # First: a restart is not a refusal.
        if served.boot_id != boot_id:
            raise Unavailable(f"the server was restarted while it was given policy version {weights.version}")
    if served.version != weights.version:
        raise InferenceError(
            f"{engine.url} was given policy version {weights.version} and reports version {served.version}. "
            "Does somebody else push weights to this server?"
        )
    if served.digest != weights.digest:
        raise InferenceError(
            f"{engine.url} loaded version {weights.version} with digest {served.digest}, but {weights.path} "
            f"was published with digest {weights.digest}: the weights changed or were damaged on the way."
        )


async def check_parity_prompt(
    client: InferenceClient, engine: Engine, parity: inference.ParityPrompt, *, weights_digest: str
) -> None:
    """Compare the parity prompt's log-probabilities of trainer and engine for the same weights.

    Raises Unavailable if the engine was lost meanwhile, InferenceError if they differ too much."""
    request = inference.GenerateRequest(
        token_ids=parity.token_ids,
        seeds=[0],
        max_tokens=1,
        stop_token_ids=[],
        weights_digest=weights_digest,
        prompt_logprobs=True,
    )
    (choice,) = await client.ask(engine, request)
    found, allowed = inference.deviation(parity, choice.prompt_logprobs or []), parity.allowed_nats
    _log.info("%s: the parity prompt differs by %.2g nats from the trainer's (allowed: %s)", engine.url, found, allowed)
    # `not <=`, so that NaN is refused.
    if allowed is not None and not found <= allowed:
        raise InferenceError(
            f"{engine.url} serves the right weights, but computes other log-probabilities from them than the "
            f"trainer: {found:.3g} nats apart on average for a fixed text, allowed are {allowed:.3g}. One of "
            "the two leaves out a detail of the architecture, such as an attention soft cap (try "
            "--trainer.model.attention eager), or has another dtype (--trainer.sampler-dtype), config.json or "
            "a faulty kernel. If the difference is meant, raise --trainer.mismatch-limit."
        )
