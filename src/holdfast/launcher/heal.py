"""Watches a run: shows its progress, starts again what died, saves before a stop, says how the run ended.

What a death costs:
- inference: the launcher starts the server again. The orchestrator pushes the weights and repeats open requests, on any
  server, with the same seeds. One of several servers that dies too often is left out.
- orchestrator: it is started again and goes on behind the last journaled batch; the trainer waits.
- trainer (any rank): trainer and orchestrator are started again as a new attempt, from the newest
  checkpoint; batches in the journal and finished generations are used again.
- the evaluations of `sft` and `dpo`: started again, and left out when that is in vain; training goes on.
- a tracker or the live page: started again, after delays that grow.
- a storage that cannot be written: the process that says so is started again when there may be room.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from holdfast.config.inference import is_engine
from holdfast.errors import STORAGE_FAILED, HoldfastError, ProcessDied, is_storage_failure
from holdfast.launcher.cluster.cluster import is_trainer, wait_for_places
from holdfast.launcher.cluster.hosts import THIS_MACHINE
from holdfast.launcher.failures import (
    FailureDetector,
    RestartLimit,
    RestartPolicy,
    StorageBackoff,
    end_of,
    fullest,
    how_it_ended,
    profile_lines,
    report_stop,
)
from holdfast.launcher.liveness import PROBE_PERIOD_S, LivenessMonitor, place_of_beats
from holdfast.launcher.node_group import NodeGroup
from holdfast.launcher.outputs import SideProcesses
from holdfast.launcher.plan import EVALUATION, Plan
from holdfast.launcher.resume.resume_step import clear_unpublished
from holdfast.launcher.supervise import REFRESH_S, STOP_TIMEOUT_S, Child, Supervisor
from holdfast.process.child import make_output_lossy
from holdfast.process.events import EVENTS_ENV, PROCESS_ENV
from holdfast.process.heartbeat import HEALING_NAME, HEARTBEAT_ENV
from holdfast.view.console import Console, code_of_error, json_lines

_TELLING_S = 10.0
"""What a trainer whose time of grace is over gets to give up and say so."""
_MAX_EVALUATION_RESTARTS, _EVALUATION_WINDOW_S = 3, 600.0
_EVALUATION_STORAGE_S = 3600.0
"""Evaluations wait for their storage for as long, while no new step is trained."""
T = TypeVar("T")


def watch(
    plan: Plan,
    healing: RestartPolicy | None = None,
    group: NodeGroup | None = None,
) -> int:
    """Run the processes of `plan` to their end; return the exit code.

    Args:
        healing: unset: the first death ends the run.
        group: of the nodes, where the run has several.

    Raises:
        ProcessDied: one of them ended before its time and was not to be started again.
    """
    make_output_lossy()
    run_dir = plan.attempt.run_dir
    # Without healing nobody is killed for silence: the first death ends the run.
    timeout_s = healing.heartbeat_timeout_s if healing else math.inf
    # The wait for the next question counts as silence: well below what is taken for death.
    period_s = min(PROBE_PERIOD_S, timeout_s / 4)
    is_shared = healing is not None and healing.cluster is not None
    with (
        SideProcesses(plan) as side_processes,
        place_of_beats(run_dir.path, is_shared=is_shared, node=plan.node) as beats,
        Supervisor() as supervisor,
    ):
        monitors = {
            name: LivenessMonitor(_beat_of(beats, name), plan.health.get(name), probe_period_s=period_s)
            for name in plan.commands
        }
        try:
            while True:
                outcome = _Watcher(plan, supervisor, healing, monitors, beats, group, side_processes).run()
                if isinstance(outcome, int):
                    return outcome
                plan = outcome
        finally:
            for monitor in monitors.values():
                monitor.end()


class _Watcher:
    """Watches one attempt."""

    def __init__(
        self,
        plan: Plan,
        supervisor: Supervisor,
        healing: RestartPolicy | None,
        monitors: dict[str, LivenessMonitor],
        beats: Path,
        group: NodeGroup | None,
        side_processes: SideProcesses,
    ) -> None:
        self._side_processes = side_processes
        self._plan = plan
        self._supervisor = supervisor
        self._healing = healing
        self._deaths = FailureDetector(healing, supervisor, monitors)
        self._of_evaluation = RestartLimit(_MAX_EVALUATION_RESTARTS, _EVALUATION_WINDOW_S)
        self._storage_backoff = healing.storage_backoff if healing else StorageBackoff(0.0)
        self._evaluation_storage = StorageBackoff(_EVALUATION_STORAGE_S)
        self._run_dir = plan.attempt.run_dir
        self._logs = self._run_dir.logs(plan.attempt.number)
        self._monitors = monitors
        self._beats = beats
        self._group = group
        self._console = Console(
            self._run_dir,
            attempt=plan.attempt.number,
            events_name=self._events.name,
            first_step=plan.attempt.resume_step or 0,
            max_steps=plan.trainer.max_steps,
        )

    def run(self) -> int | Plan:
        """Return the exit code of the run, or the plan of the attempt in which it goes on."""
        try:
            with self._console:
                outcome = self._run()
        except Exception as error:
            self._tell_end(code_of_error(error), error=str(error) or type(error).__name__)
            raise
        if isinstance(outcome, Plan):
            return outcome
        step, last = self._console.last_step, self._plan.trainer.max_steps
        code = 0
        if outcome is not None:
            attempt, config = self._plan.attempt, self._plan.trainer
            code = report_stop(outcome, self._trainer(), step=step, attempt=attempt, config=config)
        else:
            print(f"finished step {step} of {last}; weights: {self._run_dir.weights_of(step)}")
        self._tell_end(code)
        return code

    def _run(self) -> int | Plan | None:
        """Return the signal that the run was stopped by, the plan of its next attempt, or None where it is done."""
        outcome = self._until_storage_takes_it(self._start)
        if outcome is None:
            outcome = self._until_storage_takes_it(lambda: self._supervisor.run(self._refresh))
        while isinstance(outcome, Child):
            outcome = self._signal_taken_by(outcome) or self._bring_back(outcome)
        if isinstance(outcome, Plan):
            return outcome
        if outcome is not None:
            self._side_processes.stop_waiting()
            self._save_before_stop(outcome)
        self._supervisor.stop()
        return outcome

    def _tell_end(self, exit_code: int, *, error: str | None = None) -> None:
        """Say how the run can go on, to people, to `--log-format json`, and to who looks from elsewhere."""
        step = self._console.last_step
        end = end_of(self._plan.attempt, self._plan.trainer, step=step, exit_code=exit_code)
        for line in [*end.lines, *profile_lines(self._run_dir, self._plan.trainer)]:
            print(line, flush=True)
        if (lines := json_lines()) is not None:
            lines.end = end.fields
        self._console.note("ended", exit_code=exit_code, step=step, error=error)

    @property
    def _events(self) -> Path:
        return self._logs / f"{self._plan.file_name('events')}.jsonl"

    def _start(self) -> None:
        """Start what does not run yet; an inference server outlives an attempt."""
        self._logs.mkdir(parents=True, exist_ok=True)
        self._tell_of_healing()
        for name, argv in self._plan.commands.items():
            if any(child.name == name and child.process.poll() is None for child in self._supervisor.children):
                continue
            environment = {
                **self._plan.environments.get(name, {}),
                EVENTS_ENV: str(self._events),
                PROCESS_ENV: name,
                # Nobody looks at them where nothing heals. A run within a run must not beat for the outer one.
                HEARTBEAT_ENV: str(_beat_of(self._beats, name)) if self._healing is not None else "",
            }
            # Before it starts: beats of its predecessor must not speak for it.
            self._monitors[name].forget(self._plan.health.get(name))
            self._supervisor.start(
                name,
                argv,
                self._logs / f"{self._plan.file_name(name)}.log",
                environment=environment,
                is_service=is_engine(name),
                has_done_its_work=self._plan.work_of(name),
                host=self._plan.hosts.get(name, THIS_MACHINE),
            )

    def _restart(self, child: Child) -> None:
        if child.name == "orchestrator":
            clear_unpublished(self._run_dir)
        self._monitors[child.name].forget()
        self._tell_of_healing()
        child.environment[EVENTS_ENV] = str(self._events)  # it may be of an earlier attempt
        self._supervisor.restart(child)

    def _refresh(self) -> None:
        self._look()
        self._follow_group()
        if self._healing is not None:
            self._deaths.end_the_silent(self._console.say)

    def _look(self) -> None:
        """Show what is new, and see to those who are told of it."""
        self._console.refresh()
        self._side_processes.look(self._console.say)

    def _pause(self, seconds: float = REFRESH_S) -> int | None:
        """Wait; return the number of a signal that came meanwhile."""
        return self._supervisor.pause(seconds, self._refresh_waiting)

    def _follow_group(self) -> None:
        """Stop, or end the trainer, where another node makes us."""
        if self._group is None or self._deaths.ended_by_group or (verdict := self._group.stop_order()) is None:
            return
        self._deaths.ended_by_group = verdict.reason
        if verdict.signal:
            self._supervisor.take_for_signaled(verdict.signal)
        elif (trainer := self._trainer()) is not None and trainer.process.poll() is None:
            self._console.say(f"{verdict.reason}: ending the trainer here, too")
            trainer.process.kill()

    def _refresh_waiting(self) -> None:
        """Show what goes on while something is waited for, which nobody else shall mind."""
        self._look()
        self._tell_of_healing()

    def _tell_of_healing(self) -> None:
        """Make those who wait for another process go on waiting, see `heartbeat.Wait`."""
        (self._beats / HEALING_NAME).touch()

    def _bring_back(self, child: Child) -> Child | Plan | int | None:
        """Start a dead child again, after the delay that its death asks for; return what became of the run then.

        Raises:
            ProcessDied: it is not to be started again.
        """
        if child.name == EVALUATION:
            return self._evaluate_again(child)
        if self._group is not None:
            # Its ranks as well, before the others go on: they write into the same directory.
            child.process.clear(STOP_TIMEOUT_S)
            self._group.trainer_died(how_it_ended(child))
        if child.process.returncode == STORAGE_FAILED:
            number = self._wait_for_storage(self._deaths.error_of(child))
            if number is None:
                self._console.note("starting again", restarted=child.name, reason="its storage failed")
        elif (delay_s := self._deaths.restart_delay_s(child, step=self._console.last_step)) is not None:
            number = self._wait_to_restart(child, delay_s)
        elif self._deaths.can_spare(child):
            return self._go_on_without(child)
        else:
            self._supervisor.stop()
            raise self._deaths.error_of(child)
        if number is not None:
            return number
        if (is_trainer(child.name) or child.process.loss is not None) and self._healing is not None:
            # The orchestrator as well: `again` goes back to a step, and sets aside what lies after it. And where a
            # server comes back at another address, it has to be told.
            self._supervisor.stop(names={child.name for child in self._supervisor.children if not child.is_service})
            number = self._wait_for_places(self._healing)
            if number is not None:
                return number
            if self._group is not None:
                number = self._group.gather(self._pause, self._console.say)
                if number is not None:
                    return number
            return self._until_storage_takes_it(self._healing.again)
        number = self._until_storage_takes_it(lambda: self._restart(child))
        if number is not None:
            return number
        return self._until_storage_takes_it(lambda: self._supervisor.run(self._refresh))

    def _evaluate_again(self, child: Child) -> Child | int | None:
        """Start evaluations again, or train on without: whatever they die of, training goes on."""
        storage_s = None
        if child.process.returncode == STORAGE_FAILED:
            storage_s = self._evaluation_storage.delay_s(self._console.last_step)
        delay_s = self._of_evaluation.delay_s(child.name, child.process.returncode) if storage_s is None else storage_s
        if delay_s is None:
            try:
                self._run_dir.give_up_evaluations()
            except OSError as error:
                self._console.say(
                    f"WARNING: checkpoints that were to be evaluated stay, whatever ckpt.keep says: {error}"
                )
            return self._go_on_without(child)
        if storage_s is None:
            self._console.say(f"{child.name} {how_it_ended(child)}: starting it again")
            number = self._pause(delay_s)
        else:
            number = self._pause_for_storage(self._deaths.error_of(child), delay_s)
        if number is not None:
            return number
        self._console.note("starting again", restarted=child.name, reason=how_it_ended(child))
        number = self._until_storage_takes_it(lambda: self._restart(child))
        if number is not None:
            return number
        return self._until_storage_takes_it(lambda: self._supervisor.run(self._refresh))

    def _wait_for_places(self, healing: RestartPolicy) -> int | None:
        """Wait until the cluster has a place for every process; return the number of a signal that came meanwhile.

        Raises:
            ProcessDied: it has none for too long.
        """
        if healing.cluster is None:
            return None
        try:
            return wait_for_places(
                healing.cluster,
                timeout_s=healing.cluster_timeout_s,
                pause=self._pause,
                say=self._console.say,
            )
        except TimeoutError as missing:
            self._supervisor.stop()
            raise ProcessDied(
                f"the cluster was waited for in vain for {healing.cluster_timeout_s:g} s: {missing}"
            ) from None

    def _until_storage_takes_it(self, action: Callable[[], T]) -> T | int:
        """Do what writes to the run directory, again while that fails; return its result, or the number of a signal."""
        while True:
            try:
                return action()
            except (OSError, HoldfastError) as error:
                if not is_storage_failure(error):
                    raise
                number = self._wait_for_storage(error)
            if number is not None:
                return number

    def _wait_for_storage(self, error: Exception) -> int | None:
        """Wait before the next try; return the number of a signal that came meanwhile.

        Raises:
            ProcessDied: the storage has failed for too long.
        """
        delay_s = self._storage_backoff.delay_s(self._console.last_step)
        if delay_s is None:
            self._supervisor.stop()
            given_up = ProcessDied(str(error))
            if timeout_s := self._storage_backoff.timeout_s:
                path, free_bytes = fullest(self._run_dir)  # on a full disk the log of the process may have no reason
                told = f"waited for in vain for {timeout_s:g} s: {path} has {free_bytes:,} bytes free"
                given_up.args = (f"{error}\n       the storage was {told}",)
            given_up.exit_code = STORAGE_FAILED
            raise given_up from None
        return self._pause_for_storage(error, delay_s)

    def _pause_for_storage(self, error: Exception, delay_s: float) -> int | None:
        path, free_bytes = fullest(self._run_dir)
        reason = str(error).split(". ")[0].split("\n")[0]
        self._console.say(
            f"waiting for storage: {reason}. {path} has {free_bytes:,} bytes free: make room or repair it, and the run "
            f"continues by itself (next try in {delay_s:g} s)"
        )
        return self._pause(delay_s)

    def _wait_to_restart(self, child: Child, delay_s: float) -> int | None:
        """Wait out the delay before `child` is started again; return the number of a signal that came meanwhile."""
        how, which = self._deaths.restart_of(child)
        self._console.say(f"{child.name} {how}: starting it again (restart {which})")
        self._console.note("starting again", restarted=child.name, reason=how)
        return self._pause(delay_s)

    def _go_on_without(self, child: Child) -> Child | int | None:
        """Leave a dead process out until the next attempt; return what became of the run then."""
        reason = str(self._deaths.error_of(child)).replace("\n", "\n  ")
        self._console.say(f"WARNING: the run continues without {child.name}, which is not started again. {reason}")
        self._supervisor.give_up(child)
        return self._until_storage_takes_it(lambda: self._supervisor.run(self._refresh))

    def _signal_taken_by(self, child: Child) -> int | None:
        """Return the signal that a trainer saved for and ended by: a scheduler may signal ranks as well as us."""
        number = child.process.returncode - 128
        is_request = number in (signal.SIGTERM, signal.SIGUSR1) and self._plan.trainer.ckpt is not None
        return number if is_trainer(child.name) and is_request else None

    def _save_before_stop(self, number: int) -> None:
        """Have the trainer save its current step, where checkpoints are on."""
        ckpt = self._plan.trainer.ckpt
        saving = f"saving the current step, for at most {ckpt.grace_s:g} s" if ckpt else "stopping"
        self._console.say(f"{signal.Signals(number).name}: {saving}")
        trainer = self._trainer()
        if not ckpt or not trainer:
            return
        # The trainer keeps to the grace itself, from the same signal on, and then says what has not landed.
        timeout_s = ckpt.grace_s + _TELLING_S
        if not self._supervisor.ask_to_end(trainer, number, self._console.refresh, timeout_s=timeout_s):
            trainer.process.kill()  # the time is over, or a second signal wants it over

    def _trainer(self) -> Child | None:
        """The trainer; None where the storage let none start."""
        return next((child for child in self._supervisor.children if child.name == "trainer"), None)


def _beat_of(beats: Path, name: str) -> Path:
    """Return what the beats of process `name` begin with; those of `inference_10` do not begin as `inference_1`'s."""
    return beats / f"{name}."
