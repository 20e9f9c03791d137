"""The launcher: prepares the run directory, starts the processes, watches them and stops them.

`rl` decides once which step to resume from and hands the same number to all processes. It starts
everything at the same time; whoever is ready first waits for the others through the run directory.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.error
import urllib.request
from pathlib import Path

from triad.config.base import CkptConfig
from triad.config.inference import InferenceConfig
from triad.config.orchestrator import OrchestratorConfig
from triad.config.rl import RlConfig, hand_down_shared
from triad.config.trainer import SftConfig, TrainerConfig, TrainingCommand
from triad.console import Console
from triad.errors import NOT_SAVED, ConfigError, DataError, InferenceError, ProcessDied
from triad.events import EVENTS_ENV, PROCESS_ENV
from triad.process import available_cores
from triad.resume import Attempt, prepare, with_resume, write_config
from triad.run_dir import RunDir, resolve_resume_step
from triad.supervise import Child, Supervisor, error_message, last_lines


def launch_training(program: str, config: TrainingCommand) -> int:
    """Run `sft`, or the trainer of `rl` alone; return the exit code."""
    check_model(config)
    attempt = prepare(config, clean=config.clean, dry_run=config.dry_run)
    config = with_resume(config, attempt.resume_step)
    path = write_config(attempt, "trainer" if program == "rl" else program, config, dry_run=config.dry_run)
    if config.dry_run:
        return _print_plan(attempt, [path], config.max_steps)
    return _watch(attempt, {"trainer": [sys.executable, "-m", "trainer.launch", program, str(path)]}, config)


def launch_rl(config: RlConfig) -> int:
    """Run trainer, orchestrator and, unless one is there, an inference server; return the exit code."""
    config = hand_down_shared(config)
    check_model(config.trainer)
    urls = config.orchestrator.client.urls
    is_ours = _address(config.inference) in urls  # otherwise the servers are somebody else's to start
    served = _served_model(config.inference) if is_ours else None
    attempt = prepare(config.trainer, clean=config.clean, dry_run=config.dry_run, orchestrator=config.orchestrator)
    trainer = with_resume(config.trainer, attempt.resume_step)
    orchestrator = with_resume(config.orchestrator, attempt.resume_step)
    _share_cores(trainer, config.inference)
    dry_run = config.dry_run
    paths = {
        name: write_config(attempt, name, section, dry_run=dry_run)
        for name, section in (("trainer", trainer), ("orchestrator", orchestrator), ("inference", config.inference))
    }
    write_config(attempt, "rl", config, dry_run=dry_run)
    if dry_run:
        return _print_plan(attempt, list(paths.values()), trainer.max_steps)
    commands = {
        "trainer": [sys.executable, "-m", "trainer.launch", "rl", str(paths["trainer"])],
        "orchestrator": [sys.executable, "-m", "orchestrator.main", str(paths["orchestrator"])],
    }
    if not is_ours:
        print(f"using the inference servers at {', '.join(urls)}")
    elif served is None:
        commands = {"inference": [sys.executable, "-m", "inference.main", str(paths["inference"])], **commands}
    else:
        print(f"using the inference server that answers at {_address(config.inference)} (model {served})")
    return _watch(attempt, commands, trainer)


def launch_orchestrator(config: OrchestratorConfig) -> int:
    """Become the orchestrator of a run whose trainer is started elsewhere."""
    run_dir = RunDir(config.output_dir)
    ckpt = config.ckpt or CkptConfig()
    if ckpt.resume_dir is not None:
        raise ConfigError(
            f"ckpt.resume_dir = {ckpt.resume_dir}: the trainer's command brings the checkpoint into the run. Start "
            "that first, then this with --ckpt.resume-step and the number of the step."
        )
    resume_step = resolve_resume_step(run_dir, ckpt.resume_step, how=ckpt.verify)
    attempt = Attempt(run_dir, max(1, run_dir.next_attempt() - 1), resume_step)
    config = with_resume(config, resume_step)
    path = write_config(attempt, "orchestrator", config, dry_run=config.dry_run)
    if config.dry_run:
        return _print_plan(attempt, [path], config.max_steps)
    return _become([sys.executable, "-m", "orchestrator.main", str(path)], "orchestrator")


def launch_inference(config: InferenceConfig) -> int:
    """Become the inference server."""
    attempt = Attempt(RunDir(config.output_dir), 0, None)
    path = write_config(attempt, "inference", config, dry_run=config.dry_run)
    if config.dry_run:
        print(f"resolved configuration: {path}\nwould serve {config.model.name} at {_address(config)}")
        return 0
    print(f"loading vLLM to serve {config.model.name} at {_address(config)}; usually 15-60 s on CPU", flush=True)
    return _become([sys.executable, "-m", "inference.main", str(path)], "inference")


def _become(argv: list[str], process: str) -> int:
    os.environ[PROCESS_ENV] = process
    sys.stdout.flush()
    os.execv(argv[0], argv)


def _share_cores(trainer: TrainerConfig, inference: InferenceConfig) -> None:
    """Give trainer and engine their own cores: two thread teams on the same cores are ruinous."""
    cores = available_cores()
    if trainer.parallel.threads is None:
        trainer.parallel.threads = max(1, cores // 2 // trainer.parallel.num_ranks)
    if inference.engine.threads is None:
        inference.engine.threads = max(1, cores - trainer.parallel.threads * trainer.parallel.num_ranks)


def _print_plan(attempt: Attempt, paths: list[Path], max_steps: int) -> int:
    print(f"would start {attempt.start} in {attempt.run_dir.path} and train until step {max_steps}")
    for path in paths:
        print(f"resolved configuration: {path}")
    return 0


def _watch(attempt: Attempt, commands: dict[str, list[str]], config: TrainingCommand) -> int:
    """Start the commands, show the run, stop everything when one ends badly; return the exit code.

    A signal asks the trainer to save its current step first, where checkpoints are on.

    Args:
        config: of the trainer.

    Raises:
        ProcessDied: one of them ended before its time.
    """
    logs = attempt.run_dir.logs(attempt.number)
    logs.mkdir(parents=True, exist_ok=True)
    events = logs / "events.jsonl"
    max_steps = config.max_steps
    console = Console(
        metrics=attempt.run_dir.metrics, events=events, first_step=attempt.resume_step or 0, max_steps=max_steps
    )
    with Supervisor() as supervisor, console:
        for name, argv in commands.items():
            environment = {EVENTS_ENV: str(events), PROCESS_ENV: name}
            supervisor.start(name, argv, logs / f"{name}.log", environment=environment, is_service=name == "inference")
        outcome = supervisor.run(console.refresh)
        if isinstance(outcome, int):
            grace = config.ckpt.grace_s if config.ckpt else None
            saving = f"saving the current step, for at most {grace:g} s" if grace else "stopping"
            console.say(f"{signal.Signals(outcome).name}: {saving}")
            if grace:
                supervisor.ask_to_end("trainer", console.refresh, timeout_s=grace)
        supervisor.stop()
    if isinstance(outcome, Child):
        raise _death(outcome)
    if isinstance(outcome, int):
        (trainer,) = [child for child in supervisor.children if child.name == "trainer"]
        return _report_stop(attempt, config, trainer, step=console.last_step, number=outcome)
    print(f"finished step {console.last_step} of {max_steps}; weights: {attempt.run_dir.weights_of(console.last_step)}")
    return 0


def _report_stop(attempt: Attempt, config: TrainingCommand, trainer: Child, *, step: int, number: int) -> int:
    """Say what a stopped run saved; return 128 + signal, or `NOT_SAVED` where its last step should be and is not."""
    stopped = f"stopped at step {step} of {config.max_steps}"
    if config.ckpt is None:
        print(f"{stopped}; nothing was saved (--ckpt saves the step that a signal stops at)")
        return 128 + number
    steps = attempt.run_dir.committed_steps()
    resume = f"go on from step {steps[-1]} with --ckpt.resume-step latest" if steps else "there is no checkpoint"
    # By SIGTERM itself it ends only before it has begun to train; 128 + SIGTERM says that everything landed.
    has_landed = trainer.process.returncode in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
    if not has_landed or (steps[-1] if steps else 0) < step:
        reason = error_message(trainer.log) or f"see {trainer.log}"
        print(f"{stopped}; step {step} was NOT saved: {reason}\n{resume}")
        return NOT_SAVED
    print(f"{stopped}, which is saved; {resume}" if step else f"{stopped}, before anything was trained")
    return 128 + number


def _death(child: Child) -> ProcessDied:
    code = child.process.returncode
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    reason = error_message(child.log)
    if reason is not None:
        error = ProcessDied(f"{child.name}: {reason}\n       log: {child.log}")
    else:
        error = ProcessDied(f"{child.name} {how}; the last lines of {child.log}:\n{last_lines(child.log)}")
    error.exit_code = code if code in (2, 3) else 1
    return error


def check_model(config: TrainingCommand) -> None:
    """Refuse local paths that are not there, before anything is imported or created."""
    name = config.model.name
    looks_local = name.startswith((".", "/", "~")) or name.count("/") != 1
    if looks_local and not (Path(name) / "config.json").is_file():
        what = "has no config.json" if Path(name).is_dir() else "is not a directory"
        raise DataError(
            f"model.name = '{name}' {what} (from {Path.cwd()}). Give a directory with config.json, safetensors and "
            "tokenizer, or a hub id such as Qwen/Qwen3-0.6B."
        )
    if isinstance(config, SftConfig):
        data = config.data.name
        is_local = data.endswith((".jsonl", ".json", ".parquet")) or data.startswith((".", "/"))
        if is_local and not Path(data).exists():
            raise DataError(f"data.name = '{data}': there is no such file or directory (from {Path.cwd()})")


def _address(config: InferenceConfig) -> str:
    host = "127.0.0.1" if config.server.host in ("0.0.0.0", "::") else config.server.host
    return f"http://{host}:{config.server.port}"


def _served_model(config: InferenceConfig) -> str | None:
    """Return the model of the inference server that answers at the configured address, None for no answer.

    Raises:
        InferenceError: something else answers there, or a server with another model.
    """
    url = f"{_address(config)}/weights"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            served = str(json.load(answer)["model"])
        _check_same_model(served, config)
        return served
    except urllib.error.HTTPError as error:
        reason = f"HTTP {error.code}"
    except urllib.error.URLError as error:
        if isinstance(error.reason, ConnectionRefusedError):
            return None
        reason = str(error.reason)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
    wrong = InferenceError(
        f"something answers at {_address(config)}, but it is not an inference server of triad ({reason}). "
        "Stop it, or choose another port with --inference.server.port."
    )
    wrong.exit_code = 2
    raise wrong


def _check_same_model(served: str, config: InferenceConfig) -> None:
    wanted = config.model.name
    if served == wanted or (Path(served).exists() and Path(wanted).exists() and Path(served).samefile(wanted)):
        return
    error = InferenceError(
        f"the inference server at {_address(config)} serves the model '{served}', this run trains '{wanted}'. Stop "
        "that server, name its model with --model.name, or choose another port with --inference.server.port."
    )
    error.exit_code = 2
    raise error
