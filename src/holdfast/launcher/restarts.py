"""Watches a run: shows its progress, starts again what died, saves before a stop, says how the run ended.

After a death of
- an inference server, the launcher starts it again. The orchestrator pushes the weights and repeats open requests, on
  any server, with the same seeds. One of several servers that dies too often is left out.
- the orchestrator, it is started again and continues after the last journaled batch; the trainer waits.
- the trainer (any rank), or any process if an input of the run has changed, trainer and orchestrator start again as a
  new attempt, from the newest checkpoint. Journaled batches and finished generations are used again, if inputs are the
  same.
- the evaluations of `sft` and `dpo`, they start again, or are left out if that fails; training continues.
- a process whose storage fails, it is started again when there may be room.
"""

import math
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from holdfast.config.inference import is_engine
from holdfast.errors import STORAGE_FAILED, HoldfastError, ProcessDied, ReadError, is_storage_failure
from holdfast.launcher import restart_policy
from holdfast.launcher.cluster.cluster import is_trainer, wait_for_places
from holdfast.launcher.cluster.hosts import THIS_MACHINE
from holdfast.launcher.liveness import PROBE_PERIOD_S, LivenessMonitor, place_of_beats
from holdfast.launcher.plan import EVALUATION, Plan
from holdfast.launcher.resume.config_diff import change_training, changed_inputs
from holdfast.launcher.resume.resume_step import clear_unpublished
from holdfast.launcher.side_processes import SideProcesses
from holdfast.launcher.supervisor import REFRESH_S, Child, Supervisor
from holdfast.process.child import make_output_lossy
from holdfast.process.events import EVENTS_ENV, PROCESS_ENV
from holdfast.process.heartbeat import HEALING_NAME, HEARTBEAT_ENV
from holdfast.run.run_dir import numbered_paths
from holdfast.view.console import Console, code_of_error, json_lines

_TELLING_S = 10.0  # for a trainer whose grace is over, to report it
_MAX_EVALUATION_RESTARTS, _EVALUATION_WINDOW_S = 3, 600.0
_EVALUATION_STORAGE_S = 3600.0
T = TypeVar("T")


def watch(plan: Plan, healing: restart_policy.RestartPolicy | None = None) -> int:
    """Run the processes of `plan` to their end; return the exit code. `healing`: unset: the first death ends the run.
    Raise ProcessDied if a process died and was not to be started again."""
    make_output_lossy()
    run_dir = plan.attempt.run_dir
    timeout_s = healing.heartbeat_timeout_s if healing else math.inf
    # The wait between two probes counts as silence, so it must be short.
    period_s = min(PROBE_PERIOD_S, timeout_s / 4)
    is_shared = healing is not None and healing.cluster is not None
    with (
        SideProcesses(plan) as side_processes,
        place_of_beats(run_dir.path, is_shared=is_shared) as beats,
        Supervisor() as supervisor,
    ):
        monitors = {
            name: LivenessMonitor(_beat_of(beats, name), plan.health.get(name), probe_period_s=period_s)
            for name in plan.commands
        }
        try:
            while True:
                outcome = _Watcher(plan, supervisor, healing, monitors, beats, side_processes).run()
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
        healing: restart_policy.RestartPolicy | None,
        monitors: dict[str, LivenessMonitor],
        beats: Path,
        side_processes: SideProcesses,
    ) -> None:
        self._side_processes = side_processes
        self._plan = plan
        self._supervisor = supervisor
        self._healing = healing
        self._detector = restart_policy.FailureDetector(healing, supervisor, monitors)
        self._of_evaluation = restart_policy.RestartLimit(_MAX_EVALUATION_RESTARTS, _EVALUATION_WINDOW_S)
        self._storage_backoff = healing.storage_backoff if healing else restart_policy.StorageBackoff(0.0)
        self._evaluation_storage = restart_policy.StorageBackoff(_EVALUATION_STORAGE_S)
        self._run_dir = plan.attempt.run_dir
        self._logs = self._run_dir.logs(plan.attempt.number)
        self._journal = self._journaled()
        self._monitors = monitors
        self._beats = beats
        self._console = Console(
            self._run_dir,
            attempt=plan.attempt.number,
            first_step=plan.attempt.resume_step or 0,
            max_steps=plan.trainer.max_steps,
        )

    def run(self) -> int | Plan:
        """Return the exit code of the run, or the plan of its next attempt."""
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
            code = restart_policy.report_stop(outcome, self._trainer(), step=step, attempt=attempt, config=config)
        else:
            print(f"finished step {step} of {last}; weights: {self._run_dir.weights_of(step)}")
        self._tell_end(code)
        return code

    def _run(self) -> int | Plan | None:
        """Return the signal that stopped the run, the plan of its next attempt, or None if it is done."""
        outcome: Child | Plan | int | None = self._watch_after(self._start)
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
        """Report how the run can continue: on the console, in `--log-format json`, and in the events."""
        step = self._console.last_step
        lines, fields = restart_policy.exit_report(
            self._plan.attempt, self._plan.trainer, step=step, exit_code=exit_code
        )
        for line in [*lines, *restart_policy.profile_lines(self._run_dir, self._plan.trainer)]:
            print(line, flush=True)
        if (output := json_lines()) is not None:
            output.end = fields
        trained = step - (self._plan.attempt.resume_step or 0)
        sampled = self._journaled() != self._journal
        self._console.note("ended", exit_code=exit_code, step=step, trained=trained, sampled=sampled, error=error)

    def _journaled(self) -> dict[str, int]:
        """Return the names in the journal, with their sizes; nothing if the storage is away."""
        with suppress(OSError):
            return {path.name: path.stat().st_size for path in numbered_paths(self._run_dir.rollouts)}
        return {}

    @property
    def _events(self) -> Path:
        return self._logs / "events.jsonl"

    def _start(self) -> None:
        """Start what does not run; an inference server outlives an attempt."""
        self._logs.mkdir(parents=True, exist_ok=True)
        self._note_healing()
        for name, argv in self._plan.commands.items():
            if any(child.name == name and child.process.poll() is None for child in self._supervisor.children):
                continue
            environment = {
                **self._plan.environments.get(name, {}),
                EVENTS_ENV: str(self._events),
                PROCESS_ENV: name,
                # Empty: a run within a run must not send heartbeats for the outer one.
                HEARTBEAT_ENV: str(_beat_of(self._beats, name)) if self._healing is not None else "",
            }
            self._monitors[name].forget(self._plan.health.get(name))
            self._supervisor.start(
                name,
                argv,
                self._logs / f"{name}.log",
                environment=environment,
                is_service=is_engine(name),
                has_done_its_work=self._plan.work_of(name),
                host=self._plan.hosts.get(name, THIS_MACHINE),
            )

    def _restart(self, child: Child) -> None:
        if child.name == "orchestrator":
            clear_unpublished(self._run_dir)
        self._monitors[child.name].forget()
        self._note_healing()
        child.environment[EVENTS_ENV] = str(self._events)  # it may be of an earlier attempt
        self._supervisor.restart(child)

    def _refresh(self) -> None:
        self._refresh_views()
        if self._healing is not None:
            self._detector.end_the_silent(self._console.say)

    def _refresh_views(self) -> None:
        self._console.refresh()
        self._side_processes.look(self._console.say)
        if (number := self._plan.asked_to_stop()) is not None:
            self._supervisor.take_for_signaled(number)

    def _pause(self, seconds: float = REFRESH_S) -> int | None:
        """Wait; return the number of a signal that came."""
        return self._supervisor.pause(seconds, self._refresh_waiting)

    def _refresh_waiting(self) -> None:
        self._refresh_views()
        self._note_healing()

    def _note_healing(self) -> None:
        """Tell processes that wait for another one to continue to wait, see `heartbeat.Wait`."""
        with suppress(OSError):  # where several hosts share it, it may be on the storage that is waited for
            (self._beats / HEALING_NAME).touch()

    def _bring_back(self, child: Child) -> Child | Plan | int | None:
        """Start a dead child again after a delay, or raise `ProcessDied`; return the outcome as `_run` does."""
        if child.name == EVALUATION:
            return self._evaluate_again(child)
        if child.process.returncode == STORAGE_FAILED:
            number = self._wait_for_storage(self._detector.error_of(child))
            if number is None:
                self._console.note("starting again", restarted=child.name, reason="its storage failed")
        elif (delay_s := self._detector.restart_delay_s(child, step=self._console.last_step)) is not None:
            number = self._wait_to_restart(child, delay_s)
        elif self._detector.can_spare(child):
            return self._go_on_without(child)
        else:
            self._supervisor.stop()
            raise self._detector.error_of(child)
        if number is not None:
            return number
        is_other = self._has_other_inputs()
        if is_other:
            self._side_processes.begin_again()
        if (is_trainer(child.name) or child.process.loss is not None or is_other) and self._healing is not None:
            # The orchestrator as well: `again` goes back to a step, and servers may come back at another address.
            for other in self._supervisor.children:
                if is_trainer(other.name):  # without a rank nothing is saved, and the others may hang
                    other.process.kill()
            self._supervisor.stop(names={child.name for child in self._supervisor.children if not child.is_service})
            number = self._wait_for_places(self._healing)
            if number is not None:
                return number
            try:
                return self._until_storage_takes_it(self._healing.again)
            except ProcessDied as lost:  # a host, since it had a place
                if self._healing.cluster is None:
                    raise
                self._console.say(str(lost))
                return self._bring_back(child)
        return self._watch_after(lambda: self._restart(child))

    def _has_other_inputs(self) -> bool:
        """Whether a file or library that the attempt trains with has changed: a new process would compute otherwise."""
        attempt = self._plan.attempt
        if self._healing is None or not attempt.inputs:
            return False
        try:
            now = self._healing.inputs(attempt.resume_step is None)
        except ReadError:  # the process that needs the file says so
            return False
        return change_training(changed_inputs(now, attempt.inputs))

    def _evaluate_again(self, child: Child) -> Child | int | None:
        """Start evaluations again, or train on without them."""
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
            self._console.say(f"{child.name} {restart_policy.how_it_ended(child)}: starting it again")
            number = self._pause(delay_s)
        else:
            number = self._pause_for_storage(self._detector.error_of(child), delay_s)
        if number is not None:
            return number
        self._console.note("starting again", restarted=child.name, reason=restart_policy.how_it_ended(child))
        return self._watch_after(lambda: self._restart(child))

    def _wait_for_places(self, healing: restart_policy.RestartPolicy) -> int | None:
        """Wait until the cluster has a place for every process; return the number of a signal that came."""
        if healing.cluster is None:
            return None
        try:
            timeout_s, say = healing.cluster_timeout_s, self._console.say
            return wait_for_places(healing.cluster, timeout_s=timeout_s, pause=self._pause, say=say)
        except TimeoutError as missing:
            self._supervisor.stop()
            raise ProcessDied(f"waited in vain for {healing.cluster_timeout_s:g} s: {missing}") from None

    def _watch_after(self, start: Callable[[], None]) -> Child | int | None:
        """Do `start`, and watch until a child fails, a signal comes or the run is done."""
        number = self._until_storage_takes_it(start)
        if number is not None:
            return number
        return self._until_storage_takes_it(lambda: self._supervisor.run(self._refresh))

    def _until_storage_takes_it(self, action: Callable[[], T]) -> T | int:
        """Do what writes to the run directory, again while the storage fails; return its result, or a signal."""
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
        """Wait before the next try, or raise `ProcessDied`; return the number of a signal that came."""
        delay_s = self._storage_backoff.delay_s(self._console.last_step)
        if delay_s is None:
            self._supervisor.stop()
            told = str(error)
            if timeout_s := self._storage_backoff.timeout_s:
                path, free_bytes = restart_policy.fullest(self._run_dir)  # on a full disk the log may have no reason
                told += f"\n       the storage was waited for in vain for {timeout_s:g} s: "
                told += f"{path} has {free_bytes:,} bytes free"
            raise ProcessDied(told, exit_code=STORAGE_FAILED) from None
        return self._pause_for_storage(error, delay_s)

    def _pause_for_storage(self, error: Exception, delay_s: float) -> int | None:
        path, free_bytes = restart_policy.fullest(self._run_dir)
        reason = str(error).split(". ")[0].split("\n")[0]
        self._console.say(
            f"waiting for storage: {reason}. {path} has {free_bytes:,} bytes free: make room or repair it, and the run "
            f"continues by itself (next try in {delay_s:g} s)"
        )
        return self._pause(delay_s)

    def _wait_to_restart(self, child: Child, delay_s: float) -> int | None:
        """Wait before `child` is started again; return the number of a signal that came."""
        how, which = self._detector.restart_of(child)
        self._console.say(f"{child.name} {how}: starting it again (restart {which})")
        self._console.note("starting again", restarted=child.name, reason=how)
        return self._pause(delay_s)

    def _go_on_without(self, child: Child) -> Child | int | None:
        """Leave a dead process out until the next attempt; return the outcome as `_run` does."""
        reason = str(self._detector.error_of(child)).replace("\n", "\n  ")
        self._console.say(f"WARNING: the run continues without {child.name}, which is not started again. {reason}")
        return self._watch_after(lambda: self._supervisor.give_up(child))

    def _signal_taken_by(self, child: Child) -> int | None:
        """Return the signal that the trainer saved for and ended by: a scheduler may signal ranks directly."""
        number = child.process.returncode - 128
        is_request = number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT) and self._plan.trainer.ckpt is not None
        return number if is_trainer(child.name) and is_request else None

    def _save_before_stop(self, number: int) -> None:
        """Have the trainer save its current step, if checkpoints are on. Ctrl-C waits for the step without a limit."""
        ckpt, trainer, name = self._plan.trainer.ckpt, self._trainer(), signal.Signals(number).name
        if not ckpt or not trainer or trainer.process.poll() is not None:
            self._console.say(f"{name}: stopping")
            return
        if number == signal.SIGINT:
            again = "its newest checkpoint"
            with suppress(OSError, ReadError):  # of a storage that is away
                again = f"step {max(self._run_dir.committed_steps(), default=0)}"
            self._console.say(
                f"{name}: the current step ends and is saved{self._console.pace()}. A second Ctrl-C ends the run at "
                f"once: it would go on from {again}"
            )
            timeout_s = math.inf
        else:
            self._console.say(f"{name}: saving the current step, for at most {ckpt.grace_s:g} s (ckpt.grace_s)")
            # The trainer keeps to the grace itself, and then reports what is not saved.
            timeout_s = ckpt.grace_s + _TELLING_S
        if self._supervisor.ask_to_end(trainer, number, self._console.refresh, timeout_s=timeout_s):
            return
        following = self._supervisor.take_signal()
        if number == signal.SIGINT and following not in (None, signal.SIGINT):
            self._save_before_stop(following)  # it has a deadline
            return
        if following is None:
            self._console.say(f"the step did not end within ckpt.grace_s = {ckpt.grace_s:g} s")
        trainer.process.kill()

    def _trainer(self) -> Child | None:
        """The trainer; None if the storage let none start."""
        return next((child for child in self._supervisor.children if child.name == "trainer"), None)


def _beat_of(beats: Path, name: str) -> Path:
    """Return the prefix of the heartbeats of process `name`; the point tells `inference_1` from `inference_10`."""
    return beats / f"{name}."
