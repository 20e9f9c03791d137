"""Messages between the launchers of a multi-node run, and the check that two nodes can train one run together.

Two nodes must have the same code, settings and run directory.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import msgspec
import tomli
import xxhash

from holdfast.launcher.resume.config_diff import compare_settings
from holdfast.run import atomic
from holdfast.run.lock import Holder

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
class Verdict:
    """What another node makes this one do: stop by `signal`, or end its trainer because of `reason`."""

    reason: str
    signal: int = 0


def why_not_together(ours: Hello, theirs: Hello) -> str:
    """Return why the node of `theirs` cannot take part in the run of `ours`, naming both; empty where it can."""
    here, there = ours.name, theirs.name
    if theirs.code != ours.code:
        return (
            f"nodes run other code: {_version(ours.code)} on {here}, {_version(theirs.code)} on {there}. Install the "
            "same on all."
        )
    drift = compare_settings(tomli.loads(ours.settings), tomli.loads(theirs.settings))
    if differing := sorted(drift.computing + drift.free):
        lines = "\n  ".join(differing)
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


def why_not_writable(path: Path) -> str:
    """Return why this node cannot write to `path`, in words; empty where it can."""
    probe = atomic.temporary_sibling(path / "probe")
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        return f"cannot be written ({error.strerror})"
    return ""


def digest_of_code() -> str:
    """Return the installed version, and a digest of its source: of two checkouts it says whether they differ."""
    digest = xxhash.xxh3_64()
    root = Path(__file__).parents[1]  # of the package
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return f"{version('holdfast')} {version('torch')} {digest.hexdigest()}"


def _version(code: str) -> str:
    ours, torch, digest = code.split()
    return f"holdfast {ours} (source {digest[:8]}) with torch {torch}"
