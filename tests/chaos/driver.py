"""One real `rl` run that is hit again and again, and whose disk fills up, by a schedule drawn from a seed."""

import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from holdfast.run.run_dir import RunDir
from tests.chaos.everything import JudgeProcess
from tests.chaos.schedule import Hit
from tests.chaos.surroundings import ReadErrors, Store
from tests.chaos.witness import Progress, Witness
from tests.faults.blows import find_process
from tests.faults.disks import SmallDisk
from tests.runs.rl import POLL_S, RlRun

_RECOVERY_TIMEOUT_S = 600.0
_RESUME = ("--ckpt.resume-step", "auto")
# So often that the limit is no subject, and forgotten so soon that the delays stay short.
_RESTARTS = ("--max-restarts", "1000", "--restart-window-s", "3")
# Importing torch holds the interpreter, on a busy machine for longer than one would think.
_HEARTBEAT_S = 15.0
_HEARTBEAT = (
    *("--heartbeat-timeout-s", f"{_HEARTBEAT_S:g}"),
    *("--inference.server.update-timeout-s", f"{2 * _HEARTBEAT_S:g}"),
)
# Longer than a process may be silent, if it alone is.
_FROZEN_S = 1.5 * _HEARTBEAT_S
_AWAY_S = 20.0
_READ_ERRORS = 3  # at once
KILLED_AS_SILENT = "has sent no heartbeat"
WAITING = "waiting for storage"
WITNESS_NAME = "seen"
JUDGE = "judge"
# A disk stays full for this long after the run has said that it waits: other processes are to meet it too.
_STAYS_FULL_S = 2.0
_NOTHING_STARTED = 2
_SAVED, _NOT_SAVED = 128 + signal.SIGTERM, 4


@dataclass
class Blow:
    hit: Hit
    time: float  # monotonic seconds
    step: int  # the last trained step then
    next_step_s: float | None = None  # seconds until the next step was trained; None: another hit came before


@dataclass
class ChaosRun:
    run_dir: RunDir
    witness: Witness
    blows: list[Blow]
    exit_code: int  # of the last launcher
    survivors: list[psutil.Process]  # processes that outlived a launcher
    console: list[str]  # what each launcher printed, in order
    seconds: float  # from the start of the first launcher to the end of the last
    left: list[RunDir]  # what was in the directory of each machine that the run was evicted from
    killed_when_thawed: int  # how many processes were killed as silent of which the launcher was frozen as well

    def restarts(self) -> dict[str, int]:
        text = "\n".join(self.console)
        starts = [line for line in text.split("\n") if "starting it again" in line]
        counted = {name: sum(name in line for line in starts) for name in ("orchestrator", "trainer", "inference")}
        return counted | {"launcher": len(self.console) - 1}

    def storage_waits(self) -> int:
        return "\n".join(self.console).count(WAITING)


class Chaos:
    """Deals the hits of a schedule to a run, and starts its launcher again when that was hit. `disk`: what the run
    directory lies on; a schedule without full disks needs none. `store`: where the run keeps its checkpoints too; a
    schedule without evictions and outages needs none. `judge`: what scores for the run; it is started again when it was
    hit. `starts_python`: start all of it as a user does, with vLLM; otherwise it is forked, with stub engines.
    """

    def __init__(
        self,
        output_dir: Path,
        hits: Sequence[Hit],
        *flags: str,
        disk: SmallDisk | None = None,
        store: Store | None = None,
        judge: JudgeProcess | None = None,
        starts_python: bool = False,
        say: Callable[[str], object] = str,
    ) -> None:
        self._output_dir = output_dir if disk is None else disk.path
        self._disk = disk
        self._store = store
        self._judge = judge
        self._starts_python = starts_python
        self._aside = output_dir.with_name(f"{output_dir.name}-machines")
        self._left: list[RunDir] = []
        self._killed_when_thawed = 0
        self._hits = hits
        self._say = say
        self._flags = (*_RESTARTS, *_HEARTBEAT, *flags)
        self._read_errors = ReadErrors(output_dir.with_name(f"{output_dir.name}-read-errors"), self._output_dir)
        self._environment = dict(self._read_errors.environment) if any(hit.kind == "EIO" for hit in hits) else {}
        if store is not None:
            self._flags += ("--ckpt.dir", store.url)
            self._environment |= store.environment
        self._run_dir = RunDir(self._output_dir)
        self._progress = Progress(self._run_dir)
        self._blows: list[Blow] = []
        self._console: list[str] = []
        self._survivors: list[psutil.Process] = []
        self._run: RlRun
        self._full: _Full | None = None

    def run(self, *, timeout_s: float) -> ChaosRun:
        """Run to the end; hits that do not fit into `timeout_s` are left out."""
        begin = time.monotonic()
        with Witness(self._run_dir, self._output_dir / WITNESS_NAME) as witness:
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
            self._run_dir,
            witness,
            self._blows,
            code,
            self._survivors,
            self._console,
            time.monotonic() - begin,
            self._left,
            self._killed_when_thawed,
        )

    def _start(self) -> None:
        flags = (*self._flags, *_RESUME)
        self._run = RlRun(self._output_dir, *flags, environment=self._environment, starts_python=self._starts_python)

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
        self._tend_disk()
        while not condition():
            self._tend_disk()
            self._measure()
            if time.monotonic() > deadline:
                raise AssertionError(f"the run does not go on after {self._blows[-1:]}:\n{self._run.output[-4000:]}")
            time.sleep(POLL_S)
        self._measure()

    def _tend_disk(self) -> None:
        """Keep a disk that was filled full, until a launcher has said that it waits and a little longer."""
        full = self._full
        if full is None or self._disk is None:
            return
        if self._run.ended():
            self._release()
            if self._run.wait() == _NOTHING_STARTED:  # a launcher that was killed cannot begin on a full disk
                self._end()
                self._start()
            return
        if full.run is not self._run:
            full.run, full.said = self._run, 0
        if full.release_time is None and WAITING in self._run.output[full.said :]:
            full.release_time = time.monotonic() + _STAYS_FULL_S
        if full.release_time is not None and time.monotonic() >= full.release_time:
            self._release()
        else:
            self._disk.fill()

    def _release(self) -> None:
        assert self._disk is not None
        self._disk.release()
        self._full = None
        self._say("the disk has room again")

    def _measure(self) -> None:
        if self._blows and self._blows[-1].next_step_s is None and self._progress.step() > self._blows[-1].step:
            self._blows[-1].next_step_s = time.monotonic() - self._blows[-1].time

    def _deal(self, hit: Hit, witness: Witness) -> None:
        if hit.kind == "full":
            assert self._disk is not None, "a schedule with full disks needs a small one"
            self._note(self._blow(hit))
            self._full = _Full(self._run, len(self._run.output))
            self._disk.fill()
        elif hit.kind == "EIO":
            self._note(self._blow(hit))
            self._read_errors.inject(_READ_ERRORS)
        elif hit.kind == "away":
            assert self._store is not None, "a schedule with outages needs a store"
            self._note(self._blow(hit))
            self._store.go_away(_AWAY_S)
        elif hit.kind == "freeze":
            self._freeze(hit)
        elif hit.kind == "evict":
            self._evict(hit)
        else:
            self._signal(hit, witness)

    def _freeze(self, hit: Hit) -> None:
        """Stop every process for longer than one of them alone may be silent, and let all go on."""
        blow, said = self._blow(hit), len(self._run.output)
        launcher = self._run.launcher()
        frozen = [launcher]
        try:
            launcher.suspend()
            while new := [process for process in self._run.processes() if process not in frozen]:
                for process in new:
                    process.suspend()
                frozen += new
            time.sleep(_FROZEN_S)  # that time passes is the fault
        except psutil.NoSuchProcess:
            return  # it has just ended
        finally:
            for process in reversed(frozen):
                if process.is_running():
                    process.resume()
        self._note(blow)
        self._wait_for(lambda: self._run.ended() or self._progress.step() > blow.step)
        self._killed_when_thawed += self._run.output[said:].count(KILLED_AS_SILENT)

    def _evict(self, hit: Hit) -> None:
        """End the run as a scheduler does, take its directory away if it says that all is saved, and start it again."""
        assert self._store is not None, "a schedule with evictions needs a store"
        if self._full is not None:
            self._release()
        self._note(self._blow(hit))
        self._run.interrupt(signal.SIGTERM)
        code = self._end()
        if code == _SAVED:
            aside = self._aside / str(len(self._left))
            aside.mkdir(parents=True)
            for path in self._output_dir.iterdir():
                if path.name != WITNESS_NAME:
                    shutil.move(path, aside / path.name)
            self._left.append(RunDir(aside))
            self._say("went on on an empty machine")
        else:
            assert code in (_NOT_SAVED, 0), (
                f"exit code {code} of a run that was asked to end\n{self._console[-1][-4000:]}"
            )
        self._start()

    def _signal(self, hit: Hit, witness: Witness) -> None:
        judge = self._judge if hit.victim == JUDGE else None
        while not self._run.ended():
            victim = judge.process() if judge is not None else find_process(self._run, hit.victim)
            blow = self._blow(hit)
            if victim is not None and _send(victim, signal.Signals[hit.kind]):
                break
            self._tend_disk()
            time.sleep(POLL_S)  # it is being started again, or ended before the signal
        else:
            return
        self._note(blow)
        if hit.victim == "launcher":
            self._end()
            witness.note_finished()
            self._start()
        elif judge is not None:
            judge.start()
        else:
            witness.note_finished()

    def _blow(self, hit: Hit) -> Blow:
        return Blow(hit, time.monotonic(), self._progress.step())

    def _note(self, blow: Blow) -> None:
        self._blows.append(blow)
        self._say(f"{blow.hit.kind} {blow.hit.victim} after step {blow.step}")


def _send(victim: psutil.Process, number: signal.Signals) -> bool:
    """Send a signal; return False if the process has ended by itself."""
    try:
        victim.send_signal(number)
    except psutil.NoSuchProcess:
        return False
    return True


@dataclass
class _Full:
    run: RlRun  # the start of the launcher that is to say that it waits
    said: int  # how many characters of what it printed are from before
    release_time: float | None = None  # monotonic seconds; None: it has not said so yet
