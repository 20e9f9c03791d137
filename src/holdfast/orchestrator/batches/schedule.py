"""Which policy version makes which batch.

The `strict` schedule: batch N is sampled wholly by version max(0, N - 1 - async_level), so which
policy made which batch never depends on timing. It is its own backpressure: batch N cannot begin
before the trainer has published that version.
"""

from __future__ import annotations

import logging

from holdfast.orchestrator.weight_push.transport import WeightTransport

_log = logging.getLogger("orchestrator")


class StrictSchedule:
    """Says which policy version each batch must be sampled by.

    Args:
        transport: by which published weights come to the engines.
        async_level: how many optimizer steps the policy of a batch may be behind.
        trainer_step: the step that the trainer began after.
    """

    def __init__(self, transport: WeightTransport, *, async_level: int, trainer_step: int) -> None:
        self._transport = transport
        self._async_level = async_level
        self._trainer_step = trainer_step

    def version_for(self, step: int) -> int:
        """Return the version that samples batch `step`.

        The first batches after a resume may want versions from before the checkpoint. Where those are
        still published they are used, so the batch is the one that an uninterrupted run makes;
        where not, the resumed version samples it.
        """
        # Batch N is trained by step N, on weights N - 1; the first ones have version 0 alone.
        wanted = max(0, step - 1 - self._async_level)
        if wanted >= self._trainer_step or self._transport.is_published(wanted):
            return wanted
        _log.warning(
            "batch %d: policy version %d is no longer in %s, so version %d samples it: from here on this run differs "
            "from an uninterrupted one",
            step,
            wanted,
            self._transport.place,
            self._trainer_step,
        )
        return self._trainer_step
