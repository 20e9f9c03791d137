"""Evaluations beside a trainer: the process that makes them, checked before anything starts, and where it computes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from holdfast.commands.launcher.placement import Machine, Placement, gpus_per_engine
from holdfast.commands.launcher.plan import EVALUATION, Plan
from holdfast.commands.launcher.plan_table import planned_engine
from holdfast.commands.launcher.preflight import check_in_child
from holdfast.commands.resume.attempt import Attempt, write_config
from holdfast.shared.config.base import ModelConfig
from holdfast.shared.config.trainer import NOT_ON_NODES, EvaluatedCommand, TrainingCommand
from holdfast.shared.errors import ConfigError
from holdfast.shared.files.model_length import check_max_len
from holdfast.shared.files.run_dir import RunDir
from holdfast.shared.process.gpus import Gpu, require_vllm
from holdfast.shared.process.import_path import module_command


def check_evaluations(config: TrainingCommand) -> None:
    """Check what a training program asks of the policy meanwhile, if it does.

    Raises:
        ConfigError, DataError: what cannot be used, or is trained on.
    """
    if not isinstance(config, EvaluatedCommand) or config.eval is None:
        return
    if config.parallel.nodes > 1:  # by an outer launcher
        raise ConfigError(NOT_ON_NODES)
    require_vllm()
    check_max_len(config.eval.inference, config.model.name, key="eval.inference.model")
    for section in config.eval.environments:
        for value in section.args.values():
            if isinstance(value, str) and _is_part(value, of=config.data.name):
                raise ConfigError(
                    f"eval.environments: '{section.label}' asks what is in {value}, and that is trained on "
                    f"(data.name = '{config.data.name}'): nothing of it is held out. Name another file."
                )
    asked = config.eval.following(config.output_dir, config.output_dir)
    model = ModelConfig(name=config.model.name, tokenizer=config.model.tokenizer)
    check_in_child(
        "holdfast.orchestrator.evaluation.check",
        asked.model_copy(update={"run": None, "follow": False, "interval": None, "model": model}),
    )


def _is_part(name: str, *, of: str) -> bool:
    """Whether `name` is a file that is the data `of`, or lies in them."""
    return os.path.isfile(name) and Path(name).resolve().is_relative_to(Path(of).resolve())  # noqa: PTH113 - whatever the text is


def evaluation_gpus(config: TrainingCommand, placement: Placement, machine: Machine) -> tuple[Gpu, ...]:
    """Return the GPUs of the evaluations of a training program: those that the trainer leaves.

    Raises:
        ConfigError: these are too few.
    """
    if not isinstance(config, EvaluatedCommand) or config.eval is None or machine.engine_device == "cpu":
        return ()
    size = gpus_per_engine(config.eval.inference)
    left = [gpu for gpu in machine.inventory.gpus if gpu not in placement.trainer]
    if len(left) < size:
        raise ConfigError(
            f"the server of the evaluations needs {size} of the {len(machine.inventory.gpus)} GPUs, and the trainer "
            f"leaves {len(left)}: lower parallel.num_ranks, or leave eval out and start `evaluate --run "
            f"{config.output_dir} --follow` where there is room for it"
        )
    return tuple(left[:size])


def with_evaluations(
    plan: Plan, attempt: Attempt, config: TrainingCommand, placement: Placement, gpus: tuple[Gpu, ...]
) -> Plan:
    """Return `plan` with the process that evaluates, if `config` asks for one."""
    if not isinstance(config, EvaluatedCommand) or config.eval is None:
        return plan
    run_dir = RunDir(config.output_dir)
    if not config.dry_run:
        run_dir.given_up.unlink(missing_ok=True)  # by an earlier attempt: this one tries again
    settings = config.eval.following(run_dir.path, run_dir.evaluations)
    path = write_config(attempt, EVALUATION, settings, dry_run=config.dry_run)
    return replace(
        plan,
        commands=plan.commands | {EVALUATION: module_command("holdfast.commands.evaluate.follow", str(path))},
        paths=[*plan.paths, path],
        environments=plan.environments | {EVALUATION: placement.environment(gpus)},
        processes=[*plan.processes, planned_engine(EVALUATION, config.eval.inference, gpus)],
    )
