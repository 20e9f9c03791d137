"""The command `evaluate`: evaluates one policy, follows a run, or compares two evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.arguments import Parser
from holdfast.config import help
from holdfast.process.child import make_output_lossy

if TYPE_CHECKING:
    from holdfast.config.evaluation import EvaluateConfig

_COMPARE = "--compare"


def main(argv: list[str]) -> int:
    """Run `evaluate`; return its exit code. Raise HoldfastError for a mistake on the command line, or what ended the
    evaluation."""
    if any(word.split("=")[0] == _COMPARE for word in argv):
        return _compare(argv)
    if help.is_asked(argv):
        print(help.text("evaluate", "How good a policy is on held-out tasks.", argv))
        return 0
    from holdfast.config.evaluation import EvaluateConfig
    from holdfast.config.given import check_given
    from holdfast.config.load import parse_command_line

    config = parse_command_line(EvaluateConfig, argv)
    check_given("evaluate", config)
    if not config.dry_run:
        make_output_lossy()  # the results are in files
    if config.log_format == "text":
        return launch(config)
    from holdfast.view.console import run_in_json_lines

    return run_in_json_lines(lambda: launch(config))


def _compare(argv: list[str]) -> int:
    parser = Parser(prog="evaluate", allow_abbrev=False, description="Show two evaluations of the same tasks.")
    parser.add_argument(_COMPARE, nargs=2, type=Path, metavar=("A", "B"), required=True, help="their directories")
    parser.add_argument("--confidence", type=float, default=0.95, help="of the intervals (0.95)")
    parser.add_argument(
        "--answers",
        type=int,
        default=0,
        metavar="N",
        help="show what both said to N tasks of each environment, 500 characters at most; --json has all (0)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    arguments = parser.parse_args(argv)
    if not 0.5 < arguments.confidence < 1:
        parser.error(f"--confidence {arguments.confidence:g} is not between 0.5 and 1")
    if arguments.answers < 0:
        parser.error(f"--answers {arguments.answers} is below 0")
    from holdfast.commands.evaluated_policy import comparison_report
    from holdfast.orchestrator.evaluation.statistics import compare

    first, second = arguments.compare
    found = compare(first, second, confidence=arguments.confidence, answers=arguments.answers)
    report = comparison_report(found, first, second)
    report.print(as_json=arguments.json)
    return 0


def launch(config: EvaluateConfig) -> int:
    """Evaluate as `config` says; return the exit code. Raise HoldfastError for settings that cannot be used, or what
    ended the evaluation."""
    # Not at the top: `--help` would wait for them.
    from holdfast.commands.ckpt_dirs import TensorWorkFailed
    from holdfast.commands.evaluate_follow import follow
    from holdfast.commands.evaluated_policy import (
        check_servable,
        prepare_directory,
        run_evaluation,
        served_model,
        step_of_run,
        tell_result,
        unfinished_step,
        weights_of_step,
        with_settings_of_run,
        write_settings,
    )
    from holdfast.launcher.supervise import Supervisor
    from holdfast.orchestrator.evaluation.statistics import summary_in
    from holdfast.run.run_dir import RunDir

    if config.follow:
        return follow(config)
    config = with_settings_of_run(config)
    directory = RunDir(config.output_dir)
    step = None
    if config.run is not None:
        step = unfinished_step(config, directory)
        step = step_of_run(config.run, config.step) if step is None else step
        config.step = step  # noted in the settings: `latest` is another step by the time that this is given again
    check_servable(config)
    if config.dry_run:
        print(f"resolved configuration: {write_settings(config, directory.path / 'config' / 'dry_run')}")
        print(f"would evaluate {_named(config, step)} in {directory.path}")
        return 0
    # Before it is locked, too: nothing of a refused one is left behind, and who follows the run waits for no lock.
    _refuse_followed(directory.path.parent)
    directory.lock()
    _refuse_followed(directory.path.parent)
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


def _refuse_followed(place: Path) -> None:
    """Refuse a step's directory of evaluations that follow a run, which are made by one process."""
    from holdfast.errors import RunDirError
    from holdfast.run.run_dir import RunDir

    directory = RunDir(place)
    if directory.is_under_way() and not directory.holds_run():
        raise RunDirError(
            f"{place} is written by `evaluate --follow`, or by a run that evaluates its steps (eval). Choose another "
            "--output-dir, or wait for it."
        )


def _named(config: EvaluateConfig, step: int | None) -> str:
    if config.run is not None:
        return f"step {step} of {config.run}"
    assert config.model is not None, "an evaluation has a policy"
    return config.model.name
