"""What the orchestrator needs of the way by which published weights come to the engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from holdfast.shared.wire.canary import Canary


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
