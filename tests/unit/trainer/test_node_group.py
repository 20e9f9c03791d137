"""The commands of one run on several nodes, as threads that meet over loopback, and the links of their ranks."""

import math
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch.distributed import TCPStore

from holdfast.config import SftConfig
from holdfast.config.training import AdamWConfig, ParallelConfig
from holdfast.errors import ConfigError, NodeLost, ProcessDied, RunDirError
from holdfast.launcher import node_group
from holdfast.launcher.launch import launch_on_nodes, plan_on_node
from holdfast.launcher.node_group import NodeGroup, NodePart, StopOrder
from holdfast.launcher.rendezvous import Rendezvous, free_port
from holdfast.launcher.resume.attempt import Attempt
from holdfast.process.heartbeat import awake_s
from holdfast.run.lock import Holder
from holdfast.run.run_dir import RunDir
from holdfast.trainer.launch import ENDPOINT_ENV, NODE_RANK_ENV, NodeLink, meeting_point, node_rank
from holdfast.trainer.stop import StopRequest
from tests.faults.disks import Disk
from tests.runs.processes import HANG_S
from tests.runs.processes import wait_until as until

PAUSE_S = 0.02


class Nodes:
    """Commands of one run, and what they said while they waited."""

    def __init__(self, output_dir: Path) -> None:
        self.run_dir = RunDir(output_dir)
        self.port = free_port()
        self.said: list[str] = []
        self._groups: list[NodeGroup] = []
        self._threads = ThreadPoolExecutor()
        self._is_over = False

    def group(
        self, *, rank: int | None = None, silent_s: float = HANG_S, visible_s: float = HANG_S, **changes: Any
    ) -> NodeGroup:
        """Start a command; the first of all leads."""
        made = NodeGroup(self.config(**changes), "sft", rank=rank, silent_s=silent_s, visible_s=visible_s)
        self._groups.append(made)
        return made

    def config(self, **changes: Any) -> SftConfig:
        parallel = {"nodes": 2, "num_ranks": 1, "rdzv_endpoint": f"localhost:{self.port}", "rdzv_timeout_s": HANG_S}
        parallel |= changes.pop("parallel", {})
        settings = {"output_dir": self.run_dir.path, **changes}
        return SftConfig(parallel=ParallelConfig(**parallel), **settings)

    def gather(self, group: NodeGroup, *, until: Callable[[], int | None] = lambda: None) -> Future[int | None]:
        """Have it wait for the next attempt; `until` gives a signal."""

        def pause() -> int | None:
            time.sleep(PAUSE_S)
            return 9 if self._is_over else until()

        return self._threads.submit(group.gather, pause, self.said.append)

    def begin(self, leader: NodeGroup, other: NodeGroup, *, number: int = 1) -> tuple[NodePart, NodePart]:
        joining = self.gather(other)
        assert self.gather(leader).result(HANG_S) is None
        if not self.run_dir.holds_run():
            self.run_dir.create()
        self.settings(number)
        part = leader.begin(Attempt(self.run_dir, number, None if number == 1 else number))
        assert joining.result(HANG_S) is None
        return part, other.join()

    def settings(self, number: int) -> None:
        """Write the file that the head node writes for attempt `number`."""
        self.run_dir.configs(number).mkdir(parents=True)
        (self.run_dir.configs(number) / "sft.toml").touch()

    def end(self) -> None:
        self._is_over = True
        for group in self._groups:
            group._rendezvous.end()
        self._threads.shutdown()


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setattr("holdfast.launcher.rendezvous._PERIOD_S", 0.02)
    made = Nodes(tmp_path / "run")
    yield made
    made.end()


def reason(group: NodeGroup, *others: NodeGroup) -> str:
    """Return the reason of its next verdict, while the others go on as well."""

    def look() -> StopOrder | None:
        for other in others:
            other.stop_order()
        return group.stop_order()

    verdict = until(look)
    assert verdict is not None
    return verdict.reason


def test_the_first_leads_and_all_get_one_attempt(nodes: Nodes) -> None:
    settings = {"optim": AdamWConfig(max_grad_norm=math.inf)}  # which JSON cannot say
    leader, other = nodes.group(**settings), nodes.group(**settings)
    assert leader.is_head and not other.is_head
    mine, others = nodes.begin(leader, other)
    assert (mine.rank, others.rank) == (0, 1)
    assert (mine.attempt, mine.resume_step, mine.endpoint) == (others.attempt, others.resume_step, others.endpoint)
    assert mine.endpoint.rpartition(":")[2] != str(nodes.port)  # nothing of an attempt is found by the next
    assert leader.stop_order() is None and other.stop_order() is None
    assert any("1 of 2 nodes are here" in line for line in nodes.said)


def test_nobody_begins_before_the_trainers_of_all_have_ended(nodes: Nodes) -> None:
    leader, other = nodes.group(), nodes.group()
    nodes.begin(leader, other)
    leader.trainer_died("was killed by signal 9")
    waiting = nodes.gather(leader)
    assert "killed" in reason(other)
    assert not waiting.done()
    other.trainer_died("was ended")
    joining = nodes.gather(other)
    assert waiting.result(HANG_S) is None
    joining.cancel()


@pytest.mark.parametrize(("changes", "says"), [
    ({"parallel": {"num_ranks": 2}}, "parallel.num_ranks: 1 -> 2"),
    ({"seed": 7}, "seed: 0 -> 7"),
    ({"output_dir": Path("/elsewhere")}, "nodes write to other directories"),
])  # fmt: skip
def test_a_node_with_another_command_is_refused_with_both_names(
    nodes: Nodes, changes: dict[str, Any], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    waiting = nodes.gather(nodes.group())
    with pytest.raises(ConfigError, match=says) as refused:
        nodes.gather(nodes.group(**changes)).result(HANG_S)
    assert str(refused.value).count(Holder.me().host) == 2
    assert says in capsys.readouterr().out  # of the one that leads
    assert not waiting.done()  # it waits on for the right one
    nodes.gather(nodes.group())
    assert waiting.result(HANG_S) is None


def test_a_node_with_other_code_is_refused(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = nodes.gather(nodes.group())
    monkeypatch.setattr(node_group, "digest_of_code", lambda: "0.1 2.13 ffffffffffffffff")
    with pytest.raises(ConfigError, match=r"nodes run other code: .* holdfast 0\.1 \(source ffffffff\) with torch"):
        nodes.gather(nodes.group()).result(HANG_S)
    waiting.cancel()


def test_the_code_of_a_node_is_that_of_the_package_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes may have other packages beside it."""
    (tmp_path / "holdfast" / "launcher").mkdir(parents=True)
    own = tmp_path / "holdfast" / "launcher" / "node_group.py"
    own.write_text("a = 1\n")
    monkeypatch.setattr(node_group, "__file__", str(own))
    digest = node_group.digest_of_code()
    (tmp_path / "other.py").write_text("b = 1\n")
    assert node_group.digest_of_code() == digest
    (tmp_path / "holdfast" / "errors.py").write_text("c = 1\n")
    assert node_group.digest_of_code() != digest


def test_a_node_that_cannot_be_understood_is_refused(nodes: Nodes, capsys: pytest.CaptureFixture[str]) -> None:
    leader = nodes.group()
    stranger = Rendezvous(("localhost", nodes.port), lambda: b'{"other": "version"}', hosts=False)
    stranger.send(b"{}")
    until(lambda: leader.stop_order() or "cannot be understood" in capsys.readouterr().out)
    stranger.end()


@pytest.mark.parametrize("is_another", [False, True])
def test_a_directory_that_one_node_does_not_see_is_refused(nodes: Nodes, is_another: bool) -> None:
    leader, other = nodes.group(), nodes.group(visible_s=0.1)
    joining = nodes.gather(other)
    assert nodes.gather(leader).result(HANG_S) is None
    nodes.run_dir.create()
    leader.begin(Attempt(nodes.run_dir, 1, None))
    says = "attempt_1/sft.toml, which .* has written, is not on this node"
    if is_another:  # on this node the same path holds an earlier run, which has an attempt of this number
        (nodes.run_dir.path / "run.json").unlink()
        nodes.run_dir.create()
        nodes.settings(1)
        says = f"holds run {nodes.run_dir.run_id()} on this node, and run {leader._run_id} on "
    with pytest.raises(ConfigError, match=f"{says}.*: all nodes must share the output directory"):
        joining.result(HANG_S)


def test_a_node_that_cannot_write_is_refused(nodes: Nodes, tmp_path: Path) -> None:
    (place := tmp_path / "disk").mkdir()
    with Disk(f"mount -t tmpfs -o ro none {place}") as disk:
        if disk.problem:
            pytest.skip(disk.problem)
        config = nodes.config(parallel={"rdzv_timeout_s": 0.2}, output_dir=disk.view(place))
        with pytest.raises(RunDirError, match="cannot be written: Read-only"):
            launch_on_nodes(config, rank=1, environment={})
        leader, other = nodes.group(), nodes.group()
        nodes.begin(leader, other)
        with pytest.raises(RunDirError, match="cannot be written: Read-only"):  # made by the head node meanwhile
            plan_on_node(config, other, {})


def test_a_directory_that_the_head_node_removes_is_no_error(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes.run_dir.rollouts.mkdir(parents=True)
    touch = Path.touch

    def remove_and_touch(path: Path) -> None:
        if path.parent == nodes.run_dir.rollouts:
            path.parent.rmdir()
        touch(path)

    monkeypatch.setattr(Path, "touch", remove_and_touch)
    nodes.run_dir.require_writable()
    assert not nodes.run_dir.rollouts.exists()


def test_the_wait_for_the_directory_begins_anew_with_each_attempt(nodes: Nodes) -> None:
    leader, other = nodes.group(), nodes.group()
    begin = awake_s()
    other._unseen_since = begin - 2 * HANG_S  # of an attempt that ended before its settings were seen
    joining = nodes.gather(other)
    assert nodes.gather(leader).result(HANG_S) is None
    nodes.run_dir.create()
    leader.begin(Attempt(nodes.run_dir, 1, None))
    until(lambda: joining.done() or (other._unseen_since is not None and other._unseen_since > begin))
    nodes.settings(1)
    assert joining.result(HANG_S) is None


def test_a_lost_node_that_asks_twice_comes_again_once(nodes: Nodes) -> None:
    nodes.group()
    node = Rendezvous(("localhost", nodes.port), lambda: b"{}", hosts=False)
    until(lambda: node.number > 0)
    first = node.number
    node.rejoin(first)
    until(lambda: node.number > first)
    second = node.number
    node.rejoin(first)
    turn = node.send(b"{}")
    until(lambda: node.has_sent(turn))
    assert node.number == second
    node.end()


@pytest.mark.parametrize(("others", "changes", "says"), [
    (0, {}, "1 of 2 nodes are here"),
    (0, {"rank": 1, "endpoint": "localhost:1"}, "waiting for the head node"),
    (2, {}, r"3 commands are here, and parallel\.nodes is 2"),
], ids=["too few", "no head", "too many"])  # fmt: skip
def test_nodes_wait_no_longer_than_is_set(nodes: Nodes, others: int, changes: dict[str, Any], says: str) -> None:
    endpoint = {"rdzv_endpoint": changes["endpoint"]} if changes else {}
    group = nodes.group(rank=changes.get("rank"), parallel={"rdzv_timeout_s": 0.2, **endpoint})
    for _ in range(others):
        nodes.gather(nodes.group(parallel={"rdzv_timeout_s": 0.2}))
    until(lambda: len(group._rendezvous.others()) == others)
    with pytest.raises(NodeLost, match=rf"waited in vain for 0\.2 s .*{says}"):
        nodes.gather(group).result(HANG_S)


def test_a_signal_ends_the_wait(nodes: Nodes) -> None:
    assert nodes.gather(nodes.group(), until=lambda: 15).result(HANG_S) == 15


def test_a_silent_node_is_lost_and_comes_again_under_another_number(nodes: Nodes) -> None:
    leader, other = nodes.group(silent_s=0.5), nodes.group()
    nodes.begin(leader, other)
    number = other._rendezvous.number
    other._rendezvous._ended.set()  # as if it were frozen
    assert "has not been heard" in reason(leader)
    leader.trainer_died("was ended")
    thawed = nodes.group()
    thawed._status = msgspec.structs.replace(other._status)
    until(lambda: thawed._rendezvous.number > number)
    nodes.begin(leader, _ended(thawed), number=2)


def test_who_comes_while_the_head_node_prepares_takes_part_in_the_next_attempt(nodes: Nodes) -> None:
    """For a command that was killed meanwhile, which the head node does not miss yet: it would be one rank too many."""
    leader, killed = nodes.group(silent_s=0.5), nodes.group()
    joining = nodes.gather(killed)
    assert nodes.gather(leader).result(HANG_S) is None
    killed._rendezvous._ended.set()
    joining.cancel()
    again = nodes.group()
    until(lambda: len(leader._rendezvous.others()) == 2)
    nodes.run_dir.create()
    nodes.settings(1)
    leader.begin(Attempt(nodes.run_dir, 1, None))
    assert leader._head.ranks == {killed._rendezvous.number: 1}
    assert "has not been heard" in reason(leader)
    assert nodes.begin(_ended(leader), again, number=2)[1].rank == 1


def _ended(group: NodeGroup) -> NodeGroup:
    group.trainer_died("was ended")
    return group


def test_who_was_taken_for_lost_ends_its_trainer_and_comes_again(nodes: Nodes) -> None:
    leader, other = nodes.group(silent_s=0.5), nodes.group()
    nodes.begin(leader, other)
    before = other._rendezvous._take_turn
    held: list[Any] = []
    other._rendezvous._take_turn = held.append  # type: ignore[method-assign]
    assert "has not been heard" in reason(leader)
    other._rendezvous._take_turn = before  # type: ignore[method-assign]
    assert reason(other, leader) == "this node was taken for lost"
    nodes.begin(_ended(leader), _ended(other), number=2)


def test_a_node_that_has_finished_is_not_lost(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_group, "_FAREWELL_S", 1.0)
    three = {"nodes": 3}
    leader = nodes.group(silent_s=2.0, parallel=three)
    first, last = nodes.group(parallel=three), nodes.group(parallel=three)
    waiting = nodes.gather(last)
    nodes.begin(leader, first)
    assert waiting.result(HANG_S) is None
    last.join()
    number = first._rendezvous.number
    assert first.leave(0) == 0
    until(lambda: leader._rendezvous.others()[number][2] > 2.0)
    assert leader.stop_order() is None
    leaving = nodes._threads.submit(leader.leave, 0)
    until(lambda: leader._status.is_finished)
    for _ in range(10):  # its trainer ends after the head node's
        assert last.stop_order() is None
        time.sleep(PAUSE_S)
    assert last.leave(0) == leaving.result(HANG_S) == 0


def test_a_command_that_was_killed_is_noticed_by_its_process(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    leader = nodes.group()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with monkeypatch.context() as patch:
        me = Holder.me()
        patch.setattr(Holder, "me", classmethod(lambda cls: Holder(ended.pid, me.host, me.pid_space)))
        dead = nodes.group()
    until(lambda: dead._rendezvous.number > 0)
    waiting = nodes.gather(leader)
    until(lambda: dead._rendezvous.number in leader._head.gone)
    nodes.gather(nodes.group())
    assert waiting.result(HANG_S) is None


def test_the_end_of_the_run_on_one_node_is_that_of_all(nodes: Nodes) -> None:
    leader, other = nodes.group(), nodes.group()
    nodes.begin(leader, other)
    leaving = nodes._threads.submit(other.leave, 3, "loss is nan")
    assert "loss is nan" in reason(leader)
    assert leaving.result(HANG_S) == 3
    with pytest.raises(ProcessDied, match="the run has ended on node .*loss is nan") as died:
        nodes.gather(leader).result(HANG_S)
    assert died.value.exit_code == 3


def test_whatever_ends_the_head_node_is_told_to_all(nodes: Nodes) -> None:
    nodes.run_dir.path.mkdir()
    (nodes.run_dir.path / "configs").touch()
    waiting = nodes.gather(nodes.group(rank=1))
    with pytest.raises(NotADirectoryError):
        launch_on_nodes(nodes.config(), rank=0, environment={})
    with pytest.raises(ProcessDied, match="the run has ended on node .*Not a directory") as died:
        waiting.result(HANG_S)
    assert died.value.exit_code == 2


def test_a_signal_to_one_node_stops_all_with_one_exit_code(nodes: Nodes) -> None:
    leader, other = nodes.group(), nodes.group()
    nodes.begin(leader, other)
    leaving = nodes._threads.submit(other.leave, 138)
    verdict = until(leader.stop_order)
    assert verdict is not None and verdict.signal == 10
    assert leaving.result(HANG_S) == 138
    assert nodes.gather(leader).result(HANG_S) == 10
    assert leader.leave(143) == 138  # that of the first


def test_a_leader_that_is_lost_and_comes_back_goes_on_with_the_run(nodes: Nodes) -> None:
    leader, other = nodes.group(), nodes.group(silent_s=0.5)
    nodes.begin(leader, other)
    leader._rendezvous.end()
    assert "has not been heard for 0.5 s" in reason(other)
    other.trainer_died("was ended")
    waiting = nodes.gather(other)
    until(lambda: any("is lost: waiting for its command" in line for line in nodes.said))
    again = nodes.group()
    assert again.is_head
    assert nodes.gather(again).result(HANG_S) is None
    assert again.is_rejoined()
    nodes.settings(2)
    again.begin(Attempt(nodes.run_dir, 2, 2))
    assert waiting.result(HANG_S) is None
    again._rendezvous.end()
    until(lambda: other._rendezvous.number < 0)  # the connection breaks before it takes part
    assert other.join().attempt == 2


def test_a_new_run_goes_on_with_nothing(nodes: Nodes) -> None:
    leader = nodes.group()
    waiting = nodes.gather(leader)
    nodes.gather(nodes.group())
    assert waiting.result(HANG_S) is None
    assert not leader.is_rejoined()
    nodes.run_dir.create()  # of somebody else
    assert not leader.is_rejoined()


def test_who_must_lead_and_cannot_is_refused(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = "no.such.host.invalid"
    nodes.group()
    with pytest.raises(ConfigError, match=r"nodes cannot meet at localhost:.* Choose a free port of this machine"):
        nodes.group(rank=0)
    monkeypatch.setattr("holdfast.launcher.rendezvous._STORE_S", 0.5)
    with pytest.raises(ConfigError, match=rf"nodes cannot meet at {nowhere}:\d+: this machine knows no '{nowhere}'\. "):
        nodes.group(rank=0, parallel={"rdzv_endpoint": f"{nowhere}:{nodes.port}"})
    for elsewhere in ("192.0.2.1", nowhere):  # an address of documentation
        assert not nodes.group(parallel={"rdzv_endpoint": f"{elsewhere}:{nodes.port}"}).is_head


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Node:
    """One node of two, linked to the other by a client of its own."""

    def __init__(self, server: TCPStore, rank: int, *, silent_s: float = HANG_S, ending_s: float = 0.0) -> None:
        self.stop = StopRequest()
        self.lost: queue.Queue[str] = queue.Queue()
        timeout = timedelta(seconds=HANG_S)
        connect = partial(TCPStore, "127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=timeout)
        how = {"stop": self.stop, "lose": self.lost.put, "silent_s": silent_s, "ending_s": ending_s}
        self.link = NodeLink(connect, rank=rank, nodes=2, **how)


@pytest.fixture
def linked(server: TCPStore) -> Iterator[tuple[Node, Node]]:
    nodes = Node(server, 0), Node(server, 1)
    yield nodes
    for node in nodes:
        node.link.end()


def test_a_request_to_stop_reaches_every_node(linked: tuple[Node, Node]) -> None:
    first, second = linked
    second.stop.ask(10)
    until(first.stop.signal_number)
    assert first.stop.signal_number() == 10 and first.lost.empty() and second.lost.empty()


@pytest.mark.parametrize("silent", [0, 1])
def test_a_node_that_falls_silent_is_named(server: TCPStore, silent: int) -> None:
    falls_silent, listens = Node(server, silent), Node(server, 1 - silent, silent_s=1.0)
    until(lambda: server.check([f"holdfast/beat/{silent}"]))
    time_of_first = server.get(f"holdfast/beat/{silent}")
    until(lambda: server.get(f"holdfast/beat/{silent}") != time_of_first)  # it is heard to live for a while
    falls_silent.link.end()
    assert f"node {silent} has sent no heartbeat" in listens.lost.get(timeout=HANG_S)


@pytest.mark.parametrize("is_ending", [False, True])
def test_a_lost_store_is_the_loss_of_node_0_but_at_the_end(is_ending: bool) -> None:
    servers = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    node = Node(servers[0], 1, ending_s=HANG_S if is_ending else 0.0)
    until(lambda: servers[0].check(["holdfast/beat/1"]))
    servers.clear()
    if not is_ending:
        assert "node 0 cannot be reached" in node.lost.get(timeout=HANG_S)
        return
    node.link.end()
    until(lambda: "nodes" not in [thread.name for thread in threading.enumerate()])
    assert node.lost.empty()


@pytest.mark.parametrize("number", [None, "", "2", "-1", "one"])
def test_a_node_without_a_number_is_refused(monkeypatch: pytest.MonkeyPatch, number: str | None) -> None:
    monkeypatch.delenv(NODE_RANK_ENV, raising=False)
    if number is not None:
        monkeypatch.setenv(NODE_RANK_ENV, number)
    with pytest.raises(ConfigError, match=NODE_RANK_ENV):
        node_rank(ParallelConfig(nodes=2, rdzv_endpoint="head"))
    assert node_rank(ParallelConfig()) == 0
    monkeypatch.setenv(NODE_RANK_ENV, "1")
    with pytest.raises(ConfigError, match=r"parallel\.rdzv_endpoint"):
        node_rank(ParallelConfig(nodes=2))
    assert node_rank(ParallelConfig(nodes=2, rdzv_endpoint="head")) == 1


@pytest.mark.parametrize(("endpoint", "place"), [
    ("head", ("head", 29400)),
    ("head:29500", ("head", 29500)),
    ("10.0.0.1:1", ("10.0.0.1", 1)),
    ("[fd00::1]:29500", ("fd00::1", 29500)),
    *((wrong, None) for wrong in ("", ":29500", "head:", "head:x", "head:0", "head:70000", "a b:1")),
    *((wrong, None) for wrong in ("http://head", "me@head:1", "[fd00::1", "a..b:1")),
])  # fmt: skip
def test_where_nodes_meet(monkeypatch: pytest.MonkeyPatch, endpoint: str, place: tuple[str, int] | None) -> None:
    if place is None:
        with pytest.raises(ValueError, match="HOST:PORT"):
            ParallelConfig(rdzv_endpoint=endpoint)
        return
    monkeypatch.delenv(ENDPOINT_ENV, raising=False)
    assert ParallelConfig(rdzv_endpoint=endpoint).rendezvous == place
    assert meeting_point(ParallelConfig(rdzv_endpoint=endpoint)) == place
    monkeypatch.setenv(ENDPOINT_ENV, endpoint)
    assert meeting_point(ParallelConfig(rdzv_endpoint="elsewhere")) == place
