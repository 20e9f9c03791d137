"""The commands of one run on several nodes, as threads that meet over loopback, and the links of their ranks."""

import math
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from holdfast.config import SftConfig
from holdfast.config.training import AdamWConfig, ParallelConfig
from holdfast.errors import ConfigError, NodeLost, ProcessDied, RunDirError
from holdfast.launcher import nodes as nodes_module
from holdfast.launcher.cluster.channels import SocketChannel
from holdfast.launcher.cluster.cluster import check_shared
from holdfast.launcher.launch import launch_on_nodes
from holdfast.launcher.nodes import Follower, Nodes, Registration, meet
from holdfast.process.imports import module_command
from holdfast.run.lock import Holder
from holdfast.run.run_dir import RunDir
from holdfast.trainer.launch import ENDPOINT_ENV, NODE_RANK_ENV, StopLink
from holdfast.trainer.stop import StopRequest
from tests.faults.disks import Disk
from tests.runs.ports import free_port
from tests.runs.processes import HANG_S
from tests.runs.processes import wait_until as until

SERVES = module_command("http.server", "0")


class Commands:
    """Commands of one run of two nodes: the head node's part, and whole commands of other nodes."""

    def __init__(self, output_dir: Path) -> None:
        self.run_dir = RunDir(output_dir)
        self.port = free_port()
        self.signals: list[int] = []
        self._heads: list[Nodes] = []
        self._threads = ThreadPoolExecutor()

    def config(self, **changes: Any) -> SftConfig:
        parallel = {"nodes": 2, "num_ranks": 1, "rdzv_endpoint": f"localhost:{self.port}", "rdzv_timeout_s": HANG_S}
        parallel |= changes.pop("parallel", {})
        return SftConfig(parallel=ParallelConfig(**parallel), **{"output_dir": self.run_dir.path, **changes})

    def head(self, **changes: Any) -> Nodes:
        config = self.config(**changes)
        server = meet(config.parallel, None)
        assert server is not None
        self._heads.append(Nodes(server, config.parallel, Registration.of(config, None)))
        return self._heads[-1]

    def node(self, rank: int | None = None, **changes: Any) -> Future[int]:
        """Start the command of another node."""
        config = self.config(**changes)
        follower = Follower(config, Registration.of(config, rank), {"OF_THE_NODE": "1"}, self.signals)
        return self._threads.submit(follower.run)

    def end(self) -> None:
        self.signals.append(signal.SIGKILL)
        for head in self._heads:
            head.close()
        self._threads.shutdown()


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    made = Commands(tmp_path / "run")
    yield made
    made.end()


def test_the_nodes_of_one_command_get_places_until_the_run_is_over(commands: Commands) -> None:
    settings = {"optim": AdamWConfig(max_grad_norm=math.inf)}  # which JSON cannot say
    head = commands.head(**settings)
    assert not head.is_placed() and "1 of 2 nodes are here: waiting for the others" in head.missing()
    node = commands.node(**settings)
    until(head.is_placed)
    commands.run_dir.create()
    check_shared(head, ["trainer_1"], commands.run_dir.path)
    first, second = head.environments(), head.environments()
    assert [one[NODE_RANK_ENV] for one in first.values()] == ["0", "1"] and list(first) == ["trainer", "trainer_1"]
    (endpoint,) = {one[ENDPOINT_ENV] for one in first.values()}
    assert endpoint != second["trainer"][ENDPOINT_ENV] and not endpoint.endswith(str(commands.port))
    assert meet(commands.config().parallel, None) is None, "another command on this machine leads"
    head.end(0)
    head.close()
    assert node.result(HANG_S) == 0


def test_ranks_of_an_outer_launcher_decide_the_order(commands: Commands) -> None:
    three = {"nodes": 3}
    head = commands.head(parallel=three)
    commands.node(2, parallel=three)
    until(lambda: len(head._there()) == 1)
    commands.node(1, parallel=three)
    until(head.is_placed)
    assert [node.rank for _, node in head._placed] == [1, 2]


def test_a_node_runs_what_the_head_node_starts_with_its_own_environment(commands: Commands, tmp_path: Path) -> None:
    head = commands.head()
    commands.node()
    until(head.is_placed)
    code = "import os; print(os.environ['OF_THE_NODE'], os.environ['OF_THE_HEAD'], flush=True)"
    (module := tmp_path / "shows.py").write_text(code)
    environment = {"OF_THE_HEAD": "2", "PYTHONPATH": str(module.parent)}
    process = head.host("trainer_1").start(module_command("shows"), tmp_path / "a.log", environment)
    assert process.wait(HANG_S) == 0 and (tmp_path / "a.log").read_text() == "1 2\n"


@pytest.mark.parametrize(("changes", "says"), [
    ({"parallel": {"num_ranks": 2}}, "parallel.num_ranks: 1 -> 2"),
    ({"seed": 7}, "seed: 0 -> 7"),
    ({"output_dir": Path("/elsewhere")}, "nodes write to other directories"),
])  # fmt: skip
def test_a_node_with_another_command_is_refused_with_both_names(
    commands: Commands, changes: dict[str, Any], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    head = commands.head()
    with pytest.raises(ConfigError, match=says) as refused:
        commands.node(**changes).result(HANG_S)
    assert str(refused.value).count(Holder.me().host) == 2
    assert says in capsys.readouterr().out  # of the head node
    commands.node()
    until(head.is_placed)  # it waits on for the right node


def test_a_node_with_other_code_is_refused(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    commands.head()
    monkeypatch.setattr(nodes_module, "digest_of_code", lambda: "0.1 2.13 ffffffffffffffff")
    with pytest.raises(ConfigError, match=r"nodes run other code: .* holdfast 0\.1 \(source ffffffff\) with torch"):
        commands.node().result(HANG_S)


def test_the_code_of_a_node_is_that_of_the_package_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes may have other packages beside it."""
    (tmp_path / "holdfast" / "launcher").mkdir(parents=True)
    own = tmp_path / "holdfast" / "launcher" / "nodes.py"
    own.write_text("a = 1\n")
    monkeypatch.setattr(nodes_module, "__file__", str(own))
    digest = nodes_module.digest_of_code()
    (tmp_path / "other.py").write_text("b = 1\n")
    assert nodes_module.digest_of_code() == digest
    (tmp_path / "holdfast" / "errors.py").write_text("c = 1\n")
    assert nodes_module.digest_of_code() != digest


def test_a_node_that_cannot_be_understood_is_refused(commands: Commands) -> None:
    commands.head()
    with socket.create_connection(("localhost", commands.port)) as stranger, stranger.makefile("r") as reader:
        stranger.sendall(b'{"other": "version"}\n')
        assert "does not understand" in reader.readline()


def test_a_directory_that_one_node_does_not_see_is_refused(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    head = commands.head()
    commands.node()
    until(head.is_placed)
    commands.run_dir.create()
    monkeypatch.setattr("holdfast.launcher.cluster.hosts._is_there", lambda _: False)
    monkeypatch.setattr("holdfast.launcher.cluster.cluster._VISIBLE_S", 0.0)
    with pytest.raises(ConfigError, match="does not see .*: give an --output-dir on a filesystem that all hosts share"):
        check_shared(head, ["trainer_1"], commands.run_dir.path)


def test_a_node_that_cannot_write_is_refused(commands: Commands, tmp_path: Path) -> None:
    (place := tmp_path / "disk").mkdir()
    with Disk(f"mount -t tmpfs -o ro none {place}") as disk:
        if disk.problem:
            pytest.skip(disk.problem)
        config = commands.config(parallel={"rdzv_timeout_s": 0.2}, output_dir=disk.view(place))
        with pytest.raises(RunDirError, match="cannot be written: Read-only"):
            launch_on_nodes(config, rank=1, environment={})


def test_a_directory_that_the_head_removes_is_no_error(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    commands.run_dir.rollouts.mkdir(parents=True)
    touch = Path.touch

    def remove_and_touch(path: Path) -> None:
        if path.parent == commands.run_dir.rollouts:
            path.parent.rmdir()
        touch(path)

    monkeypatch.setattr(Path, "touch", remove_and_touch)
    commands.run_dir.require_writable()
    assert not commands.run_dir.rollouts.exists()


@pytest.mark.parametrize(
    ("rank", "says"), [(0, "1 of 2 nodes are here"), (1, "waiting for the head node, at localhost:")]
)
def test_nodes_wait_no_longer_than_is_set(commands: Commands, rank: int, says: str) -> None:
    config = commands.config(parallel={"rdzv_timeout_s": 0.2})
    with pytest.raises(NodeLost, match=rf"waited in vain for 0\.2 s .*{says}"):
        launch_on_nodes(config, rank=rank, environment={})


@pytest.mark.parametrize(("says", "error"), [(b"", NodeLost), (b"SSH-2.0\n", ConfigError)], ids=["frozen", "another"])
def test_what_listens_and_is_no_head_node_is_not_waited_for(
    commands: Commands, says: bytes, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.launcher.cluster.channels.SILENT_S", 0.1)
    with socket.create_server(("localhost", commands.port)) as server:
        node = commands.node(parallel={"rdzv_timeout_s": 0.2})
        connection, _ = server.accept()
        with connection:
            connection.sendall(says)
            with pytest.raises(error, match=f"localhost:{commands.port}"):
                node.result(HANG_S)


def test_a_signal_ends_the_wait_and_that_of_a_node_reaches_the_head_node(commands: Commands) -> None:
    waiting = commands.node()
    commands.signals.append(signal.SIGTERM)
    assert waiting.result(HANG_S) == 128 + signal.SIGTERM
    commands.signals.clear()
    head, node = commands.head(), commands.node()
    until(head.is_placed)
    assert head.asked_to_stop() is None
    commands.signals.append(signal.SIGUSR1)
    assert until(head.asked_to_stop) == signal.SIGUSR1
    head.end(138)
    head.close()
    assert node.result(HANG_S) == 138


def test_a_silent_node_is_lost_and_another_takes_its_place(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    head = commands.head()
    commands.node()
    until(head.is_placed)
    ((silent, _),) = head._placed
    process = head.host("trainer_1").start(SERVES, tmp_path / "a.log", {})
    until(lambda: process.pid)
    spare = commands.node()
    until(lambda: len(head._there()) == 2)
    assert head.is_placed() and head._placed[0][0] is silent, "a node with a place keeps it"
    silent.silent_s = -1.0  # type: ignore[misc]
    assert process.poll() == -signal.SIGKILL and "does not answer" in str(process.loss)
    until(head.is_placed)
    assert head._placed[0][0] is not silent and not spare.done()
    until(lambda: len(head._there()) == 2)  # it has ended its process, and come again


def test_without_a_head_node_a_trainer_ends_and_the_next_head_node_goes_on(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = commands.head()
    node = commands.node()
    until(head.is_placed)
    assert not head.trains(commands.run_dir)
    commands.run_dir.create()
    assert not head.trains(commands.run_dir), "of somebody else"
    process = head.host("trainer_1").start(SERVES, tmp_path / "a.log", {})
    pid = until(lambda: process.pid)
    monkeypatch.setattr(SocketChannel, "tell", lambda *_: None)  # as if it were killed
    head.close()
    until(lambda: not Path(f"/proc/{pid}").exists())
    until(lambda: "is lost: waiting for its command to be started again" in capsys.readouterr().out)
    again = commands.head()
    until(again.is_placed)
    assert again.trains(commands.run_dir) and not node.done()


def test_whatever_ends_the_head_node_is_told_to_all(commands: Commands) -> None:
    commands.run_dir.path.mkdir()
    (commands.run_dir.path / "configs").touch()
    node = commands.node()
    with pytest.raises(NotADirectoryError):
        launch_on_nodes(commands.config(), rank=0, environment={})
    with pytest.raises(ProcessDied, match="the run has ended on node .*Not a directory") as died:
        node.result(HANG_S)
    assert died.value.exit_code == 2


def test_who_must_lead_and_cannot_is_refused(commands: Commands) -> None:
    nowhere = "no.such.host.invalid"
    commands.head()
    with pytest.raises(ConfigError, match=r"nodes cannot meet at localhost:.* Choose a free port of this machine"):
        meet(commands.config().parallel, 0)
    parallel = {"rdzv_endpoint": f"{nowhere}:{commands.port}"}
    with pytest.raises(ConfigError, match=rf"nodes cannot meet at {nowhere}:\d+: this machine knows no '{nowhere}'\. "):
        meet(commands.config(parallel=parallel).parallel, 0)
    for elsewhere in ("192.0.2.1", nowhere):  # an address of documentation
        parallel = {"rdzv_endpoint": f"{elsewhere}:{commands.port}"}
        assert meet(commands.config(parallel=parallel).parallel, None) is None


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_a_request_to_stop_reaches_every_node(server: TCPStore) -> None:
    connect = partial(TCPStore, "127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    first, second = StopRequest(), StopRequest()
    links = [StopLink(connect, stop) for stop in (first, second)]
    second.ask(10)
    assert until(first.signal_number) == 10
    for link in links:
        link.end()


@pytest.mark.parametrize(("endpoint", "place"), [
    ("head", ("head", 29400)), ("head:29500", ("head", 29500)), ("10.0.0.1:1", ("10.0.0.1", 1)),
    ("[fd00::1]:29500", ("fd00::1", 29500)),
    *((wrong, None) for wrong in ("", ":29500", "head:", "head:x", "head:0", "head:70000", "a b:1")),
    *((wrong, None) for wrong in ("http://head", "me@head:1", "[fd00::1", "a..b:1")),
])  # fmt: skip
def test_where_nodes_meet(endpoint: str, place: tuple[str, int] | None) -> None:
    if place is None:
        with pytest.raises(ValueError, match="HOST:PORT"):
            ParallelConfig(rdzv_endpoint=endpoint)
        return
    assert ParallelConfig(rdzv_endpoint=endpoint).rendezvous == place
