"""Starts an evaluation and the server that it needs, and stops both."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from holdfast.commands.ckpt.tensor_work import TensorWorkFailed
from holdfast.commands.evaluate.policy import served_model, step_of_run, weights_of_step, with_settings_of_run
from holdfast.commands.evaluate.report import summary_report
from holdfast.commands.launcher.console import Tail
from holdfast.commands.launcher.device_choices import choose_inference
from holdfast.commands.launcher.endings import death_of
from holdfast.commands.launcher.placement import Placement, inference_gpus, this_machine
from holdfast.commands.launcher.ports import release_all, reserve_first_free
from holdfast.commands.launcher.preflight import check_in_child
from holdfast.commands.launcher.restarts import Restarts
from holdfast.commands.launcher.supervise import Child, Supervisor
from holdfast.orchestrator.evaluation.results import IDENTITY_NAME, ROLLOUTS_NAME, SUMMARY_NAME
from holdfast.orchestrator.evaluation.summary import summary_in
from holdfast.shared.config.evaluation import EvaluateConfig
from holdfast.shared.config.load import to_toml
from holdfast.shared.errors import ConfigError, RunDirError
from holdfast.shared.files import durable
from holdfast.shared.files.local_inputs import check_model_path, check_weights_path
from holdfast.shared.files.run_dir import JUDGEMENTS_NAME, RunDir
from holdfast.shared.process.events import EVENTS_ENV, PROCESS_ENV
from holdfast.shared.process.gpus import find_gpus, require_vllm
from holdfast.shared.process.import_path import module_command

_MAX_RESTARTS = 3
_RESTART_WINDOW_S = 600.0
_OURS = (IDENTITY_NAME, ROLLOUTS_NAME, SUMMARY_NAME, JUDGEMENTS_NAME, "run.json", "rollouts", "config", "logs")


def launch(config: EvaluateConfig) -> int:
    """Evaluate as `config` says; return the exit code.

    Raises:
        HoldfastError: what cannot be used, or what ended the evaluation.
    """
    config = with_settings_of_run(config)
    step = step_of_run(config.run, config.step) if config.run is not None else None
    _check(config)
    directory = RunDir(config.output_dir)
    if config.dry_run:
        print(f"resolved configuration: {_write(config, directory.path / 'config' / 'dry_run')}")
        print(f"would evaluate {_named(config, step)} in {directory.path}")
        return 0
    directory.lock()
    _prepare(config, directory)
    if config.run is not None and step is not None:
        try:
            weights = weights_of_step(config.run, step, directory.path)
        except TensorWorkFailed as failure:
            return failure.exit_code
        config.inference.model = config.inference.model.model_copy(update={"name": str(weights)})
    elif config.url is None and config.model is not None:
        model = served_model(config, config.model.name)
        config.inference.model = config.inference.model.model_copy(update=model.model_dump())
    print(f"evaluating {_named(config, step)}", flush=True)
    code = _run(config, directory)
    if code == 0:
        summary_report(summary_in(directory.path), directory.path).print(as_json=False)
    return code


def _check(config: EvaluateConfig) -> None:
    """Check what can be before anything is started.

    Raises:
        ConfigError, DataError: what cannot be used.
    """
    if config.url is None:
        require_vllm()
        if config.model is not None:
            check_model_path(config.model.name, key="model.name")
            check_weights_path(config.model.name)
        served = config.inference.model
        if config.seq_len > served.max_len:
            raise ConfigError(
                f"seq_len = {config.seq_len} is more than inference.model.max_len = {served.max_len}, the longest "
                "session that the server takes. Lower seq_len or raise max_len."
            )
        if config.inference.engines > 1:
            raise ConfigError(
                f"inference.engines = {config.inference.engines}: an evaluation has one server; leave it out"
            )
    check_in_child("holdfast.orchestrator.evaluation.check", config)


def _prepare(config: EvaluateConfig, directory: RunDir) -> None:
    """Make the directory one of an evaluation.

    Raises:
        RunDirError: it holds a run.
    """
    path = directory.path
    if directory.holds_run() and not (path / "config" / "evaluate.toml").exists():
        raise RunDirError(
            f"{path} holds a run. An evaluation needs a directory of its own: choose another with --output-dir."
        )
    if config.clean and (path / "config" / "evaluate.toml").exists():  # else what has these names is not ours
        for name in _OURS:
            entry = path / name
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)
        for entry in path.glob("model_step_*"):
            shutil.rmtree(entry)
    _write(config, path / "config")
    directory.create()  # so that its server is its own: nobody else can push weights to it


def _run(config: EvaluateConfig, directory: RunDir) -> int:
    """Run server and evaluation to the end; return the exit code.

    Raises:
        ProcessDied: one of them failed.
    """
    path, held = directory.path, []
    environment: dict[str, str] = {}
    if config.url is None:
        server = config.inference.server
        held = reserve_first_free(server.host, server.port)
        server.port = held[0].port
        machine = this_machine(find_gpus())
        gpus = inference_gpus(config.inference, machine)
        choose_inference(config.inference, machine)
        environment = Placement(engines=(gpus,), hides_gpus=bool(machine.inventory.gpus)).environment(gpus)
    settings = _write(config, path / "config")
    logs = path / "logs"
    logs.mkdir(exist_ok=True)
    events = logs / "events.jsonl"
    tail = _Progress(events)
    try:
        with Supervisor() as supervisor:
            if config.url is None:
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
            return _watch(supervisor, tail, path)
    finally:
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
        self._begin = time.monotonic()

    def refresh(self) -> None:
        """Print what is new."""
        for event in self._events:
            details = " ".join(
                f"{key} {value}" for key, value in event.items() if key not in ("phase", "process", "time")
            )
            seconds = time.monotonic() - self._begin
            print(f"{seconds:6.1f}s  {event['process']:<10}  {event['phase']}  {details}".rstrip(), flush=True)


def _write(config: EvaluateConfig, directory: Path) -> Path:
    path = directory / "evaluate.toml"
    durable.write_file(path, to_toml(config).encode())
    return path


def _named(config: EvaluateConfig, step: int | None) -> str:
    if config.run is not None:
        return f"step {step} of {config.run}"
    assert config.model is not None, "an evaluation has a policy"
    return f"{config.model.name} at {config.url}" if config.url else config.model.name
