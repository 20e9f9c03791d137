"""Evaluates one policy, or follows a run: the command from its settings to its table."""

from __future__ import annotations

from holdfast.commands.ckpt.tensor_work import TensorWorkFailed
from holdfast.commands.evaluate.follow import follow
from holdfast.commands.evaluate.policy import served_model, step_of_run, weights_of_step, with_settings_of_run
from holdfast.commands.evaluate.report import tell_result
from holdfast.commands.evaluate.serving import check_servable, prepare_directory, run_evaluation, write_settings
from holdfast.commands.launcher.supervise import Supervisor
from holdfast.orchestrator.evaluation.summary import summary_in
from holdfast.shared.config.evaluation import EvaluateConfig
from holdfast.shared.files.run_dir import RunDir


def launch(config: EvaluateConfig) -> int:
    """Evaluate as `config` says; return the exit code.

    Raises:
        HoldfastError: what cannot be used, or what ended the evaluation.
    """
    if config.follow:
        return follow(config)
    config = with_settings_of_run(config)
    step = step_of_run(config.run, config.step) if config.run is not None else None
    check_servable(config)
    directory = RunDir(config.output_dir)
    if config.dry_run:
        print(f"resolved configuration: {write_settings(config, directory.path / 'config' / 'dry_run')}")
        print(f"would evaluate {_named(config, step)} in {directory.path}")
        return 0
    directory.lock()
    prepare_directory(config, directory)
    if config.run is not None and step is not None:
        try:
            weights = weights_of_step(config.run, step, directory.path)
        except TensorWorkFailed as failure:
            return failure.exit_code
        config.inference.model = config.inference.model.model_copy(update={"name": str(weights)})
    elif config.model is not None:
        model = served_model(config, config.model.name)
        config.inference.model = config.inference.model.model_copy(update=model.model_dump())
    print(f"evaluating {_named(config, step)}", flush=True)
    with Supervisor() as supervisor:
        code = run_evaluation(config, directory, supervisor)
    if code == 0:
        tell_result(summary_in(directory.path), directory.path, step=step)
    return code


def _named(config: EvaluateConfig, step: int | None) -> str:
    if config.run is not None:
        return f"step {step} of {config.run}"
    assert config.model is not None, "an evaluation has a policy"
    return config.model.name
