"""One evaluation with the server that it needs: checked, started, watched to its end, and stopped."""

from __future__ import annotations

import time
from pathlib import Path

from holdfast.commands.launcher.device_choices import choose_inference
from holdfast.commands.launcher.endings import death_of
from holdfast.commands.launcher.placement import Placement, inference_gpus, this_machine
from holdfast.commands.launcher.ports import release_all, reserve_first_free
from holdfast.commands.launcher.preflight import check_in_child
from holdfast.commands.launcher.restarts import Restarts
from holdfast.commands.launcher.supervise import Child, Supervisor
from holdfast.commands.live.output import code_of_error, json_lines
from holdfast.commands.live.plain import event_line
from holdfast.commands.live.state import LAUNCHER, RunState
from holdfast.commands.live.tails import Tail
from holdfast.orchestrator.evaluation.results import IDENTITY_NAME, ROLLOUTS_NAME
from holdfast.shared.config.evaluation import EvaluateConfig
from holdfast.shared.config.load import to_toml
from holdfast.shared.errors import ConfigError, RunDirError
from holdfast.shared.files import durable
from holdfast.shared.files.local_inputs import check_model_path, check_weights_path
from holdfast.shared.files.model_length import check_max_len
from holdfast.shared.files.run_dir import JUDGEMENTS_NAME, SUMMARY_NAME, RunDir
from holdfast.shared.process.events import EVENTS_ENV, PROCESS_ENV, append
from holdfast.shared.process.gpus import find_gpus, require_vllm
from holdfast.shared.process.import_path import module_command

_MAX_RESTARTS = 3
_RESTART_WINDOW_S = 600.0
_OURS = (IDENTITY_NAME, ROLLOUTS_NAME, SUMMARY_NAME, JUDGEMENTS_NAME, "run.json", "rollouts", "logs", "config")


def check_servable(config: EvaluateConfig) -> None:
    """Check what can be before anything is started.

    Raises:
        ConfigError, DataError: what cannot be used.
    """
    require_vllm()
    if config.model is not None:
        check_model_path(config.model.name, key="model.name")
        check_weights_path(config.model.name, needs_index=False)
    served = config.inference.model
    if config.seq_len > served.max_len:
        raise ConfigError(
            f"seq_len = {config.seq_len} is more than inference.model.max_len = {served.max_len}, the longest "
            "session that the server takes. Lower seq_len or raise max_len."
        )
    if config.inference.engines > 1:
        raise ConfigError(f"inference.engines = {config.inference.engines}: an evaluation has one server; leave it out")
    if config.model is not None:
        check_max_len(config.inference, config.model.name, key="inference.model")
    check_in_child("holdfast.orchestrator.evaluation.check", config)


def prepare_directory(config: EvaluateConfig, directory: RunDir) -> None:
    """Make the directory one of an evaluation.

    Raises:
        RunDirError: it holds a run.
    """
    path = directory.path
    if directory.holds_run() and not (path / "config" / "evaluate.toml").exists():
        raise RunDirError(
            f"{path} holds a run. An evaluation needs a directory of its own: choose another with --output-dir."
        )
    is_ours = (path / "config" / "evaluate.toml").exists()  # else what has these names is not ours
    if is_ours:
        durable.clear_leftovers(path)
    if config.clean and is_ours:
        # Its settings last: while they are there, the same command finds the rest after a kill.
        remove_exports(path)
        for name in _OURS:
            entry = path / name
            if entry.is_dir():
                durable.remove_directory(entry)
            else:
                entry.unlink(missing_ok=True)
    write_settings(config, path / "config")
    directory.create()  # so that its server is its own: nobody else can push weights to it


def remove_exports(path: Path) -> None:
    """Remove the models that were exported for an evaluation below `path`; none is ever left in part."""
    for exported in path.glob("model_step_*"):
        durable.remove_directory(exported)


def run_evaluation(config: EvaluateConfig, directory: RunDir, supervisor: Supervisor) -> int:
    """Run server and evaluation to the end; return the exit code. Nothing of them runs on.

    Raises:
        ProcessDied: one of them failed.
    """
    path = directory.path
    server = config.inference.server
    held = reserve_first_free(server.host, server.port)
    server.port = held[0].port
    machine = this_machine(find_gpus())
    gpus = inference_gpus(config.inference, machine)
    choose_inference(config.inference, machine)
    environment = Placement(engines=(gpus,), hides_gpus=bool(machine.inventory.gpus)).environment(gpus)
    settings = write_settings(config, path / "config")
    logs = path / "logs"
    logs.mkdir(exist_ok=True)
    events = logs / "events.jsonl"
    tail = _Progress(events)
    append(events, LAUNCHER, "starting")
    try:
        served = path / "config" / "inference.toml"
        durable.write_file(served, to_toml(config.inference).encode())
        supervisor.start(
            "inference",
            module_command("holdfast.inference.main", str(served), str(path)),
            logs / "inference.log",
            environment={**environment, EVENTS_ENV: str(events), PROCESS_ENV: "inference"},
            is_service=True,
        )
        supervisor.start(
            "evaluation",
            module_command("holdfast.orchestrator.evaluation.main", str(settings)),
            logs / "evaluation.log",
            environment={EVENTS_ENV: str(events), PROCESS_ENV: "evaluation"},
            has_done_its_work=(path / SUMMARY_NAME).exists,
        )
        code = _watch(supervisor, tail, path)
    except Exception as error:
        append(events, LAUNCHER, "ended", exit_code=code_of_error(error), error=str(error))
        raise
    else:
        append(events, LAUNCHER, "ended", exit_code=code)
        return code
    finally:
        supervisor.stop()
        # Who evaluates one step after another has one supervisor: by a later one their process ids may be others'.
        supervisor.children.clear()
        tail.refresh()
        release_all(held)


def _watch(supervisor: Supervisor, progress: _Progress, path: Path) -> int:
    restarts = Restarts(_MAX_RESTARTS, _RESTART_WINDOW_S)
    while True:
        ended = supervisor.run(progress.refresh)
        if ended is None:
            return 0
        if not isinstance(ended, Child):
            return _stopped(supervisor, ended, path)
        delay_s = restarts.delay_s(ended.name, ended.process.returncode)
        if delay_s is None:
            raise death_of(ended, stuck=None, restarts=restarts)
        print(f"{ended.name} died; starting it again", flush=True)
        if (number := supervisor.pause(delay_s, progress.refresh)) is not None:
            return _stopped(supervisor, number, path)
        supervisor.restart(ended)


def _stopped(supervisor: Supervisor, number: int, path: Path) -> int:
    supervisor.stop()
    print(f"stopped; what is done is in {path}, and the same command goes on from there")
    return 128 + number


class _Progress:
    """Prints the phases of the processes as they come."""

    def __init__(self, events: Path) -> None:
        self._events = Tail(events, from_end=True)
        self._state = RunState()
        self._begin = time.monotonic()

    def refresh(self) -> None:
        """Print what is new."""
        for event in self._events:
            told = self._state.take_event(event, attempt=1)
            if told is None:
                continue
            if (lines := json_lines()) is not None:
                lines.tell_news(told, max_steps=0)
            else:
                print(event_line(told, seconds=time.monotonic() - self._begin), flush=True)


def write_settings(config: EvaluateConfig, directory: Path) -> Path:
    path = directory / "evaluate.toml"
    durable.write_file(path, to_toml(config).encode())
    return path
