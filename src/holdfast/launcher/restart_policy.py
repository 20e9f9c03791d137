"""The effect of a dead or hanging process on a run: its reason, whether and when it is started again, and the message.

The reason of an engine failure is in the log of the inference server: vLLM's engine is another process and tells nobody
else. A storage that cannot be written (a full disk) does not count as a crash: everything that was committed is intact,
so the launcher waits for the storage.
"""

import math
import os
import re
import shutil
import signal
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.config.inference import is_engine
from holdfast.config.training import TrainingCommand
from holdfast.errors import NOT_SAVED, STORAGE_FAILED, STUCK, ProcessDied, ReadError, masked
from holdfast.launcher.cluster.cluster import Places, is_trainer
from holdfast.launcher.cluster.hosts import Process
from holdfast.launcher.liveness import LivenessMonitor
from holdfast.launcher.plan import Plan
from holdfast.launcher.resume.attempt import Attempt
from holdfast.launcher.supervisor import Child, Supervisor, end_of_log, last_lines
from holdfast.process.heartbeat import awake_s
from holdfast.run.run_dir import RunDir

_FIRST_DELAY_S = 0.2
_LAST_DELAY_S = 10.0
_STORAGE_FIRST_DELAY_S = 1.0
_STORAGE_LAST_DELAY_S = 30.0
# Exit codes of reported errors, which would only come again.
_REPORTED = (2, 3, NOT_SAVED)
# An inference server writes this first; a log holds one start after the other.
_START = "inference INFO loading vllm"
_ENGINE = re.compile(r"^\((?:EngineCore|Worker)\w* pid=\d+\) (?:[A-Z]+ [\d-]+ [\d:]+ \[[^\]]*\] ?)?")
# How our server reports a killed engine, which is not a failure, whatever the engine had logged before.
_KILLED = re.compile(
    r"inference ERROR the engine died .*(?:signal SIG(?:KILL|TERM|INT)|'EngineCore\w*': -(?:9|15|2)\b)"
)
_TRACEBACK = "Traceback (most recent call last):"
_CHAIN = ("During handling of the above", "The above exception was", _TRACEBACK)
_MOST_LINES = 6
_MOST_CHARACTERS = 300  # of a line: some list every parameter of the model


class RestartLimit:
    """Allows every process at most `limit` restarts within `window_s` seconds."""

    def __init__(self, limit: int, window_s: float) -> None:
        self.limit = limit
        self.window_s = window_s
        self._times: defaultdict[str, deque[float]] = defaultdict(deque)
        self._failures: dict[str, tuple[str | None, int]] = {}
        self._stuck: dict[str, tuple[int, int]] = {}

    def comes_again(self, name: str, failure: str | None, *, step: int) -> bool:
        """Note a death of process `name`; return whether it died of the same `failure` before, at the same step.
        `failure`: None if only the death itself is known, which counts as another failure."""
        before, self._failures[name] = self._failures.get(name), (failure, step)
        return failure is not None and before == (failure, step)

    def delay_s(self, name: str, exit_code: int, *, stuck_at: int | None = None) -> float | None:
        """Return the seconds to wait before process `name` is started again; None: it is not.

        Deaths by a signal, crashes and a dead engine are worth another try, reported errors are not. `stuck_at`: the
        step at which it made no progress. That takes longer to notice than any window, so it may be started again
        `limit` times at the same step."""
        if exit_code in _REPORTED:
            return None
        if stuck_at is not None:
            step, count = self._stuck.get(name, (stuck_at, 0))
            count = count if step == stuck_at else 0
            if count >= self.limit:
                return None
            self._stuck[name] = (stuck_at, count + 1)
            return _FIRST_DELAY_S
        self._stuck.pop(name, None)
        now = time.monotonic()
        times = self._times[name]
        while times and now - times[0] > self.window_s:
            times.popleft()
        if len(times) >= self.limit:
            return None
        times.append(now)
        return min(_LAST_DELAY_S, _FIRST_DELAY_S * 2 ** (len(times) - 1))

    def used(self, name: str) -> int:
        """Return the restarts of `name` within the window, or at the step at which it is stuck."""
        return self._stuck[name][1] if name in self._stuck else len(self._times[name])

    def over(self, name: str) -> str:
        """Return what `used` counts over."""
        return f" after step {self._stuck[name][0]}" if name in self._stuck else f" in {self.window_s:g} s"


class StorageBackoff:
    """Decides when to try a failed storage again, and when to give up. `timeout_s`: give up after failing for this long
    without training a new step; 0: at once."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._since_s = self._last_s = 0.0
        self._step = -1
        self._failures = 0

    def delay_s(self, step: int) -> float | None:
        """Return the seconds to wait before the next try, after a failure after `step`; None: give up.

        The time begins again with each new step, because then there was room again; and with an older step, if nothing
        failed for `timeout_s`, as such steps were trained again."""
        now = awake_s()
        was_well = now - self._last_s > self.timeout_s
        self._last_s = now
        if step > self._step or (was_well and step < self._step):
            self._since_s, self._step, self._failures = now, step, 0
        left_s = self._since_s + self.timeout_s - now
        if left_s <= 0:
            return None
        self._failures += 1
        return min(left_s, _STORAGE_LAST_DELAY_S, _STORAGE_FIRST_DELAY_S * 2 ** (self._failures - 1))


def fullest(run_dir: RunDir) -> tuple[Path, int]:
    """Return the directory of the run with the fewest free bytes, and how many: each may be another mount."""
    free: dict[Path, int] = {}
    for path in (run_dir.path, run_dir.checkpoints, run_dir.rollouts, run_dir.weights):
        try:
            free[path] = shutil.disk_usage(path).free
        except OSError:  # missing, or on a dead filesystem
            continue
    path = min(free, key=lambda candidate: free[candidate], default=run_dir.path)
    return path, free.get(path, 0)


@dataclass(frozen=True)
class RestartPolicy:
    """How a run continues after its processes die.

    Attributes:
        again: makes the plan of the next attempt after the trainer died.
        heartbeat_timeout_s: a process that is silent for this long is killed.
        inputs: digests of the run's inputs as they are now, by `is_fresh`; see `find_inputs`.
        cluster: which places the processes, and may lose places; None: this machine.
        cluster_timeout_s: how long to wait for other places.
    """

    again: Callable[[], Plan]
    restarts: RestartLimit
    storage_backoff: StorageBackoff
    heartbeat_timeout_s: float
    inputs: Callable[[bool], Mapping[str, str]] = lambda is_fresh: {}
    cluster: Places | None = None
    cluster_timeout_s: float = 0.0


def engine_failure(log: Path, *, begin: int = 0) -> str | None:
    """Return all lines of the exception that ended the engine of the last start in `log`, the first of a chain.

    None if the log has no exception, or if the engine was killed. `begin`: bytes of `log` that others wrote before."""
    lines = end_of_log(log, begin=begin)
    starts = [number for number, line in enumerate(lines) if _START in line]
    lines = lines[starts[-1] if starts else 0 :]
    # Only lines of the engine: errors of the server follow from them.
    own = [_ENGINE.sub("", line) for line in lines if _ENGINE.match(line)]
    if _TRACEBACK not in own or any(map(_KILLED.search, lines)):
        return None
    after = own[own.index(_TRACEBACK) + 1 :]
    first = next((number for number, line in enumerate(after) if line and not line.startswith(" ")), None)
    if first is None:
        return None
    source = [line.strip() for line in after[:first] if line.startswith("    ") and set(line.strip()) - set("^~ ")]
    # An assertion often says nothing but its own source.
    message = [after[first] if ":" in after[first] or not source else f"{after[first]}: {source[-1]}"]
    for line in after[first + 1 : first + _MOST_LINES]:
        if line.startswith(_CHAIN):
            break
        message.append(line)
    return "\n".join(line.rstrip()[:_MOST_CHARACTERS] for line in message if line.strip())


def engine_failure_of(child: Child) -> str | None:
    """Return why the engine of a dead inference server failed; None if either was killed."""
    if not is_engine(child.name) or child.process.returncode < 0:
        return None
    return engine_failure(child.log, begin=child.log_begin)


def _counted_as(child: Child) -> str:
    """Return the name under which restarts are counted: the trainers of all nodes start again together."""
    return "trainer" if is_trainer(child.name) else child.name


def how_it_ended(child: Child) -> str:
    """Return by which signal or exit code it ended, in a few words."""
    if child.process.loss is not None:
        return f"is gone: {child.process.loss}"
    code = child.process.returncode
    early = " before its work was done" if code == 0 and not child.is_service else ""
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}{early}"


def death_of(child: Child, *, stuck: str | None, restarts: RestartLimit) -> ProcessDied:
    """Return the error that ends a run because of `child`, with its exit code. `stuck`: the work without progress, if
    the process was killed because of it."""
    reason, failure, how = child.error, engine_failure_of(child), how_it_ended(child)
    log = f"\n       log: {child.log}"
    if failure is not None:
        said = (reason or f"the engine died, the server {how}").removesuffix(" (its log is above)")
        indented = failure.replace("\n", "\n       ")
        text = f"{child.name}: {said}\n       {indented}{log}"
    elif reason is not None:
        text = f"{child.name}: {reason}{log}"
    elif child.process.loss is not None:
        text = f"{child.name} {how}{log}"
    elif stuck is not None:
        text = f"{stuck}{log}"
    else:
        text = f"{child.name} {how}; the last lines of {child.log}:\n{last_lines(child.log)}"
    if used := restarts.used(_counted_as(child)):
        text += f"\n       it was started again {used} times{restarts.over(_counted_as(child))}"
    code = child.process.returncode
    return ProcessDied(text, exit_code=3 if code == STUCK else code if code in (2, 3, STORAGE_FAILED) else 1)


def report_stop(number: int, trainer: Child | None, *, step: int, attempt: Attempt, config: TrainingCommand) -> int:
    """Print what a stopped run saved; return 128 + signal, or `NOT_SAVED` if its last step is not saved.

    Args:
        number: of the signal.
        trainer: which has ended; None if the storage let none start.
        step: the last trained one.
    """
    stopped = f"stopped at step {step} of {config.max_steps}"
    if config.ckpt is None or trainer is None:
        print(f"{stopped}; nothing was saved (--ckpt saves the step that a signal stops at)")
        return 128 + number
    try:
        steps = attempt.run_dir.committed_steps()
    except (OSError, ReadError) as error:
        print(f"{stopped}; cannot tell whether this step is saved: {error}")
        return NOT_SAVED
    resume = f"to continue from step {steps[-1]}, {attempt.to_go_on}" if steps else "there is no checkpoint"
    is_saved = (steps[-1] if steps else 0) >= step
    code = trainer.process.returncode
    # 128 + N: it saved for a signal of the launcher or a scheduler.
    was_killed = code not in (0, *(128 + asked for asked in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)))
    if is_saved and was_killed and config.ckpt.dir is not None and step:
        said = trainer.error or f"the trainer {how_it_ended(trainer)} before it had uploaded it"
        print(f"{stopped}; step {step} is saved here, but not at {masked(config.ckpt.dir)}: {said}\n{resume}")
        return NOT_SAVED
    if not is_saved or code in (1, 2, 3, STORAGE_FAILED):
        what = f"step {step} is saved here, but" if is_saved else f"step {step} was NOT saved:"
        print(f"{stopped}; {what} {trainer.error or f'see {trainer.log}'}\n{resume}")
        return NOT_SAVED
    print(f"{stopped}, which is saved; {resume}" if step else f"{stopped}, before anything was trained")
    return 128 + number


def profile_lines(run_dir: RunDir, config: TrainingCommand) -> list[str]:
    """Return a line with the directory of the profile, if there is one."""
    if config.profile is None:
        return []
    try:
        return [f"profile: {path} (a trace of each rank, for https://ui.perfetto.dev)" for path in run_dir.profiles()]
    except OSError as error:
        return [f"cannot list the profiles: {error}"]


def exit_report(
    attempt: Attempt, config: TrainingCommand, *, step: int, exit_code: int
) -> tuple[list[str], dict[str, Any]]:
    """Return where the last checkpoint is and how the run continues from it: lines for people, fields for programs."""
    run_dir = attempt.run_dir
    fields: dict[str, Any] = {"step": step, "max_steps": config.max_steps, "checkpoint": None, "resume": None}
    lines: list[str] = []
    is_finished = exit_code == 0
    weights = run_dir.weights_of(step)
    # Not `Path.is_dir`, which raises if the storage fails.
    is_there = is_finished or os.path.isdir(weights)  # noqa: PTH112
    fields["weights"] = str(weights) if is_there else None
    if not is_finished and exit_code < 128 and exit_code != NOT_SAVED:
        lines.append(f"ended at step {step} of {config.max_steps}, by an error")
    try:
        steps = run_dir.committed_steps()
    except (OSError, ReadError) as error:
        return [*lines, f"cannot list the checkpoints: {error}"], fields
    if not steps:
        # After a mistake on the command line, only its message matters.
        if not step:
            return [], fields
        if exit_code < 128:  # a stopped run has printed it
            saves = config.ckpt and (config.ckpt.interval or config.ckpt.every_minutes)
            remedy = "train from the first step again" if saves else "with --ckpt.interval N a stopped run can continue"
            lines.append(f"no checkpoint was saved: {remedy}")
        return lines, fields
    last = run_dir.checkpoint(steps[-1])
    resume = "--ckpt.resume-step latest"
    fields |= {"checkpoint": {"step": steps[-1], "path": str(last)}, "resume": resume}
    to_go_on = attempt.to_go_on
    ended_by = run_dir.ended_by()
    if is_finished and (ended_by or steps[-1] >= config.max_steps):
        longer = {"": f"a larger {config.length_flag}", "stop": "a larger --stop.patience", "hooks": "other hooks"}
        to_go_on = f"give the same command with {resume} and {longer[ended_by]}"
    if exit_code == 2:  # what was given is refused: the same command would be refused again
        to_go_on = f"mend that and {to_go_on.replace('the same command again', 'the command again')}"
    lines.append(f"last checkpoint: step {steps[-1]} in {last}; to continue, {to_go_on}")
    return lines, fields


class FailureDetector:
    """Kills processes that are silent or stuck, and decides which dead ones are started again.

    Args:
        healing: unset: no process is started again, or killed for silence.
        monitors: by name of the process.
    """

    def __init__(
        self, healing: RestartPolicy | None, supervisor: Supervisor, monitors: Mapping[str, LivenessMonitor]
    ) -> None:
        self._restarts = healing.restarts if healing else RestartLimit(0, 0.0)
        self._timeout_s = healing.heartbeat_timeout_s if healing else math.inf
        self._supervisor = supervisor
        self._monitors = monitors
        self._killed: set[Process] = set()
        self._stuck: dict[Process, str] = {}

    def end_the_silent(self, say: Callable[[str], None]) -> None:
        """Kill the processes without heartbeats or progress, and log it."""
        for child in self._supervisor.children:
            monitor = self._monitors[child.name]
            # First: it reads the heartbeats, which `stuck` needs.
            silent_s = monitor.silent_s()
            if child.process.poll() is not None or child.process in self._killed:
                continue
            if silent_s > self._timeout_s:
                say(f"{child.name} has sent no heartbeat for {silent_s:.0f} s: killing it")
            elif (stuck := monitor.stuck()) is not None:
                who = f"{child.name} ({stuck.part})" if stuck.part else child.name
                self._stuck[child.process] = f"{who} made no progress in {stuck.doing}"
                say(f"{who} has made no progress for {stuck.seconds:.0f} s in {stuck.doing}: killing it")
            else:
                continue
            child.process.show_stacks(monitor.pids(), child.log)
            self._killed.add(child.process)  # once: a process that waits for storage may not end at once
            child.process.kill()

    def restart_delay_s(self, child: Child, *, step: int) -> float | None:
        """Return the seconds to wait before `child` is started again after `step` was trained; None: it is not."""
        comes_again = self._restarts.comes_again(_counted_as(child), engine_failure_of(child), step=step)
        is_stuck = child.process in self._stuck or child.process.returncode == STUCK
        if comes_again:
            return None
        return self._restarts.delay_s(_counted_as(child), self._code_of(child), stuck_at=step if is_stuck else None)

    def restart_of(self, child: Child) -> tuple[str, str]:
        """Return how `child` ended, and which of its restarts follows: `1 of 3`."""
        failure = engine_failure_of(child)
        reason = f" ({failure.splitlines()[0]})" if failure else ""
        return f"{how_it_ended(child)}{reason}", f"{self._restarts.used(_counted_as(child))} of {self._restarts.limit}"

    def can_spare(self, child: Child) -> bool:
        """Whether the run can continue without `child`: an inference server, if another one lives or is started again.

        A reported error would end the others as well."""
        others = [one for one in self._supervisor.children if is_engine(one.name) and one is not child]
        return is_engine(child.name) and bool(others) and self._code_of(child) not in (2, 3)

    def error_of(self, child: Child) -> ProcessDied:
        """Return the error with the reason why `child` died."""
        return death_of(child, stuck=self._stuck.get(child.process), restarts=self._restarts)

    def _code_of(self, child: Child) -> int:
        """Return its exit code; the code of a crash if a server could not start again: its port may not be free yet."""
        monitor = self._monitors[child.name]
        was_starting_again = child.is_service and monitor.was_well and not monitor.is_well
        return 1 if was_starting_again else child.process.returncode
