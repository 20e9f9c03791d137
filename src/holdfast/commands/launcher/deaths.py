"""What has died or hangs, and what follows from that: whether it is started again, when, and what is told of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from holdfast.commands.launcher.endings import death_of, engine_failure_of, how_it_ended
from holdfast.commands.launcher.hosts.host import Process
from holdfast.commands.launcher.liveness import LivenessMonitor
from holdfast.commands.launcher.plan import Healing
from holdfast.commands.launcher.restarts import Restarts
from holdfast.commands.launcher.supervise import Child, Supervisor
from holdfast.shared.config.inference import is_engine
from holdfast.shared.errors import STUCK, ProcessDied


class Deaths:
    """Judges the deaths of one attempt, and ends what is silent or comes no further.

    Args:
        healing: unset: nothing is started again, and nobody is killed for silence.
        monitors: by name of the process.

    Attributes:
        ended_by_group: why another node has made us end the trainer; empty where none has.
    """

    def __init__(
        self, healing: Healing | None, supervisor: Supervisor, monitors: Mapping[str, LivenessMonitor]
    ) -> None:
        self._restarts = healing.restarts if healing else Restarts(0, 0.0)
        self._timeout_s = healing.heartbeat_timeout_s if healing else math.inf
        self._supervisor = supervisor
        self._monitors = monitors
        self._killed: set[Process] = set()
        self._stuck: dict[Process, str] = {}
        self.ended_by_group = ""

    def end_the_silent(self, say: Callable[[str], None]) -> None:
        """Kill what shows no sign of life, or comes no further, and say so."""
        for child in self._supervisor.children:
            monitor = self._monitors[child.name]
            # First: asking is what listens, and `stuck` goes by what was heard.
            silent_s = monitor.silent_s()
            if child.process.poll() is not None or child.process in self._killed:
                continue
            if silent_s > self._timeout_s:
                say(f"{child.name} has shown no sign of life for {silent_s:.0f} s: killing it")
            elif (stuck := monitor.stuck()) is not None:
                who = f"{child.name} ({stuck.part})" if stuck.part else child.name
                self._stuck[child.process] = f"{who} came no further in {stuck.doing}"
                say(f"{who} has come no further for {stuck.seconds:.0f} s in {stuck.doing}: killing it")
            else:
                continue
            # Before the kill: afterwards nobody can say where it hung.
            child.process.show_stacks(monitor.pids(), child.log)
            self._killed.add(child.process)  # once: where its storage hangs, it takes its time to end
            self._supervisor.kill(child)

    def restart_delay_s(self, child: Child, *, step: int) -> float | None:
        """Return the seconds to wait before `child` is started again; None: it is not.

        Args:
            step: the last one that is done.
        """
        comes_again = self._restarts.comes_again(child.name, engine_failure_of(child), step=step)
        is_stuck = child.process in self._stuck or child.process.returncode == STUCK
        if comes_again:
            return None
        return self._restarts.delay_s(child.name, self._code_of(child), stuck_at=step if is_stuck else None)

    def restart_of(self, child: Child) -> tuple[str, str]:
        """Return how `child` ended, and which of its restarts comes: `1 of 3`."""
        failure = engine_failure_of(child)
        reason = f" ({failure.splitlines()[0]})" if failure else ""
        how = "was ended for that" if self.ended_by_group else how_it_ended(child)
        return f"{how}{reason}", f"{self._restarts.used(child.name)} of {self._restarts.limit}"

    def can_spare(self, child: Child) -> bool:
        """Whether the run may go on without a dead child: an inference server, while another one lives or comes back.

        What it told would end the others as well.
        """
        # Those that have died, too, and whose turn comes next: those that do not come back are no children any more.
        others = [one for one in self._supervisor.children if is_engine(one.name) and one is not child]
        return is_engine(child.name) and bool(others) and self._code_of(child) not in (2, 3)

    def error_of(self, child: Child) -> ProcessDied:
        """Return the error that says what `child` died of."""
        stuck = self._stuck.get(child.process) or self.ended_by_group or None
        return death_of(child, stuck=stuck, restarts=self._restarts)

    def _code_of(self, child: Child) -> int:
        """Return its exit code, and that of a crash for what is worth another try whatever it told."""
        return 1 if self._died_starting_again(child) else child.process.returncode

    def _died_starting_again(self, child: Child) -> bool:
        """Whether it is a server that once was well and could not start again: of the memory or the port of the dead.

        That it tells an error, which an earlier one would have told as well, does not mean that it comes again.
        """
        monitor = self._monitors[child.name]
        return child.is_service and monitor.was_well and not monitor.is_well
