"""What the processes that start the ranks on several nodes tell one another while the ranks run.

Every node beats in the store of their rendezvous, and passes on a request to stop, so that a signal to one node
reaches the ranks of all, also while they wait for a batch, where no collective runs. A node that has failed, or is
silent, ends the others: their ranks may be inside of a collective that nobody ends.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

from holdfast.shared.config.trainer import ParallelConfig
from holdfast.shared.errors import ConfigError
from holdfast.shared.process.clock import awake_s
from holdfast.trainer.session.stop import StopRequest

NODE_RANK_ENV = "HOLDFAST_NODE_RANK"
"""Which of the nodes this one is, from 0."""
ENDPOINT_ENV = "HOLDFAST_RDZV_ENDPOINT"
"""HOST:PORT where the nodes of this attempt meet; unset: that of the configuration."""

_PERIOD_S = 0.2
SILENT_S = 30.0
# What the others get to end by themselves when the store is gone: at the end of a run it goes first.
_ENDING_S = 5.0
_log = logging.getLogger("trainer")


def node_rank(parallel: ParallelConfig) -> int:
    """Return which of the nodes this one is.

    Raises:
        ConfigError: nobody said so, or said something else; or there is no place to meet at.
    """
    if parallel.nodes == 1:
        return 0
    said = os.environ.get(NODE_RANK_ENV, "")
    if not said.isdecimal() or int(said) >= parallel.nodes:
        raise ConfigError(
            f"parallel.nodes = {parallel.nodes} takes {NODE_RANK_ENV}, the number of this node from 0 to "
            f"{parallel.nodes - 1}, from the environment, which has '{said}'. `sft`, `dpo`, `reward-model` and "
            "`trainer`, started on every node, set it themselves."
        )
    if parallel.rdzv_endpoint is None and ENDPOINT_ENV not in os.environ:
        raise ConfigError(f"parallel.nodes = {parallel.nodes} needs parallel.rdzv_endpoint, where the nodes meet")
    return int(said)


def meeting_point(parallel: ParallelConfig) -> tuple[str, int]:
    """Return host and port where the nodes of this attempt meet."""
    endpoint = os.environ.get(ENDPOINT_ENV, parallel.rdzv_endpoint)
    return parallel.model_copy(update={"rdzv_endpoint": endpoint}).rendezvous


class Store(Protocol):
    """What of torch's stores is used."""

    def set(self, key: str, value: str) -> object: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


class NodeLink:
    """Keeps this node in touch with the others for as long as its ranks run.

    Args:
        connect: opens the store of the rendezvous; may wait until it is there.
        rank: of this node; node 0 has the store.
        nodes: how many there are.
        stop: the request of this node's ranks.
        lose: called with the reason when another node is lost, from the thread of this link.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        *,
        rank: int,
        nodes: int,
        stop: StopRequest,
        lose: Callable[[str], object],
        silent_s: float = SILENT_S,
        ending_s: float = _ENDING_S,
    ) -> None:
        self._connect = connect
        self._rank = rank
        # All look at node 0, and node 0 at all: its end is that of the store.
        self._others = [node for node in range(nodes) if node != rank] if rank == 0 else [0]
        self._stop = stop
        self._lose = lose
        self._silent_s = silent_s
        self._ending_s = ending_s
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="nodes", daemon=True).start()

    def end(self) -> None:
        """Watch no more: the ranks of this node have ended."""
        self._ended.set()

    def _run(self) -> None:
        try:
            store = self._connect()
            count = 0
            while not self._ended.wait(_PERIOD_S):
                count += 1
                store.set(f"holdfast/beat/{self._rank}", str(count))
                self._pass_on_stop(store)
                lost = self._silent(store)
                if lost is not None:
                    self._lose(lost)
                    return
        except RuntimeError as error:  # torch's: the connection is broken, or never was one
            if not self._ended.wait(self._ending_s):
                self._lose(f"node 0 cannot be reached: {str(error).splitlines()[0]}")

    def _pass_on_stop(self, store: Store) -> None:
        number = self._stop.signal_number()
        if number:
            store.set("holdfast/stop", str(number))
        elif store.check(["holdfast/stop"]):
            self._stop.ask(int(store.get("holdfast/stop")))

    def _silent(self, store: Store) -> str | None:
        """Return which node has given no sign of life for too long, if any has."""
        now = awake_s()
        for node in self._others:
            key = f"holdfast/beat/{node}"
            beat = store.get(key) if store.check([key]) else b""
            heard, since = self._heard.get(node, (None, now))
            if beat != heard:
                self._heard[node] = (beat, now)
            elif beat and now - since > self._silent_s:  # one that never beat is waited for by the rendezvous
                return f"node {node} has shown no sign of life for {now - since:.0f} s"
        return None


def link_nodes(endpoint: tuple[str, int], *, rank: int, nodes: int, timeout_s: float, stop: StopRequest) -> NodeLink:
    """Return the link of this process to the other nodes; one that is lost ends this process with exit code 1."""

    def connect() -> Store:
        from torch.distributed import TCPStore

        timeout = timedelta(seconds=timeout_s)
        return TCPStore(*endpoint, is_master=False, wait_for_workers=False, timeout=timeout)

    def lose(reason: str) -> None:
        _log.error("ending: %s", reason)
        # At once, and the kernel ends the ranks: the main thread may wait for them, and they for a collective.
        os._exit(1)

    return NodeLink(connect, rank=rank, nodes=nodes, stop=stop, lose=lose)
