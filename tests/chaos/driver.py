"""One real `rl` run that is hit again and again, by a schedule drawn from a seed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.chaos.schedule import Hit
from tests.chaos.witness import Progress, Witness
from tests.rl_runs import POLL_S, RlRun
from triad.run_dir import RunDir

_MODULES = {"orchestrator": "orchestrator.main", "inference": "inference.main"}
_RECOVERY_TIMEOUT_S = 240.0
_RESUME = ("--ckpt.resume-step", "auto")
# So often that the limit is no subject, and forgotten so soon that the delays stay short.
_RESTARTS = ("--max-restarts", "1000", "--restart-window-s", "3")
_HEARTBEAT = ("--heartbeat-timeout-s", "10")


@dataclass
class Blow:
    """A hit that was dealt.

    Attributes:
        time: monotonic seconds.
        step: the last trained step then.
        next_step_s: seconds until the next step was trained; None: another hit came before.
    """

    hit: Hit
    time: float
    step: int
    next_step_s: float | None = None


@dataclass
class ChaosRun:
    """What became of a run.

    Attributes:
        exit_code: of the last launcher.
        survivors: processes that outlived a launcher.
        console: what each launcher printed, in order.
        seconds: from the start of the first launcher to the end of the last.
    """

    run_dir: RunDir
    witness: Witness
    blows: list[Blow]
    exit_code: int
    survivors: list[psutil.Process]
    console: list[str]
    seconds: float

    def restarts(self) -> dict[str, int]:
        """How often a launcher said that it starts a process again."""
        text = "\n".join(self.console)
        names = ("orchestrator", "trainer", "inference")
        counted = {
            name: sum("starting it again" in line and name in line for line in text.split("\n")) for name in names
        }
        return counted | {"launcher": len(self.console) - 1}


class Chaos:
    """Deals the hits of a schedule to a run, and starts its launcher again when that was hit."""

    def __init__(self, output_dir: Path, hits: Sequence[Hit], *flags: str, say: Callable[[str], object] = str) -> None:
        self._output_dir = output_dir
        self._hits = hits
        self._say = say
        self._flags = (*_RESTARTS, *_HEARTBEAT, *flags)
        self._run_dir = RunDir(output_dir)
        self._progress = Progress(self._run_dir)
        self._blows: list[Blow] = []
        self._console: list[str] = []
        self._survivors: list[psutil.Process] = []
        self._run: RlRun

    def run(self, *, timeout_s: float) -> ChaosRun:
        """Run to the end; hits that do not fit into `timeout_s` are left out."""
        begin = time.monotonic()
        with Witness(self._run_dir, self._output_dir.with_name(f"{self._output_dir.name}-seen")) as witness:
            self._start()
            try:
                for hit in self._hits:
                    if not self._wait(hit) or time.monotonic() - begin > timeout_s:
                        break
                    self._deal(hit, witness)
                self._wait_for(self._run.ended)
                code = self._end()
            finally:
                self._run.__exit__()
        return ChaosRun(
            self._run_dir, witness, self._blows, code, self._survivors, self._console, time.monotonic() - begin
        )

    def _start(self) -> None:
        self._run = RlRun(self._output_dir, *self._flags, *_RESUME)

    def _end(self) -> int:
        code = self._run.wait()
        self._survivors += self._run.survivors()
        self._console.append(self._run.output)
        return code

    def _wait(self, hit: Hit) -> bool:
        """Wait for the moment of `hit`; return False when the run ended before."""
        went_on = self._blows[-1].step + 1 if self._blows else 1
        if hit.step is not None:
            step = max(hit.step, went_on)  # not while the run still recovers from the hit before
            self._wait_for(lambda: self._run.ended() or self._progress.step() >= step)
        deadline = time.monotonic() + hit.delay_s
        self._wait_for(
            lambda: (
                self._run.ended()
                or time.monotonic() >= deadline
                or (hit.step is None and self._progress.step() >= went_on)
            )
        )
        return not self._run.ended()

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _RECOVERY_TIMEOUT_S
        while not condition():
            self._measure()
            if time.monotonic() > deadline:
                raise AssertionError(f"the run does not go on after {self._blows[-1:]}:\n{self._run.output[-4000:]}")
            time.sleep(POLL_S)
        self._measure()

    def _measure(self) -> None:
        if self._blows and self._blows[-1].next_step_s is None and self._progress.step() > self._blows[-1].step:
            self._blows[-1].next_step_s = time.monotonic() - self._blows[-1].time

    def _deal(self, hit: Hit, witness: Witness) -> None:
        while True:
            victim = find_process(self._run, hit.victim)
            if victim is not None or self._run.ended():
                break
            time.sleep(POLL_S)  # it is just being started again
        if victim is None:
            return
        blow = Blow(hit, time.monotonic(), self._progress.step())
        try:
            victim.send_signal(hit.number)
        except psutil.NoSuchProcess:
            return
        self._blows.append(blow)
        self._say(f"{hit.number.name} {hit.victim} after step {blow.step}")
        if hit.victim == "launcher":
            self._end()
            witness.note_finished()
            self._start()
        else:
            witness.note_finished()


def find_process(run: RlRun, victim: str) -> psutil.Process | None:
    """Return the process of `run` that is called `victim` in a schedule; None while there is none."""
    try:
        if victim == "launcher":
            return run.launcher()
        if victim in ("trainer", "rank"):
            ranks = run.find("trainer.launch")
            return ranks[0 if victim == "trainer" else -1] if len(ranks) > (victim == "rank") else None
        found = run.find(_MODULES["inference" if victim == "engine" else victim])
        if victim == "engine":
            children = found[0].children() if found else []
            found = [child for child in children if "EngineCore" in "".join(child.cmdline())]
        return found[0] if found else None
    except psutil.NoSuchProcess:
        return None


def is_stop(blow: Blow) -> bool:
    """Whether the victim hung instead of dying."""
    return blow.hit.number == signal.SIGSTOP
