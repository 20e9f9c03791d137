"""Pushing published weights to the engines, and reading back what they serve."""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast.orchestrator.current_phase import phase
from holdfast.orchestrator.engines.client import InferenceClient
from holdfast.orchestrator.engines.engine import Engine
from holdfast.orchestrator.engines.http import Unavailable
from holdfast.orchestrator.weight_push.canary_check import check_canary
from holdfast.orchestrator.weight_push.transport import PublishedWeights, WeightTransport
from holdfast.shared.errors import InferenceError
from holdfast.shared.wire.inference_api import Owner, UpdateRequest

_log = logging.getLogger("orchestrator")

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
