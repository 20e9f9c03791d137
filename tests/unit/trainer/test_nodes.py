"""What the launchers of ranks on several nodes tell one another, over a real store of torch."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from holdfast.config.training import ParallelConfig
from holdfast.errors import ConfigError
from holdfast.trainer.launch import ENDPOINT_ENV, NODE_RANK_ENV, NodeLink, Store, meeting_point, node_rank
from holdfast.trainer.stop import StopRequest
from tests.runs.processes import HANG_S


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Node:
    """One node of two, linked to the other by a client of its own."""

    def __init__(self, server: TCPStore, rank: int, *, silent_s: float = HANG_S, ending_s: float = 0.0) -> None:
        self.stop = StopRequest()
        self.lost: queue.Queue[str] = queue.Queue()
        port = server.port

        def connect() -> Store:
            timeout = timedelta(seconds=HANG_S)
            return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timeout)

        self.link = NodeLink(
            connect,
            rank=rank,
            nodes=2,
            stop=self.stop,
            lose=self.lost.put,
            silent_s=silent_s,
            ending_s=ending_s,
        )


@pytest.fixture
def linked(server: TCPStore) -> Iterator[tuple[Node, Node]]:
    nodes = Node(server, 0), Node(server, 1)
    yield nodes
    for node in nodes:
        node.link.end()


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_request_to_stop_reaches_every_node(linked: tuple[Node, Node]) -> None:
    first, second = linked
    second.stop.ask(10)
    _until(first.stop.signal_number)
    assert first.stop.signal_number() == 10 and first.lost.empty() and second.lost.empty()


@pytest.mark.parametrize("silent", [0, 1])
def test_a_node_that_falls_silent_is_named(server: TCPStore, silent: int) -> None:
    falls_silent, listens = Node(server, silent), Node(server, 1 - silent, silent_s=1.0)
    _until(lambda: server.check([f"holdfast/beat/{silent}"]))
    time_of_first = server.get(f"holdfast/beat/{silent}")
    _until(lambda: server.get(f"holdfast/beat/{silent}") != time_of_first)  # it is heard to live for a while
    falls_silent.link.end()
    assert f"node {silent} has shown no sign of life" in listens.lost.get(timeout=HANG_S)


def test_a_lost_store_is_the_loss_of_node_0() -> None:
    servers = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    node = Node(servers[0], 1)
    _until(lambda: servers[0].check(["holdfast/beat/1"]))
    servers.clear()
    assert "node 0 cannot be reached" in node.lost.get(timeout=HANG_S)


def test_at_its_end_a_node_loses_nobody() -> None:
    servers = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    node = Node(servers[0], 1, ending_s=HANG_S)
    _until(lambda: servers[0].check(["holdfast/beat/1"]))
    servers.clear()
    node.link.end()
    _until(lambda: "nodes" not in [thread.name for thread in threading.enumerate()])
    assert node.lost.empty()


@pytest.mark.parametrize("number", [None, "", "2", "-1", "one"])
def test_a_node_without_a_number_is_refused(monkeypatch: pytest.MonkeyPatch, number: str | None) -> None:
    monkeypatch.delenv(NODE_RANK_ENV, raising=False)
    if number is not None:
        monkeypatch.setenv(NODE_RANK_ENV, number)
    with pytest.raises(ConfigError, match=NODE_RANK_ENV):
        node_rank(ParallelConfig(nodes=2, rdzv_endpoint="head"))
    assert node_rank(ParallelConfig()) == 0


def test_nodes_without_a_place_to_meet_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NODE_RANK_ENV, "1")
    with pytest.raises(ConfigError, match=r"parallel\.rdzv_endpoint"):
        node_rank(ParallelConfig(nodes=2))
    assert node_rank(ParallelConfig(nodes=2, rdzv_endpoint="head")) == 1


@pytest.mark.parametrize(
    ("endpoint", "place"),
    [
        ("head", ("head", 29400)),
        ("head:29500", ("head", 29500)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("[fd00::1]:29500", ("fd00::1", 29500)),
    ],
)
def test_where_nodes_meet(monkeypatch: pytest.MonkeyPatch, endpoint: str, place: tuple[str, int]) -> None:
    monkeypatch.delenv(ENDPOINT_ENV, raising=False)
    assert ParallelConfig(rdzv_endpoint=endpoint).rendezvous == place
    assert meeting_point(ParallelConfig(rdzv_endpoint=endpoint)) == place
    monkeypatch.setenv(ENDPOINT_ENV, endpoint)
    assert meeting_point(ParallelConfig(rdzv_endpoint="elsewhere")) == place


@pytest.mark.parametrize(
    "endpoint", ["", ":29500", "head:", "head:x", "head:0", "head:70000", "a b:1", "http://head", "me@head:1"]
)
def test_what_is_no_place_to_meet_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        ParallelConfig(rdzv_endpoint=endpoint)
