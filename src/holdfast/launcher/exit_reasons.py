"""Decides what to do when a process dies or hangs: restart it or not, when, and what to tell the user.

The reason of an engine failure is in the log of the inference server: vLLM's engine is another process and tells nobody
else.
"""

from __future__ import annotations

import math
import os
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.config.inference import is_engine
from holdfast.config.training import TrainingCommand
from holdfast.errors import NOT_SAVED, STORAGE_FAILED, STUCK, ProcessDied, ReadError
from holdfast.launcher.cluster.hosts import Process
from holdfast.launcher.liveness import LivenessMonitor
from holdfast.launcher.plan import Healing, Restarts
from holdfast.launcher.resume.attempt import Attempt
from holdfast.launcher.supervise import Child, Supervisor, last_lines
from holdfast.run.run_dir import RunDir

# What an inference server writes first; a log holds one start after the other.
_START = "inference INFO loading vllm"
_ENGINE = re.compile(r"^\((?:EngineCore|Worker)\w* pid=\d+\) (?:[A-Z]+ [\d-]+ [\d:]+ \[[^\]]*\] ?)?")
# How our server says that its engine was killed, which is no failure of its own, whatever it had logged before.
_KILLED = re.compile(
    r"inference ERROR the engine died .*(?:signal SIG(?:KILL|TERM|INT)|'EngineCore\w*': -(?:9|15|2)\b)"
)
_TRACEBACK = "Traceback (most recent call last):"
_CHAIN = ("During handling of the above", "The above exception was", _TRACEBACK)
_MOST_LINES = 6
_MOST_CHARACTERS = 300  # of a line: some list every parameter of the model


def engine_failure(log: Path, *, begin: int = 0) -> str | None:
    """Return the exception that ended the engine of the last start in `log`, all its lines.

    None where there is none, or where the engine was killed.

    Of several that followed from each other it is the first.

    Args:
        begin: bytes of `log` that others wrote before.
    """
    lines = log.read_bytes()[begin:].decode(errors="replace").splitlines() if log.exists() else []
    starts = [number for number, line in enumerate(lines) if _START in line]
    lines = lines[starts[-1] if starts else 0 :]
    # Only lines of the engine: what the server raises follows from them.
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
    """Return why the engine of a dead inference server failed; None where something killed either."""
    if not is_engine(child.name) or child.process.returncode < 0:
        return None
    return engine_failure(child.log, begin=child.log_begin)


def how_it_ended(child: Child) -> str:
    """Return by which signal or exit code it ended, in a few words."""
    if child.process.loss is not None:
        return f"is gone: {child.process.loss}"
    code = child.process.returncode
    early = " before its work was done" if code == 0 and not child.is_service else ""
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}{early}"


def death_of(child: Child, *, stuck: str | None, restarts: Restarts) -> ProcessDied:
    """Return the error that ends a run because of `child`, with its exit code.

    Args:
        stuck: how it came no further, where it was killed for that.
        restarts: how often it was started again.
    """
    reason = child.error
    failure = engine_failure_of(child)
    if failure is not None:
        said = (reason or f"the engine died, the server {how_it_ended(child)}").removesuffix(" (its log is above)")
        indented = failure.replace("\n", "\n       ")
        error = ProcessDied(f"{child.name}: {said}\n       {indented}\n       log: {child.log}")
    elif reason is not None:
        error = ProcessDied(f"{child.name}: {reason}\n       log: {child.log}")
    elif child.process.loss is not None:
        error = ProcessDied(f"{child.name} {how_it_ended(child)}\n       log: {child.log}")
    elif stuck is not None:
        error = ProcessDied(f"{stuck}\n       log: {child.log}")
    else:
        tail = last_lines(child.log)
        error = ProcessDied(f"{child.name} {how_it_ended(child)}; the last lines of {child.log}:\n{tail}")
    used = restarts.used(child.name)
    if used:
        error.args = (f"{error}\n       it was started again {used} times{restarts.over(child.name)}",)
    code = child.process.returncode
    error.exit_code = 3 if code == STUCK else code if code in (2, 3, STORAGE_FAILED) else 1
    return error


def report_stop(number: int, trainer: Child | None, *, step: int, attempt: Attempt, config: TrainingCommand) -> int:
    """Say what a stopped run saved; return 128 + signal, or `NOT_SAVED` where its last step is not saved.

    Args:
        number: of the signal.
        trainer: the process, which has ended; None where the storage let none start.
        step: the last one that was trained.
        attempt: that was stopped.
        config: what the trainer was started with.
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
    # 128 + N: it saved for a signal, ours or one that a scheduler sent to its ranks.
    was_killed = code not in (0, *(128 + asked for asked in (signal.SIGTERM, signal.SIGUSR1)))
    if is_saved and was_killed and config.ckpt.dir is not None and step:
        said = trainer.error or f"the trainer {how_it_ended(trainer)} before it had uploaded it"
        print(f"{stopped}; step {step} is saved here, but not at {config.ckpt.dir}: {said}\n{resume}")
        return NOT_SAVED
    if not is_saved or code in (1, 2, 3, STORAGE_FAILED):
        what = f"step {step} is saved here, but" if is_saved else f"step {step} was NOT saved:"
        print(f"{stopped}; {what} {trainer.error or f'see {trainer.log}'}\n{resume}")
        return NOT_SAVED
    print(f"{stopped}, which is saved; {resume}" if step else f"{stopped}, before anything was trained")
    return 128 + number


def profile_lines(run_dir: RunDir, config: TrainingCommand) -> list[str]:
    """Return where the profile lies, for people, where one was asked for and came about."""
    if config.profile is None:
        return []
    try:
        return [f"profile: {path} (a trace of each rank, for https://ui.perfetto.dev)" for path in run_dir.profiles()]
    except OSError as error:
        return [f"cannot list the profiles: {error}"]


@dataclass(frozen=True)
class End:
    """What is left of a run that has ended.

    Attributes:
        lines: for people, behind what says how it ended.
        fields: the same for programs.
    """

    lines: list[str]
    fields: dict[str, Any]


def end_of(attempt: Attempt, config: TrainingCommand, *, step: int, exit_code: int) -> End:
    """Return where the last checkpoint is, and how the run goes on from it."""
    run_dir = attempt.run_dir
    fields: dict[str, Any] = {"step": step, "max_steps": config.max_steps, "checkpoint": None, "resume": None}
    lines = []
    is_finished = exit_code == 0
    weights = run_dir.weights_of(step)
    # Not `Path.is_dir`, which raises where the storage fails.
    is_there = is_finished or os.path.isdir(weights)  # noqa: PTH112
    fields["weights"] = str(weights) if is_there else None
    if not is_finished and exit_code < 128 and exit_code != NOT_SAVED:
        lines.append(f"ended at step {step} of {config.max_steps}, by an error")
    try:
        steps = run_dir.committed_steps()
    except (OSError, ReadError) as error:
        return End([*lines, f"cannot list the checkpoints: {error}"], fields)
    if not steps:
        # Who made a mistake on the command line wants to read that, and nothing else.
        if not step:
            return End([], fields)
        if exit_code < 128:  # a run that was stopped has said so
            lines.append("no checkpoint was saved: with --ckpt.interval N a stopped run can continue")
        return End(lines, fields)
    last = run_dir.checkpoint(steps[-1])
    resume = "--ckpt.resume-step latest"
    fields |= {"checkpoint": {"step": steps[-1], "path": str(last)}, "resume": resume}
    to_go_on = attempt.to_go_on
    if is_finished and steps[-1] >= config.max_steps:
        to_go_on = f"give the same command with {resume} and a larger {config.length_flag}"
    lines.append(f"last checkpoint: step {steps[-1]} in {last}; to continue, {to_go_on}")
    return End(lines, fields)


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
                say(f"{child.name} has sent no heartbeat for {silent_s:.0f} s: killing it")
            elif (stuck := monitor.stuck()) is not None:
                who = f"{child.name} ({stuck.part})" if stuck.part else child.name
                self._stuck[child.process] = f"{who} made no progress in {stuck.doing}"
                say(f"{who} has made no progress for {stuck.seconds:.0f} s in {stuck.doing}: killing it")
            else:
                continue
            # Before the kill: afterwards nobody can say where it hung.
            child.process.show_stacks(monitor.pids(), child.log)
            self._killed.add(child.process)  # once: where its storage hangs, it takes its time to end
            child.process.kill()

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
