"""The launcher: prepares the run directory, starts the processes, watches them and stops them.

`rl` decides once which step to resume from and hands the same number to all processes. It starts
everything at the same time; whoever is ready first waits for the others through the run directory.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

from triad.config.base import CkptConfig
from triad.config.dpo import DpoConfig
from triad.config.inference import InferenceConfig
from triad.config.orchestrator import OrchestratorConfig
from triad.config.rl import RlConfig, hand_down_shared
from triad.config.rl_trainer import TrainerConfig
from triad.config.rm import RmConfig
from triad.config.trainer import SftConfig, TrainingCommand
from triad.errors import ConfigError, DataError, InferenceError
from triad.events import PROCESS_ENV
from triad.process import available_cores
from triad.restarts import Restarts
from triad.resume import Attempt, prepare, with_resume, write_config
from triad.run_dir import RunDir, resolve_resume_step
from triad.storage import Patience
from triad.watch import Healing, Plan, watch


def launch_training(program: str, config: TrainingCommand) -> int:
    """Run `sft`, `dpo`, `rm`, or the trainer of `rl` alone; return the exit code."""
    check_model(config)
    attempt = prepare(config, clean=config.clean, dry_run=config.dry_run)
    config = with_resume(config, attempt.resume_step)
    path = write_config(attempt, "trainer" if program == "rl" else program, config, dry_run=config.dry_run)
    plan = Plan(attempt, {"trainer": [sys.executable, "-m", "trainer.launch", program, str(path)]}, config, [path])
    return _print_plan(plan) if config.dry_run else watch(plan)


def launch_rl(config: RlConfig) -> int:
    """Run trainer, orchestrator and, unless one is there, an inference server; return the exit code."""
    config = hand_down_shared(config)
    check_model(config.trainer)
    urls = config.orchestrator.client.urls
    by_teacher = config.orchestrator.is_sampled_by_teacher
    is_ours = not by_teacher and _address(config.inference) in urls  # else the servers are somebody else's to start
    served = _served_model(config.inference) if is_ours else None
    starts_inference = is_ours and served is None
    plan = _plan_rl(config, starts_inference=starts_inference)
    if config.dry_run:
        return _print_plan(plan)
    if by_teacher:
        print("the teacher samples: the policy needs no inference server")
    elif not is_ours:
        print(f"using the inference servers at {', '.join(urls)}")
    elif served is not None:
        print(f"using the inference server that answers at {_address(config.inference)} (model {served})")
    healing = Healing(
        again=lambda: _plan_rl(config, starts_inference=starts_inference, again=True),
        restarts=Restarts(config.max_restarts, config.restart_window_s),
        patience=Patience(config.storage_timeout_s),
        heartbeat_timeout_s=config.heartbeat_timeout_s,
    )
    return watch(plan, healing)


def _plan_rl(config: RlConfig, *, starts_inference: bool, again: bool = False) -> Plan:
    """Decide where the run starts, or goes on after its trainer died, and write every process's configuration."""
    clean = config.clean and not again
    attempt = prepare(
        config.trainer, clean=clean, dry_run=config.dry_run, orchestrator=config.orchestrator, again=again
    )
    trainer = with_resume(config.trainer, attempt.resume_step)
    orchestrator = with_resume(config.orchestrator, attempt.resume_step)
    inference = config.inference.model_copy(deep=True)
    _share_cores(trainer, inference)
    sections = {"trainer": trainer, "orchestrator": orchestrator, "inference": inference}
    paths = {name: write_config(attempt, name, section, dry_run=config.dry_run) for name, section in sections.items()}
    write_config(attempt, "rl", config, dry_run=config.dry_run)
    commands = {
        "trainer": [sys.executable, "-m", "trainer.launch", "rl", str(paths["trainer"])],
        "orchestrator": [sys.executable, "-m", "orchestrator.main", str(paths["orchestrator"])],
    }
    if starts_inference:
        commands = {"inference": [sys.executable, "-m", "inference.main", str(paths["inference"])], **commands}
    health = {"inference": f"{_address(inference)}/health"} if starts_inference else {}
    return Plan(attempt, commands, trainer, list(paths.values()), health)


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
        print(f"would make batches until step {config.max_steps}\nresolved configuration: {path}")
        return 0
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


def _print_plan(plan: Plan) -> int:
    attempt = plan.attempt
    print(f"would start {attempt.start} in {attempt.run_dir.path} and train until step {plan.trainer.max_steps}")
    for path in plan.paths:
        print(f"resolved configuration: {path}")
    return 0


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
    if isinstance(config, SftConfig | DpoConfig | RmConfig):
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
