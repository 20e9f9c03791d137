"""The launcher of one node of a multi-node run: the head node prepares the run, all nodes follow it.

The head node is the host of `parallel.rdzv_endpoint`. Only the head node looks at the run directory, takes its lock,
and decides about the attempt and the step to resume from. If a trainer dies on any node, the attempt ends on all nodes.
The next attempt begins when all nodes are back. A node counts as lost by the time of its last message.

Two nodes train one run together only with the same code, settings and run directory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import tomli
import xxhash

from holdfast.config.load import to_toml
from holdfast.config.training import TrainingCommand
from holdfast.errors import ConfigError, NodeLost, ProcessDied, RunDirError
from holdfast.launcher.rendezvous import Rendezvous, free_port
from holdfast.launcher.resume.attempt import Attempt
from holdfast.launcher.resume.config_diff import changed_settings
from holdfast.process.heartbeat import awake_s
from holdfast.run import atomic
from holdfast.run.lock import Holder
from holdfast.run.run_dir import RunDir

_SILENT_S = 30.0  # a node that sends nothing for so long is lost
# Network filesystems may show a new file this late.
_VISIBLE_S = 35.0
_FAREWELL_S = 5.0
_POLL_S = 0.05

_FIRST_SIGNAL = 128


class Registration(msgspec.Struct, frozen=True):
    """A node's message when it joins.

    Attributes:
        code: digest of the installed code.
        settings: as TOML, which has numbers that JSON has not.
        run_id: the run that it trains already; empty for none.
    """

    holder: Holder
    code: str
    output_dir: str
    settings: str
    run_id: str = ""
    rank: int = -1

    @property
    def name(self) -> str:
        return f"{self.holder.host} (process {self.holder.pid})"


class ExitStatus(msgspec.Struct, frozen=True):
    """How the run has ended on one node."""

    code: int
    message: str = ""

    @property
    def signal(self) -> int:
        """The signal that it has stopped by; 0 for none."""
        return max(0, self.code - _FIRST_SIGNAL)


class NodeStatus(msgspec.Struct, frozen=True):
    """A node's message, sent again and again.

    Attributes:
        attempt: its last attempt.
        runs: whether its trainer runs.
        knows: the last turn of the head node that it received.
    """

    attempt: int = 0
    runs: bool = False
    knows: int = 0
    is_finished: bool = False
    died: str = ""
    over: ExitStatus | None = None


class HeadState(msgspec.Struct, frozen=True):
    """The head node's message to all.

    Attributes:
        ranks: node rank by number at the meeting.
        turn: counts the starts and the ends of attempts.
        broken: why the attempt is over.
        gone: numbers of nodes that were taken for lost.
    """

    host: str
    present: int = 1
    turn: int = 0
    attempt: int = 0
    resume_step: int | None = None
    run_id: str = ""
    endpoint: str = ""
    ranks: dict[int, int] = {}
    broken: str = ""
    refused: dict[int, str] = {}
    gone: list[int] = []
    over: ExitStatus | None = None

    def with_broken(self, reason: str) -> HeadState:
        """Return the same after the end of the attempt because of `reason`; the first reason stays."""
        return self if self.broken else msgspec.structs.replace(self, broken=reason, turn=self.turn + 1)


@dataclass(frozen=True)
class NodePart:
    """This node's part in an attempt.

    Attributes:
        rank: of the node.
        endpoint: HOST:PORT where the trainers meet.
    """

    rank: int
    endpoint: str
    attempt: int
    resume_step: int | None


@dataclass(frozen=True)
class StopOrder:
    """A request of another node: stop by `signal`, or end its trainer because of `reason`."""

    reason: str
    signal: int = 0


def why_not_together(ours: Registration, theirs: Registration) -> str:
    """Return why the node of `theirs` cannot take part in the run of `ours`, naming both; empty if it can."""
    here, there = ours.name, theirs.name
    if theirs.code != ours.code:
        return (
            f"nodes run other code: {_version(ours.code)} on {here}, {_version(theirs.code)} on {there}. Install the "
            "same on all."
        )
    differing = changed_settings(tomli.loads(ours.settings), tomli.loads(theirs.settings), TrainingCommand)
    if differing:
        lines = "\n  ".join(sorted(differing.values()))
        return (
            f"nodes were started with other settings ({here} -> {there}):\n  {lines}\nStart the same command on every "
            "node."
        )
    if theirs.output_dir != ours.output_dir:
        return (
            f"nodes write to other directories: {ours.output_dir} on {here}, {theirs.output_dir} on {there}. Name one "
            "that all share, by its whole path, with --output-dir."
        )
    return ""


def digest_of_code() -> str:
    """Return the installed versions and a digest of the source, which tells checkouts of one version apart."""
    digest = xxhash.xxh3_64()
    root = Path(__file__).parents[1]  # of the package
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return f"{version('holdfast')} {version('torch')} {digest.hexdigest()}"


def _version(code: str) -> str:
    ours, torch, digest = code.split()
    return f"holdfast {ours} (source {digest[:8]}) with torch {torch}"


class NodeGroup:
    """The command of this node, beside the other nodes' commands.

    Args:
        config: of the training; `parallel.rdzv_endpoint` is set.
        name: of the file with its resolved settings.
        rank: of this node, where an outer launcher gave one: 0 is the head.
    """

    def __init__(
        self,
        config: TrainingCommand,
        name: str,
        *,
        rank: int | None = None,
        silent_s: float = _SILENT_S,
        visible_s: float = _VISIBLE_S,
    ) -> None:
        self._parallel = config.parallel
        self._run_dir = RunDir(config.output_dir)
        self._name = name
        self._settings = to_toml(config)
        self._code = digest_of_code()
        self._rank = rank
        self._silent_s, self._visible_s = silent_s, visible_s
        self._run_id = ""
        self._me = Holder.me()
        self._status = NodeStatus()
        self._missing_since: float | None = None
        self._told = ""
        self._unseen_since: float | None = None
        self._begun: tuple[HeadState, int] | None = None
        self._head = HeadState(self._registration().name)
        self._refused: dict[int, str] = {}
        self._matching: set[int] = set()
        self._ready: list[int] = []
        self._rendezvous = Rendezvous(
            self._parallel.rendezvous,
            lambda: msgspec.json.encode(self._registration()),
            hosts=None if rank is None else rank == 0,
        )
        self._send()

    @property
    def is_head(self) -> bool:
        """Whether this is the head node, which prepares the run."""
        return self._rendezvous.is_host

    def _registration(self) -> Registration:
        rank = -1 if self._rank is None else self._rank
        return Registration(self._me, self._code, str(self._run_dir.path), self._settings, self._run_id, rank)

    # --- before an attempt

    def gather(self, pause: Callable[[], int | None], say: Callable[[str], None]) -> int | None:
        """Wait until the next attempt can begin: the head node for all others, the others for the head node.

        Args:
            pause: waits for a moment; returns the number of a signal that ends the wait.

        Returns:
            None, or that number.

        Raises:
            NodeLost: a node did not come, or come back, in time.
            ConfigError: this node may not take part.
            ProcessDied: the run ended on another node.
        """
        self._missing_since = None
        while not (self._all_are_here() if self.is_head else self._has_begun()):
            self._wait_no_longer_than_allowed()
            over = self._head_now().over
            if over is not None:
                if over.signal:
                    return over.signal
                raise _died(over)
            if (waits_for := self._waits_for()) != self._told:
                self._told = waits_for
                say(waits_for)
            if (number := pause()) is not None:
                return number
        self._told = ""
        return None

    def _all_are_here(self) -> bool:
        self._follow()
        present = self._present()
        # By the turn: a node that has not received the end of the attempt may be about to begin it. Messages may have
        # come since `_follow` looked: a node that it has not compared is not ready.
        self._ready = [
            number
            for number, (_, status) in present.items()
            if number in self._matching and not status.runs and status.knows == self._head.turn
        ]
        is_full = len(self._ready) == len(present) == self._parallel.nodes - 1
        # With one too many it waits as well: the old entry of a restarted node may not have timed out yet.
        self._missing_since = None if len(present) == self._parallel.nodes - 1 else self._missing_since or awake_s()
        return is_full and not self._status.runs

    def _has_begun(self) -> bool:
        head = self._head_now()
        number = self._rendezvous.number
        if (reason := head.refused.get(number)) is not None:
            raise ConfigError(reason)
        if number in head.gone:
            self._rendezvous.rejoin(number)  # it was frozen, for instance
            return False
        is_away = not self._rendezvous.was_there or self._rendezvous.silent_s() > self._silent_s
        self._missing_since = (self._missing_since or awake_s()) if is_away else None
        self._update(knows=head.turn)
        if head.attempt <= self._status.attempt or number not in head.ranks or head.broken:
            self._unseen_since = None  # the next attempt has a wait of its own
            return False
        if not (unseen := self._why_unseen(head)):
            self._begun = head, head.ranks[number]
            return True
        self._unseen_since = self._unseen_since or awake_s()
        if awake_s() - self._unseen_since > self._visible_s:
            raise ConfigError(f"{unseen}: all nodes must share the output directory")
        return False

    def _why_unseen(self, head: HeadState) -> str:
        """Return why this node does not see what the head node has written; empty if it does."""
        identity = self._run_dir.path / "run.json"
        for path in (self._run_dir.configs(head.attempt) / f"{self._name}.toml", identity):
            if not atomic.is_visible(path):
                return f"{path}, which {head.host} has written, is not on this node"
        try:
            found = self._run_dir.run_id()
        except (OSError, RunDirError) as error:
            return f"{identity}, which {head.host} has written, cannot be read on this node ({error})"
        # Another directory may hold an earlier run with an attempt of this number.
        if found != head.run_id:
            return f"{self._run_dir.path} holds run {found} on this node, and run {head.run_id} on {head.host}"
        return ""

    def _wait_no_longer_than_allowed(self) -> None:
        since, timeout_s = self._missing_since, self._parallel.rdzv_timeout_s
        if since is None or awake_s() - since <= timeout_s:
            return
        raise NodeLost(
            f"waited in vain for {timeout_s:g} s (parallel.rdzv_timeout_s): {self._waits_for()}. Start the same "
            "command on every node; what was committed is whole."
        )

    def _waits_for(self) -> str:
        host, port = self._parallel.rendezvous
        if self.is_head:
            there = 1 + len(self._present())
            missing = self._parallel.nodes - there
            if missing > 0:
                return f"{there} of {self._parallel.nodes} nodes are here: waiting for the others at {host}:{port}"
            if missing < 0:
                return (
                    f"{there} commands are here, and parallel.nodes is {self._parallel.nodes}: waiting for some to end"
                )
            return f"all {self._parallel.nodes} nodes are here: waiting until they are ready"
        if not self._rendezvous.was_there:
            return f"waiting for the head node, at {host}:{port}"
        if self._rendezvous.silent_s() > self._silent_s:
            return f"the head node, {host}, is lost: waiting for its command to be started again"
        there = self._head_now().present
        return f"waiting for the head node, {host}, to begin ({there} of {self._parallel.nodes} nodes are here)"

    def is_rejoined(self) -> bool:
        """Whether another node trains this run already: then the head node was lost, and continues the run."""
        if not self._run_dir.holds_run():
            return False
        run_id = self._run_dir.run_id()
        return any(node.run_id == run_id for node, _ in self._present().values())

    def begin(self, attempt: Attempt) -> NodePart:
        """At the head node: tell the others to start, as everything is prepared; return its own part."""
        present = self._present()
        # Not who came since `gather`, perhaps for a node that is lost: that node's rank is still its own.
        order = sorted(self._ready, key=lambda one: (present[one][0].rank, present[one][0].holder.host, one))
        host = self._parallel.rendezvous[0]
        host = f"[{host}]" if ":" in host else host
        self._run_id = attempt.run_dir.run_id()
        self._head = msgspec.structs.replace(
            self._head,
            turn=self._head.turn + 1,
            attempt=attempt.number,
            resume_step=attempt.resume_step,
            run_id=self._run_id,
            # A new port: the store of the attempt before must not be found.
            endpoint=f"{host}:{free_port()}",
            ranks={number: rank for rank, number in enumerate(order, start=1)},
            broken="",
        )
        return self._take_part(self._head, rank=0)

    def join(self) -> NodePart:
        """At another node: return its part in the attempt."""
        # As `gather` has seen it: the connection may have broken since.
        assert self._begun is not None
        head, rank = self._begun
        self._run_id = head.run_id
        return self._take_part(head, rank=rank)

    def _take_part(self, head: HeadState, *, rank: int) -> NodePart:
        self._update(attempt=head.attempt, runs=True, died="")
        return NodePart(rank, head.endpoint, head.attempt, head.resume_step)

    # --- during an attempt

    def stop_order(self) -> StopOrder | None:
        """Return what the others ask of this node, if anything; to be called again and again."""
        if self.is_head:
            self._follow()
        elif self._rendezvous.silent_s() > self._silent_s:
            return StopOrder(f"the head node has not been heard for {self._silent_s:g} s")
        head = self._head_now()
        if self._rendezvous.number in head.gone:
            return StopOrder("this node was taken for lost")
        if head.over is not None:
            return StopOrder(head.over.message, head.over.signal)
        if head.attempt == self._status.attempt and head.broken:
            return StopOrder(head.broken)
        return StopOrder("another attempt has begun without this node") if head.attempt > self._status.attempt else None

    def trainer_died(self, how: str) -> None:
        """Tell the others that the trainer of this node has ended, with all of its ranks."""
        self._update(runs=False, died=how)

    def leave(self, code: int, message: str = "") -> int:
        """Tell the others how the run has ended here; return the exit code that all agree on.

        A signal may reach several nodes: all take the first that the head node received.
        """
        over = None if code == 0 else ExitStatus(code, f"{self._me.host}: {message or f'exit code {code}'}")
        self._update(runs=False, is_finished=code == 0, over=over)
        turn = self._send()
        deadline = awake_s() + _FAREWELL_S
        while awake_s() < deadline and not (self._rendezvous.has_sent(turn) and self._all_know(over)):
            time.sleep(_POLL_S)
        agreed = self._head_now().over
        self._rendezvous.end()
        is_everybodys = over is not None and over.signal and agreed is not None and agreed.signal
        return agreed.code if is_everybodys and agreed is not None else code

    def _all_know(self, over: ExitStatus | None) -> bool:
        """Whether nobody needs this node any more: the head node leaves last."""
        if not self.is_head:
            return over is None or self._head_now().over is not None
        self._follow()
        return all(status.over is not None or status.is_finished for _, status in self._present().values())

    # --- messages

    def _send(self) -> int:
        return self._rendezvous.send(msgspec.json.encode(self._head if self.is_head else self._status))

    def _update(self, **changes: Any) -> None:
        """Send a changed status."""
        status = msgspec.structs.replace(self._status, **changes)
        if status != self._status:
            self._status = status
            self._send()

    def _head_now(self) -> HeadState:
        if self.is_head:
            return self._head
        said = self._rendezvous.from_head()
        return msgspec.json.decode(said, type=HeadState) if said else HeadState("")

    def _present(self) -> dict[int, tuple[Registration, NodeStatus]]:
        """At the head node: the other nodes that are there and may take part."""
        nodes = {}
        for number, (node, status, _) in self._rendezvous.others().items():
            if number in self._refused:
                continue
            try:
                said = msgspec.json.decode(status, type=NodeStatus) if status else NodeStatus()
                nodes[number] = (msgspec.json.decode(node, type=Registration), said)
            except (msgspec.DecodeError, UnicodeDecodeError):  # of another version
                self._refuse(number, f"nodes run other code: one that came to {self._head.host} cannot be understood")
        return nodes

    def _refuse(self, number: int, reason: str) -> None:
        self._refused[number] = reason
        print(f"refused: {reason}", flush=True)

    def _follow(self) -> None:
        """At the head node: process the statuses of the others and send the new state."""
        present = self._present()
        gone = self._gone(present)
        head = self._head
        for number, (node, status) in present.items():
            if number in gone:
                self._rendezvous.forget(number)
                head = head.with_broken(gone[number]) if number in head.ranks else head
            elif reason := self._why_refused(number, node, status):
                self._refuse(number, reason)
            elif status.over is not None and head.over is None:
                head = msgspec.structs.replace(head, over=status.over)
            elif number in head.ranks and not (status.runs or status.is_finished) and status.attempt == head.attempt:
                head = head.with_broken(f"on node {node.name} the trainer {status.died}")
        if head.attempt and not (self._status.runs or self._status.is_finished):
            head = head.with_broken(f"on node {head.host} the trainer {self._status.died}")
        if self._status.over is not None and head.over is None:
            head = msgspec.structs.replace(head, over=self._status.over)
        head = msgspec.structs.replace(
            head,
            present=1 + len(present.keys() - gone.keys() - self._refused.keys()),
            refused=dict(self._refused),
            gone=sorted({*head.gone, *gone}),
        )
        if head != self._head:
            self._head = head
            self._send()

    def _gone(self, present: dict[int, tuple[Registration, NodeStatus]]) -> dict[int, str]:
        """At the head node: the nodes that are lost, by number, and why."""
        others = self._rendezvous.others()
        gone = {}
        for number, (node, status) in present.items():
            # Its command may end before the trainers here and on other nodes.
            if status.is_finished and (self._status.runs or self._status.is_finished):
                continue
            silent_s = others[number][2]
            if silent_s > self._silent_s:
                gone[number] = f"node {node.name} has not been heard for {silent_s:.0f} s"
            elif node.holder.is_dead:  # of a command on this machine
                gone[number] = f"the command on node {node.name} has ended"
        return gone

    def _why_refused(self, number: int, node: Registration, status: NodeStatus) -> str:
        """At the head node: why the node of this number may not take part; empty if it may."""
        if number not in self._matching:
            if reason := why_not_together(self._registration(), node):
                return reason
            self._matching.add(number)
        return ""


def _died(over: ExitStatus) -> ProcessDied:
    error = ProcessDied(f"the run has ended on node {over.message}")
    error.exit_code = over.code
    return error
