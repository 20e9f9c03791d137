"""Which weights an evaluation is about: a directory, or a step of a run as one."""

from __future__ import annotations

from pathlib import Path

from holdfast.commands.ckpt.change import export
from holdfast.commands.ckpt.checkpoint_dirs import CheckpointDirs
from holdfast.commands.resume.attempt import CONFIG_NAME
from holdfast.commands.resume.resume_step import resolve_resume_step
from holdfast.commands.track.settings import read_settings
from holdfast.orchestrator.evaluation.tasks import held_out_sections, settings_of_run
from holdfast.shared.config.base import ModelConfig
from holdfast.shared.config.evaluation import EvaluateConfig
from holdfast.shared.errors import CheckpointError, DataError
from holdfast.shared.files.adapter import holds_adapter
from holdfast.shared.files.checkpoints import TRAINER_DIR
from holdfast.shared.files.manifest import MANIFEST_NAME, file_digest, is_committed
from holdfast.shared.files.run_dir import RunDir


def with_settings_of_run(config: EvaluateConfig) -> EvaluateConfig:
    """Return `config` with what it leaves to the run that it names."""
    config = config.model_copy(deep=True)
    trained = settings_of_run(config.run) if config.run is not None else None
    if trained is not None:
        takes_max_tokens = "max_tokens" not in config.sampling.model_fields_set
        if "seq_len" not in config.model_fields_set:
            config.seq_len = trained.seq_len
        if "environments" not in config.model_fields_set:
            config.environments = held_out_sections(
                trained.environments, seq_len=config.seq_len, takes_max_tokens=takes_max_tokens
            )
        if takes_max_tokens:
            config.sampling.max_tokens = trained.sampling.max_tokens
    if "max_len" not in config.inference.model.model_fields_set:
        config.inference.model.max_len = max(config.inference.model.max_len, config.seq_len)
    return config


def step_of_run(run: Path, wanted: int | str) -> int:
    """Return the step that is meant, which has a checkpoint that is whole, or weights that are published.

    Raises:
        DataError: there is no run.
        CheckpointError: the step is not there or damaged, listing those that are.
    """
    run_dir = RunDir(run)
    if not run_dir.holds_run():
        raise DataError(
            f"run = {run} is no run directory: it has no run.json (from {Path.cwd()}). "
            "Name the output directory of one."
        )
    if wanted == "latest":
        if steps := run_dir.committed_steps():
            return steps[-1]
        if versions := _whole_weights(run_dir):
            return versions[-1]
    elif int(wanted) in run_dir.committed_steps() or int(wanted) in _whole_weights(run_dir):
        return int(wanted)
    raise CheckpointError(
        f"step = {wanted} is not in {run}: it has checkpoints of {_listed(run_dir.committed_steps())}, and whole "
        f"weights of {_listed(_whole_weights(run_dir))}."
    )


def weights_of_step(run: Path, step: int, directory: Path, *, takes_published: bool = True) -> Path:
    """Return a directory with the weights of a step: what the run has published, else an export below `directory`.

    What is published may go away while the run trains on, so then a checkpoint is exported if there is one.

    Args:
        takes_published: False: a checkpoint is exported in any case.

    Raises:
        CheckpointError: the checkpoint is damaged, or gone.
        TensorWorkFailed: it could not be exported, which has been said.
    """
    run_dir = RunDir(run)
    has_checkpoint = step in run_dir.committed_steps()
    if takes_published and step in _whole_weights(run_dir) and not (has_checkpoint and run_dir.is_under_way()):
        return run_dir.weights_of(step)
    if not has_checkpoint:
        raise CheckpointError(f"the weights of step {step} have just gone from {run}, which has no checkpoint of it")
    target = directory / name_of_export(run_dir, step)
    if target.exists():  # exported by an earlier start of this evaluation: published whole, or not at all
        return target
    resolve_resume_step(run_dir, step)
    model = read_settings(run_dir.checkpoint(step) / TRAINER_DIR / CONFIG_NAME).get("model", {})
    base = model.get("name") if model.get("lora") else None
    export(CheckpointDirs(run), step=str(step), to=target, dtype=None, max_shard_size=None, model=None, base=base)
    return target


def name_of_export(run_dir: RunDir, step: int) -> str:
    """Return the name of what is exported of the checkpoint that `step` has now.

    Raises:
        FileNotFoundError: it has none.
    """
    # By what it is made of: another run has this step as well, and this one may train it again.
    return f"model_step_{step}_{file_digest(run_dir.checkpoint(step) / MANIFEST_NAME)[:12]}"


def served_model(config: EvaluateConfig, directory: Path | str) -> ModelConfig:
    """Return the model that the server of an evaluation loads."""
    tokenizer = config.model.tokenizer if config.model is not None else None
    return ModelConfig(name=str(directory), tokenizer=tokenizer)


def _whole_weights(run_dir: RunDir) -> list[int]:
    """Return the versions whose weights are published whole; of a policy with adapters engines get those alone."""
    return [
        version
        for version in run_dir.published_weights()
        if is_committed(run_dir.weights_of(version)) and not holds_adapter(run_dir.weights_of(version))
    ]


def _listed(steps: list[int]) -> str:
    return f"steps {', '.join(map(str, steps))}" if steps else "no step"
