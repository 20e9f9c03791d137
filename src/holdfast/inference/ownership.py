"""Whose weights this server may serve: a server has one owner at a time.

A run owns a server from its first push of weights on. The server then refuses weights of anybody else, until the
run gives it back or is silent for a lease: every request with the run's id in the header `OWNER_HEADER` is a sign
of life. The same run takes its server again at any time, and so does the run that begins anew in the same directory,
since only one run can hold that. A server that a launcher started for its own run is that run's for good: both end
together.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.inference.request_error import RequestError
from holdfast.shared.process.clock import awake_s
from holdfast.shared.wire.inference_api import OWNED, Owner, OwnerStatus


class Ownership:
    """The owner of one server.

    Args:
        lease_s: how long a silent run owns the server.
        reserved: the run that the server was started for; None: it is for whoever comes.
        clock: seconds; a server that was frozen has not been able to hear anybody.
    """

    def __init__(self, lease_s: float, *, reserved: Owner | None = None, clock: Callable[[], float] = awake_s) -> None:
        self._lease_s = lease_s
        self._reserved = reserved
        self._clock = clock
        self._owner = reserved
        self._heard = clock()

    def status(self) -> OwnerStatus | None:
        """Return the owner, or None where there is none (any more)."""
        if self._owner is None:
            return None
        silent_s = self._clock() - self._heard
        if self._owner == self._reserved:
            return OwnerStatus(self._owner.run_id, self._owner.directory, silent_s, None)
        if silent_s > self._lease_s:
            return None
        return OwnerStatus(self._owner.run_id, self._owner.directory, silent_s, self._lease_s)

    def claim(self, owner: Owner | None) -> None:
        """Make `owner` the owner; None: somebody who needs no server for long, and may use one that nobody owns.

        Raises:
            RequestError: 409, the server is another's.
        """
        current = self.status()
        if current is not None and not _is_same(current, owner):
            raise RequestError(
                409,
                f"this server is owned by the run in {current.directory} (run {current.run_id}, last heard of "
                f"{current.silent_s:.0f} s ago), and {_free(current)}. Use another server, or stop that run.",
                code=OWNED,
            )
        # A reserved server stays its run's: whoever passes here is that run.
        if owner is not None and self._reserved is None:
            self._owner, self._heard = owner, self._clock()

    def renew(self, run_id: str) -> None:
        """Take note of a sign of life of run `run_id`."""
        # Even after the lease: nobody else has claimed it since.
        if self._owner is not None and self._owner.run_id == run_id:
            self._heard = self._clock()

    def release(self, owner: Owner) -> None:
        """Let `owner` go, if it is the owner."""
        if self._reserved is None and self._owner is not None and _is_same(self._owner, owner):
            self._owner = None


def _is_same(current: Owner | OwnerStatus, other: Owner | None) -> bool:
    """Whether `other` may have what is the `current` owner's: it is the same run, or the next one in its directory."""
    return other is not None and (other.run_id == current.run_id or other.directory == current.directory)


def _free(owner: OwnerStatus) -> str:
    if owner.lease_s is None:
        return "was started for that run alone"
    return f"is free when that run ends, or {owner.lease_s:g} s after its last sign of life"
