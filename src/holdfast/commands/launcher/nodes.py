"""The commands of one training run on several nodes: one of them prepares, all agree on what follows.

The command on the host of `parallel.rdzv_endpoint` leads. It alone looks at the run directory, takes its lock, decides
about the attempt and the step to go on from, and says so to the others, which never decide by themselves. When a
trainer dies on any node the attempt is over on all; when all nodes are there again, the next one begins.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

import msgspec

from holdfast.commands.launcher.meeting import Meeting, free_port
from holdfast.commands.launcher.node_checks import digest_of_code, why_not_together, why_not_writable
from holdfast.commands.launcher.node_words import Hello, Lead, Over, Part, Verdict, Word
from holdfast.commands.resume.attempt import Attempt
from holdfast.shared.config.load import to_toml
from holdfast.shared.config.trainer import TrainingCommand
from holdfast.shared.errors import ConfigError, NodeLost, ProcessDied
from holdfast.shared.files import durable
from holdfast.shared.files.lock import Holder
from holdfast.shared.files.run_dir import RunDir
from holdfast.shared.process.clock import awake_s

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
        # By the turn: one that has not heard yet that the attempt is over may be about to begin it.
        idle = [word for _, word in present.values() if word.sees == self._lead.mark and not word.runs]
        idle = [word for word in idle if word.knows == self._lead.turn]
        is_full = len(idle) == len(present) == self._parallel.nodes - 1
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
        return durable.is_visible(self._run_dir.configs(lead.attempt) / f"{self._name}.toml")

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

    def begin(self, attempt: Attempt) -> Part:
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

    def join(self) -> Part:
        """At another node: return its part in the attempt that has begun."""
        lead = self._lead_now()
        self._run_id = lead.run_id
        return self._take_part(lead, rank=lead.ranks[self._meeting.number])

    def _take_part(self, lead: Lead, *, rank: int) -> Part:
        self._word = msgspec.structs.replace(self._word, attempt=lead.attempt, runs=True, died="")
        self._say()
        return Part(rank, lead.endpoint, lead.attempt, lead.resume_step)

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
            except msgspec.DecodeError:  # of another version
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
            durable.write_file(self._mark, self._lead.mark.encode())
            self._has_left_mark = True

    def _answer(self, lead: Lead) -> None:
        """At another node: say what it has heard, and whether the output directory is that of the host and writable."""
        word = self._word
        if lead.mark and word.sees != lead.mark:
            if self._looked[0] != lead.mark:
                self._looked = (lead.mark, awake_s())
            if durable.is_visible(self._mark) and self._mark.read_text() == lead.mark:
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
