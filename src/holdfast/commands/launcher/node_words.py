"""What the commands of one run on several nodes say to one another, and what follows from it for one of them."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from holdfast.shared.files.lock import Holder

_FIRST_SIGNAL = 128


class Hello(msgspec.Struct, frozen=True):
    """What a node says of itself when it comes.

    Attributes:
        code: digest of the installed code.
        settings: as TOML, which has numbers that JSON has not.
        run_id: the run that it trains already; empty for none.
    """

    pid: int
    host: str
    pid_space: str
    code: str
    output_dir: str
    settings: str
    run_id: str = ""
    rank: int = -1

    @property
    def holder(self) -> Holder:
        return Holder(self.pid, self.host, self.pid_space)

    @property
    def name(self) -> str:
        return f"{self.host} (process {self.pid})"


class Over(msgspec.Struct, frozen=True):
    """How the run has ended on one node."""

    code: int
    message: str = ""

    @property
    def signal(self) -> int:
        """The signal that it has stopped by; 0 for none."""
        return max(0, self.code - _FIRST_SIGNAL)


class Word(msgspec.Struct, frozen=True):
    """What a node says of itself from moment to moment.

    Attributes:
        attempt: the last one that it took part in.
        runs: whether its trainer goes on.
        knows: the turn of the host that it had heard of when it began nothing.
        sees: the mark of the host that it has found in its output directory.
        problem: why it cannot use that.
        dead: numbers of nodes whose process has ended on its machine.
    """

    attempt: int = 0
    runs: bool = False
    knows: int = 0
    is_finished: bool = False
    died: str = ""
    sees: str = ""
    problem: str = ""
    dead: list[int] = []
    over: Over | None = None


class Lead(msgspec.Struct, frozen=True):
    """What the host says to all.

    Attributes:
        mark: what stands in `nodes.mark` in the output directory.
        ranks: node rank by number at the meeting.
        turn: counts what is said of attempts: that one has begun, and that it is over.
        broken: why the attempt is over.
        gone: numbers of nodes that were taken for lost.
        holders: the nodes that are there, by number.
    """

    host: str
    mark: str
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
    holders: dict[int, tuple[int, str, str]] = {}
    over: Over | None = None

    def with_broken(self, reason: str) -> Lead:
        """Return the same, with an attempt that is over because of `reason`; the first reason stays."""
        return self if self.broken else msgspec.structs.replace(self, broken=reason, turn=self.turn + 1)


@dataclass(frozen=True)
class Part:
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
class Verdict:
    """What another node makes this one do: stop by `signal`, or end its trainer because of `reason`."""

    reason: str
    signal: int = 0
