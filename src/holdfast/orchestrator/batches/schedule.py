"""Which policy version makes which batch.

The `strict` schedule: batch N is sampled wholly by version max(0, N - 1 - async_level), so which
policy made which batch never depends on timing. It is its own backpressure: batch N cannot begin
before the trainer has published that version.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast.orchestrator.engines.client import InferenceClient
from holdfast.orchestrator.weight_push.published_files import PublishedWeights, wait_for_weights
from holdfast.shared.errors import InferenceError
from holdfast.shared.files.manifest import is_committed
from holdfast.shared.files.run_dir import RunDir

_log = logging.getLogger("orchestrator")

# How often weights may be published again while engines load them.
_REPLACEMENTS = 3


class StrictSchedule:
    """Serves to every batch the policy version that it must be sampled by."""

    def __init__(
        self, run_dir: RunDir, client: InferenceClient, *, async_level: int, trainer_step: int, timeout_s: float
    ) -> None:
        self._run_dir = run_dir
        self._client = client
        self._async_level = async_level
        self._trainer_step = trainer_step
        self._timeout_s = timeout_s
        self._serving: PublishedWeights | None = None

    def version_for(self, step: int) -> int:
        """Return the version that samples batch `step`.

        The first batches after a resume may want versions from before the checkpoint. Where those are
        still published they are used, so the batch is the one that an uninterrupted run makes;
        where not, the resumed version samples it.
        """
        wanted = max(0, step - 1 - self._async_level)
        if wanted >= self._trainer_step or is_committed(self._run_dir.weights_of(wanted)):
            return wanted
        _log.warning(
            "batch %d: policy version %d is no longer in %s, so version %d samples it: from here on this run differs "
            "from an uninterrupted one",
            step,
            wanted,
            self._run_dir.weights,
            self._trainer_step,
        )
        return self._trainer_step

    async def wait_for_version(self, version: int, *, check: Callable[[], None]) -> PublishedWeights:
        """Wait until the trainer has published `version`; `check` is called meanwhile and may raise.

        Raises:
            InferenceError: it did not come within `weights_timeout_s`.
        """
        if self._serving is not None and self._serving.version == version:
            return self._serving
        return await wait_for_weights(self._run_dir, version, timeout_s=self._timeout_s, check=check)

    async def serve(self, weights: PublishedWeights, *, check: Callable[[], None]) -> PublishedWeights:
        """Make all engines serve `weights`, and return what they serve. What serves already is asked for all the same:
        an engine may have been restarted since.

        Raises:
            InferenceError: an engine refused them, or reports another version or digest.
        """
        for _ in range(_REPLACEMENTS):
            try:
                await self._client.serve(weights)
                break
            except InferenceError:
                if not weights.was_replaced():
                    raise
                _log.warning("%s was published again while it was loaded; loading it again", weights.path)
                weights = await wait_for_weights(self._run_dir, weights.version, timeout_s=self._timeout_s, check=check)
        else:
            raise InferenceError(f"{weights.path} was published again {_REPLACEMENTS} times while it was loaded")
        self._serving = weights
        return weights
