"""Rendezvous of the launchers of one multi-node run: the head node prepares the run, and all nodes follow it.

The head node is the host of `parallel.rdzv_endpoint`. Only the head node looks at the run directory, takes its lock,
and decides about the attempt and the step to resume from. The other nodes never decide anything. If a trainer dies on
any node, the attempt ends on all nodes. The next attempt begins when all nodes are back.

`Meeting` exchanges short messages through a torch store on the head node, which speaks to all; the other nodes speak
only to the head node. A thread does this, so a host that is switched off blocks nobody else. A node counts as lost by
the time of its last message.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec

from holdfast.config.load import to_toml
from holdfast.config.training import TrainingCommand
from holdfast.errors import ConfigError, NodeLost, ProcessDied
from holdfast.launcher.node_checks import (
    Hello,
    Lead,
    NodePart,
    Over,
    Verdict,
    Word,
    digest_of_code,
    why_not_together,
    why_not_writable,
)
from holdfast.launcher.resume.attempt import Attempt
from holdfast.process.heartbeat import awake_s
from holdfast.run import atomic
from holdfast.run.lock import Holder
from holdfast.run.run_dir import RunDir

if TYPE_CHECKING:
    from torch.distributed import TCPStore


_PERIOD_S = 0.1
_CONNECT_S = 5.0
_STORE_S = 30.0


class Meeting:
    """What is said and heard here; messages are bytes, of whatever form.

    Args:
        address: host and port of the store.
        hello: makes what this node says of itself once, whenever it comes to the meeting.
        hosts: whether the store is to be here; unset: where the address is one of this machine, and free.

    Raises:
        ConfigError: the store cannot be here.
    """

    def __init__(self, address: tuple[str, int], hello: Callable[[], bytes], *, hosts: bool | None = None) -> None:
        self._address = address
        self._hello = hello
        self._lock = threading.Lock()
        self._word = b""
        self._said = 0  # how often it was taken along
        self._lead = b""
        self._hellos: dict[int, bytes] = {}
        self._words: dict[int, tuple[bytes, float]] = {}
        self._forgotten: set[int] = set()
        self._contact_s = awake_s()
        self._was_there = False
        self._comes_again = False
        self._ended = threading.Event()
        self._store = _open_store(address, must_host=hosts) if hosts is not False else None
        self.is_host = self._store is not None
        self.number = 0 if self.is_host else -1
        """Of this node at the meeting: 0 of the host; -1 while it has none."""
        self._thread = threading.Thread(target=self._run, name="meeting", daemon=True)
        self._thread.start()

    def say(self, word: bytes) -> int:
        """Say `word` from now on: the host to all, the others to the host; return the turn in which it is said."""
        with self._lock:
            self._word = word
            return self._said + 2  # the turn that is under way may have taken the word before

    def has_said(self, turn: int) -> bool:
        """Whether what was to be said by `turn` has been."""
        with self._lock:
            return self._said >= turn

    def lead(self) -> bytes:
        """What the host says; empty while it has not been heard."""
        with self._lock:
            return self._lead

    def others(self) -> dict[int, tuple[bytes, bytes, float]]:
        """At the host: hello, word, and seconds since the last sign of life of every other node, by number."""
        now = awake_s()
        with self._lock:
            return {
                number: (hello, *self._heard(number, now))
                for number, hello in self._hellos.items()
                if number not in self._forgotten
            }

    def _heard(self, number: int, now: float) -> tuple[bytes, float]:
        word, since = self._words[number]
        return word.partition(b"\n")[2], now - since

    def forget(self, number: int) -> None:
        """At the host: listen to the node of this number no more."""
        with self._lock:
            self._forgotten.add(number)

    def come_again(self) -> None:
        """At another node: come to the meeting anew, under another number."""
        self._comes_again = True

    def silent_s(self) -> float:
        """Return for how long the host has not been heard."""
        with self._lock:
            return 0.0 if self.is_host else awake_s() - self._contact_s

    @property
    def was_there(self) -> bool:
        """Whether the host was ever heard."""
        return self.is_host or self._was_there

    def end(self) -> None:
        """Say and hear no more."""
        self._ended.set()
        self._thread.join(_PERIOD_S * 5)  # longer only where the host is away
        self._store = None

    def _run(self) -> None:
        while not self._ended.wait(_PERIOD_S):
            try:
                if self._comes_again:
                    self._comes_again, self._store = False, None
                store = self._store or self._come()
                if store is not None:
                    self._take_turn(store)
            except RuntimeError:  # of torch: the connection is broken
                if not self.is_host:
                    self._store = None
                    self.number = -1

    def _come(self) -> TCPStore | None:
        """Come to the meeting anew; return its store, if it is there."""
        # Asked by ourselves first: torch's client writes pages to stderr where nobody answers.
        try:
            socket.create_connection(self._address, timeout=_CONNECT_S).close()
        except OSError:
            return None
        store = _store(self._address, is_master=False)
        number = store.add("holdfast/nodes", 1)
        store.set(f"holdfast/hello/{number}", self._hello().decode())
        with self._lock:
            self._lead = b""  # of a host that was there before
        self._store, self.number = store, number
        return store

    def _take_turn(self, store: TCPStore) -> None:
        with self._lock:
            turn, word = self._said + 1, self._word
        if self.is_host:
            store.set("holdfast/lead", word.decode())
            for number in range(1, store.add("holdfast/nodes", 0) + 1):
                self._listen(store, number)
        else:
            # With the number of the turn: that it changes is the sign of life.
            store.set(f"holdfast/word/{self.number}", f"{turn}\n{word.decode()}")
            lead = store.get("holdfast/lead") if store.check(["holdfast/lead"]) else b""
            with self._lock:
                self._lead, self._contact_s, self._was_there = lead, awake_s(), True
        with self._lock:
            self._said = turn

    def _listen(self, store: TCPStore, number: int) -> None:
        keys = [f"holdfast/hello/{number}", f"holdfast/word/{number}"]
        if number in self._forgotten or not store.check(keys):
            return
        hello, word = store.multi_get(keys)
        with self._lock:
            self._hellos[number] = hello
            if number not in self._words or self._words[number][0] != word:
                self._words[number] = (word, awake_s())


def _open_store(address: tuple[str, int], *, must_host: bool | None) -> TCPStore | None:
    """Return a store here, or None where the address is another machine's, or another process has it.

    Raises:
        ConfigError: it must be here, and cannot.
    """
    host, port = address
    if must_host is None and not _is_here(host):
        return None
    try:
        return _store(address, is_master=True)
    except RuntimeError as error:
        if must_host is None and is_taken(port):
            return None
        raise ConfigError(f"nodes cannot meet at {host}:{port}: {_why_not(host, error)}") from None


def _why_not(host: str, error: RuntimeError) -> str:
    try:
        socket.getaddrinfo(host, None)
    except OSError:  # said now alone: the name of a pod becomes known late
        return (
            f"this machine knows no '{host}'. Give a name or address that all nodes know, with "
            "--parallel.rdzv-endpoint, or as MASTER_ADDR of the outer launcher."
        )
    return f"{str(error).splitlines()[0]}. Choose a free port of this machine with --parallel.rdzv-endpoint."


def _store(address: tuple[str, int], *, is_master: bool) -> TCPStore:
    # Where a connection breaks, torch writes a page for each to stderr; who is lost is told by us.
    before = os.environ.get("TORCH_CPP_LOG_LEVEL")
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
    try:
        from torch.distributed import TCPStore
    finally:
        # Read once, at the import: the processes that are started from here shall have their own.
        del os.environ["TORCH_CPP_LOG_LEVEL"]
        if before is not None:
            os.environ["TORCH_CPP_LOG_LEVEL"] = before
    timeout = timedelta(seconds=_STORE_S)
    return TCPStore(*address, is_master=is_master, wait_for_workers=False, timeout=timeout)


def _is_here(host: str) -> bool:
    """Whether `host` is an address of this machine: then, and only then, it can be bound."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:  # no such name: said by whoever waits for it
        return False
    for family, kind, _, _, address in found:
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(address)
            return True
    return False


def is_taken(port: int) -> bool:
    """Whether a process of this machine listens at `port`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def free_port() -> int:
    """Return a port of this machine that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


SILENT_S = 30.0
"""A node that says nothing for so long is lost."""
# Network filesystems may show a new file this late; and a host that ends waits for the others to hear of it.
_VISIBLE_S = 35.0
_FAREWELL_S = 5.0
_POLL_S = 0.05
MARK_NAME = "nodes.mark"


class NodeGroup:
    """This command among those of the other nodes.

    Args:
        config: of the training; `parallel.rdzv_endpoint` is set.
        name: of the file with its resolved settings.
        rank: of this node, where an outer launcher gave one: 0 leads.
    """

    def __init__(
        self,
        config: TrainingCommand,
        name: str,
        *,
        rank: int | None = None,
        silent_s: float = SILENT_S,
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
        self._word = Word()
        self._looked: tuple[str, float] = ("", 0.0)
        self._missing_since: float | None = None
        self._told = ""
        self._mark = self._run_dir.path / MARK_NAME
        self._has_left_mark = False
        self._lead = Lead(host=self._hello().name, mark=uuid.uuid4().hex)
        self._refused: dict[int, str] = {}
        self._matching: set[int] = set()
        self._meeting = Meeting(
            self._parallel.rendezvous,
            lambda: msgspec.json.encode(self._hello()),
            hosts=None if rank is None else rank == 0,
        )
        self._say()

    @property
    def leads(self) -> bool:
        """Whether this node prepares the run."""
        return self._meeting.is_host

    def _hello(self) -> Hello:
        me = self._me
        return Hello(
            me.pid,
            me.host,
            me.pid_space,
            self._code,
            str(self._run_dir.path),
            self._settings,
            self._run_id,
            -1 if self._rank is None else self._rank,
        )

    # --- before an attempt

    def gather(self, pause: Callable[[], int | None], say: Callable[[str], None]) -> int | None:
        """Wait until the next attempt can begin: at the host, until all nodes are there; else, until it says so.

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
        while not (self._all_are_here() if self.leads else self._has_begun()):
            self._wait_no_longer_than_allowed()
            over = self._lead_now().over
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
        # By the turn: one that has not heard yet that the attempt is over may be about to begin it. Words may have come
        # since `_follow` looked: a node that it has not compared, or that reports a problem, is not ready.
        ready = [
            number
            for number, (_, word) in present.items()
            if number in self._matching and not word.problem and word.sees == self._lead.mark
            if not word.runs and word.knows == self._lead.turn
        ]
        is_full = len(ready) == len(present) == self._parallel.nodes - 1
        # One too many is waited for as well: it may be one that was lost, of which that is not known yet.
        self._missing_since = None if len(present) == self._parallel.nodes - 1 else self._missing_since or awake_s()
        return is_full and not self._word.runs

    def _has_begun(self) -> bool:
        lead = self._lead_now()
        number = self._meeting.number
        if (reason := lead.refused.get(number)) is not None:
            raise ConfigError(reason)
        if number in lead.gone:
            self._meeting.come_again()  # it was frozen, for instance
            return False
        is_away = not self._meeting.was_there or self._meeting.silent_s() > self._silent_s
        self._missing_since = (self._missing_since or awake_s()) if is_away else None
        self._answer(lead)
        if lead.attempt <= self._word.attempt or number not in lead.ranks or lead.broken:
            return False
        return atomic.is_visible(self._run_dir.configs(lead.attempt) / f"{self._name}.toml")

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
        if self.leads:
            there = 1 + len(self._present())
            missing = self._parallel.nodes - there
            if missing > 0:
                return f"{there} of {self._parallel.nodes} nodes are here: waiting for the others at {host}:{port}"
            if missing < 0:
                return (
                    f"{there} commands are here, and parallel.nodes is {self._parallel.nodes}: waiting for some to end"
                )
            return f"all {self._parallel.nodes} nodes are here: waiting until they are ready"
        if not self._meeting.was_there:
            return f"waiting for the node that leads, at {host}:{port}"
        if self._meeting.silent_s() > self._silent_s:
            return f"the node that leads, {host}, is lost: waiting for its command to be started again"
        there = self._lead_now().present
        return f"waiting for the node that leads, {host}, to begin ({there} of {self._parallel.nodes} nodes are here)"

    def is_rejoined(self) -> bool:
        """Whether another node trains this run already: then the one that leads was lost, and goes on with it."""
        if not self._run_dir.holds_run():
            return False
        run_id = self._run_dir.run_id()
        return any(hello.run_id == run_id for hello, _ in self._present().values())

    def begin(self, attempt: Attempt) -> NodePart:
        """At the host: tell the others to start, now that everything is prepared; return its own part."""
        present = self._present()
        order = sorted(present, key=lambda number: (present[number][0].rank, present[number][0].host, number))
        host = self._parallel.rendezvous[0]
        host = f"[{host}]" if ":" in host else host
        self._run_id = attempt.run_dir.run_id()
        self._lead = msgspec.structs.replace(
            self._lead,
            turn=self._lead.turn + 1,
            attempt=attempt.number,
            resume_step=attempt.resume_step,
            run_id=self._run_id,
            # A port of its own: what the attempt before left in its store must not be found by this one.
            endpoint=f"{host}:{free_port()}",
            ranks={number: rank for rank, number in enumerate(order, start=1)},
            broken="",
        )
        return self._take_part(self._lead, rank=0)

    def join(self) -> NodePart:
        """At another node: return its part in the attempt that has begun."""
        lead = self._lead_now()
        self._run_id = lead.run_id
        return self._take_part(lead, rank=lead.ranks[self._meeting.number])

    def _take_part(self, lead: Lead, *, rank: int) -> NodePart:
        self._word = msgspec.structs.replace(self._word, attempt=lead.attempt, runs=True, died="")
        self._say()
        return NodePart(rank, lead.endpoint, lead.attempt, lead.resume_step)

    # --- during an attempt

    def verdict(self) -> Verdict | None:
        """Return what the others make this node do, if anything; to be called again and again."""
        if self.leads:
            self._follow()
        elif self._meeting.silent_s() > self._silent_s:
            return Verdict(f"the node that leads has not been heard for {self._silent_s:g} s")
        lead = self._lead_now()
        if self._meeting.number in lead.gone:
            return Verdict("this node was taken for lost")
        if lead.over is not None:
            return Verdict(lead.over.message, lead.over.signal)
        # Not heard anew yet: the host, or the way to it, was away for a moment.
        if lead.attempt == self._word.attempt and lead.broken:
            return Verdict(lead.broken)
        return Verdict("another attempt has begun without this node") if lead.attempt > self._word.attempt else None

    def trainer_died(self, how: str) -> None:
        """Say that the trainer of this node has ended, with all of its ranks."""
        self._word = msgspec.structs.replace(self._word, runs=False, died=how)
        self._say()

    def leave(self, code: int, message: str = "") -> int:
        """Say how the run has ended here, and leave; return the exit code that all agree on.

        A signal may reach several nodes: the first that the host hears of is everybody's.
        """
        over = None if code == 0 else Over(code, f"{self._me.host}: {message or f'exit code {code}'}")
        self._word = msgspec.structs.replace(self._word, runs=False, is_finished=code == 0, over=over)
        turn = self._say()
        deadline = awake_s() + _FAREWELL_S
        while awake_s() < deadline and not (self._meeting.has_said(turn) and self._all_know(over)):
            time.sleep(_POLL_S)
        agreed = self._lead_now().over
        if self.leads:
            self._mark.unlink(missing_ok=True)
        self._meeting.end()
        is_everybodys = over is not None and over.signal and agreed is not None and agreed.signal
        return agreed.code if is_everybodys and agreed is not None else code

    def _all_know(self, over: Over | None) -> bool:
        """Whether nobody needs this node any more: the host leaves last."""
        if not self.leads:
            return over is None or self._lead_now().over is not None
        self._follow()
        return all(word.over is not None or word.is_finished for _, word in self._present().values())

    # --- what is said and heard

    def _say(self) -> int:
        return self._meeting.say(msgspec.json.encode(self._lead if self.leads else self._word))

    def _lead_now(self) -> Lead:
        if self.leads:
            return self._lead
        said = self._meeting.lead()
        return msgspec.json.decode(said, type=Lead) if said else Lead("", "")

    def _present(self) -> dict[int, tuple[Hello, Word]]:
        """At the host: the other nodes that are there and may take part."""
        nodes = {}
        for number, (hello, word, _) in self._meeting.others().items():
            if number in self._refused:
                continue
            try:
                said = msgspec.json.decode(word, type=Word) if word else Word()
                nodes[number] = (msgspec.json.decode(hello, type=Hello), said)
            except (msgspec.DecodeError, UnicodeDecodeError):  # of another version
                self._refuse(number, f"nodes run other code: one that came to {self._lead.host} cannot be understood")
        return nodes

    def _refuse(self, number: int, reason: str) -> None:
        self._refused[number] = reason
        print(f"refused: {reason}", flush=True)

    def _follow(self) -> None:
        """At the host: take in what the others say, and say what follows from it."""
        self._leave_mark()
        present = self._present()
        gone = self._gone(present)
        lead = self._lead
        for number, (hello, word) in present.items():
            if number in gone:
                self._meeting.forget(number)
                lead = lead.with_broken(gone[number]) if number in lead.ranks else lead
            elif reason := self._why_refused(number, hello, word):
                self._refuse(number, reason)
            elif word.over is not None and lead.over is None:
                lead = msgspec.structs.replace(lead, over=word.over)
            elif number in lead.ranks and not (word.runs or word.is_finished) and word.attempt == lead.attempt:
                lead = lead.with_broken(f"on node {hello.name} the trainer {word.died}")
        if lead.attempt and not (self._word.runs or self._word.is_finished):
            lead = lead.with_broken(f"on node {lead.host} the trainer {self._word.died}")
        if self._word.over is not None and lead.over is None:
            lead = msgspec.structs.replace(lead, over=self._word.over)
        stay = {number: hello for number, (hello, _) in present.items() if number not in {*gone, *self._refused}}
        lead = msgspec.structs.replace(
            lead,
            present=1 + len(stay),
            refused=dict(self._refused),
            gone=sorted({*lead.gone, *gone}),
            holders={number: (one.pid, one.host, one.pid_space) for number, one in stay.items()},
        )
        if lead != self._lead:
            self._lead = lead
            self._say()

    def _gone(self, present: dict[int, tuple[Hello, Word]]) -> dict[int, str]:
        """At the host: the nodes that are lost, by number, and why."""
        others = self._meeting.others()
        seen_dead = {number for _, word in present.values() for number in word.dead}
        gone = {}
        for number, (hello, _) in present.items():
            silent_s = others[number][2]
            if silent_s > self._silent_s:
                gone[number] = f"node {hello.name} has not been heard for {silent_s:.0f} s"
            elif number in seen_dead or hello.holder.is_dead:
                gone[number] = f"the command on node {hello.name} has ended"
        return gone

    def _why_refused(self, number: int, hello: Hello, word: Word) -> str:
        """At the host: why the node of this number may not take part; empty where it may."""
        if number not in self._matching:
            if reason := why_not_together(self._hello(), hello):
                return reason
            self._matching.add(number)  # what it says of itself is said once
        if word.problem:
            return f"{self._run_dir.path} of {self._lead.host} {word.problem} on {hello.name}"
        return ""

    # --- the directory that all share

    def _leave_mark(self) -> None:
        """Put the file into the output directory that the others shall find there."""
        if not self._has_left_mark:
            atomic.write_file(self._mark, self._lead.mark.encode())
            self._has_left_mark = True

    def _answer(self, lead: Lead) -> None:
        """At another node: say what it has heard, and whether the output directory is that of the host and writable."""
        word = self._word
        if lead.mark and word.sees != lead.mark:
            if self._looked[0] != lead.mark:
                self._looked = (lead.mark, awake_s())
            if atomic.is_visible(self._mark) and self._mark.read_text() == lead.mark:
                word = msgspec.structs.replace(word, sees=lead.mark, problem=why_not_writable(self._run_dir.path))
            elif awake_s() - self._looked[1] > self._visible_s:
                word = msgspec.structs.replace(
                    word, problem="is not the directory of that path: all nodes must share it, and it is another one"
                )
        dead = [number for number, holder in lead.holders.items() if Holder(*holder).is_dead]
        word = msgspec.structs.replace(word, dead=dead, knows=lead.turn)
        if word != self._word:
            self._word = word
            self._say()


def _died(over: Over) -> ProcessDied:
    error = ProcessDied(f"the run has ended on node {over.message}")
    error.exit_code = over.code
    return error
